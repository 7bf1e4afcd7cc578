"""Whole runs with several drafters and targets on the CPU: they learn what one drafter would."""

import itertools
import json
import threading

import pytest
import torch
from safetensors.torch import load_file

from tests.support.tiny import tiny_target, write_tiny_corpus
from tests.support.trainer_runs import metrics_lines, read_status, run_here, settings_for
from trainer.drafter import worker
from trainer.drafter.worker import DrafterWorker
from trainer.errors import PipelineError
from trainer.optim.adamw import MasterAdamW


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return tiny_target(folder), write_tiny_corpus(folder / "data")


@pytest.fixture
def packs(monkeypatch):
    """Packs of all micro-batches, with the thread that had each."""
    seen = []
    real = DrafterWorker._accumulate

    def accumulate(self, pack):
        seen.append((self.name, (pack.epoch, pack.pack_id)))
        return real(self, pack)

    monkeypatch.setattr(DrafterWorker, "_accumulate", accumulate)
    return seen


def masters(out, lineage="lineage-0000"):
    folder = sorted((out / lineage / "state").glob("step-*"))[-1]
    tensors = load_file(folder / "tensors.safetensors")
    return {name: value for name, value in tensors.items() if name.startswith(("master.", "exp_avg"))}


def assert_same_training(out, reference):
    ours, theirs = masters(out), masters(reference)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-6, msg=name)
    losses = [
        [(line["step"], line["train"]["loss"]) for line in metrics_lines(folder / "run")]
        for folder in (out, reference)
    ]
    assert [step for step, _ in losses[0]] == [step for step, _ in losses[1]]
    for (_, mine), (_, other) in zip(*losses, strict=True):
        assert mine == pytest.approx(other, rel=1e-4)


@pytest.mark.parametrize(("drafters", "accumulation"), [(2, 2), (4, 1)], ids=["two", "four"])
def test_golden_20_several_drafters_train_as_one_with_more_micro_batches(
    tiny, tmp_path, packs, drafters, accumulation
):
    common = {"queue__ordered": True, "optim__epochs": 3, "optim__lr": 0.003}
    assert run_here(settings_for(*tiny, tmp_path / "one", **common, optim__grad_accum=4)) == 0
    one = [pack for _, pack in packs]
    packs.clear()

    settings = settings_for(
        *tiny,
        tmp_path / "many",
        **common,
        optim__grad_accum=accumulation,
        devices__drafter_gpus=",".join(["cpu"] * drafters),
    )
    assert run_here(settings) == 0

    # 27 packs make six steps of four and one of three, so the last step is short on some replicas
    assert sorted(pack for _, pack in packs) == sorted(one)
    assert {name for name, _ in packs} == {f"drafter-cpu{place}" for place in range(drafters)}
    assert read_status(tmp_path / "many" / "run")["step"] == 7
    assert_same_training(tmp_path / "many", tmp_path / "one")


def test_drafters_and_targets_in_free_running_order_take_each_pack_once(tiny, tmp_path, packs):
    devices = {"devices__target_gpus": "cpu,cpu", "devices__drafter_gpus": "cpu,cpu,cpu"}

    # a rate at which six steps tell more than the order in which the packs happen to come
    assert run_here(settings_for(*tiny, tmp_path / "out", **devices, optim__lr=0.003)) == 0

    assert sorted(pack for _, pack in packs) == [(epoch, pack) for epoch in range(2) for pack in range(9)]
    assert read_status(tmp_path / "out" / "run")["step"] == 6
    lines = metrics_lines(tmp_path / "out" / "run")
    assert lines[-1]["train"]["loss"] < lines[0]["train"]["loss"]
    assert lines[-1]["tokens"] == sum(
        entry["tokens"] for entry in lines[-1]["workers"] if entry["name"].startswith("drafter")
    )


