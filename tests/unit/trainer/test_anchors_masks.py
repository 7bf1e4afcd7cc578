"""Anchors, labels and masks on arbitrary packs (Hypothesis), and their refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.tiny_drafter import anchors_at, make_drafter, make_ends, make_pack, make_tokens
from trainer.drafter.anchors import (
    anchor_candidates,
    block_labels,
    decay_weights,
    pad_anchors,
    select_anchors,
    trim_blocks,
)
from trainer.drafter.loss import block_hidden
from trainer.drafter.masks import FULL, SLIDING, build_layout, build_masks, dense_mask, make_mask_mod
from trainer.errors import ConfigError
from trainer.pipeline.messages import PackedTokens


@st.composite
def packs(draw) -> PackedTokens:
    lengths = draw(st.lists(st.integers(1, 12), min_size=1, max_size=4))
    mask = draw(st.lists(st.booleans(), min_size=sum(lengths), max_size=sum(lengths)))
    tokens = make_tokens(lengths, seed=draw(st.integers(0, 99)))
    return PackedTokens(
        input_ids_T=tokens.input_ids_T,
        loss_mask_T=torch.tensor(mask),
        doc_id_T=tokens.doc_id_T,
        position_T=tokens.position_T,
    )


@settings(deadline=None, max_examples=60)
@given(tokens=packs(), limit=st.integers(1, 12), size=st.integers(1, 6), seed=st.integers(0, 9))
def test_blocks_obey_the_rules_on_any_pack(tokens, limit: int, size: int, seed: int) -> None:
    anchors = select_anchors(tokens, limit, block_size=size, rng=np.random.default_rng(seed))
    labels = block_labels(tokens, anchors, block_size=size, gamma=3.0)

    docs, supervised = tokens.doc_id_T.tolist(), tokens.loss_mask_T.tolist()
    ids, positions = tokens.input_ids_T.tolist(), tokens.position_T.tolist()
    candidates = [
        a
        for a in range(len(ids) - 1)
        if supervised[a] and supervised[a + 1] and docs[a] == docs[a + 1] and positions[a] >= 1
    ]
    chosen = anchors.position_A[anchors.valid_A].tolist()
    assert chosen == sorted(set(chosen))
    assert set(chosen) <= set(candidates)
    assert len(chosen) == min(limit, len(candidates))
    assert anchor_candidates(tokens).tolist() == candidates
    for block in range(limit):
        start, reachable = int(anchors.position_A[block]), bool(anchors.valid_A[block])
        for k in range(1, size):
            row = start + k
            inside = reachable and row < len(ids) and docs[row] == docs[start]
            reachable = inside and supervised[row]
            assert bool(labels.mask_AK[block, k]) == reachable
            if inside:
                assert int(labels.labels_AK[block, k]) == ids[row]


@settings(deadline=None, max_examples=40)
@given(
    tokens=packs(),
    size=st.integers(1, 5),
    padding=st.integers(0, 3),
    window=st.one_of(st.none(), st.integers(1, 8)),
    seed=st.integers(0, 9),
)
def test_mask_forms_agree_on_any_pack(tokens, size, padding, window, seed) -> None:
    drawn = select_anchors(tokens, 5, block_size=size, rng=np.random.default_rng(seed))
    layout = build_layout(tokens, pad_anchors(drawn, 5 + padding), block_size=size)
    grid = dense_mask(layout, window)
    rows, keys = grid.shape

    evaluated = make_mask_mod(layout, window)(
        0, 0, torch.arange(rows)[:, None].expand(rows, keys), torch.arange(keys)[None].expand(rows, keys)
    )

    assert torch.equal(grid, evaluated)
    assert grid.any(dim=1).all()


@settings(deadline=None, max_examples=15)
@given(tokens=packs(), seed=st.integers(0, 9), sliding=st.booleans(), shuffled=st.booleans())
def test_segmented_attention_equals_dense_on_any_pack(tokens, seed, sliding, shuffled) -> None:
    kinds = (SLIDING, FULL) if sliding else (FULL, FULL)
    drafter, ends = make_drafter(layer_types=kinds, sliding_window=3), make_ends()
    anchors = select_anchors(tokens, 6, block_size=4, rng=np.random.default_rng(seed))
    if shuffled:
        order = torch.randperm(6, generator=torch.Generator().manual_seed(seed))
        anchors = type(anchors)(position_A=anchors.position_A[order], valid_A=anchors.valid_A[order])

    dense, segmented = (
        block_hidden(drafter, ends, make_pack(tokens), anchors, attention=kind) for kind in ("dense", "sdpa")
    )

    torch.testing.assert_close(dense, segmented, atol=2e-5, rtol=0)


def test_many_blocks_of_one_document_are_cut_into_several_segments() -> None:
    drafter, ends, tokens = make_drafter(), make_ends(), make_tokens((120,))
    anchors = select_anchors(tokens, 100, block_size=4, rng=np.random.default_rng(0))
    masks = build_masks(
        build_layout(tokens, anchors, block_size=4),
        (FULL,),
        sliding_window=None,
        implementation="sdpa",
        device="cpu",
    )

    dense, segmented = (
        block_hidden(drafter, ends, make_pack(tokens), anchors, attention=kind) for kind in ("dense", "sdpa")
    )

    assert [segment.rows for segment in masks[FULL].segments] == [256, 144]
    torch.testing.assert_close(dense, segmented, atol=2e-5, rtol=0)


def test_trimming_drops_exactly_the_blocks_without_weight() -> None:
    tokens = make_tokens((20,), supervised=0.6)
    anchors = pad_anchors(anchors_at(3, 8, 18, 19), 6)
    labels = block_labels(tokens, anchors, block_size=4, gamma=4.0)

    kept, kept_labels = trim_blocks(anchors, labels)

    assert torch.equal(kept.position_A, anchors.position_A[labels.mask_AK.any(dim=1)])
    assert kept_labels.weights_AK.sum() == labels.weights_AK.sum()
    assert kept_labels.mask_AK.any(dim=1).all()


@pytest.mark.parametrize("kwargs", [{"max_anchors": 0, "block_size": 4}, {"max_anchors": 4, "block_size": 0}])
def test_anchor_limits_below_one_are_refused(kwargs: dict) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        select_anchors(make_tokens(), rng=torch.Generator(), **kwargs)


@pytest.mark.parametrize("gamma", [0.0, -1.0, float("nan")])
def test_decay_that_does_not_decay_is_refused(gamma: float) -> None:
    with pytest.raises(ConfigError, match="--gamma"):
        decay_weights(4, gamma)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"implementation": "flash"}, "unknown attention implementation: flash"),
        ({"implementation": "flex"}, "needs a CUDA device, not cpu"),
        ({"layer_types": ("strange",)}, "unknown layer type: strange"),
        ({"layer_types": (SLIDING,), "sliding_window": 0}, "window of at least 1"),
    ],
)
def test_masks_that_cannot_be_built_are_refused(change: dict, words: str) -> None:
    arguments = {
        "layer_types": (FULL,),
        "sliding_window": None,
        "implementation": "dense",
        "device": "cpu",
    } | change
    layer_types = arguments.pop("layer_types")

    with pytest.raises(ConfigError, match=words):
        build_masks(build_layout(make_tokens(), anchors_at(5), block_size=4), layer_types, **arguments)
