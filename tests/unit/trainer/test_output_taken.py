"""An output folder removed under a running trainer: made anew, unless another trainer has it by then."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from tests.support.tiny import tiny_target, write_tiny_corpus
from tests.support.trainer_runs import await_end_of_workers, run_here, settings_for
from trainer.checkpoint import saver as saver_module
from trainer.checkpoint.store import CheckpointStore
from trainer.errors import CheckpointError, ConfigError
from trainer.lifecycle.heartbeat import write_first_status
from trainer.lifecycle.runfolder import hold_output, hold_run_folder


@pytest.fixture
def settings(tmp_path: Path) -> list[str]:
    model, data = tiny_target(tmp_path), write_tiny_corpus(tmp_path / "data")
    return settings_for(model, data, tmp_path / "out", checkpoint__every=6)


def after_first_export(monkeypatch: pytest.MonkeyPatch, act) -> None:
    """Let `act` run once, when the first export of the run is written, before its state."""
    original, waiting = saver_module.write_export, [act]

    def write(*args, **kwargs):
        original(*args, **kwargs)
        if waiting:
            waiting.pop()()

    monkeypatch.setattr(saver_module, "write_export", write)


def test_an_output_removed_in_the_middle_is_made_anew_and_held_again(
    settings, tmp_path, monkeypatch, caplog
) -> None:
    after_first_export(monkeypatch, lambda: (tmp_path / "out").rename(tmp_path / "gone"))
    held = []
    original = saver_module.verify

    def look(path: Path) -> None:
        original(path)
        with pytest.raises(ConfigError, match="in use by another trainer"), hold_output(tmp_path / "out"):
            pass
        held.append(path.name)

    monkeypatch.setattr(saver_module, "verify", look)

    assert run_here(settings) == 0

    assert held == ["step-00000012", "step-00000018"]
    assert CheckpointStore(tmp_path / "out" / "lineage-0000").find_newest().step == 18
    assert caplog.text.count("the output folder was removed while this run used it, it is made anew") == 1


def test_an_output_that_another_trainer_has_by_now_gets_nothing_more(
    settings, tmp_path, monkeypatch, caplog
) -> None:
    with contextlib.ExitStack() as other:

        def take_over() -> None:
            (tmp_path / "out").rename(tmp_path / "gone")
            other.enter_context(hold_output(tmp_path / "out"))

        after_first_export(monkeypatch, take_over)

        with pytest.raises(CheckpointError, match=r"cannot be taken again: .* in use by another trainer"):
            run_here(settings)
        await_end_of_workers()

        assert [path.name for path in (tmp_path / "out").rglob("*") if "step" in path.name] == []
    assert caplog.text.count("training goes on") >= 1


def test_a_run_folder_of_a_living_trainer_is_left_alone(settings, tmp_path) -> None:
    run_dir = tmp_path / "run"
    write_first_status(run_dir)
    with hold_run_folder(run_dir):
        (run_dir / "status.json").write_text("of the other")
        write_first_status(run_dir)

        with pytest.raises(ConfigError, match=r"run folder is in use by another trainer: .*DFLASH_RUN_DIR"):
            run_here(settings, DFLASH_RUN_DIR=str(run_dir))

        assert (run_dir / "status.json").read_text() == "of the other"
        assert sorted(path.name for path in run_dir.iterdir()) == ["status.json"]

    assert run_here(settings, DFLASH_RUN_DIR=str(run_dir)) == 0
