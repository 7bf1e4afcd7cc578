"""Stop protocol, status record, run folder, and exit codes."""

import json
import logging
import os
import resource
import signal
import threading
from pathlib import Path

import pytest

from trainer.__main__ import leave_tracebacks_to_bugs
from trainer.checkpoint.state import check_state
from trainer.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    NonFiniteError,
    OutOfMemoryError,
    WorkerDiedError,
)
from trainer.lifecycle.exits import describe, exit_code, translate
from trainer.lifecycle.heartbeat import PHASES, StatusFile
from trainer.lifecycle.runfolder import find_git_sha, hold_output, write_json
from trainer.lifecycle.signals import SignalCounter, StopFile, StoppedEarlyError
from trainer.lifecycle.stopping import StopWatch


def read(status):
    return json.loads(status.path.read_text())


@pytest.fixture
def status(tmp_path):
    now = [1000.0]
    status = StatusFile(tmp_path, wall=lambda: now[0])
    status.now = now
    return status


@pytest.fixture
def signals():
    counter = SignalCounter()
    counter.install()
    yield counter
    counter.restore()


def ask(tmp_path, **fields):
    (tmp_path / "control").mkdir(exist_ok=True)
    body = {
        "v": 1,
        "id": "s1",
        "reason": "test",
        "actor": "me",
        "requested_at": 0,
        "deadline_s": 60,
        "save": True,
    }
    (tmp_path / "control" / "stop.json").write_text(json.dumps(body | fields))


def watch(tmp_path, status, signals, needed_s=5.0):
    return StopWatch(tmp_path, status, signals, needed_s=lambda: needed_s)


def test_phases_are_the_contracts():
    assert PHASES == (
        "init",
        "loading",
        "compiling",
        "filling",
        "training",
        "evaluating",
        "checkpointing",
        "draining",
        "done",
    )


def test_phase_change_is_written_at_once_with_its_time(status):
    status.set_phase("loading", "data")
    status.now[0] = 1007.0
    status.set_phase("loading", "target")
    assert (read(status)["phase"], read(status)["phase_since"]) == ("loading", 1000.0)
    assert read(status)["message"] == "target"

    status.set_phase("training")
    assert (read(status)["phase"], read(status)["phase_since"]) == ("training", 1007.0)


def test_nested_phase_returns_to_the_one_before(status):
    status.set_phase("training")
    with status.during("checkpointing"):
        assert read(status)["phase"] == "checkpointing"
    assert read(status)["phase"] == "training"


def test_stop_while_saving_keeps_the_phase_and_then_drains(status):
    status.set_phase("training")
    with status.during("checkpointing"):
        status.drain("stop requested")
        assert read(status)["phase"] == "checkpointing"
    assert read(status)["phase"] == "draining"


def test_progress_and_checkpoint_are_recorded(status, tmp_path):
    status.progress(7, 20)
    status.checkpoint_saved(6, tmp_path / "step-00000006")

    record = read(status)
    assert (record["step"], record["total_steps"], record["last_progress_at"]) == (7, 20, 1000.0)
    assert record["last_checkpoint"] == {
        "step": 6,
        "path": str(tmp_path / "step-00000006"),
        "saved_at": 1000.0,
    }


def test_lost_run_folder_never_raises_and_is_said_once(status, tmp_path, caplog):
    status.path = tmp_path / "gone" / "status.json"

    status.write()
    status.write()

    assert caplog.text.count("status cannot be written") == 1


def test_first_signal_asks_for_an_orderly_stop(tmp_path, status, signals):
    stopping = watch(tmp_path, status, signals)
    assert not stopping.look()

    os.kill(os.getpid(), signal.SIGTERM)

    assert stopping.look()
    assert not stopping.look()
    assert (stopping.request.id, stopping.request.save) == (None, True)
    assert read(status)["stop"] == {
        "id": None,
        "seen_at": 1000.0,
        "extend_s": 0.0,
        "why": "finishing the step, then saving",
    }


