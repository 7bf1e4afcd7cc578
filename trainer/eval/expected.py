"""Expected acceptance length on given texts: the training path, no noise, anchors that never change.

Called by `eval.online`: on held-out samples, and on what the target itself has just said. Hidden states
come from the target's batch forward, as in training, and not from decoding with a cache: that is what makes
the figure a check of the other path. Must not change drafter or target.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from trainer.data.collate import TargetBatch, collate
from trainer.data.corpus import Sample
from trainer.drafter.acceptance import AcceptanceReading, BlockCounts, summarize
from trainer.drafter.anchors import Anchors, anchor_candidates, block_labels, select_anchors
from trainer.drafter.loss import FrozenEnds, microbatch_sums
from trainer.drafter.model import Drafter
from trainer.pipeline.messages import FeaturePack, HiddenStates, PackedTokens
from trainer.target.capture import Target

_BATCH_TOKENS = 8192
_GAMMA = 1.0
"""Decay of the loss, which is not looked at here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedPass:
    """How a pass is made.

    `lock` is held during each forward of the target; `beat` is called after each batch, `is_stopping` before.
    """

    max_anchors: int
    head_chunk_rows: int
    seed: int
    lock: threading.Lock
    beat: Callable[[], None]
    is_stopping: Callable[[], bool]


@torch.no_grad()
def expected_acceptance(
    target: Target,
    drafter: Drafter,
    ends: FrozenEnds,
    samples: Sequence[Sample],
    settings: ExpectedPass,
    *,
    starts: Sequence[Sequence[int]] | None = None,
) -> AcceptanceReading | None:
    """Count how far the drafter would get from fixed anchors.

    Args:
        target: gives the hidden states.
        drafter: on the target's device.
        ends: the target's embedding and head for it.
        samples: texts with the positions that count.
        settings: see there.
        starts: per sample where its blocks start, in ascending order; None draws them, always the same.

    Returns:
        The reading, or None when a stop came in between.
    """
    counts = BlockCounts.zeros(drafter.config.block_size, drafter.device)
    for number, chosen in enumerate(_batches(samples)):
        if settings.is_stopping():
            return None
        batch = collate([samples[index] for index in chosen], pad_id=target.info.pad_token_id or 0)
        if starts is None:
            anchors = _draw(batch.tokens, drafter.config.block_size, settings, number)
        else:
            anchors = _place(batch.tokens, [starts[index] for index in chosen])
        counts = counts + _count(target, drafter, ends, batch, anchors, settings)
        settings.beat()
    # host sync: once an evaluation, its figures are wanted now
    return summarize(
        BlockCounts(
            correct_K=counts.correct_K.cpu(),
            supervised_K=counts.supervised_K.cpu(),
            prefix_correct_K=counts.prefix_correct_K.cpu(),
            complete_blocks=counts.complete_blocks.cpu(),
        )
    )


def _batches(samples: Sequence[Sample]) -> list[list[int]]:
    """Group samples of similar length, by index, so that a padded batch stays small."""
    batches: list[list[int]] = []
    for index in sorted(range(len(samples)), key=lambda one: len(samples[one].input_ids_T)):
        width = len(samples[index].input_ids_T)
        if not batches or (len(batches[-1]) + 1) * width > _BATCH_TOKENS:
            batches.append([])
        batches[-1].append(index)
    return batches


def _draw(tokens: PackedTokens, block_size: int, settings: ExpectedPass, number: int) -> Anchors:
    """Draw anchors that depend on nothing but the seed and the batch."""
    count = min(anchor_candidates(tokens).numel(), settings.max_anchors)
    rng = np.random.default_rng([settings.seed, number])
    return select_anchors(tokens, max(1, count), block_size=block_size, rng=rng)


def _place(tokens: PackedTokens, starts: Sequence[Sequence[int]]) -> Anchors:
    """Put anchors where blocks really started, as far as a token follows there."""
    begins = (tokens.position_T == 0).nonzero().flatten().tolist()
    wanted = [begin + start for begin, row in zip(begins, starts, strict=True) for start in row]
    possible = set(anchor_candidates(tokens).tolist())
    position_A = torch.tensor([position for position in wanted if position in possible], dtype=torch.int64)
    return Anchors(position_A=position_A, valid_A=torch.ones(len(position_A), dtype=torch.bool))


def _count(
    target: Target,
    drafter: Drafter,
    ends: FrozenEnds,
    batch: TargetBatch,
    anchors: Anchors,
    settings: ExpectedPass,
) -> BlockCounts:
    size = drafter.config.block_size
    if not bool(anchors.valid_A.any()):
        return BlockCounts.zeros(size, drafter.device)
    with settings.lock:
        hidden_BSLD, _ = target.hidden_states(
            batch.input_ids_BS, batch.attention_mask_BS, drafter.config.target_layer_ids
        )
    features_TLD = hidden_BSLD.flatten(0, 1).index_select(0, batch.valid_rows_T.to(hidden_BSLD.device))
    pack = FeaturePack.unplanned(batch.tokens, HiddenStates(features=features_TLD))
    return microbatch_sums(
        drafter,
        ends,
        pack,
        anchors,
        block_labels(batch.tokens, anchors, block_size=size, gamma=_GAMMA),
        noise_sigma=0.0,
        noise_seed=0,
        head_chunk_rows=settings.head_chunk_rows,
        attention="sdpa",
    ).counts
