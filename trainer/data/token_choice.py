"""Draws tokens from logits by numbers that were fixed beforehand, without reading anything on the host.

Called by both ways of decoding. The random numbers are the caller's, so a draw depends neither on a device's
generator nor on who shares its batch. Must not be used for greedy decoding.

Dimension suffixes: R rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ROWS_AT_ONCE = 256
"""Rows whose probabilities exist at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are drawn; without it the likeliest is taken."""

    temperature: float
    top_p: float = 1.0


def draw(logits_RV: Tensor, uniform_R: Tensor, sampling: Sampling) -> Tensor:
    """Draw one token per row by inverting the distribution at `uniform_R`; the same number, the same token.

    Args:
        logits_RV: of any float type.
        uniform_R: fp32 in [0, 1).
        sampling: temperature above 0; with `top_p` below 1 only the likeliest tokens up to that mass.
    """
    logits = torch.split(logits_RV, ROWS_AT_ONCE)
    uniforms = torch.split(uniform_R, ROWS_AT_ONCE)
    return torch.cat([_draw(*part, sampling) for part in zip(logits, uniforms, strict=True)])


def _draw(logits_RV: Tensor, uniform_R: Tensor, sampling: Sampling) -> Tensor:
    probability_RV = torch.softmax(logits_RV.float() / sampling.temperature, -1)
    if sampling.top_p >= 1.0:
        return _invert(probability_RV, uniform_R)
    sorted_RV, token_RV = torch.sort(probability_RV, dim=-1, descending=True, stable=True)
    before_RV = sorted_RV.cumsum(-1) - sorted_RV
    kept_RV = torch.where(before_RV < sampling.top_p, sorted_RV, 0.0)
    return token_RV.gather(1, _invert(kept_RV, uniform_R)[:, None])[:, 0]


def _invert(weight_RV: Tensor, uniform_R: Tensor) -> Tensor:
    mass_RV = weight_RV.cumsum(-1)
    # The last sum is not exactly 1; scaled by it, the uniform always falls on a token with weight.
    reached_RV = mass_RV <= (uniform_R * mass_RV[:, -1])[:, None]
    return torch.clamp(reached_RV.sum(-1), max=weight_RV.shape[-1] - 1)
