"""Evaluation while training: real acceptance on prompts, expected acceptance on held-out texts.

Called between optimizer steps by `trainer.train`. Both are measured on the weights that an export of this
moment would hold: rounded as the export rounds them, loaded into a drafter of their own on the target's
device. The headline figure is the mean over prompts of each prompt's mean acceptance length, greedy. Must
not change drafter or target.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from trainer.config import EvalConfig
from trainer.data.corpus import Sample
from trainer.drafter.acceptance import AcceptanceReading
from trainer.drafter.loss import FrozenEnds
from trainer.drafter.model import Drafter
from trainer.eval.alarm import Estimate, Judgement, judge
from trainer.eval.batched import decode_prompts
from trainer.eval.expected import ExpectedPass, expected_acceptance
from trainer.eval.speculative import SpeculativeResult, frozen_ends
from trainer.eval.statistics import Counted, by_offset, mean_of_prompts, mean_of_verifies
from trainer.lifecycle.heartbeat import StatusFile
from trainer.target.capture import Target

_LOG = logging.getLogger(__name__)

EXPORT_DTYPE = torch.bfloat16
"""What exports store (see `checkpoint.export`)."""
CONDITION = "acceptance"
"""Name under which the alarm stands in the status."""
_GPU_BATCH_SIZE = 16
"""Prompts at once on a GPU; the target's worker waits for them, so they are not all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What the training run gives to an evaluation.

    `lock` is the target worker's, held for a few prompts at a time, so that both share one replica of the
    target; `beat` is a sign of life; `is_stopping` is asked often: a stop does not wait for the rest.
    """

    lock: threading.Lock
    beat: Callable[[], None]
    is_stopping: Callable[[], bool]
    max_anchors: int
    head_chunk_rows: int
    seed: int


class OnlineEvaluation:
    """Measures the drafter as it would be exported now.

    Args:
        target: the frozen target.
        prompts: token ids of held-out prompts; may be empty.
        held_out: held-out samples with the positions that count; may be empty.
        config: how often, how much, and when it is an alarm.
        around: what the run gives.
    """

    def __init__(
        self,
        target: Target,
        prompts: Sequence[Sequence[int]],
        held_out: Sequence[Sample],
        *,
        config: EvalConfig,
        around: Surroundings,
    ) -> None:
        self._target = target
        self._prompts = prompts
        self._held_out = held_out
        self._config = config
        self._around = around
        self._pass = ExpectedPass(
            max_anchors=around.max_anchors,
            head_chunk_rows=around.head_chunk_rows,
            seed=around.seed,
            lock=around.lock,
            beat=around.beat,
            is_stopping=around.is_stopping,
        )

    def is_due(self, step: int) -> bool:
        """Tell whether anything is to be measured behind this step."""
        return self._is_prompts_turn(step) or self._is_held_out_turn(step)

    def measure(self, drafter: Drafter, step: int) -> Mapping[str, Any] | None:
        """Return the record for the metrics line, or None when a stop came in between.

        Prompts that end at once are left out, not counted as 1. `alarm` holds a line of text when estimate
        and reality part.
        """
        started_s = time.monotonic()
        exported = as_exported(drafter, self._target)
        ends = frozen_ends(self._target, exported.config)
        record: dict[str, Any] = {"step": step}
        held_out, outputs = _NOTHING, _NOTHING
        results: Sequence[SpeculativeResult] = ()
        if self._is_held_out_turn(step):
            reading = expected_acceptance(self._target, exported, ends, self._held_out, self._pass)
            if reading is None:
                return None
            held_out = _estimate(reading)
            record |= _describe("held_out_eal", reading)
        if self._is_prompts_turn(step):
            decoded = self._decode(exported)
            if decoded is None:
                return None
            results, seconds = decoded
            reading = self._replay(exported, ends, results)
            if reading is None:
                return None
            outputs = _estimate(reading)
            record |= _describe("output_eal", reading) | _figures(
                results, exported.config.block_size, seconds
            )
        judgement = self._judge(held_out, outputs, results)
        record["eal"] = outputs.length if held_out.length is None else held_out.length
        record |= {"gap": judgement.gap, "alarm": judgement.reason}
        return record | {"seconds": round(time.monotonic() - started_s, 3)}

    def _is_prompts_turn(self, step: int) -> bool:
        return bool(self._prompts and self._config.every and step % self._config.every == 0)

    def _is_held_out_turn(self, step: int) -> bool:
        every = self._config.held_out_every or self._config.every
        return bool(self._held_out and every and step % every == 0)

    def _decode(self, drafter: Drafter) -> tuple[list[SpeculativeResult], float] | None:
        """Decode all prompts; None when a stop came in between."""
        config, started_s = self._config, time.monotonic()
        at_once = 1 if self._target.device.type == "cpu" else _GPU_BATCH_SIZE
        results: list[SpeculativeResult] = []
        for start in range(0, len(self._prompts), at_once):
            if self._around.is_stopping():
                return None
            with self._around.lock:
                results += decode_prompts(
                    self._target,
                    drafter,
                    self._prompts[start : start + at_once],
                    max_new_tokens=config.max_new_tokens,
                    eos_ids=self._target.info.stop_ids,
                    batch_size=at_once,
                )
            self._around.beat()
        return results, time.monotonic() - started_s

    def _replay(
        self, drafter: Drafter, ends: FrozenEnds, results: Sequence[SpeculativeResult]
    ) -> AcceptanceReading | None:
        """Run the very blocks that were decoded through the training path."""
        samples = [
            Sample(
                input_ids_T=np.asarray([*prompt, *result.token_ids], dtype=np.int32),
                loss_mask_T=np.arange(len(prompt) + len(result.token_ids)) >= len(prompt),
                domain=None,
            )
            for prompt, result in zip(self._prompts, results, strict=True)
        ]
        # a block starts at the newest token that was committed before it; the prefill gives the first one
        starts = [
            [len(prompt) + before for before in accumulate(result.accept_counts[:-1], initial=0)]
            for prompt, result in zip(self._prompts, results, strict=True)
        ]
        return expected_acceptance(self._target, drafter, ends, samples, self._pass, starts=starts)

    def _judge(
        self, held_out: Estimate, outputs: Estimate, results: Sequence[SpeculativeResult]
    ) -> Judgement:
        counted = [_counted(result) for result in results]
        verifies = sum(len(one.accept_counts) for one in counted)
        return judge(
            outputs if held_out.length is None else held_out,
            Estimate(length=mean_of_verifies(counted), blocks=verifies),
            on_outputs=outputs,
            limit=self._config.alarm_gap,
            min_blocks=self._config.alarm_min_blocks,
        )


def report_evaluation(record: Mapping[str, Any], status: StatusFile) -> None:
    """Say in log and status what an evaluation found; an alarm stays until one finds both sides together."""
    _LOG.info(
        "evaluation at step %d: acceptance length %s, expected %s, gap %s",
        record["step"],
        _shown(record.get("acceptance_length")),
        _shown(record["eal"]),
        _shown(record["gap"]),
    )
    if record["alarm"] is not None:
        _LOG.warning("evaluation at step %d: %s", record["step"], record["alarm"])
        status.set_degraded(CONDITION, record["alarm"])
    elif record["gap"] is not None:
        status.clear_degraded(CONDITION)


def _shown(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2f}"


_NOTHING = Estimate(length=None, blocks=0)


@torch.no_grad()
def as_exported(drafter: Drafter, target: Target) -> Drafter:
    """Copy a drafter to the target's device with its weights as an export would give them back."""
    with torch.device("meta"):
        copy = Drafter(drafter.config)
    weights = {
        name: tensor.detach().to(EXPORT_DTYPE).to(device=target.device, dtype=target.dtype, copy=True)
        for name, tensor in drafter.state_dict().items()
    }
    copy.load_state_dict(weights, strict=True, assign=True)
    return copy


def _figures(results: Sequence[SpeculativeResult], block_size: int, seconds: float) -> dict[str, Any]:
    counted = [_counted(result) for result in results]
    counts = [count for one in counted for count in one.accept_counts]
    tokens = sum(len(result.token_ids) for result in results)
    return {
        "acceptance_length": mean_of_prompts(counted),
        "prompts": sum(bool(one.accept_counts) for one in counted),
        "verifies": len(counts),
        "new_tokens": tokens,
        "tokens_s": tokens / seconds if seconds else None,
        "per_offset": {str(row["offset"]): row["prefix"] for row in by_offset(counts, block_size)},
    }


def _describe(name: str, reading: AcceptanceReading) -> dict[str, Any]:
    return {
        name: reading.expected_acceptance_length,
        f"{name}_blocks": reading.complete_blocks,
        f"{name}_per_offset": {str(k): value for k, value in enumerate(reading.prefix_acceptance, start=1)},
    }


def _estimate(reading: AcceptanceReading) -> Estimate:
    return Estimate(length=reading.expected_acceptance_length, blocks=reading.complete_blocks)


def _counted(result: SpeculativeResult) -> Counted:
    # lengths of contexts are not looked at here
    return Counted(prompt_tokens=0, accept_counts=result.accept_counts)
