"""Which tiles of the attention grid FlexAttention must visit, worked out on the CPU from a pack's geometry.

Called by `masks` for every micro-batch. torch's own `create_block_mask` evaluates the rule on the whole grid
on the GPU; compiling it took longer than a minute for one shape (16,384 rows, H200, torch 2.11), and the
answer follows from the anchors alone: a block sees one stretch of context and its own rows. Must not touch a
device; the rule itself is `masks`'.

Dimension suffixes: A blocks, M row tiles, N key tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

TILE = 128
"""Rows and keys of a tile."""

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretches:
    """The stretch of context that each block sees (int64 [A]); none where the end is not above the start."""

    start_A: Ints
    """first key that some row of the block sees"""
    narrow_start_A: Ints
    """first key that every row of the block sees"""
    end_A: Ints
    """key behind the last one"""


def find_tiles(seen: Stretches, *, block_size: int, context_rows: int) -> tuple[Bools, Bools]:
    """Find the tiles that hold a visible pair, and those that hold nothing else.

    Args:
        seen: per block, in row order; block rows must fill whole tiles.
        block_size: rows per block.
        context_rows: keys before the blocks' own, whole tiles.

    Returns:
        Twice bool [M, N], key tiles over the context, then over the blocks' own rows. Tiles that hold no
        visible pair may be named when blocks do not fill tiles evenly; a visible pair is never left out.
    """
    rows = len(seen.end_A) * block_size
    key_start_N = np.arange(0, context_rows, TILE)
    key_end_N = key_start_N + TILE
    start, end = seen.start_A[:, None], seen.end_A[:, None]
    is_empty = start >= end
    some_AN = (start < key_end_N) & (end > key_start_N) & ~is_empty
    every_AN = (seen.narrow_start_A[:, None] <= key_start_N) & (end >= key_end_N) & ~is_empty
    first_row_M = np.arange(0, rows, TILE)
    first_M, last_M = first_row_M // block_size, (first_row_M + TILE - 1) // block_size
    # a tile's blocks, its last one repeated where tiles hold unequally many
    blocks_MB = np.minimum(first_M[:, None] + np.arange((last_M - first_M).max() + 1), last_M[:, None])
    own_first_M, own_last_M = first_M * block_size // TILE, ((last_M + 1) * block_size - 1) // TILE
    tile_N = np.arange(rows // TILE)
    own_MN = (tile_N >= own_first_M[:, None]) & (tile_N <= own_last_M[:, None])
    some_MN = np.concatenate([some_AN[blocks_MB].any(axis=1), own_MN], axis=1)
    every_MN = np.concatenate([every_AN[blocks_MB].all(axis=1), np.zeros_like(own_MN)], axis=1)
    return some_MN, every_MN


def ordered(tiles_MN: Bools) -> tuple[Tensor, Tensor]:
    """Return FlexAttention's sparse form: how many tiles each row has, and their numbers first in its list.

    Returns:
        int32 [1, 1, M] and int32 [1, 1, M, N].
    """
    counts = tiles_MN.sum(axis=1, dtype=np.int32)
    numbers = np.argsort(~tiles_MN, axis=1, kind="stable").astype(np.int32)
    return torch.from_numpy(counts)[None, None], torch.from_numpy(numbers)[None, None]