def test_golden_36_resume_with_another_number_of_drafters_takes_the_rest_once_and_says_so(
    tiny, tmp_path, packs, monkeypatch
):
    out, common = tmp_path / "out", {"optim__epochs": 4, "optim__grad_accum": 2}
    real = DrafterWorker.train_step

    def stop_after_five(self):
        went_on = real(self)
        if self.step >= 5:
            self._board.stop.set()
        return went_on

    with monkeypatch.context() as patch:
        patch.setattr(DrafterWorker, "train_step", stop_after_five)
        run_here(settings_for(*tiny, out, **common))
    first = [pack for _, pack in packs]
    packs.clear()

    assert run_here(settings_for(*tiny, out, **common, devices__drafter_gpus="cpu,cpu,cpu")) == 0

    second = [pack for _, pack in packs]
    assert sorted(first[:10] + second) == [(epoch, pack) for epoch in range(4) for pack in range(9)]
    record = json.loads((out / "run" / "resume.json").read_text())
    world = {"field": "world.drafters", "was": ["cpu"], "is": ["cpu", "cpu", "cpu"]}
    assert world in record["differences"]
    # 26 packs are left, six to a step
    status = read_status(out / "run")
    assert (status["step"], status["total_steps"]) == (10, 10)
    # the schedule goes on where the packs stand (10 of 36, one step of six) and ends at its end
    rates = {line["step"]: line["train"]["lr"] for line in metrics_lines(out / "run")}
    assert rates[10] < rates[6]


def test_stop_while_replicas_stand_in_the_middle_of_a_step_ends_it_for_all(tiny, tmp_path, monkeypatch):
    """The first replica asks for a stop after its first micro-batch; nobody waits for a step that is off."""
    real = DrafterWorker._microbatch
    is_asked = threading.Event()

    def microbatch(self, pack):
        if self.step == 2 and not is_asked.is_set():
            is_asked.set()
            self._board.stop.set()
        return real(self, pack)

    monkeypatch.setattr(DrafterWorker, "_microbatch", microbatch)
    changes = {"optim__epochs": 50, "optim__grad_accum": 3, "devices__drafter_gpus": "cpu,cpu"}

    assert run_here(settings_for(*tiny, tmp_path / "out", **changes)) == 9

    status = read_status(tmp_path / "out" / "run")
    assert status["last_checkpoint"]["step"] == status["step"] in (2, 3)


def test_replicas_that_come_apart_end_the_run_before_the_next_checkpoint(tiny, tmp_path, monkeypatch):
    real = MasterAdamW.step
    calls = itertools.count(1)

    def step(self, lr):
        real(self, lr)
        if next(calls) == 5:
            next(iter(self._masters.values())).view(torch.int32).flatten()[0] ^= 1

    monkeypatch.setattr(MasterAdamW, "step", step)
    changes = {"devices__drafter_gpus": "cpu,cpu", "checkpoint__every": 2}

    with pytest.raises(PipelineError, match=r"drafter-cpu\d? no longer equal|no longer equal drafter-cpu0"):
        run_here(settings_for(*tiny, tmp_path / "out", **changes))

    saved = sorted(path.name for path in (tmp_path / "out" / "lineage-0000" / "state").glob("step-*"))
    assert saved == ["step-00000002"]


def test_replicas_that_come_apart_between_checkpoints_are_found_by_the_running_checksum(
    tiny, tmp_path, monkeypatch
):
    monkeypatch.setattr(worker, "CHECKSUM_EVERY", 2)
    real = DrafterWorker.train_step
    last = []

    def train_step(self):
        if self._replica == 1 and self.step == 3:
            next(iter(self._optimizer._masters.values())).view(torch.int32).flatten()[0] ^= 1
        last.append(self.step)
        return real(self)

    monkeypatch.setattr(DrafterWorker, "train_step", train_step)
    changes = {"devices__drafter_gpus": "cpu,cpu", "optim__epochs": 50}

    with pytest.raises(PipelineError, match="drafter-cpu1 no longer equal drafter-cpu0"):
        run_here(settings_for(*tiny, tmp_path / "out", **changes))

    # made at step 3, in the checksum of step 4, compared when step 5 closes
    assert max(last) == 4


def test_golden_21_replica_that_gets_no_pack_at_the_end_of_the_data_brings_zeros(tiny, tmp_path, packs):
    # 9 packs, 4 replicas with 2 each to a step: the last step has one pack for one replica
    changes = {"optim__epochs": 1, "optim__grad_accum": 2, "devices__drafter_gpus": "cpu,cpu,cpu,cpu"}

    assert run_here(settings_for(*tiny, tmp_path / "out", **changes)) == 0

    assert len(packs) == 9
    assert read_status(tmp_path / "out" / "run")["step"] == 2
    assert all(torch.isfinite(value).all() for value in masters(tmp_path / "out").values())
