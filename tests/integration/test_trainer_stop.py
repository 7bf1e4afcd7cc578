"""Stopping a real trainer process: signals in every phase, the stop file, and what is on disk afterwards."""

import json
import signal
import subprocess
import sys

import pytest

from tests.support.tiny import tiny_target, write_tiny_corpus
from tests.support.trainer_runs import REPOSITORY, await_status, launch, read_status, settings_for
from trainer.checkpoint.store import CheckpointStore, verify

LONG = {"optim__epochs": 20_000, "telemetry__status_interval_s": 0.2}

SLOW_SAVE = """
import functools, sys, time
from trainer import train
from trainer.__main__ import main

def hang(point):
    time.sleep(600 if point == "state.before_manifest" else 0)

train.CheckpointStore = functools.partial(train.CheckpointStore, crash_point=hang)
main()
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return tiny_target(folder), write_tiny_corpus(folder / "data")


@pytest.fixture
def start(tiny, tmp_path):
    """Start a long run; ends whatever is left of it."""
    started = []

    def begin(**changes):
        settings = settings_for(*tiny, tmp_path / "out", **(LONG | changes))
        process = launch(settings, tmp_path / "log", DFLASH_RUN_DIR=str(tmp_path / "run"))
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.wait(30)


def in_phase(name):
    return lambda status: status["phase"] == name


def lineage(tmp_path):
    return CheckpointStore(tmp_path / "out" / "lineage-0000")


@pytest.mark.parametrize(
    ("phase", "changes", "saves"),
    [
        ("loading", {}, False),
        ("filling", {"queue__hs_min_ready": 100_000, "queue__hs_max_depth": 100_000}, True),
        ("training", {}, True),
        ("checkpointing", {"checkpoint__every": 1}, True),
    ],
    ids=["loading", "filling", "training", "checkpointing"],
)
def test_sigterm_ends_with_exit_9_and_whole_checkpoints(start, tmp_path, phase, changes, saves):
    process = start(**changes)
    await_status(process, tmp_path / "run", in_phase(phase))

    process.send_signal(signal.SIGTERM)

    assert process.wait(60) == 9, (tmp_path / "log").read_text()
    status = read_status(tmp_path / "run")
    assert (status["phase"], status["message"]) == ("done", "stopped on request")
    assert status["stop"]["why"] == "finishing the step, then saving"
    if saves:
        newest = lineage(tmp_path).find_newest()
        assert newest.skipped == ()
        assert status["last_checkpoint"]["step"] == newest.step == status["step"]
        verify(tmp_path / "out" / "lineage-0000" / "export" / newest.path.name)


def test_sigterm_while_libraries_load_is_a_stop_too(start, tmp_path):
    process = start()
    await_status(process, tmp_path / "run", in_phase("init"))

    process.send_signal(signal.SIGTERM)

    assert process.wait(60) == 9, (tmp_path / "log").read_text()
    assert not (tmp_path / "out" / "lineage-0000" / "state").exists()


def test_stop_file_without_save_is_honoured_and_acknowledged(start, tmp_path):
    process = start()
    await_status(process, tmp_path / "run", lambda status: status["step"] >= 2)
    body = {"v": 1, "id": "op-7", "reason": "test", "actor": "me", "requested_at": 0, "deadline_s": 60}

    (tmp_path / "run" / "control" / "stop.json").write_text(json.dumps(body | {"save": False}))

    assert process.wait(60) == 9
    status = read_status(tmp_path / "run")
    assert status["stop"]["id"] == "op-7"
    assert status["stop"]["why"] == "finishing the step, without saving"
    assert status["last_checkpoint"] is None
    assert lineage(tmp_path).steps("state") == []


def test_second_sigterm_abandons_the_save_and_leaves_nothing_half(tiny, tmp_path):
    settings = settings_for(*tiny, tmp_path / "out", **LONG)
    words = ["train", *(word for text in settings for word in ("--set", text))]
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_SAVE, *words],
        stdout=subprocess.DEVNULL,
        cwd=REPOSITORY,
    )
    run_dir = tmp_path / "out" / "run"
    try:
        await_status(process, run_dir, lambda status: status["step"] >= 2)
        process.send_signal(signal.SIGTERM)
        await_status(process, run_dir, in_phase("checkpointing"))

        process.send_signal(signal.SIGTERM)

        assert process.wait(60) == 9
    finally:
        process.kill()
        process.wait(30)
    assert read_status(run_dir)["stop"]["why"] == "second signal: save abandoned"
    assert lineage(tmp_path).steps("state") == []
    assert lineage(tmp_path).find_newest().skipped == ()


def test_run_killed_while_saving_resumes_from_what_verifies(start, tmp_path):
    process = start(checkpoint__every=1)
    await_status(process, tmp_path / "run", lambda status: status["step"] >= 5)
    await_status(process, tmp_path / "run", in_phase("checkpointing"))
    process.kill()
    assert process.wait(30) == -signal.SIGKILL
    newest = lineage(tmp_path).find_newest()
    assert newest.skipped == ()
    assert newest.step >= 4

    process = start()
    await_status(
        process,
        tmp_path / "run",
        lambda status: status["pid"] == process.pid and status["step"] > newest.step,
    )
    process.send_signal(signal.SIGTERM)

    assert process.wait(60) == 9
    assert f"resumed from {newest.path}" in (tmp_path / "log").read_text()
