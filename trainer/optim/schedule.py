"""Learning rate as a pure function of the optimizer step.

Called by the drafter worker before each step. Host arithmetic only: must not touch a device, so that a step
never waits for one.
"""

from __future__ import annotations

import math


def warmup_steps(total_steps: int, warmup_ratio: float) -> int:
    """Return the number of steps with a rising learning rate."""
    return math.ceil(total_steps * warmup_ratio)


def learning_rate(
    step: int, *, total_steps: int, peak: float, warmup_ratio: float, shape: str, decay_ratio: float = 0.2
) -> float:
    """Return the rate of optimizer step `step` (0-based): linear warm-up, then the given shape.

    The first step already learns (rate `peak / warm-up steps`); whatever falls to 0 reaches it just after the
    last step.

    Args:
        step: optimizer step.
        total_steps: of the whole run.
        peak: highest rate.
        warmup_ratio: share of the steps with a rising rate.
        shape: `cosine` (to 0), `constant`, or `wsd` (warm-up, stable, decay: constant, then linear to 0).
        decay_ratio: share of the steps with a falling rate, for `wsd`.
    """
    warmup = warmup_steps(total_steps, warmup_ratio)
    if step < warmup:
        return peak * (step + 1) / warmup
    if shape == "constant":
        return peak
    if shape == "wsd":
        falling = max(1, math.ceil(total_steps * decay_ratio))
        return peak * min(1.0, max(0, total_steps - step) / falling)
    progress = (step - warmup) / max(1, total_steps - warmup)
    return peak * 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
