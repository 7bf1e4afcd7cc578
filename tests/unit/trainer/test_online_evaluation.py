"""Evaluation during training: exported weights are measured, and a gap to the estimate is an alarm."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from tests.support.tiny_drafter import MASK_ID, make_drafter, overfit, talkative_target
from trainer.checkpoint.export import export_drafter
from trainer.config import EvalConfig
from trainer.data.corpus import Sample
from trainer.drafter.exported import load_drafter
from trainer.eval.alarm import Estimate, judge
from trainer.eval.online import OnlineEvaluation, Surroundings, as_exported, report_evaluation
from trainer.eval.speculative import speculative_generate
from trainer.lifecycle.heartbeat import StatusFile
from trainer.target.loader import load_target
from trainer.telemetry.fields import FIELDS, field_paths

TRAINED = [[5 + (7 * i + 3 * j) % 50 for j in range(4 + i)] for i in range(16)]
PROMPTS = TRAINED[:6]
NEW_TOKENS = 17


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    return load_target(talkative_target(folder), device="cpu", dtype=torch.float32, mask_token_id=MASK_ID)


@pytest.fixture(scope="module")
def samples(target) -> list[Sample]:
    """The target's own greedy answers, answers supervised."""
    rows = []
    for prompt in TRAINED:
        answer = speculative_generate(target, None, prompt, max_new_tokens=NEW_TOKENS, eos_ids=()).token_ids
        ids = np.asarray([*prompt, *answer], dtype=np.int32)
        rows.append(Sample(input_ids_T=ids, loss_mask_T=np.arange(len(ids)) >= len(prompt), domain=None))
    return rows


@pytest.fixture(scope="module")
def trained(target, samples):
    return overfit(target, samples, steps=110)


def _evaluation(target, held_out=(), *, is_stopping=lambda: False, **settings) -> OnlineEvaluation:
    values = {"every": 2, "prompts": "given", "max_new_tokens": NEW_TOKENS, "alarm_min_blocks": 5}
    return OnlineEvaluation(
        target,
        PROMPTS,
        held_out,
        config=EvalConfig(**(values | settings)),
        around=Surroundings(
            lock=threading.Lock(),
            beat=lambda: None,
            is_stopping=is_stopping,
            max_anchors=512,
            head_chunk_rows=64,
            seed=0,
        ),
    )


class ShiftedTarget:
    """A target whose decoding hands over the layer after the one that was asked for: a planted bug."""

    def __init__(self, target) -> None:
        self._target = target

    def __getattr__(self, name: str):
        return getattr(self._target, name)

    def step(self, input_ids_1T, cache, layer_ids):
        return self._target.step(input_ids_1T, cache, tuple(layer + 1 for layer in layer_ids))


def test_a_healthy_drafter_raises_no_alarm(target, samples, trained) -> None:
    record = _evaluation(target, samples).measure(trained, 2)

    assert record["alarm"] is None
    assert record["acceptance_length"] > 3.0
    assert record["held_out_eal"] == record["eal"] > 3.0
    assert abs(record["gap"]) < 0.2
    assert record["per_offset"]["1"] >= record["per_offset"]["3"] > 0.5
    assert record["verifies"] < record["new_tokens"]
    assert record["tokens_s"] > 0


def test_every_field_of_the_record_is_documented(target, samples, trained) -> None:
    record = _evaluation(target, samples).measure(trained, 2)

    documented = {field.path for field in FIELDS if field.group == "eval"}
    assert field_paths({"eval": record}) == documented


@pytest.mark.parametrize("steps", [0, 40], ids=["untrained", "half trained"])
def test_the_training_path_finds_the_very_counts_of_decoding(target, samples, steps: int) -> None:
    drafter = overfit(target, samples, steps=steps)
    record = _evaluation(target).measure(drafter, 2)
    exported, counts = as_exported(drafter, target), []

    for prompt in PROMPTS:
        result = speculative_generate(
            target, exported, prompt, max_new_tokens=NEW_TOKENS, eos_ids=target.info.stop_ids
        )
        before = 0
        for count in result.accept_counts:
            if before + 3 < len(
                result.token_ids
            ):  # a block that the end of the text cuts has no full estimate
                counts.append(count)
            before += count

    assert record["output_eal_blocks"] == len(counts)
    assert record["output_eal"] == pytest.approx(sum(counts) / len(counts))


def test_hidden_states_of_the_wrong_layer_in_decoding_trip_the_alarm(target, samples, trained) -> None:
    record = _evaluation(ShiftedTarget(target), samples).measure(trained, 2)

    assert record["acceptance_length"] < 2.6
    assert record["held_out_eal"] > 3.0
    assert record["gap"] > 0.3
    assert "target layer ids" in record["alarm"]


