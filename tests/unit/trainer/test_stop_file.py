"""`control/stop.json` as anybody may write it: no request is told once, and neither ends nor holds a run."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest

from tests.support.tiny import tiny_target, write_tiny_corpus
from tests.support.trainer_runs import run_here, settings_for
from trainer.errors import ConfigError
from trainer.lifecycle.signals import MOST_BYTES, StopFile, StopRequest


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "control").mkdir()
    return tmp_path / "control" / "stop.json"


def link_to_itself(path: Path) -> None:
    path.symlink_to(path)


NO_REQUEST = {
    "a pipe": (os.mkfifo, "it is not a file"),
    "a folder": (Path.mkdir, "it is not a file"),
    "a device": (lambda path: path.symlink_to("/dev/zero"), "it is not a file"),
    "a circle of links": (link_to_itself, "Too many levels of symbolic links"),
    "too large": (lambda path: path.write_bytes(b" " * MOST_BYTES + b"{}"), f"more than {MOST_BYTES} bytes"),
    "brackets without end": (lambda path: path.write_text("[" * 60_000), "RecursionError"),
    "no end to wait for": (
        lambda path: path.write_text('{"id": "1", "deadline_s": NaN}'),
        "deadline_s is no number of seconds: nan",
    ),
    "an endless end": (
        lambda path: path.write_text('{"id": "1", "deadline_s": 1e999}'),
        "deadline_s is no number of seconds: inf",
    ),
    "more than a float holds": (
        lambda path: path.write_text(json.dumps({"id": "1", "deadline_s": 10**400})),
        "OverflowError",
    ),
    "a long list": (
        lambda path: path.write_text('{"id": "1", "deadline_s": "' + "x" * 9000 + '"}'),
        "ValueError",
    ),
}


@pytest.mark.parametrize(("make", "told"), NO_REQUEST.values(), ids=NO_REQUEST.keys())
def test_what_is_no_request_is_told_once_and_one_that_comes_later_is_read(place, caplog, make, told) -> None:
    make(place)
    file = StopFile(place.parents[1])

    with caplog.at_level(logging.ERROR):
        assert file.read() is None
        assert file.read() is None

    (record,) = caplog.records
    assert told in record.getMessage()
    assert len(record.getMessage()) < 600

    place.rename(place.with_name("other"))
    place.write_text('{"id": "7", "deadline_s": 5}')
    assert file.read() == StopRequest(id="7", reason="stop.json", deadline_s=5.0, save=True)


@pytest.mark.parametrize(
    ("value", "saves"),
    [("false", False), ("true", True), ("null", True), ('""', True), ("0", True), ('"false"', True)],
    ids=["false", "true", "null", "empty", "nought", "text"],
)
def test_only_a_plain_false_leaves_out_the_save(place, value, saves) -> None:
    place.write_text(f'{{"id": "1", "save": {value}}}')

    request = StopFile(place.parents[1]).read()

    assert request is not None
    assert request.save is saves


def test_a_request_of_an_earlier_run_is_removed_whatever_it_is(place, caplog) -> None:
    for make in (os.mkfifo, link_to_itself, lambda path: path.write_text("{")):
        make(place)
        with caplog.at_level(logging.WARNING):
            StopFile(place.parents[1]).clear_stale()
        assert not os.path.lexists(place)
        assert "removed a stop request of an earlier run" in caplog.records[-1].getMessage()

    StopFile(place.parents[1]).clear_stale()
    assert len(caplog.records) == 3

    place.mkdir()
    with pytest.raises(ConfigError, match=r"cannot be removed: .*stop\.json \(.*\); remove it"):
        StopFile(place.parents[1]).clear_stale()


def test_a_run_folder_that_cannot_be_made_is_one_error_and_not_hidden_by_another(tmp_path) -> None:
    (tmp_path / "file").touch()
    model, data = tiny_target(tmp_path), write_tiny_corpus(tmp_path / "data")

    with pytest.raises(ConfigError, match=r"run folder cannot be made: .*file/run"):
        run_here(settings_for(model, data, tmp_path / "out"), DFLASH_RUN_DIR=str(tmp_path / "file" / "run"))
