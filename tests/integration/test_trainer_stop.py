"""Stopping the real command line; every phase, by signal and by file: `tests/faults/`."""

import signal

import pytest

from tests.support.tiny import tiny_target, write_tiny_corpus
from tests.support.trainer_runs import await_status, launch, read_status, settings_for
from trainer.checkpoint.store import CheckpointStore, verify

LONG = {"optim__epochs": 20_000, "telemetry__status_interval_s": 0.2}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return tiny_target(folder), write_tiny_corpus(folder / "data")


@pytest.fixture
def start(tiny, tmp_path):
    """Start a long run; ends whatever is left of it."""
    started = []

    def begin(**environ):
        settings = settings_for(*tiny, tmp_path / "out", **LONG)
        process = launch(settings, tmp_path / "log", DFLASH_RUN_DIR=str(tmp_path / "run"), **environ)
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.wait(180)


def in_phase(name):
    return lambda status: status["phase"] == name


def lineage(tmp_path):
    return CheckpointStore(tmp_path / "out" / "lineage-0000")


def test_sigterm_ends_with_exit_9_and_whole_checkpoints(start, tmp_path):
    process = start()
    await_status(process, tmp_path / "run", in_phase("training"))

    process.send_signal(signal.SIGTERM)

    assert process.wait(180) == 9, (tmp_path / "log").read_text()
    status = read_status(tmp_path / "run")
    assert (status["phase"], status["message"]) == ("done", "stopped on request")
    assert status["stop"]["why"] == "finishing the step, then saving"
    newest = lineage(tmp_path).find_newest()
    assert newest.skipped == ()
    assert status["last_checkpoint"]["step"] == newest.step == status["step"]
    verify(tmp_path / "out" / "lineage-0000" / "export" / newest.path.name)


def test_sigterm_while_libraries_load_is_a_stop_too(start, tmp_path):
    (tmp_path / "slow" / "torch").mkdir(parents=True)
    (tmp_path / "slow" / "torch" / "__init__.py").write_text("import time\n\ntime.sleep(600)\n")
    process = start(PYTHONPATH=str(tmp_path / "slow"))
    await_status(process, tmp_path / "run", in_phase("init"))

    process.send_signal(signal.SIGTERM)

    assert process.wait(180) == 9, (tmp_path / "log").read_text()
    assert not (tmp_path / "out" / "lineage-0000" / "state").exists()