def test_without_held_out_data_the_decoded_texts_themselves_show_the_bug(target, trained) -> None:
    healthy = _evaluation(target).measure(trained, 2)
    planted = _evaluation(ShiftedTarget(target)).measure(trained, 2)

    assert healthy["alarm"] is None
    assert healthy["eal"] == healthy["output_eal"]
    assert planted["output_eal"] > 3.0
    assert "target layer ids" in planted["alarm"]


def test_alarm_stands_in_the_status_until_both_sides_agree_again(target, samples, trained, tmp_path) -> None:
    status = StatusFile(tmp_path)

    report_evaluation(_evaluation(ShiftedTarget(target), samples).measure(trained, 2), status)
    during = dict(status._record["degraded"])
    report_evaluation(_evaluation(target, samples).measure(trained, 4), status)

    assert "acceptance length" in during["acceptance"]
    assert status._record["degraded"] == {}


def test_what_is_measured_are_the_weights_of_an_export(target, tmp_path) -> None:
    drafter = make_drafter(seed=3)
    export_drafter(drafter, None, tmp_path / "export")
    loaded = load_drafter(tmp_path / "export", dtype=torch.float32)

    copy = as_exported(drafter, target)

    assert copy.state_dict().keys() == loaded.state_dict().keys()
    for name, tensor in copy.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name]), name
    assert not torch.equal(copy.fc.weight, drafter.fc.weight)
    assert copy.fc.weight.data_ptr() != drafter.fc.weight.data_ptr()


def test_held_out_texts_have_a_turn_of_their_own(target, samples) -> None:
    evaluation = _evaluation(target, samples, every=6, held_out_every=4, held_out_data="given")
    drafter = make_drafter()

    due = [step for step in range(1, 13) if evaluation.is_due(step)]
    held_out, prompts = evaluation.measure(drafter, 4), evaluation.measure(drafter, 6)

    assert due == [4, 6, 8, 12]
    assert "acceptance_length" not in held_out
    assert held_out["eal"] is not None
    assert held_out["gap"] is None
    assert "held_out_eal" not in prompts
    assert evaluation.measure(drafter, 8)["held_out_eal"] == held_out["held_out_eal"]


def test_a_stop_ends_the_evaluation(target, samples) -> None:
    assert _evaluation(target, samples, is_stopping=lambda: True).measure(make_drafter(), 2) is None
    assert _evaluation(target, (), is_stopping=lambda: True).measure(make_drafter(), 2) is None


GOOD = Estimate(length=3.0, blocks=100)


@pytest.mark.parametrize(
    ("expected", "real", "gap"),
    [
        (GOOD, Estimate(length=2.4, blocks=100), 0.2),
        (Estimate(length=None, blocks=0), GOOD, None),
        (GOOD, Estimate(length=None, blocks=0), None),
        (GOOD, Estimate(length=1.0, blocks=63), None),
        (Estimate(length=9.0, blocks=63), GOOD, None),
    ],
    ids=["near", "no estimate", "nothing decoded", "few verifies", "few blocks"],
)
def test_no_alarm_without_reason(expected: Estimate, real: Estimate, gap: float | None) -> None:
    judgement = judge(expected, real, on_outputs=expected, limit=0.3, min_blocks=64)

    assert judgement.reason is None
    assert judgement.gap == (None if gap is None else pytest.approx(gap))


@pytest.mark.parametrize("length", [1.5, 4.2])
def test_either_direction_is_an_alarm(length: float) -> None:
    real = Estimate(length=length, blocks=100)

    assert judge(GOOD, real, on_outputs=GOOD, limit=0.3, min_blocks=64).reason is not None


def test_decoding_that_parts_from_its_own_blocks_is_an_alarm_whatever_held_out_texts_say() -> None:
    real = Estimate(length=1.2, blocks=100)

    judgement = judge(real, real, on_outputs=GOOD, limit=0.3, min_blocks=64)

    assert judgement.gap == 0.0
    assert "3.00 and real one 1.20" in judgement.reason
    assert "layer ids" in judgement.reason


def test_an_estimate_that_is_right_on_the_outputs_points_to_the_data() -> None:
    real = Estimate(length=1.2, blocks=100)

    assert "chat template" in judge(GOOD, real, on_outputs=real, limit=0.3, min_blocks=64).reason
    assert "layer ids" in judge(GOOD, real, on_outputs=GOOD, limit=0.3, min_blocks=64).reason
