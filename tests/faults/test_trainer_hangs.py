"""T1: a trainer that stands still is found, shows where every thread stands, and ends with exit 7."""

import functools
import os
import threading
import time
import types

import pytest

from tests.support.tiny import tiny_target, write_tiny_corpus
from tests.support.trainer_forks import trainer_forks
from tests.support.trainer_runs import (
    await_end_of_workers,
    await_until,
    read_status,
    run_here,
    settings_for,
)
from trainer import assembly
from trainer import train as train_module
from trainer.errors import StalledError
from trainer.lifecycle import stalls
from trainer.lifecycle.stalls import StartWatch, render_stacks
from trainer.pipeline.workers import Board

PLACES = {
    "target": ("trainer.target.worker.collate", "target-cpu"),
    "drafter": ("trainer.drafter.worker.select_anchors", "drafter-cpu"),
    "feeder": ("trainer.data.sampler.bucket_counts", "feeder"),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return tiny_target(folder), write_tiny_corpus(folder / "data")


@pytest.fixture
def release(monkeypatch):
    """Ends every planted hang with the test; the run itself does not wait long for hung threads."""
    event = threading.Event()
    monkeypatch.setattr(train_module, "JOIN_AFTER_FAILURE_S", 0.1)
    monkeypatch.setattr(train_module, "SAVE_AFTER_FAILURE_S", 0.1)
    yield event
    event.set()
    await_end_of_workers()


class FromThen:
    """A clock that stands until `begin`: what a loaded machine needs before a hang is not part of it."""

    def __init__(self):
        self._begun_s = None

    def begin(self):
        """Let it go, once."""
        self._begun_s = self._begun_s or time.monotonic()

    def __call__(self):
        return 0.0 if self._begun_s is None else time.monotonic() - self._begun_s


@pytest.fixture
def clock(monkeypatch):
    """The clock of the run's stall limit."""
    made = FromThen()
    monkeypatch.setattr(train_module, "Board", functools.partial(Board, monotonic=made))
    return made


def stacks_in(caplog):
    return "".join(record.getMessage() for record in caplog.records if "stacks of all" in record.message)


@pytest.mark.parametrize(("place", "thread"), PLACES.values(), ids=PLACES.keys())
def test_t1_hung_worker_is_shown_with_its_stack_before_the_run_ends(
    tiny, tmp_path, monkeypatch, caplog, release, clock, place, thread
):
    def planted_hang(*_args, **_options):
        clock.begin()
        release.wait(600)
        raise RuntimeError("released")

    monkeypatch.setattr(place, planted_hang)

    with pytest.raises(StalledError, match=r"nothing moved for .* queue\.stall_s") as caught:
        run_here(settings_for(*tiny, tmp_path / "out", queue__stall_s=2.0))

    assert caught.value.exit_code == 7
    stack = next(part for part in stacks_in(caplog).split("thread ") if part.startswith(thread))
    assert "in planted_hang" in stack
    assert "thread MainThread" in stacks_in(caplog)
    assert len([record for record in caplog.records if "stacks of all" in record.message]) == 1


def test_t1_heartbeat_goes_on_but_progress_stands_still_while_hung(
    tiny, tmp_path, monkeypatch, release, clock
):
    run_dir, seen, calls = tmp_path / "out" / "run", [], []
    real = train_module_worker_function("select_anchors")

    def hang_in_the_third(*args, **options):
        calls.append(1)
        if len(calls) < 3:
            return real(*args, **options)
        # the file may still be of before: what was written after the hang began counts
        for _ in range(2):
            seen.append(await_written_after(run_dir, time.time() + 0.1))
        clock.begin()
        release.wait(600)
        raise RuntimeError("released")

    monkeypatch.setattr("trainer.drafter.worker.select_anchors", hang_in_the_third)

    with pytest.raises(StalledError):
        run_here(settings_for(*tiny, tmp_path / "out", queue__stall_s=1.0, telemetry__status_interval_s=0.05))

    before, after = seen
    assert after["written_at"] > before["written_at"]
    assert after["last_progress_at"] == before["last_progress_at"] is not None
    assert after["step"] == 2


def await_written_after(run_dir, moment):
    for _ in range(12_000):
        status = read_status(run_dir)
        if status["written_at"] > moment:
            return status
        time.sleep(0.01)
    raise AssertionError("the heartbeat stopped")


def train_module_worker_function(name):
    from trainer.drafter import worker

    return getattr(worker, name)


def test_t1_disk_that_never_answers_stalls_by_the_limit_of_checkpoints(
    tiny, tmp_path, monkeypatch, caplog, release, clock
):
    def planted_hang(self, kind, step, fill):
        clock.begin()
        release.wait(600)
        raise OSError("released")

    monkeypatch.setattr(train_module.CheckpointStore, "save", planted_hang)

    with pytest.raises(StalledError, match=r"checkpoint\.stall_s"):
        run_here(settings_for(*tiny, tmp_path / "out", checkpoint__every=2, checkpoint__stall_s=0.5))

    assert "in planted_hang" in stacks_in(caplog)
    assert "thread checkpoint" in stacks_in(caplog)


def test_t1_evaluation_that_hangs_is_found(tiny, tmp_path, monkeypatch, caplog, release, clock):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"id": "a", "prompt": "say it"}\n')

    def planted_hang(*_args, **_options):
        clock.begin()
        release.wait(600)
        raise RuntimeError("released")

    monkeypatch.setattr("trainer.eval.online.OnlineEvaluation.measure", planted_hang)

    with pytest.raises(StalledError, match=r"nothing moved for .* queue\.stall_s"):
        run_here(
            settings_for(*tiny, tmp_path / "out", queue__stall_s=2.0, eval__every=2, eval__prompts=prompts)
        )

    assert "in planted_hang" in stacks_in(caplog)


