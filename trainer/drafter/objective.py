"""What is minimised: which loss each block position has, how positions are weighed, and the divisor.

Made from the configuration once, used by `loss.microbatch_sums` for every pack. Holds no state and never
waits for a GPU. Two choices are independent: the loss of a position (cross-entropy, KL against the target, or
a mix) and its weight (static decay, or D-PACE from the drafter's own probabilities).

Source: D-PACE weights, arXiv 2605.18810.

Dimension suffixes: A anchors, K block positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.config import LossConfig

DECAY = "decay"
DPACE = "dpace"


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """Loss and weights; the default is cross-entropy with static decay."""

    soft_label_share: float = 0.0
    """part of the KL in the loss, 0 to 1"""
    weighting: str = DECAY
    dpace_alpha: float = 0.5
    """smoothing of D-PACE: 1 weighs by the number of positions that follow, 0 by the bare probabilities"""

    @classmethod
    def from_config(cls, loss: LossConfig) -> Objective:
        """Pick the choices from the configuration."""
        return cls(
            soft_label_share=loss.soft_label_weight,
            weighting=loss.weighting,
            dpace_alpha=loss.dpace_alpha,
        )

    def describe(self, *, decay_gamma: float) -> str:
        """Say in one line what is minimised, for the log."""
        share = self.soft_label_share
        losses = {0.0: "cross-entropy", 1.0: "KL against the target"}
        loss = losses.get(share, f"{share:g} KL against the target + {1 - share:g} cross-entropy")
        is_dpace = self.weighting == DPACE
        return (
            f"{loss}, {f'D-PACE with alpha {self.dpace_alpha:g}' if is_dpace else f'decay {decay_gamma:g}'}"
        )


@torch.no_grad()
def dpace_weights(cross_entropy_AK: Tensor, mask_AK: Tensor, *, alpha: float) -> Tensor:
    """Weigh each position by the acceptance that hangs on it.

    With q the drafter's probability of the label and q~ = (1 - alpha) q + alpha, position j gets the sum over
    m >= j of the product of q~ over 1..m: the expected number of accepted drafts from j on, were each
    accepted with q~. A block that ends early (document end, unsupervised token) ends its sums there, as if it
    were that short: nothing behind could be accepted.

    Args:
        cross_entropy_AK: fp32, -log q; anything where `mask_AK` is False.
        mask_AK: bool, supervised positions; in each block a run from offset 1 on (offset 0 is the anchor).
        alpha: smoothing, 0 to 1.

    Returns:
        fp32 [A, K], 0 where the mask is False; never increasing along a block, without a graph.
    """
    smoothed_AK = (1.0 - alpha) * torch.exp(-cross_entropy_AK) + alpha
    smoothed_AK = torch.where(mask_AK, smoothed_AK, 0.0)
    reach_AK = smoothed_AK[:, 1:].cumprod(dim=1)
    weights_AK = torch.zeros_like(smoothed_AK)
    weights_AK[:, 1:] = reach_AK.flip(1).cumsum(dim=1).flip(1)
    return weights_AK
