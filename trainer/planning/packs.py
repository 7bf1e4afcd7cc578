"""What the data and the batch settings make of packs: counts, and the largest that can come.

Pure; made from the lengths of the samples. The largest pack is a bound over all epochs: the longest
samples of each bucket together, as many as a batch may hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trainer.config import TrainConfig
from trainer.data.buckets import bucket_edges
from trainer.data.sampler import PackSampler


@dataclass(frozen=True, slots=True, kw_only=True)
class PackFacts:
    """Packs of one configuration over one data set."""

    packs_per_epoch: int
    tokens_per_epoch: int
    total_packs: int
    total_steps: int
    worst_lengths: tuple[int, ...]
    """documents of the pack with the most tokens that any epoch can hold"""
    worst_batch: tuple[int, int]
    """samples and padded length of the batch with the most padded tokens"""
    common_lengths: tuple[int, ...]
    """documents of the largest pack of the bucket that has the most tokens in an epoch, for measuring"""

    @property
    def most_tokens(self) -> int:
        """Tokens of the largest pack."""
        return sum(self.worst_lengths)

    @property
    def mean_tokens(self) -> float:
        """Tokens of a pack on average."""
        return self.tokens_per_epoch / self.packs_per_epoch


def pack_facts(config: TrainConfig, lengths: Sequence[int]) -> PackFacts:
    """Deal the samples as a run of this configuration would.

    Args:
        config: of the run.
        lengths: tokens of each sample, at most `data.max_seq_len`.
    """
    data, optim = config.data, config.optim
    edges = data.bucket_edges or bucket_edges(data.max_seq_len)
    sampler = PackSampler(
        lengths=lengths,
        edges=edges,
        epochs=optim.epochs,
        seed=optim.seed,
        token_budget=data.token_budget,
        max_batch_size=data.max_batch_size,
    )
    plan = sampler.plan(0)
    # a vector operation: there may be a million samples
    buckets = np.searchsorted(np.asarray(edges), np.asarray(lengths), side="left")
    by_bucket: dict[int, list[int]] = {}
    for bucket, length in zip(buckets.tolist(), lengths, strict=True):
        by_bucket.setdefault(bucket, []).append(length)
    worst = [_longest_together(members, config) for members in by_bucket.values()]
    common = max(by_bucket.values(), key=sum)
    total_packs = len(plan) * optim.epochs
    steps = -(-total_packs // (optim.grad_accum * len(config.devices.drafters())))
    return PackFacts(
        packs_per_epoch=len(plan),
        tokens_per_epoch=sum(lengths),
        total_packs=total_packs,
        total_steps=min(steps, optim.max_steps) if optim.max_steps else steps,
        worst_lengths=max(worst, key=sum),
        worst_batch=max(((len(pack), pack[0]) for pack in worst), key=lambda batch: batch[0] * batch[1]),
        common_lengths=_longest_together(common, config),
    )


def _longest_together(members: Sequence[int], config: TrainConfig) -> tuple[int, ...]:
    longest = sorted(members, reverse=True)
    return tuple(longest[: max(1, min(config.data.max_batch_size, config.data.token_budget // longest[0]))])
