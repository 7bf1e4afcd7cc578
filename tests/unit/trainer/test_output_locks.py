"""One command at a time per output, also when another one removes what it had locked just before."""

from __future__ import annotations

import errno
import fcntl
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from trainer.data import completions, staging
from trainer.errors import ConfigError
from trainer.lifecycle import locks
from trainer.lifecycle.runfolder import hold_output

HOLDERS: dict[str, Callable[[Path], AbstractContextManager[object]]] = {
    "train and import": lambda folder: hold_output(folder / "out"),
    "prepare": lambda folder: staging.locked_output(folder / "out"),
    "generate": lambda folder: completions.locked_output(folder / "out.jsonl", {"a": 1}),
}
REFUSAL = r"in use by another trainer|another (prepare|generate) writes"


@pytest.fixture(params=HOLDERS.values(), ids=HOLDERS.keys())
def hold(request: pytest.FixtureRequest):
    return request.param


def before_locking(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object], *, times: int = 1) -> None:
    """Let `act` run between the opening and the locking of an output."""
    left = [times]

    def lock(descriptor: int, mode: int) -> None:
        if left[0]:
            left[0] -= 1
            act()
        fcntl.flock(descriptor, mode)

    monkeypatch.setattr(locks, "_flock", lock)


def clear(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def test_a_second_command_is_refused(tmp_path, hold) -> None:
    with hold(tmp_path), pytest.raises(ConfigError, match=REFUSAL):
        hold(tmp_path).__enter__()

    with hold(tmp_path):
        pass


def test_an_output_that_is_removed_just_before_it_is_locked_is_held_by_one_all_the_same(
    tmp_path, hold, monkeypatch
) -> None:
    before_locking(monkeypatch, lambda: clear(tmp_path))

    with hold(tmp_path):
        assert any(tmp_path.iterdir())
        with pytest.raises(ConfigError, match=REFUSAL):
            hold(tmp_path).__enter__()


def test_an_output_that_never_stays_is_given_up(tmp_path, hold, monkeypatch) -> None:
    before_locking(monkeypatch, lambda: clear(tmp_path), times=10_000)

    with pytest.raises(ConfigError, match="other commands keep making and removing this output"):
        hold(tmp_path).__enter__()


def test_an_output_where_nothing_can_be_locked_is_told_as_that(tmp_path, hold, monkeypatch) -> None:
    def refuse(*_args: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(locks, "_flock", refuse)

    with pytest.raises(ConfigError, match=r"cannot be locked: .* \(No locks available\)"):
        hold(tmp_path).__enter__()
