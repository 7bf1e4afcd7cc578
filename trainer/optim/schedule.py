"""Learning rate as a pure function of the optimizer step.

Called by the drafter worker before each step. Host arithmetic only: must not touch a device, so that a step
never waits for one.
"""

from __future__ import annotations

import math


def warmup_steps(total_steps: int, warmup_ratio: float) -> int:
    """Return the number of steps with a rising learning rate."""
    return math.ceil(total_steps * warmup_ratio)


def learning_rate(step: int, *, total_steps: int, peak: float, warmup_ratio: float, shape: str) -> float:
    """Return the rate of optimizer step `step` (0-based): linear warm-up, then cosine to 0 or constant.

    The first step already learns (rate `peak / warm-up steps`); the cosine reaches 0 just after the last.
    """
    warmup = warmup_steps(total_steps, warmup_ratio)
    if step < warmup:
        return peak * (step + 1) / warmup
    if shape == "constant":
        return peak
    progress = (step - warmup) / max(1, total_steps - warmup)
    return peak * 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
