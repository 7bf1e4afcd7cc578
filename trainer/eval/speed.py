"""How much faster decoding is with the drafter: both ways through the same code, in turn, several times.

Called by `eval.measure`. One sequence at a time, decoding only: the target's prefill and the first draft,
which is the drafter's prefill, are left out. Each round decodes a prompt plainly (block size 1) and with
every block size, in an order that turns from round to round, so that a machine that gets slower or faster
favours nobody. Outputs are compared token by token.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from trainer.drafter.model import Drafter
from trainer.eval.speculative import SpeculativeResult, speculative_generate
from trainer.target.capture import Target

PLAIN = 1
"""The block size of plain decoding."""
_WARM_UP_TOKENS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """First place where an output with a drafter differs from the target's own."""

    prompt: int
    position: int
    """new tokens before it"""
    logit_gap: float | None
    """how much the target, asked once more, prefers the one token; None where one output ended"""
    is_tie: bool
    """the gap is within the rounding of the weights' dtype"""


@dataclass(slots=True)
class Timed:
    """Decoding of the compared prompts with one block size, all rounds."""

    decode_s: list[float] = field(default_factory=list)
    """per round"""
    draft_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    """committed by verifies, per round"""
    outputs: dict[int, list[int]] = field(default_factory=dict)
    """by prompt, of the first round"""
    pieces: dict[tuple[int, int], float] = field(default_factory=dict)
    """seconds per token by round and prompt"""

    def add(self, round_: int, prompt: int, result: SpeculativeResult) -> None:
        """Count one decoded prompt."""
        for sums in (self.decode_s, self.draft_s, self.tokens):
            if len(sums) <= round_:
                sums.append(0)
        self.decode_s[round_] += result.decode_s
        self.draft_s[round_] += result.draft_s
        self.tokens[round_] += sum(result.accept_counts)
        self.outputs.setdefault(prompt, result.token_ids)
        if result.accept_counts:
            self.pieces[round_, prompt] = result.decode_s / sum(result.accept_counts)

    def seconds_per_token(self, round_: int | None = None) -> float | None:
        """Return the time per output token of one round, or of all."""
        which = slice(None) if round_ is None else slice(round_, round_ + 1)
        tokens = sum(self.tokens[which])
        return sum(self.decode_s[which]) / tokens if tokens else None


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedPlan:
    """What is timed."""

    prompts: Sequence[int]
    """indices of the compared prompts"""
    rounds: int
    max_new_tokens: int


def measure_speed(
    target: Target,
    drafter: Drafter,
    encoded: Sequence[Sequence[int]],
    plan: SpeedPlan,
    *,
    block_sizes: Sequence[int],
    eos_ids: Collection[int],
    on_prompt: Callable[[int, int], None] = lambda _done, _all: None,
) -> dict[int, dict[str, Any]]:
    """Time plain and speculative greedy decoding.

    Args:
        target: the target.
        drafter: the drafter.
        encoded: all prompts as token ids.
        plan: which of them, how often, how long.
        block_sizes: what to compare with plain decoding.
        eos_ids: tokens that end a sequence.
        on_prompt: called with how many prompts are done, of how many.

    Returns:
        Per block size the record for the report.
    """
    sizes = [size for size in dict.fromkeys(block_sizes) if size != PLAIN]
    timed = {size: Timed() for size in (PLAIN, *sizes)}

    def decode(size: int, prompt: int, limit: int) -> SpeculativeResult:
        return speculative_generate(
            target,
            None if size == PLAIN else drafter,
            encoded[prompt],
            max_new_tokens=limit,
            eos_ids=eos_ids,
            block_size=size,
        )

    # The first forward of each kind pays for allocations and kernel choice; keep that out of the times.
    for size in timed:
        decode(size, plan.prompts[0], _WARM_UP_TOKENS)
    for turn in range(plan.rounds):
        for place, prompt in enumerate(plan.prompts):
            for size in _turned(list(timed), place + turn):
                timed[size].add(turn, prompt, decode(size, prompt, plan.max_new_tokens))
            on_prompt(turn * len(plan.prompts) + place + 1, plan.rounds * len(plan.prompts))
    return {
        size: speed_record(
            timed[PLAIN], timed[size], find_divergences(target, encoded, timed[PLAIN], timed[size])
        )
        for size in sizes
    }


def _turned(sizes: list[int], by: int) -> list[int]:
    start = by % len(sizes)
    return sizes[start:] + sizes[:start]


def speed_record(plain: Timed, fast: Timed, divergences: Sequence[Divergence]) -> dict[str, Any]:
    """Sum up one block size against plain decoding."""
    slow_s, fast_s = plain.seconds_per_token(), fast.seconds_per_token()
    pairs = [(plain.seconds_per_token(n), fast.seconds_per_token(n)) for n in range(len(plain.decode_s))]
    return {
        "compared_prompts": len(plain.outputs),
        "rounds": len(plain.decode_s),
        "identical_outputs": len(plain.outputs) - len(divergences),
        "diverged_outputs": len(divergences),
        "diverged_at_a_tie": sum(divergence.is_tie for divergence in divergences),
        "divergences": [
            {
                "prompt_index": divergence.prompt,
                "position": divergence.position,
                "logit_gap": divergence.logit_gap,
                "is_tie": divergence.is_tie,
            }
            for divergence in divergences
        ],
        "plain_ms_per_token": None if slow_s is None else slow_s * 1000,
        "speculative_ms_per_token": None if fast_s is None else fast_s * 1000,
        "draft_time_ratio": sum(fast.draft_s) / sum(fast.decode_s) if sum(fast.decode_s) else None,
        "speedup": slow_s / fast_s if slow_s is not None and fast_s else None,
        "speedup_median": _median_speedup(plain, fast),
        "speedup_per_round": [slow / quick if slow is not None and quick else None for slow, quick in pairs],
    }


def _median_speedup(plain: Timed, fast: Timed) -> float | None:
    """Take the median over prompts and rounds: a machine that stops for a second does not move it."""
    ratios = [plain.pieces[key] / fast.pieces[key] for key in plain.pieces if fast.pieces.get(key)]
    return median(ratios) if ratios else None


def find_divergences(
    target: Target, encoded: Sequence[Sequence[int]], plain: Timed, fast: Timed
) -> list[Divergence]:
    """Find the outputs that are not the target's own, and how near each parting was."""
    found = []
    for prompt, own in plain.outputs.items():
        other = fast.outputs[prompt]
        if own != other:
            found.append(_first_difference(target, encoded[prompt], prompt, own, other))
    return found


def _first_difference(
    target: Target, prompt_ids: Sequence[int], prompt: int, own: list[int], other: list[int]
) -> Divergence:
    """Ask the target once more, over the whole common prefix at once, how close the two tokens are."""
    shared = next(
        (n for n, (one, two) in enumerate(zip(own, other, strict=False)) if one != two),
        min(len(own), len(other)),
    )
    if shared == min(len(own), len(other)):
        return Divergence(prompt=prompt, position=shared, logit_gap=None, is_tie=False)
    ids_1T = torch.tensor([[*prompt_ids, *own[:shared]]], dtype=torch.int64, device=target.device)
    logits_V = target.step(ids_1T, target.new_cache(), ())[0][-1].float()
    one, two = logits_V[own[shared]].item(), logits_V[other[shared]].item()
    # sums over many rounded products differ by a few units in the last place of the largest term
    tolerance = 8 * torch.finfo(target.dtype).eps * max(abs(one), abs(two), 1.0)
    gap = abs(one - two)
    return Divergence(prompt=prompt, position=shared, logit_gap=gap, is_tie=gap <= tolerance)
