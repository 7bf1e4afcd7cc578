"""The loss spelt out, for tests: full logits, autograd, and one block position after the other.

What `trainer.drafter.loss.microbatch_sums` computes in chunks and without waiting is written here as the
formulas say. Slow on purpose; must share nothing with the head and the weights that it is compared with.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.nn.functional import kl_div

from trainer.drafter.anchors import Anchors, block_labels
from trainer.drafter.loss import FrozenEnds, block_hidden
from trainer.drafter.model import Drafter
from trainer.drafter.objective import DPACE, Objective
from trainer.pipeline.messages import FeaturePack

GAMMA = 4.0
OBJECTIVES = {
    "ce": Objective(),
    "kl": Objective(soft_label_share=1.0),
    "mixed": Objective(soft_label_share=0.3),
    "dpace": Objective(weighting=DPACE),
    "kl-dpace": Objective(soft_label_share=1.0, weighting=DPACE, dpace_alpha=0.2),
    "mixed-dpace": Objective(soft_label_share=0.7, weighting=DPACE, dpace_alpha=0.0),
}


@dataclass(frozen=True)
class PlainSums:
    """Numerator (with its graph), divisor, and the sum of all weights."""

    numerator: torch.Tensor
    denominator: float
    total_weight: float


def plain_sums(
    drafter: Drafter,
    ends: FrozenEnds,
    pack: FeaturePack,
    anchors: Anchors,
    objective: Objective,
    *,
    target: torch.Tensor | None = None,
) -> PlainSums:
    """Compute one pack's sums; `target` replaces the log-probabilities made from the last hidden state."""
    size = drafter.config.block_size
    labels = block_labels(pack.tokens, anchors, block_size=size, gamma=GAMMA)
    hidden = block_hidden(drafter, ends, pack, anchors, attention="dense")
    student = _logits(hidden, ends).log_softmax(dim=-1).view(len(anchors), size, -1)
    if target is None:
        assert pack.last_hidden_TD is not None
        target = _logits(pack.last_hidden_TD.to(hidden.device), ends).log_softmax(dim=-1)
    numerator = torch.zeros((), device=hidden.device, requires_grad=True) * 1.0
    share, total, blocks = objective.soft_label_share, 0.0, 0
    for block, anchor in enumerate(anchors.position_A.tolist()):
        reached = [k for k in range(1, size) if labels.mask_AK[block, k]]
        blocks += bool(reached)
        hard = [-student[block, k, labels.labels_AK[block, k]] for k in reached]
        weights = _weights(objective, reached, [math.exp(-loss.item()) for loss in hard])
        for k, loss, weight in zip(reached, hard, weights, strict=True):
            soft = kl_div(student[block, k], target[anchor + k - 1], reduction="sum", log_target=True)
            numerator = numerator + weight * (share * soft + (1 - share) * loss)
            total += weight
    return PlainSums(numerator, float(blocks) if objective.weighting == DPACE else total, total)


def _weights(objective: Objective, reached: list[int], q: list[float]) -> list[float]:
    if objective.weighting != DPACE:
        return [math.exp(-(k - 1) / GAMMA) for k in reached]
    smooth = [(1 - objective.dpace_alpha) * value + objective.dpace_alpha for value in q]
    return [sum(math.prod(smooth[: m + 1]) for m in range(j, len(q))) for j in range(len(q))]


def _logits(hidden: torch.Tensor, ends: FrozenEnds) -> torch.Tensor:
    logits = hidden @ ends.head_weight_VD.T
    cap = ends.logit_softcap
    return logits if cap is None else torch.tanh(logits / cap) * cap
