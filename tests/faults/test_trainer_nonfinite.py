"""T2: NaN and infinity never reach a parameter; they are counted, named, and end the run when they stay."""

import re
import threading

import pytest
import torch
from safetensors.torch import load_file

from tests.support.tiny import tiny_target, write_tiny_corpus
from tests.support.trainer_runs import metrics_lines, run_here, settings_for
from trainer.checkpoint.store import CheckpointStore
from trainer.drafter.worker import DrafterWorker
from trainer.errors import NonFiniteError
from trainer.target.capture import Target

REPLICAS = {"one": "cpu", "three": "cpu,cpu,cpu"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return tiny_target(folder), write_tiny_corpus(folder / "data")


def poison_hidden_states(monkeypatch, *, calls=None, value=float("nan")):
    """Spoil what the target's worker produces, in the given calls (None: in all)."""
    real = Target.hidden_states
    made = []

    def poisoned(self, *args, **options):
        hidden, last = real(self, *args, **options)
        # the start-up check of the target stays as it is
        if threading.current_thread().name.startswith("target"):
            made.append(1)
            if calls is None or len(made) in calls:
                hidden = hidden.clone()
                hidden[0, 0, 0, 0] = value
        return hidden, last

    monkeypatch.setattr(Target, "hidden_states", poisoned)


def poison_gradient(monkeypatch, pack, value):
    """Spoil the gradient of one pack, on whichever replica it is."""
    real = DrafterWorker._accumulate

    def accumulate(self, item):
        sums = real(self, item)
        if (item.epoch, item.pack_id) == pack:
            next(iter(self._optimizer._gradients.values())).view(-1)[0] = value
        return sums

    monkeypatch.setattr(DrafterWorker, "_accumulate", accumulate)


def tensors_of(out):
    newest = CheckpointStore(out / "lineage-0000").find_newest()
    assert newest.skipped == ()
    return load_file(newest.path / "tensors.safetensors")


@pytest.mark.parametrize("drafters", REPLICAS.values(), ids=REPLICAS.keys())
@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=["nan", "inf"])
def test_t2_poisoned_hidden_states_skip_one_step_and_training_goes_on(
    tiny, tmp_path, monkeypatch, drafters, value
):
    poison_hidden_states(monkeypatch, calls={3}, value=value)

    assert run_here(settings_for(*tiny, tmp_path, devices__drafter_gpus=drafters)) == 0

    last = metrics_lines(tmp_path / "run")[-1]["train"]
    assert last["skipped"] == 1
    assert last["loss"] is not None
    assert all(
        torch.isfinite(value).all() for value in tensors_of(tmp_path).values() if value.is_floating_point()
    )


@pytest.mark.parametrize("drafters", REPLICAS.values(), ids=REPLICAS.keys())
def test_t2_poisoned_gradient_is_not_applied_counted_and_the_packs_of_all_replicas_are_named(
    tiny, tmp_path, monkeypatch, caplog, drafters
):
    poison_gradient(monkeypatch, (0, 4), float("inf"))

    settings = settings_for(
        *tiny, tmp_path, devices__drafter_gpus=drafters, queue__ordered=True, telemetry__log_every=1
    )
    assert run_here(settings) == 0

    counts = [line["train"]["skipped"] for line in metrics_lines(tmp_path / "run")]
    replicas = drafters.count("cpu")
    step = 4 // replicas
    assert counts[:step] == [0] * step
    assert set(counts[step:]) == {1}
    text = next(r.getMessage() for r in caplog.records if "non-finite steps skipped" in r.getMessage())
    named = set(re.findall(r"\d+:\d+", text))
    assert {f"0:{pack}" for pack in range(step * replicas, (step + 1) * replicas)} <= named
    assert "seed 0" in text
    assert all(
        torch.isfinite(value).all() for value in tensors_of(tmp_path).values() if value.is_floating_point()
    )


@pytest.mark.parametrize("drafters", REPLICAS.values(), ids=REPLICAS.keys())
def test_t2_lasting_nan_ends_the_run_with_exit_5_and_the_last_good_checkpoint_stays(
    tiny, tmp_path, monkeypatch, drafters
):
    changes = {"devices__drafter_gpus": drafters, "optim__epochs": 30, "optim__max_nonfinite_steps": 3}
    assert run_here(settings_for(*tiny, tmp_path, **changes, optim__max_steps=4)) == 0
    before = tensors_of(tmp_path)
    poison_hidden_states(monkeypatch)

    with pytest.raises(NonFiniteError, match=r"steps in a row had a non-finite loss .*limit 3") as caught:
        run_here(settings_for(*tiny, tmp_path, **changes))

    assert caught.value.exit_code == 5
    line = metrics_lines(tmp_path / "run")[-1]
    assert line["train"]["loss"] is None
    assert "train.loss" in line["nonfinite"]
    assert line["train"]["skipped"] >= 3
    after = tensors_of(tmp_path)
    assert all(torch.equal(after[name], value) for name, value in before.items())
