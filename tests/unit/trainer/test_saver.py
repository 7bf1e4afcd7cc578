"""Background saving: what training waits for, what is kept, what a failure does."""

import json
import threading
import time

import pytest
import torch

from tests.support.tiny_drafter import drafter_config, make_drafter
from trainer.checkpoint import saver as saver_module
from trainer.checkpoint.saver import RunFacts, Saver
from trainer.checkpoint.scores import ScoreBook
from trainer.checkpoint.snapshot import HostSnapshot
from trainer.checkpoint.state import ConsumedPacks, read_state
from trainer.checkpoint.store import CheckpointStore, verify
from trainer.config import CheckpointConfig
from trainer.drafter.exported import load_drafter
from trainer.errors import CheckpointError, StalledError
from trainer.lifecycle.heartbeat import StatusFile
from trainer.pipeline.workers import Board


class Weights:
    """Stands for an optimizer: the drafter's parameters are its masters."""

    def __init__(self):
        self.drafter = make_drafter()
        self.reads = 0

    def state_sources(self):
        self.reads += 1
        return {f"master.{name}": value.detach() for name, value in self.drafter.named_parameters()}

    def change(self):
        with torch.no_grad():
            for value in self.drafter.parameters():
                value += 1.0


class Bench:
    """A saver with everything around it; `gate` holds the writing thread while it is closed."""

    def __init__(self, folder, monkeypatch, *, stall_s=120.0, **config):
        self.gate = threading.Event()
        self.gate.set()
        self.writing = threading.Event()
        self.weights = Weights()
        self.status = StatusFile(folder)
        self.store = CheckpointStore(folder / "lineage-0000")
        self.store.prepare()
        self.consumed = ConsumedPacks(4, 2)
        real = saver_module.write_state

        def write_state(state, path):
            self.writing.set()
            assert self.gate.wait(120)
            real(state, path)

        monkeypatch.setattr(saver_module, "write_state", write_state)
        fields = {name: getattr(drafter_config(), name) for name in drafter_config().__slots__}
        self.saver = Saver(
            self.store,
            config=CheckpointConfig(stall_s=stall_s, **config),
            facts=RunFacts(identity={"config": {}}, drafter_fields=fields, export_meta={}),
            source=self.weights,
            consumed=self.consumed,
            status=self.status,
            board=Board(stall_s=0.05),
        )

    def steps(self):
        return self.store.steps("state")


@pytest.fixture
def bench(tmp_path, monkeypatch):
    made = Bench(tmp_path, monkeypatch)
    yield made
    made.gate.set()
    made.saver.close(timeout_s=120, give_up=lambda: False)


def test_training_goes_on_while_the_checkpoint_is_written(bench):
    before = {name: value.clone() for name, value in bench.weights.state_sources().items()}
    bench.gate.clear()
    bench.consumed.add(0, 1)

    bench.saver.save(3, 30)
    assert bench.writing.wait(120)
    bench.weights.change()
    bench.consumed.add(0, 2)
    assert bench.status.phase == "init"
    assert bench.steps() == []
    bench.gate.set()
    bench.saver.close(timeout_s=120, give_up=lambda: False)

    state = read_state(bench.store.path("state", 3))
    assert (state.step, state.tokens) == (3, 30)
    assert all(torch.equal(state.tensors[name], value) for name, value in before.items())
    back = ConsumedPacks(4, 2)
    back.load(state.tensors)
    assert back.count() == 1
    exported = load_drafter(bench.store.path("export", 3)).state_dict()
    for name, value in before.items():
        assert torch.equal(exported[name.removeprefix("master.")].float(), value.bfloat16().float())


def test_second_checkpoint_waits_for_the_first_and_none_is_left_out(bench):
    bench.gate.clear()
    bench.saver.save(3, 30)
    assert bench.writing.wait(120)
    second = threading.Thread(target=bench.saver.save, args=(4, 40))
    second.start()
    second.join(0.3)

    assert second.is_alive()
    assert bench.weights.reads == 1  # no second copy in memory while the first is being written
    bench.gate.set()
    second.join(120)
    bench.saver.close(timeout_s=120, give_up=lambda: False)

    assert bench.steps() == [3, 4]
    for step in (3, 4):
        verify(bench.store.path("state", step))


def test_last_save_is_on_disk_when_it_returns_and_is_not_written_twice(bench):
    bench.saver.save(3, 30, is_last=True)
    assert bench.steps() == [3]
    assert json.loads(bench.status.path.read_text())["last_checkpoint"]["step"] == 3

    bench.saver.save(3, 30, is_last=True)

    assert bench.weights.reads == 1


def test_failed_save_is_shown_and_cleared_by_the_next_good_one(bench, monkeypatch, caplog):
    real = saver_module.write_state

    def no_room(state, path):
        if state.step == 3:
            raise OSError(28, "No space left on device")
        real(state, path)

    monkeypatch.setattr(saver_module, "write_state", no_room)
    bench.saver.save(3, 30)
    bench.saver.close(timeout_s=120, give_up=lambda: False)
    shown = json.loads(bench.status.path.read_text())["degraded"]["checkpoint"]

    bench.saver.save(4, 40, is_last=True)

    assert "checkpoint of step 3 failed" in shown
    assert "No space left" in shown
    assert json.loads(bench.status.path.read_text())["degraded"] == {}
    assert bench.saver.take_record()["failed"] == 1.0
    assert bench.steps() == [4]
    assert "checkpoint of step 3 failed, training goes on" in caplog.text


