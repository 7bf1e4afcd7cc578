"""Several commands that write one export at once, and what killed ones leave: one whole, nothing else."""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path

import pytest

from tests.support.tiny import tiny_target
from tests.support.tiny_drafter import make_drafter
from trainer.__main__ import build_parser
from trainer.checkpoint import export as export_module
from trainer.checkpoint.export import check_export, export_drafter
from trainer.checkpoint.store import list_lineages
from trainer.errors import CheckpointError, ConfigError
from trainer.eval import import_command
from trainer.eval.import_command import run_import

WRITERS = 6


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("overwrite", [False, True])
def test_of_exports_that_end_at_once_one_stands_whole(tmp_path: Path, monkeypatch, overwrite: bool) -> None:
    # each is done with its weights before the first one is put in place; a process has one id, a thread none
    together = threading.Barrier(WRITERS)
    put, own = export_module.put_in_place, threading.local()

    def meet(*args, **kwargs) -> None:
        together.wait(120)
        put(*args, **kwargs)

    monkeypatch.setattr(export_module, "put_in_place", meet)
    monkeypatch.setattr(os, "getpid", lambda: own.number)
    outcomes: list[object] = []

    def write(number: int) -> None:
        own.number = number
        try:
            outcomes.append(export_drafter(make_drafter(), None, tmp_path / "out", overwrite=overwrite))
        except CheckpointError as error:
            outcomes.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(WRITERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)

    lost = [str(outcome) for outcome in outcomes if isinstance(outcome, CheckpointError)]
    assert len(outcomes) == WRITERS
    assert len(lost) == (0 if overwrite else WRITERS - 1)
    assert all("export directory exists" in text for text in lost)
    assert _names(tmp_path) == ["out"]
    check_export(tmp_path / "out")


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_of_others_that_came_meanwhile_stays(tmp_path: Path, monkeypatch, overwrite: bool) -> None:
    put, theirs = export_module.put_in_place, tmp_path / "out" / "notes.txt"

    def late(*args, **kwargs) -> None:
        theirs.parent.mkdir()
        theirs.write_text("precious")
        put(*args, **kwargs)

    monkeypatch.setattr(export_module, "put_in_place", late)

    with pytest.raises((CheckpointError, ConfigError)):
        export_drafter(make_drafter(), None, tmp_path / "out", overwrite=overwrite)

    assert _names(tmp_path) == ["out"]
    assert theirs.read_text() == "precious"


def test_what_killed_exports_left_goes_and_what_others_write_stays(tmp_path: Path) -> None:
    for name in (".out.tmp-1", ".out.tmp-2", ".out.old-2", ".out.tmp-3", ".out.tmp-x", ".other.tmp-1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / ".out.tmp-1" / "notes.txt").write_text("precious")
    busy = os.open(tmp_path / ".out.tmp-3", os.O_RDONLY)
    fcntl.flock(busy, fcntl.LOCK_EX)

    export_drafter(make_drafter(), None, tmp_path / "out")
    os.close(busy)

    assert _names(tmp_path) == [".other.tmp-1", ".out.old-2", ".out.tmp-1", ".out.tmp-3", ".out.tmp-x", "out"]
    assert _names(tmp_path / ".out.tmp-1") == ["notes.txt"]


class _Killed(BaseException):
    """Ends a command where it stands."""


@pytest.mark.parametrize("failure", [_Killed(), OSError(28, "No space left on device")])
def test_an_import_that_ends_early_opens_no_lineage(tmp_path: Path, monkeypatch, failure) -> None:
    target, out = tiny_target(tmp_path, with_tokenizer=False), tmp_path / "run"
    drafter = export_drafter(make_drafter(), None, tmp_path / "drafter")
    words = ["--drafter", drafter, "--target-model", target, "--output", out]
    args = build_parser("import").parse_args([str(word) for word in words])
    assert run_import(args) == 0
    (out / ".import.partial" / "state").mkdir(parents=True)

    def fail(*_args) -> None:
        raise failure

    with monkeypatch.context() as patch:
        patch.setattr(import_command, "write_state", fail)
        with pytest.raises((_Killed, CheckpointError)):
            run_import(args)
    assert list_lineages(out) == ["lineage-0000"]

    assert run_import(args) == 0
    assert _names(out) == [".trainer.lock", "lineage-0000", "lineage-0001"]
    assert _names(out / "lineage-0001") == ["export", "state"]
