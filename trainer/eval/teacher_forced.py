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

from trainer.data.collate import collate
from trainer.data.corpus import Sample
from trainer.drafter.acceptance import AcceptanceReading, BlockCounts, summarize
from trainer.drafter.anchors import anchor_candidates, block_labels, select_anchors
from trainer.drafter.loss import FrozenEnds, microbatch_sums
from trainer.drafter.model import Drafter
from trainer.pipeline.messages import FeaturePack
from trainer.target.capture import Target

_BATCH_TOKENS = 8192
_GAMMA = 1.0
"""Decay of the loss, which is not looked at here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForcedPass:
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
    target: Target, drafter: Drafter, ends: FrozenEnds, samples: Sequence[Sample], settings: ForcedPass
) -> AcceptanceReading | None:
    """Count how far the drafter would get from fixed anchors.

    Args:
        target: gives the hidden states.
        drafter: on the target's device.
        ends: the target's embedding and head for it.
        samples: texts with the positions that count.
        settings: see there.

    Returns:
        The reading, or None when a stop came in between.
    """
    counts = BlockCounts.zeros(drafter.config.block_size, drafter.device)
    for number, batch in enumerate(_batches(samples)):
        if settings.is_stopping():
            return None
        counts = counts + _count(target, drafter, ends, batch, settings, number)
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


def _batches(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Group samples of similar length so that a padded batch stays small."""
    batches: list[list[Sample]] = []
    for sample in sorted(samples, key=lambda one: len(one.input_ids_T)):
        width = len(sample.input_ids_T)
        if not batches or (len(batches[-1]) + 1) * width > _BATCH_TOKENS:
            batches.append([])
        batches[-1].append(sample)
    return batches


def _count(
    target: Target,
    drafter: Drafter,
    ends: FrozenEnds,
    samples: Sequence[Sample],
    settings: ForcedPass,
    number: int,
) -> BlockCounts:
    batch = collate(samples, pad_id=target.info.pad_token_id or 0)
    candidates = anchor_candidates(batch.tokens).numel()
    if not candidates:
        return BlockCounts.zeros(drafter.config.block_size, drafter.device)
    with settings.lock:
        hidden_BSLD, _ = target.hidden_states(
            batch.input_ids_BS, batch.attention_mask_BS, drafter.config.target_layer_ids
        )
    features_TLD = hidden_BSLD.flatten(0, 1).index_select(0, batch.valid_rows_T.to(hidden_BSLD.device))
    pack = FeaturePack(
        epoch=0,
        pack_id=number,
        bucket=0,
        tokens=batch.tokens,
        features_TLD=features_TLD,
        last_hidden_TD=None,
        nbytes=features_TLD.nbytes,
    )
    size = drafter.config.block_size
    anchors = select_anchors(
        batch.tokens,
        min(candidates, settings.max_anchors),
        block_size=size,
        rng=np.random.default_rng([settings.seed, number]),
    )
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