def test_second_signal_abandons_the_save(tmp_path, status, signals):
    stopping = watch(tmp_path, status, signals)
    os.kill(os.getpid(), signal.SIGTERM)
    stopping.look()

    os.kill(os.getpid(), signal.SIGTERM)
    stopping.look()

    assert stopping.is_abandoned
    assert read(status)["stop"]["why"] == "second signal: save abandoned"


def test_request_with_a_deadline_is_abandoned_when_deadline_and_extension_are_over(tmp_path, status, signals):
    now = [0.0]
    stopping = StopWatch(tmp_path, status, signals, needed_s=lambda: 25.0, monotonic=lambda: now[0])
    ask(tmp_path, deadline_s=10)
    assert stopping.look()
    assert read(status)["stop"]["extend_s"] == 15.0

    now[0] = 24.9
    stopping.look()
    assert not stopping.is_abandoned
    now[0] = 25.1
    stopping.look()

    assert stopping.is_abandoned
    assert read(status)["stop"] == {
        "id": "s1",
        "seen_at": 1000.0,
        "extend_s": 0.0,
        "why": "deadline: save abandoned",
    }


def test_degradation_is_cleared_when_it_works_again(status):
    status.set_degraded("checkpoint", "disk full")
    status.set_degraded("wandb", "offline")

    status.clear_degraded("checkpoint")

    assert read(status)["degraded"] == {"wandb": "offline"}


def test_stop_file_decides_id_and_save(tmp_path, status, signals):
    ask(tmp_path, id="req-9", save=False)
    stopping = watch(tmp_path, status, signals)

    assert stopping.look()

    assert (stopping.request.id, stopping.request.save) == ("req-9", False)
    assert read(status)["stop"]["why"] == "finishing the step, without saving"


def test_file_and_its_signal_are_one_request(tmp_path, status, signals):
    stopping = watch(tmp_path, status, signals)
    os.kill(os.getpid(), signal.SIGTERM)
    stopping.look()
    ask(tmp_path, id="req-9", save=False)

    stopping.look()

    assert (stopping.request.id, stopping.request.save) == ("req-9", False)
    assert not stopping.is_abandoned


def test_short_deadline_is_answered_with_the_time_still_needed(tmp_path, status, signals):
    ask(tmp_path, deadline_s=60)

    watch(tmp_path, status, signals, needed_s=75.0).look()

    assert read(status)["stop"]["extend_s"] == 15.0


@pytest.mark.parametrize(
    "content",
    [b"{", b"[]", b'{"v": 1}', b'{"id": "x", "deadline_s": "soon"}', b"\xff", b'{"id": "\xff"}', b""],
)
def test_unusable_stop_file_is_reported_once_and_ignored(tmp_path, caplog, content):
    (tmp_path / "control").mkdir()
    (tmp_path / "control" / "stop.json").write_bytes(content)
    file = StopFile(tmp_path)

    assert (file.read(), file.read()) == (None, None)
    assert caplog.text.count("stop request cannot be used") == 1


def test_stale_stop_file_can_be_cleared(tmp_path, status, signals, caplog):
    ask(tmp_path)
    stopping = watch(tmp_path, status, signals)

    stopping.clear_stale()

    assert not stopping.look()
    assert "removed a stop request of an earlier run" in caplog.text


