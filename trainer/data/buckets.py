"""Which samples travel together: length buckets and the plan of an epoch.

Called by `trainer.train` (feeder, step count, resume) and tests. Pure: the plan is a function of its
arguments alone, so a resumed run finds the same packs under the same ids. Knows lengths only, never tokens;
must not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from trainer.errors import ConfigError, DataError
from trainer.pipeline.messages import BatchPlanItem

EDGE_FRACTIONS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 1.0)


def bucket_edges(max_seq_len: int) -> tuple[int, ...]:
    """Upper bounds (inclusive) of the six default buckets; 8192 gives 512, 1024, 2048, 4096, 6144, 8192."""
    if max_seq_len < 1:
        raise ConfigError(f"max_seq_len must be at least 1: {max_seq_len}")
    return tuple(sorted({max(1, round(max_seq_len * fraction)) for fraction in EDGE_FRACTIONS}))


def bucket_of(length: int, edges: Sequence[int]) -> int:
    """Index of the first bucket that holds `length`.

    Raises:
        DataError: longer than the last edge, or empty.
    """
    if not 1 <= length <= edges[-1]:
        raise DataError(f"sample length is outside the buckets (1..{edges[-1]}): {length}")
    return int(np.searchsorted(np.asarray(edges), length, side="left"))


def build_epoch_plan(
    lengths: Sequence[int],
    *,
    seed: int,
    epoch: int,
    token_budget: int,
    max_batch_size: int,
    edges: Sequence[int],
) -> list[BatchPlanItem]:
    """Deal all samples into batches of one bucket each, in random order.

    The number of batches per bucket depends on the lengths alone, not on the shuffle, so every epoch has the
    same number of packs and the step count of a run is known up front.

    Args:
        lengths: tokens per sample; a sample's id is its index.
        seed: of the run; together with `epoch` it fixes the plan.
        epoch: 0-based.
        token_budget: most tokens of a batch, padding counted (sequences times the longest).
        max_batch_size: most sequences of a batch.
        edges: ascending upper bounds of the buckets.

    Returns:
        Items with `pack_id` 0..n-1 in plan order; each sample is in exactly one of them.

    Raises:
        ConfigError: arguments that cannot work, such as a budget below the longest sample.
        DataError: a sample outside the buckets.
    """
    _check_arguments(token_budget, max_batch_size, edges)
    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, epoch])))
    batches: list[tuple[int, tuple[int, ...]]] = []
    tokens = np.asarray(lengths, dtype=np.int64)
    for bucket, members in enumerate(_members_by_bucket(tokens, edges)):
        if not members.size:
            continue
        longest = int(tokens[members].max())
        if longest > token_budget:
            raise ConfigError(f"token_budget is below the longest sample ({longest} tokens): {token_budget}")
        size = min(max_batch_size, token_budget // longest)
        shuffled = rng.permutation(members).tolist()
        batches += [
            (bucket, tuple(shuffled[start : start + size])) for start in range(0, len(shuffled), size)
        ]
    order = rng.permutation(len(batches))
    return [
        BatchPlanItem(epoch=epoch, pack_id=pack_id, bucket=batches[index][0], sample_ids=batches[index][1])
        for pack_id, index in enumerate(order.tolist())
    ]


def _members_by_bucket(lengths: NDArray[np.int64], edges: Sequence[int]) -> list[NDArray[np.int64]]:
    outside = lengths[(lengths < 1) | (lengths > edges[-1])]
    if outside.size:
        raise DataError(f"sample length is outside the buckets (1..{edges[-1]}): {outside[0]}")
    buckets = np.searchsorted(np.asarray(edges), lengths, side="left")
    return [np.flatnonzero(buckets == bucket) for bucket in range(len(edges))]


def _check_arguments(token_budget: int, max_batch_size: int, edges: Sequence[int]) -> None:
    if token_budget < 1:
        raise ConfigError(f"token_budget must be at least 1: {token_budget}")
    if max_batch_size < 1:
        raise ConfigError(f"max_batch_size must be at least 1: {max_batch_size}")
    if not edges or edges[0] < 1 or any(left >= right for left, right in pairwise(edges)):
        raise ConfigError(f"bucket edges must be positive and ascending: {list(edges)}")
