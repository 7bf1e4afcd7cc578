"""The alarm when estimate and reality part: what training believes, against what decoding gets.

Called by `eval.online`. Pure. A drafter that guesses nine tokens of ten right in training and none when it
decodes is the commonest failure of its kind, and training alone never shows it.
"""

from __future__ import annotations

from dataclasses import dataclass

CAUSES_IN_DECODING = (
    "decoding does not give the drafter what training gave it: look at the shift between anchor and hidden "
    "states, masks, rotary settings, target layer ids, and names of weights at loading"
)
CAUSES_IN_DATA = (
    "on the very texts that were decoded the estimate is right, so training data and prompts differ: look at "
    "the chat template, thinking on or off, and whether the data are the target's own completions"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """An expected acceptance length and the blocks it was counted on."""

    length: float | None
    blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What the comparison says; `gap` is None where there is too little to compare."""

    gap: float | None
    """(estimate - real) / estimate: 0.3 = decoding accepts 30 % less than expected"""
    reason: str | None
    """one line when the gap is an alarm"""


def judge(
    expected: Estimate,
    real: Estimate,
    *,
    on_outputs: Estimate,
    limit: float,
    min_blocks: int,
) -> Judgement:
    """Compare expected and real acceptance length.

    Args:
        expected: from the training path, on held-out texts where there are any.
        real: from decoding; `blocks` are its verifies.
        on_outputs: from the training path on the very blocks that were decoded. Where decoding is right it
            equals reality, so it is an alarm of its own and tells causes apart.
        limit: relative gap that is an alarm, in either direction.
        min_blocks: both sides need so many blocks.
    """
    gap = _gap(expected, real, min_blocks)
    own_gap = _gap(on_outputs, real, min_blocks)
    worst = max((gap, expected), (own_gap, on_outputs), key=lambda pair: abs(pair[0] or 0.0))
    if worst[0] is None or abs(worst[0]) <= limit:
        return Judgement(gap=gap, reason=None)
    is_data = own_gap is not None and abs(own_gap) <= limit
    reason = (
        f"expected acceptance length {worst[1].length:.2f} and real one {real.length:.2f} part by "
        f"{abs(worst[0]):.0%} (limit {limit:.0%}, eval.alarm_gap): "
        f"{CAUSES_IN_DATA if is_data else CAUSES_IN_DECODING}"
    )
    return Judgement(gap=gap, reason=reason)


def _gap(expected: Estimate, real: Estimate, min_blocks: int) -> float | None:
    if expected.length is None or real.length is None or min(expected.blocks, real.blocks) < min_blocks:
        return None
    return (expected.length - real.length) / expected.length
