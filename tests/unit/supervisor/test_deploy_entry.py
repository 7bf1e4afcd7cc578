"""Which modules of a release an environment must be able to import before it counts as proved."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import trainer
from supervisor.reconciler.deploy import entry_modules
from supervisor.reconciler.deploy_rows import release_row
from supervisor.transport.bundle import build_release


def release_of(folder: Path):
    return release_row(str(folder), build_release(folder), datetime(2026, 1, 1, tzinfo=UTC))


def package(folder: Path, *modules: str) -> Path:
    folder.mkdir()
    for name in ("__init__", *modules):
        (folder / f"{name}.py").write_text("")
    return folder


def test_the_bundled_trainer_is_imported_with_its_training_and_not_only_its_command_line():
    release = release_of(Path(trainer.__file__).parent)

    assert entry_modules(release) == ["trainer.__main__", "trainer.train"]


def test_a_release_without_them_is_imported_as_a_package(tmp_path: Path):
    assert entry_modules(release_of(package(tmp_path / "bare"))) == ["bare"]
    assert entry_modules(release_of(package(tmp_path / "main", "__main__"))) == ["main.__main__"]


def test_without_a_release_nothing_is_imported():
    assert entry_modules(None) == []
