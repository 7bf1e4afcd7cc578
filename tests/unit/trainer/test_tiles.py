"""FlexAttention's tiles, worked out from the anchors, against the rule evaluated on the whole grid."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask

from tests.support.tiny_drafter import make_tokens
from trainer.drafter.anchors import Anchors, pad_anchors, select_anchors
from trainer.drafter.loss import _pad_for_flex
from trainer.drafter.masks import BlockLayout, block_mask, build_layout, dense_mask, make_mask_mod
from trainer.drafter.tiles import TILE

CPU = torch.device("cpu")


def layout_of(
    lengths: tuple[int, ...], *, size: int, anchors: int, padding: int, seed: int, is_shuffled: bool = True
) -> BlockLayout:
    tokens = make_tokens(lengths, supervised=0.9, seed=seed)
    drawn = select_anchors(tokens, anchors, block_size=size, rng=np.random.default_rng(seed))
    if is_shuffled:
        order = torch.randperm(len(drawn), generator=torch.Generator().manual_seed(seed))
        drawn = Anchors(position_A=drawn.position_A[order], valid_A=drawn.valid_A[order])
    features = torch.zeros(tokens.input_ids_T.numel(), 1)
    tokens, _, drawn = _pad_for_flex(tokens, features, pad_anchors(drawn, len(drawn) + padding), size)
    return build_layout(tokens, drawn, block_size=size)


def by_tile(grid_QS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, keys = grid_QS.shape
    tiles = grid_QS.view(rows // TILE, TILE, keys // TILE, TILE)
    return tiles.any(dim=3).any(dim=1), tiles.all(dim=3).all(dim=1)


def unordered(counts: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    tiles = torch.zeros(numbers.shape[-2:], dtype=torch.bool)
    for row, count in enumerate(counts[0, 0].tolist()):
        named = numbers[0, 0, row, :count].long()
        assert named.unique().numel() == count
        tiles[row, named] = True
    return tiles


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=5).map(tuple),
    size=st.sampled_from([1, 4, 8, 10, 16, 32]),
    anchors=st.integers(1, 70),
    padding=st.integers(0, 20),
    window=st.one_of(st.none(), st.sampled_from([1, 3, 128, 200])),
    seed=st.integers(0, 9),
)
def test_tiles_are_those_of_the_rule_on_any_pack(lengths, size, anchors, padding, window, seed) -> None:
    layout = layout_of(lengths, size=size, anchors=anchors, padding=padding, seed=seed)
    some, every = by_tile(dense_mask(layout, window))

    mask = block_mask(layout, window, CPU)
    part = unordered(mask.kv_num_blocks, mask.kv_indices)
    full = unordered(mask.full_kv_num_blocks, mask.full_kv_indices)

    assert not (part & full).any()
    assert not (full & ~every).any()
    assert not (some & ~(part | full)).any()
    assert torch.equal(unordered(mask.q_num_blocks, mask.q_indices), part.T)
    assert torch.equal(unordered(mask.full_q_num_blocks, mask.full_q_indices), full.T)
    if TILE % size == 0 and window is None:
        context = slice(0, layout.context_rows // TILE)
        assert torch.equal((part | full)[:, context], some[:, context])
        assert torch.equal(full[:, context], every[:, context])


@pytest.mark.parametrize("window", [None, 150])
def test_tiles_equal_those_of_torch(window: int | None) -> None:
    layout = layout_of((1200, 90), size=8, anchors=96, padding=0, seed=1, is_shuffled=False)
    rows, keys = layout.block_rows, layout.context_rows + layout.block_rows
    wanted = create_block_mask(make_mask_mod(layout, window), None, None, rows, keys, device="cpu")

    mask = block_mask(layout, window, CPU)

    assert mask.seq_lengths == wanted.seq_lengths == (rows, keys)
    assert torch.equal(mask.to_dense(), wanted.to_dense())
    if window is None:
        assert torch.equal(mask.full_kv_num_blocks, wanted.full_kv_num_blocks)
        assert int(mask.full_kv_num_blocks.sum()) > 0
    for name in ("kv_num_blocks", "kv_indices", "q_num_blocks", "q_indices"):
        assert getattr(mask, name).dtype == getattr(wanted, name).dtype
        assert getattr(mask, name).shape == getattr(wanted, name).shape