def test_git_sha_is_read_without_git(tmp_path):
    sha = "0123456789abcdef0123456789abcdef01234567"
    (tmp_path / ".git" / "refs" / "heads").mkdir(parents=True)
    (tmp_path / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    (tmp_path / "a").mkdir()
    assert find_git_sha(tmp_path / "a") is None

    (tmp_path / ".git" / "packed-refs").write_text(f"# pack-refs\n{sha} refs/heads/main\n")
    assert find_git_sha(tmp_path / "a") == sha

    (tmp_path / ".git" / "refs" / "heads" / "main").write_text(sha[::-1] + "\n")
    assert find_git_sha(tmp_path / "a") == sha[::-1]

    (tmp_path / ".git" / "HEAD").write_text(sha + "\n")
    assert find_git_sha(tmp_path / "a") == sha


@pytest.mark.parametrize(
    ("error", "code"),
    [(ConfigError("x"), 2), (DataError("x"), 3), (NonFiniteError("x"), 5), (ValueError("x"), 1)],
    ids=lambda value: str(value),
)
def test_exit_code_follows_the_class(error, code):
    assert exit_code(error) == code


def test_out_of_memory_is_recognised_anywhere_in_the_causes():
    cuda = type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory. Tried\nto allocate 2 GiB")
    died = WorkerDiedError("drafter-gpu1 died")
    died.__cause__ = cuda

    translated = translate(died)

    assert isinstance(translated, OutOfMemoryError)
    assert exit_code(translated) == 6
    assert "CUDA out of memory. Tried to allocate 2 GiB" in describe(translated)
    assert "lower --token-budget" in describe(translated)


def test_description_is_one_line_with_notes():
    error = DataError("no\nrows")
    error.add_note("in thread feeder")

    assert describe(error) == "DataError: no rows (in thread feeder)"


def test_a_signal_just_before_a_long_part_of_the_start_ends_it_too(signals):
    os.kill(os.getpid(), signal.SIGTERM)
    is_inside = False

    with pytest.raises(StoppedEarlyError), signals.interrupting():
        is_inside = True

    assert not is_inside


def test_signal_while_models_load_ends_the_loading_at_once(signals):
    never = threading.Event()

    def load():
        with signals.interrupting():
            os.kill(os.getpid(), signal.SIGTERM)
            never.wait(30)

    with pytest.raises(StoppedEarlyError):
        load()
    os.kill(os.getpid(), signal.SIGTERM)  # outside of the block it only counts again

    assert signals.count == 2


def test_full_disk_at_the_start_is_one_clear_error(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
    try:
        with pytest.raises(ConfigError, match=r"run folder cannot be written: .*config.json"):
            write_json(tmp_path / "config.json", {"key": "x" * 1000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    assert list(tmp_path.iterdir()) == []


def _fail_in(output: Path, error: Exception, *, checkpoint: bool = False) -> None:
    for folder in ("lineage-0000/state", "lineage-0000/export", "run/control"):
        (output / folder).mkdir(parents=True)
    (output / "run" / "config.json").write_text("{}")
    if checkpoint:
        (output / "lineage-0000" / "state" / "step-00000001").mkdir()
    raise error


def test_a_run_without_data_leaves_nothing_in_a_folder_that_it_made(tmp_path: Path) -> None:
    output = tmp_path / "out"

    with pytest.raises(DataError), hold_output(output):
        _fail_in(output, DataError("no usable sample"))

    assert not output.exists()


@pytest.mark.parametrize(
    ("is_there", "checkpoint", "error"),
    [(True, False, DataError), (False, True, DataError), (False, False, CheckpointError)],
    ids=["a folder of before", "a checkpoint", "another error"],
)
def test_traces_stay_where_they_may_matter(tmp_path: Path, is_there: bool, checkpoint: bool, error) -> None:
    output = tmp_path / "out"
    if is_there:
        output.mkdir()

    with pytest.raises(error), hold_output(output):
        _fail_in(output, error("why"), checkpoint=checkpoint)

    assert (output / "run" / "config.json").exists()
    assert (output / "lineage-0000" / "state").exists()


def test_an_export_named_as_a_state_is_answered_without_the_words_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"not a training state: .* \(it has no \S+\); name a state"):
        check_state(tmp_path)


def test_errors_raised_on_purpose_are_logged_without_a_traceback() -> None:
    for error in (NonFiniteError("5 steps"), RuntimeError("a bug")):
        try:
            raise error
        except Exception as caught:  # noqa: BLE001 - both kinds go through the same line
            record = logging.makeLogRecord({"exc_info": (type(caught), caught, caught.__traceback__)})
        assert leave_tracebacks_to_bugs(record)
        assert bool(record.exc_info) is isinstance(error, RuntimeError)