def test_t1_start_that_hangs_ends_the_process_by_its_own_limit(tiny, tmp_path, monkeypatch, caplog, release):
    codes, clock = [], FromThen()

    def leave(code):
        codes.append(code)
        release.set()

    def planted_hang(*_args, **_options):
        clock.begin()
        assert release.wait(600)
        raise InterruptedError("left")

    monkeypatch.setattr(stalls, "time", types.SimpleNamespace(monotonic=clock))

    monkeypatch.setattr(train_module, "StartWatch", functools.partial(StartWatch, leave=leave))
    monkeypatch.setattr(assembly, "load_target", planted_hang)

    with pytest.raises(InterruptedError):
        run_here(settings_for(*tiny, tmp_path / "out", queue__start_stall_s=0.4))

    assert codes == [7]
    assert "in planted_hang" in stacks_in(caplog)
    assert "the start stands still" in caplog.text
    assert "at: loading target" in caplog.text


def test_t1_start_that_goes_on_is_left_alone(monkeypatch):
    codes, looks, now_s = [], [], [0.0]
    monkeypatch.setattr(stalls, "LOOK_S", 0.001)
    monkeypatch.setattr(stalls, "time", types.SimpleNamespace(monotonic=lambda: now_s[0]))
    watch = StartWatch(1.0, say=lambda _text: None, look_for_stop=lambda: looks.append(1), leave=codes.append)

    with watch.watching():
        for part in range(15):
            watch.enter(f"part {part}")
            now_s[0] += 0.9
            before = len(looks)
            # a look begins by asking for a stop: at the second one from here a whole one is over
            await_until(lambda before=before: len(looks) >= before + 2)

    assert codes == []


def test_t1_wider_limit_holds_while_something_long_goes_on():
    now = [0.0]
    dumped = []
    board = Board(stall_s=10.0, on_stall=lambda: dumped.append(1), monotonic=lambda: now[0])

    with board.quiet("checkpoint", limit_s=100.0, key="checkpoint.stall_s"):
        now[0] = 90.0
        board.check()
        with board.quiet("warm-up"):
            now[0] = 500.0
            board.check()
        now[0] = 650.0
        with pytest.raises(StalledError, match=r"limit 100 s, checkpoint\.stall_s"):
            board.check()
        with pytest.raises(StalledError):
            board.check()

    assert dumped == [1]


def test_t1_stacks_name_every_thread(release):
    thread = threading.Thread(target=release.wait, name="some-worker")
    thread.start()

    text = render_stacks()

    release.set()
    thread.join()
    assert "thread some-worker" in text
    assert "in test_t1_stacks_name_every_thread" in text


HOLDS_THE_LOCK = """
import ctypes, os
from trainer import train
from trainer.drafter import worker
from trainer.lifecycle import stalls

armed, real = [], worker.select_anchors

class Soon(stalls.NativeDump):
    def __init__(self, _limit_s):
        super().__init__(0.5)

    def rearm(self):
        super().rearm()
        armed.append(self)

def planted_hang(*args, **options):
    if armed:
        # anew: it may have gone off by itself while this machine was busy with something else
        armed[0]._armed_s = float("-inf")
        armed[0].rearm()
        # a PyDLL call keeps the interpreter's lock: no other thread runs until somebody writes
        ctypes.PyDLL(None).read(os.open({pipe!r}, os.O_RDWR), ctypes.create_string_buffer(1), 1)
        os._exit(0)
    return real(*args, **options)

train.NativeDump = Soon
worker.select_anchors = planted_hang
"""


def test_t1_thread_that_blocks_the_whole_interpreter_is_shown_by_the_native_timer(tiny, tmp_path):
    settings = settings_for(*tiny, tmp_path / "out", optim__epochs=20_000)
    log, pipe = tmp_path / "log", tmp_path / "pipe"
    os.mkfifo(pipe)
    log.touch()

    with trainer_forks() as forks:
        process = forks.start(settings, log, plant=HOLDS_THE_LOCK.format(pipe=str(pipe)))
        await_until(lambda: "in planted_hang" in log.read_text() or process.poll() is not None)
        shown = log.read_text()
        pipe.write_text("x")
        code = process.wait(120)

    assert code == 0, log.read_text()
    assert "Timeout (" in shown
    assert "in planted_hang" in shown