def test_defect_in_the_writing_thread_fails_the_last_save_with_its_cause(bench, monkeypatch):
    monkeypatch.setattr(saver_module, "verify", lambda _path: 1 / 0)

    with pytest.raises(CheckpointError, match="step 3 failed: ZeroDivisionError") as caught:
        bench.saver.save(3, 30, is_last=True)

    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_disk_that_never_answers_is_a_stall_by_its_own_limit(tmp_path, monkeypatch):
    bench = Bench(tmp_path, monkeypatch, stall_s=0.4)
    bench.gate.clear()
    started_s = time.monotonic()

    with pytest.raises(StalledError, match=r"checkpoint\.stall_s"):
        bench.saver.save(3, 30, is_last=True)

    assert time.monotonic() - started_s > 0.4  # not by the shorter limit of the pipeline
    bench.gate.set()
    bench.saver.close(timeout_s=120, give_up=lambda: False)


def test_time_that_a_stop_needs_counts_the_save_on_its_way(bench):
    assert bench.saver.needed_s() == 0.0
    bench.saver.save(3, 30, is_last=True)
    assert bench.saver.needed_s() == pytest.approx(one_save_s(bench), abs=1e-5)
    bench.gate.clear()
    bench.writing.clear()
    bench.saver.save(4, 40)
    assert bench.writing.wait(120)

    assert bench.saver.needed_s() == pytest.approx(2 * one_save_s(bench), abs=1e-5)
    bench.gate.set()


def one_save_s(bench):
    record = bench.saver.take_record()
    assert record["write_ms"] > 0
    return (record["copy_ms"] + record["write_ms"]) / 1e3


def test_abandoned_stop_does_not_wait_for_the_save_on_its_way(bench, caplog):
    bench.gate.clear()
    bench.saver.save(3, 30)
    assert bench.writing.wait(120)

    bench.saver.close(timeout_s=120, give_up=lambda: True)

    assert "still being written at the end; it is given up" in caplog.text
    bench.gate.set()


def test_best_checkpoint_stays_beside_the_newest(tmp_path, monkeypatch):
    bench = Bench(tmp_path, monkeypatch, keep=2, keep_best=1)
    for step, value in ((1, 1.2), (2, 2.5), (3, 1.9), (4, 1.4), (5, 1.3)):
        bench.saver.scores.observe("acceptance_length", step, value)
        bench.saver.save(step, step, is_last=True)

    assert bench.steps() == [2, 4, 5]
    assert bench.store.steps("export") == [2, 4, 5]
    scores = json.loads((tmp_path / "lineage-0000" / "scores.json").read_text())["scores"]
    assert scores["2"] == {"acceptance_length": 2.5}
    assert set(scores) == {"2", "4", "5"}


def test_evaluation_that_comes_after_the_save_scores_that_checkpoint(tmp_path):
    book = ScoreBook(tmp_path)
    book.observe("eal", 9, 1.5)
    book.add_checkpoint(10)
    book.observe("acceptance_length", 10, 2.0)
    book.add_checkpoint(20)
    book.observe("acceptance_length", 20, 1.5)

    assert book.best(1, [10, 20]) == [10]
    assert ScoreBook(tmp_path).best(2, [10, 20]) == [10, 20]
    assert book.best(1, [20]) == [20]


@pytest.mark.parametrize(
    ("scores", "best"),
    [
        ({}, []),
        ({"eal": {1: 3.0, 2: 1.0}}, [1]),
        ({"eal": {1: 3.0, 2: 1.0}, "acceptance_length": {2: 1.1}}, [2]),
        ({"eal": {1: 3.0}, "held_out_eal": {1: 1.0, 2: 1.2}}, [2]),
        ({"eal": {1: float("nan"), 2: 1.0}}, [2]),
        ({"eal": {1: 2.0, 2: 2.0}}, [2]),
    ],
    ids=[
        "none",
        "training",
        "decoding before training",
        "held-out before training",
        "nan",
        "later of equals",
    ],
)
def test_best_is_chosen_by_the_most_trustworthy_metric_there_is(tmp_path, scores, best):
    book = ScoreBook(tmp_path)
    for step in (1, 2):
        for metric, values in scores.items():
            book.observe(metric, step, values.get(step))
        book.add_checkpoint(step)

    assert book.best(1, [1, 2]) == best


def test_unknown_score_is_a_mistake_of_the_caller(tmp_path):
    with pytest.raises(ValueError, match="unknown score: speed"):
        ScoreBook(tmp_path).observe("speed", 1, 1.0)


def test_damaged_scores_are_reported_and_forgotten(tmp_path, caplog):
    (tmp_path / "scores.json").write_text('{"scores": {"x": 1}}')

    assert ScoreBook(tmp_path).best(1, [1]) == []
    assert "scores of earlier checkpoints are lost" in caplog.text


def test_snapshot_reuses_its_buffers_and_follows_changed_shapes():
    snapshot = HostSnapshot()
    source = torch.arange(6.0)
    first = snapshot.take({"a": source})
    source += 1
    second = snapshot.take({"a": source})
    third = snapshot.take({"a": torch.zeros(2, 3, dtype=torch.int64)})

    assert first["a"].data_ptr() == second["a"].data_ptr()
    assert torch.equal(second["a"], source)
    assert second["a"].data_ptr() != source.data_ptr()
    assert third["a"].shape == (2, 3)
