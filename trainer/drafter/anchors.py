"""Where drafted blocks start in a pack, what they should say, and how much each position counts.

Called by the drafter worker once per visit of a pack, on the CPU: tokens and loss masks are CPU data, so
every index list derived from them is known without asking the GPU. Must not touch a GPU and keeps no state.

Dimension suffixes: T packed tokens, A anchors, K block positions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trainer.errors import ConfigError
from trainer.pipeline.messages import PackedTokens

INVALID_LABEL = -100
"""Label of a position that carries no weight; never used as an index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchors:
    """Start positions of the blocks of one pack, sorted; padding slots are not valid and say position 0."""

    position_A: Tensor
    """int64 [A], index in the packed row"""
    valid_A: Tensor
    """bool [A]"""

    def __len__(self) -> int:
        return self.position_A.numel()


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLabels:
    """Targets of every block position. Offset 0 is the anchor itself: it has a label but never a weight."""

    labels_AK: Tensor
    """int64 [A, K]; `INVALID_LABEL` where the position lies outside the document"""
    mask_AK: Tensor
    """bool [A, K]"""
    weights_AK: Tensor
    """float32 [A, K], decay times mask"""
    complete_A: Tensor
    """bool [A]: every position after the anchor is supervised, so the block could be accepted whole"""


def select_anchors(
    tokens: PackedTokens, max_anchors: int, *, block_size: int, rng: np.random.Generator | torch.Generator
) -> Anchors:
    """Choose where drafted blocks start, uniformly and without replacement among supervised positions.

    A position qualifies when it and its successor are supervised tokens of the same document and something
    precedes it in that document (a block without context has nothing to attend to).

    Args:
        tokens: the packed row; tensors on the CPU.
        max_anchors: slots per pack; always all are returned, so shapes stay fixed for compilation.
        block_size: positions per block; only checked here, blocks may run over their document's end.
        rng: source of the draw; a seeded numpy or torch generator on the CPU.

    Returns:
        Anchors sorted by position, padding slots last.

    Raises:
        ConfigError: `max_anchors` or `block_size` below 1.
    """
    if max_anchors < 1:
        raise ConfigError(f"max_anchors must be at least 1, not {max_anchors}: raise --max-anchors")
    if block_size < 1:
        raise ConfigError(f"block_size must be at least 1, not {block_size}: raise --block-size")
    candidates = anchor_candidates(tokens)
    count = min(max_anchors, candidates.numel())
    chosen = candidates[_draw(candidates.numel(), count, rng)].sort().values
    position_A = torch.zeros(max_anchors, dtype=torch.int64)
    position_A[:count] = chosen
    return Anchors(position_A=position_A, valid_A=torch.arange(max_anchors) < count)


def anchor_candidates(tokens: PackedTokens) -> Tensor:
    """List every position that may become an anchor (int64, ascending)."""
    mask = tokens.loss_mask_T.bool()
    doc = tokens.doc_id_T
    good = torch.zeros_like(mask)
    good[:-1] = mask[:-1] & mask[1:] & (doc[:-1] == doc[1:]) & (doc[:-1] >= 0) & (tokens.position_T[:-1] >= 1)
    return good.nonzero().flatten()


def decay_weights(block_size: int, gamma: float) -> Tensor:
    """Weigh block positions: 0 at the anchor, then exp(-(k - 1) / gamma) for k = 1, 2, ... (float32)."""
    if not gamma > 0 or math.isnan(gamma):
        raise ConfigError(
            f"loss decay gamma must be above 0, not {gamma}: set --gamma (10.0 for blocks of 32)"
        )
    offset_K = torch.arange(block_size, dtype=torch.float64)
    weight_K = torch.exp(-(offset_K - 1.0) / gamma)
    weight_K[0] = 0.0
    return weight_K.to(torch.float32)


def block_labels(tokens: PackedTokens, anchors: Anchors, *, block_size: int, gamma: float) -> BlockLabels:
    """Label every block position and weigh it.

    Position k of a block is labelled with the token k places after its anchor (no shift). It counts while all
    positions from 1 to k are supervised and inside the anchor's document: decoding stops at the first token
    that is not an answer, so what lies behind it can never be reached.

    Args:
        tokens: the packed row; tensors on the CPU.
        anchors: the blocks' starts; padding blocks get no weight.
        block_size: positions per block, the anchor included.
        gamma: decay constant of the weights, in positions.
    """
    length = tokens.input_ids_T.numel()
    offset_K = torch.arange(block_size)
    index_AK = anchors.position_A[:, None] + offset_K[None, :]
    inside_AK = index_AK < length
    index_AK = index_AK.clamp(max=max(length - 1, 0))
    inside_AK &= tokens.doc_id_T[index_AK] == tokens.doc_id_T[anchors.position_A][:, None]
    inside_AK &= anchors.valid_A[:, None]
    supervised_AK = inside_AK & tokens.loss_mask_T.bool()[index_AK]
    supervised_AK[:, 0] = anchors.valid_A
    mask_AK = supervised_AK.cumprod(dim=1).bool()
    mask_AK[:, 0] = False
    return BlockLabels(
        labels_AK=torch.where(inside_AK, tokens.input_ids_T[index_AK], INVALID_LABEL),
        mask_AK=mask_AK,
        weights_AK=decay_weights(block_size, gamma)[None, :] * mask_AK,
        complete_A=anchors.valid_A & mask_AK[:, 1:].all(dim=1),
    )


def trim_blocks(anchors: Anchors, labels: BlockLabels) -> tuple[Anchors, BlockLabels]:
    """Drop blocks without any weight: they cost work and change nothing. Shapes become data dependent."""
    keep = (anchors.valid_A & labels.mask_AK.any(dim=1)).nonzero().flatten()
    return (
        Anchors(position_A=anchors.position_A[keep], valid_A=anchors.valid_A[keep]),
        BlockLabels(
            labels_AK=labels.labels_AK[keep],
            mask_AK=labels.mask_AK[keep],
            weights_AK=labels.weights_AK[keep],
            complete_A=labels.complete_A[keep],
        ),
    )


def pad_anchors(anchors: Anchors, count: int) -> Anchors:
    """Append padding slots until there are `count`; never drops one."""
    extra = max(0, count - len(anchors))
    return Anchors(
        position_A=torch.cat([anchors.position_A, anchors.position_A.new_zeros(extra)]),
        valid_A=torch.cat([anchors.valid_A, anchors.valid_A.new_zeros(extra)]),
    )


def _draw(population: int, count: int, rng: np.random.Generator | torch.Generator) -> Tensor:
    if isinstance(rng, torch.Generator):
        return torch.randperm(population, generator=rng)[:count]
    if count == 0:
        return torch.zeros(0, dtype=torch.int64)
    return torch.from_numpy(rng.choice(population, size=count, replace=False, shuffle=False).astype(np.int64))
