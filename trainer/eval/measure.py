"""The measuring part of `eval`: decodes the prompts with every block size, then times some of them.

Called by `eval.command` with loaded models. Acceptance is measured on many prompts at once where the target
allows it; speed is measured apart, one prompt at a time. Must not write files.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trainer.data.encoded_prompts import EncodedPrompts
from trainer.data.prompts import Prompt
from trainer.drafter.model import Drafter
from trainer.eval.batched import decode_prompts
from trainer.eval.report import MeasuredBlock, MeasuredPrompt
from trainer.eval.speculative import SpeculativeResult
from trainer.eval.speed import SpeedPlan, measure_speed
from trainer.eval.verify import Sampling
from trainer.pipeline.devices import dtype_name
from trainer.target.capture import Target

_LOG = logging.getLogger(__name__)

_SAY_EVERY_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurePlan:
    """What is measured, and how."""

    block_sizes: Sequence[int]
    max_new_tokens: int
    batch_size: int
    sampling: Sampling | None
    compared_prompts: int
    """prompts that are timed against plain decoding, spread over all domains; 0 leaves speed out"""
    speed_rounds: int
    speed_tokens: int
    thinking: str = "template"
    """`on`, `off`, or `template` for what the chat template does by itself"""

    def as_dict(self) -> dict[str, Any]:
        """For the record."""
        return asdict(self)


def measure(target: Target, drafter: Drafter, read: EncodedPrompts, plan: MeasurePlan) -> list[MeasuredBlock]:
    """Decode every prompt with every block size."""
    prompts, encoded = read.prompts, read.token_ids
    sizes = ", ".join(map(str, plan.block_sizes))
    _LOG.info(
        "eval: %d prompts in blocks of %s, %s on %s",
        len(prompts),
        sizes,
        dtype_name(target.dtype),
        target.device,
    )
    timing: dict[int, dict[str, Any]] = {}
    if plan.compared_prompts:
        _LOG.info(
            "eval, speed: a warm-up, then plain and speculative decoding in %d rounds", plan.speed_rounds
        )
        timing = measure_speed(
            target,
            drafter,
            encoded,
            SpeedPlan(
                prompts=spread(prompts, plan.compared_prompts),
                rounds=plan.speed_rounds,
                max_new_tokens=plan.speed_tokens,
            ),
            block_sizes=plan.block_sizes,
            eos_ids=target.info.stop_ids,
            on_prompt=_speak("speed"),
        )
    return [
        _measure_block(target, drafter, prompts, encoded, plan, size, timing.get(size))
        for size in plan.block_sizes
    ]


def spread(prompts: Sequence[Prompt], count: int) -> list[int]:
    """Choose prompts in turn from every domain, in file order."""
    by_domain: dict[str | None, list[int]] = {}
    for index, prompt in enumerate(prompts):
        by_domain.setdefault(prompt.domain, []).append(index)
    chosen: list[int] = []
    for turn in range(len(prompts)):
        chosen += [indices[turn] for indices in by_domain.values() if turn < len(indices)]
    return chosen[:count]


def _measure_block(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Prompt],
    encoded: Sequence[Sequence[int]],
    plan: MeasurePlan,
    size: int,
    timing: dict[str, Any] | None,
) -> MeasuredBlock:
    say, ended = _speak(f"block size {size}"), []

    def on_done(index: int, _result: SpeculativeResult) -> None:
        ended.append(index)
        say(len(ended), len(encoded))

    began_s = time.monotonic()
    results = decode_prompts(
        target,
        drafter,
        encoded,
        max_new_tokens=plan.max_new_tokens,
        eos_ids=target.info.stop_ids,
        block_size=size,
        sampling=plan.sampling,
        batch_size=plan.batch_size,
        on_done=on_done,
    )
    measured = [
        MeasuredPrompt(id=prompt.id, domain=prompt.domain, prompt_tokens=len(ids), speculative=result)
        for prompt, ids, result in zip(prompts, encoded, results, strict=True)
    ]
    return MeasuredBlock(block_size=size, prompts=measured, seconds=time.monotonic() - began_s, speed=timing)


def _speak(what: str) -> Callable[[int, int], None]:
    """Return a callback that logs progress now and then."""
    began_s = said_s = time.monotonic()

    def say(done: int, total: int) -> None:
        nonlocal said_s
        now_s = time.monotonic()
        if done == total or now_s - said_s >= _SAY_EVERY_S:
            said_s = now_s
            _LOG.info("eval, %s: decoded %d of %d, %.0f s so far", what, done, total, now_s - began_s)

    return say
