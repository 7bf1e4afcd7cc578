"""T6: whichever thread of the pipeline dies, the run ends with its traceback and exit 7, and nobody hangs."""

import threading

import pytest

from tests.support.tiny import tiny_target, write_tiny_corpus
from tests.support.trainer_runs import read_status, run_here, settings_for
from trainer.data import sampler
from trainer.drafter.worker import DrafterWorker
from trainer.errors import WorkerDiedError
from trainer.optim.reduce import ReplicaSum
from trainer.pipeline.meeting import Meeting
from trainer.pipeline.queues import HiddenStatesQueue
from trainer.target.worker import TargetWorker

DEVICES = {"devices__target_gpus": "cpu,cpu", "devices__drafter_gpus": "cpu,cpu,cpu"}
PIPELINE = {
    "feeder",
    *(f"target-cpu{place}" for place in range(2)),
    *(f"drafter-cpu{place}" for place in range(3)),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return tiny_target(folder), write_tiny_corpus(folder / "data")


def break_method(monkeypatch, owner, name, thread, *, after=0):
    """Let a method raise in one thread, once it was called there `after` times."""
    real = getattr(owner, name)
    calls = []

    def broken(*args, **options):
        if threading.current_thread().name == thread:
            calls.append(1)
            if len(calls) > after:
                raise ValueError("planted")
        return real(*args, **options)

    monkeypatch.setattr(owner, name, broken)


@pytest.mark.parametrize(
    ("owner", "name", "thread", "after"),
    [
        (sampler, "bucket_counts", "feeder", 0),
        (sampler, "bucket_counts", "feeder", 1),
        (TargetWorker, "_process", "target-cpu0", 0),
        (TargetWorker, "_process", "target-cpu1", 2),
        (HiddenStatesQueue, "put", "target-cpu1", 1),
        (DrafterWorker, "_accumulate", "drafter-cpu0", 1),
        (DrafterWorker, "_accumulate", "drafter-cpu1", 1),
        (DrafterWorker, "_accumulate", "drafter-cpu2", 0),
        (ReplicaSum, "add", "drafter-cpu0", 1),
        (Meeting, "hold", "drafter-cpu2", 4),
        (DrafterWorker, "_prove_equal", "drafter-cpu1", 0),
    ],
    ids=[
        "feeder at start",
        "feeder in the second epoch",
        "first target",
        "second target",
        "queue of a target",
        "leading drafter",
        "second drafter",
        "third drafter at once",
        "reducer",
        "meeting of the drafters",
        "checksum before the first step",
    ],
)
def test_t6_dead_thread_ends_the_run_with_its_traceback(
    tiny, tmp_path, monkeypatch, caplog, owner, name, thread, after
):
    break_method(monkeypatch, owner, name, thread, after=after)
    settings = settings_for(*tiny, tmp_path / "out", **DEVICES, optim__epochs=50)

    with pytest.raises(WorkerDiedError, match=f"{thread} died: ValueError: planted") as caught:
        run_here(settings)

    assert caught.value.exit_code == 7
    record = next(entry for entry in caplog.records if entry.message == f"{thread} died")
    assert record.exc_info is not None
    assert f"{thread} died" in read_status(tmp_path / "out" / "run")["message"]
    assert not PIPELINE & {t.name for t in threading.enumerate()}


def test_t6_queue_that_stays_full_is_no_wait_for_ever(tiny, tmp_path, monkeypatch):
    """The drafters die while both targets wait for room."""
    is_full = threading.Event()
    real_room = HiddenStatesQueue._has_room

    def has_room(self, item):
        answer = real_room(self, item)
        if not answer:
            is_full.set()
        return answer

    def broken(self, pack):
        assert is_full.wait(120)
        raise ValueError("planted")

    monkeypatch.setattr(HiddenStatesQueue, "_has_room", has_room)
    monkeypatch.setattr(DrafterWorker, "_accumulate", broken)
    queue = {"queue__hs_min_ready": 1, "queue__hs_max_depth": 2}

    with pytest.raises(WorkerDiedError, match=r"drafter-cpu\d died: ValueError: planted"):
        run_here(settings_for(*tiny, tmp_path / "out", **DEVICES, **queue, optim__epochs=50))

    assert not PIPELINE & {t.name for t in threading.enumerate()}


def test_t6_queue_that_stays_empty_is_no_wait_for_ever(tiny, tmp_path, monkeypatch):
    """One target dies before it delivers anything while the drafters wait below min_ready."""
    break_method(monkeypatch, TargetWorker, "_process", "target-cpu0")
    queue = {"queue__hs_min_ready": 1_000, "queue__hs_max_depth": 1_000}

    with pytest.raises(WorkerDiedError, match="target-cpu0 died: ValueError: planted"):
        run_here(settings_for(*tiny, tmp_path / "out", **DEVICES, **queue, optim__epochs=500))

    assert not PIPELINE & {t.name for t in threading.enumerate()}
