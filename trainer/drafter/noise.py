"""Uniform noise on hidden states, its schedule, and the seeds that make a visit of a pack repeatable.

Called by the drafter worker and by `loss.microbatch_sums`. Every pack has its own generator, so a resumed run
draws what the uninterrupted run would have drawn. Never touches embeddings, labels or the last hidden state.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from trainer.errors import ConfigError

Stream = Literal["anchors", "noise", "eval"]

_STREAM_IDS: dict[Stream, int] = {"anchors": 1, "noise": 2, "eval": 3}


def noise_sigma(step: int, total_steps: int, *, start: float, end: float) -> float:
    """Return the amplitude for 0-based optimizer step `step`: linear, `end` is reached at the last one."""
    if start < 0 or end < 0:
        raise ConfigError(f"noise amplitudes must not be negative: start {start}, end {end}")
    if total_steps <= 1:
        return start
    progress = min(max(step, 0), total_steps - 1) / (total_steps - 1)
    return start + (end - start) * progress


def pack_seed(*, run_seed: int, epoch: int, pack_id: int, stream: Stream) -> int:
    """Derive the seed of one purpose for one visit of one pack; independent of order and of worker."""
    sequence = np.random.SeedSequence([run_seed, epoch, pack_id, _STREAM_IDS[stream]])
    # 63 bits: torch generators take signed values.
    return int(sequence.generate_state(1, np.uint64)[0] >> 1)


def add_noise(hidden_TLD: Tensor, *, sigma: float, seed: int) -> Tensor:
    """Add uniform noise in [-sigma, sigma]; with `sigma` 0 the very same tensor comes back.

    Args:
        hidden_TLD: hidden states in any shape and float dtype; not modified.
        sigma: amplitude, 0 or more.
        seed: seed of this pack's own generator, made on the tensor's device (no transfer, no sync).
    """
    if sigma == 0.0:
        return hidden_TLD
    is_dry = hidden_TLD.device.type == "meta"  # a dry run of `planning`: sizes without values
    generator = None if is_dry else torch.Generator(device=hidden_TLD.device).manual_seed(seed)
    noise = torch.empty_like(hidden_TLD).uniform_(-sigma, sigma, generator=generator)
    return noise.add_(hidden_TLD)
