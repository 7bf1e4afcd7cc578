"""Golden properties 1 to 15 of the algorithm: layer choice, capture, isolation of blocks, cache, masks."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from tests.support.plain_loss import OBJECTIVES
from tests.support.tiny import tiny_target
from tests.support.tiny_drafter import (
    anchors_at,
    make_drafter,
    make_ends,
    make_last_hidden,
    make_pack,
    make_tokens,
)
from trainer.drafter.anchors import block_labels, pad_anchors
from trainer.drafter.cache import DraftCache
from trainer.drafter.loss import block_hidden, microbatch_sums
from trainer.drafter.masks import FULL, SLIDING, build_layout, dense_mask, make_mask_mod
from trainer.drafter.model import default_target_layer_ids
from trainer.drafter.objective import Objective
from trainer.pipeline.messages import FeaturePack, PackedTokens

CPU_KERNELS = pytest.mark.parametrize("attention", ["dense", "sdpa"])
LAYOUTS = pytest.mark.parametrize(
    "shape",
    [
        pytest.param({}, id="full"),
        pytest.param({"layer_types": (SLIDING, SLIDING), "sliding_window": 6}, id="sliding"),
        pytest.param({"layer_types": (SLIDING, FULL), "sliding_window": 3}, id="mixed"),
    ],
)


@pytest.mark.parametrize(
    ("layers", "count", "ids"),
    [
        (36, 5, (1, 9, 17, 25, 33)),
        (28, 5, (1, 7, 13, 19, 25)),
        (40, 5, (1, 10, 19, 28, 37)),
        (48, 5, (1, 12, 23, 34, 45)),
        (64, 5, (1, 16, 31, 46, 61)),
        (36, 1, (18,)),
    ],
)
def test_golden_01_default_target_layer_ids(layers: int, count: int, ids: tuple[int, ...]) -> None:
    assert default_target_layer_ids(layers, count) == ids


def test_golden_02_halves_round_to_even() -> None:
    assert default_target_layer_ids(62, 5) == (1, 16, 30, 44, 59)


def test_golden_03_captured_state_is_the_layers_output(tmp_path) -> None:
    from transformers import AutoModelForCausalLM

    from trainer.target.loader import load_target

    path = tiny_target(tmp_path)
    ids = torch.randint(4, 55, (1, 12), generator=torch.Generator().manual_seed(0))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    hooked: dict[int, torch.Tensor] = {}
    for layer in (1, 5):
        model.model.layers[layer].register_forward_hook(
            lambda _m, _i, out, layer=layer: hooked.__setitem__(
                layer, out[0] if isinstance(out, tuple) else out
            )
        )
    with torch.no_grad():
        reference = model(ids, output_hidden_states=True).hidden_states

    features, _ = load_target(path, device="cpu", dtype=torch.float32).hidden_states(ids, None, (1, 5))

    for index, layer in enumerate((1, 5)):
        assert torch.equal(features[:, :, index], reference[layer + 1])
        assert torch.equal(features[:, :, index], hooked[layer])


@CPU_KERNELS
@LAYOUTS
def test_golden_04_states_from_the_anchor_on_are_invisible(attention: str, shape: dict) -> None:
    drafter, ends, tokens = make_drafter(**shape), make_ends(), make_tokens()
    pack, anchors = make_pack(tokens), anchors_at(5, 9, 20, 30)
    before = block_hidden(drafter, ends, pack, anchors, attention=attention).view(4, 4, -1)

    for index, anchor in enumerate(anchors.position_A.tolist()):
        changed = pack.features_TLD.clone()
        changed[anchor:] += 100.0
        after = block_hidden(
            drafter, ends, make_pack(tokens, features=changed), anchors, attention=attention
        ).view(4, 4, -1)

        assert torch.equal(before[index], after[index])


@CPU_KERNELS
@LAYOUTS
def test_golden_05_the_state_before_the_anchor_is_visible(attention: str, shape: dict) -> None:
    drafter, ends, tokens = make_drafter(**shape), make_ends(), make_tokens()
    pack, anchors = make_pack(tokens), anchors_at(5, 9, 20, 30)
    before = block_hidden(drafter, ends, pack, anchors, attention=attention).view(4, 4, -1)

    for index, anchor in enumerate(anchors.position_A.tolist()):
        changed = pack.features_TLD.clone()
        changed[anchor - 1] += 1.0
        after = block_hidden(
            drafter, ends, make_pack(tokens, features=changed), anchors, attention=attention
        ).view(4, 4, -1)

        assert (before[index, 0] - after[index, 0]).abs().max() > 1e-3


@CPU_KERNELS
@LAYOUTS
def test_golden_06_blocks_do_not_see_each_other(attention: str, shape: dict) -> None:
    drafter, ends, tokens = make_drafter(**shape), make_ends(), make_tokens((40,))
    before = block_hidden(drafter, ends, make_pack(tokens), anchors_at(5, 9, 20), attention=attention)
    ids = tokens.input_ids_T.clone()
    ids[9] += 1
    changed = dataclasses.replace(tokens, input_ids_T=ids)

    other_token = block_hidden(drafter, ends, make_pack(changed), anchors_at(5, 9, 20), attention=attention)
    other_anchor = block_hidden(drafter, ends, make_pack(tokens), anchors_at(5, 12, 20), attention=attention)

    for after in (other_token, other_anchor):
        assert torch.equal(before[:4], after[:4])
        assert torch.equal(before[8:], after[8:])
        assert not torch.allclose(before[4:8], after[4:8])


@CPU_KERNELS
def test_golden_07_order_and_number_of_blocks_do_not_matter(attention: str) -> None:
    drafter, ends, tokens = make_drafter(), make_ends(), make_tokens()
    pack = make_pack(tokens)
    plain = block_hidden(drafter, ends, pack, anchors_at(5, 9, 20, 30), attention=attention).view(4, 4, -1)

    permuted = block_hidden(drafter, ends, pack, anchors_at(30, 5, 20, 9), attention=attention)
    superset = block_hidden(drafter, ends, pack, anchors_at(4, 5, 6, 9, 17, 20, 30, 31), attention=attention)

    torch.testing.assert_close(permuted.view(4, 4, -1)[[1, 3, 2, 0]], plain, atol=1e-5, rtol=0)
    torch.testing.assert_close(superset.view(8, 4, -1)[[1, 3, 5, 6]], plain, atol=1e-5, rtol=0)


@CPU_KERNELS
@LAYOUTS
def test_golden_08_training_forward_equals_inference_draft(attention: str, shape: dict) -> None:
    drafter, ends, tokens = make_drafter(**shape), make_ends(), make_tokens((40,))
    pack = make_pack(tokens)
    trained = block_hidden(drafter, ends, pack, anchors_at(3, 11, 30), attention=attention).view(3, 4, -1)

    for index, anchor in enumerate((3, 11, 30)):
        ids = torch.tensor([int(tokens.input_ids_T[anchor]), 96, 96, 96])
        drafted = drafter.draft(
            pack.features_TLD[:anchor].flatten(1), ends.embed(ids), DraftCache(2), start=anchor
        )

        torch.testing.assert_close(ends.logits(drafted), ends.logits(trained[index]), atol=1e-5, rtol=0)


@LAYOUTS
def test_golden_09_cached_context_equals_uncached(shape: dict) -> None:
    drafter, ends = make_drafter(**shape), make_ends()
    features = make_pack(make_tokens((600,))).features_TLD.flatten(1)
    embeds = ends.embed(torch.tensor([7, 96, 96, 96]))
    cache = DraftCache(2)

    for old, start in ((0, 5), (5, 6), (6, 10), (10, 300), (300, 599)):
        pieces = drafter.draft(features[old:start], embeds, cache, start=start)
        whole = drafter.draft(features[:start], embeds, DraftCache(2), start=start)

        torch.testing.assert_close(pieces, whole, atol=1e-5, rtol=0)


def test_golden_10_draft_cache_holds_the_context_and_never_rewrites_it() -> None:
    drafter, ends = make_drafter(), make_ends()
    features = make_pack(make_tokens((40,))).features_TLD.flatten(1)
    embeds, cache = ends.embed(torch.tensor([7, 96, 96, 96])), DraftCache(2)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    for old, start in ((0, 5), (5, 8), (8, 9)):
        drafter.draft(features[old:start], embeds, cache, start=start)
        rows = [cache.rows(layer) for layer in range(2)]

        assert cache.length == start
        assert all(keys.shape[1] == values.shape[1] == start for keys, values in rows)
        for (old_k, old_v), (new_k, new_v) in zip(seen, rows, strict=False):
            assert torch.equal(old_k, new_k[:, :old])
            assert torch.equal(old_v, new_v[:, :old])
        seen = [(keys.clone(), values.clone()) for keys, values in rows]


@CPU_KERNELS
def test_golden_11_packed_documents_equal_separate_ones(attention: str) -> None:
    drafter, ends = make_drafter(), make_ends()
    tokens = make_tokens((15, 25), supervised=0.9)
    pack, anchors = make_pack(tokens), anchors_at(3, 8, 13, 18, 30, 38)
    together = _sums(drafter, pack, anchors, ends, attention)
    hidden = block_hidden(drafter, ends, pack, anchors, attention=attention)

    alone = []
    for start, end, positions in ((0, 15, (3, 8, 13)), (15, 40, (18, 30, 38))):
        part = _slice(tokens, start, end)
        part_pack = make_pack(part, features=pack.features_TLD[start:end])
        part_anchors = anchors_at(*(position - start for position in positions))
        alone.append(_sums(drafter, part_pack, part_anchors, ends, attention))
        rows = block_hidden(drafter, ends, part_pack, part_anchors, attention=attention)
        offset = 0 if start == 0 else 12
        torch.testing.assert_close(rows, hidden[offset : offset + 12], atol=1e-5, rtol=0)

    assert together.numerator.item() == pytest.approx(sum(s.numerator.item() for s in alone), abs=1e-4)
    assert together.denominator.item() == pytest.approx(sum(s.denominator.item() for s in alone), abs=1e-5)


@CPU_KERNELS
@LAYOUTS
def test_golden_12_padding_changes_no_hidden_state(attention: str, shape: dict) -> None:
    drafter, ends, tokens = make_drafter(**shape), make_ends(), make_tokens((15, 25), supervised=0.9)
    pack, anchors = make_pack(tokens), anchors_at(3, 13, 18, 38)
    plain = block_hidden(drafter, ends, pack, anchors, attention=attention)

    hidden = block_hidden(drafter, ends, _padded(pack), pad_anchors(anchors, 9), attention=attention)
    hidden.square().sum().backward()

    assert torch.isfinite(hidden).all()
    torch.testing.assert_close(hidden[:16], plain, atol=1e-5, rtol=0)
    assert all(torch.isfinite(parameter.grad).all() for parameter in drafter.parameters())


@CPU_KERNELS
@LAYOUTS
@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
def test_golden_12_padding_changes_neither_loss_nor_gradient(
    attention: str, shape: dict, objective: Objective
) -> None:
    """The batch padded on the right, and blocks that stand for nothing, one at a time and together."""
    ends, tokens = make_ends(), make_tokens((15, 25), supervised=0.9)
    pack, anchors = make_pack(tokens, last_hidden=make_last_hidden(tokens)), anchors_at(3, 13, 18, 38)
    plain = make_drafter(**shape)
    reference = _sums(plain, pack, anchors, ends, attention, objective)
    reference.numerator.backward()

    for rows, blocks in ((_padded(pack), anchors), (pack, pad_anchors(anchors, 9))):
        _assert_same_step(plain, reference, make_drafter(**shape), (rows, blocks, ends, attention, objective))
    both = (_padded(pack), pad_anchors(anchors, 9), ends, attention, objective)
    _assert_same_step(plain, reference, make_drafter(**shape), both)


def _assert_same_step(plain, reference, drafter, inputs) -> None:
    sums = _sums(drafter, *inputs)
    sums.numerator.backward()
    assert math.isfinite(sums.numerator.item())
    assert sums.numerator.item() == pytest.approx(reference.numerator.item(), rel=1e-5, abs=1e-5)
    assert sums.denominator.item() == pytest.approx(reference.denominator.item(), abs=1e-6)
    for (name, mine), expected in zip(drafter.named_parameters(), plain.parameters(), strict=True):
        assert torch.isfinite(mine.grad).all(), name
        assert expected.grad.any(), name
        torch.testing.assert_close(mine.grad, expected.grad, atol=1e-5, rtol=1e-4, msg=name)


def _padded(pack: FeaturePack) -> FeaturePack:
    """Nine rows of padding, supervised and full of large numbers: nobody may look."""
    last = pack.last_hidden_TD
    return make_pack(
        _pad(pack.tokens, 9),
        features=torch.cat([pack.features_TLD, torch.full((9, 2, 64), 1e4)]),
        last_hidden=None if last is None else torch.cat([last, torch.full((9, 64), 1e4)]),
    )


@pytest.mark.parametrize("window", [None, 1, 3, 9])
def test_golden_13_all_masks_equal_the_written_rule(window: int | None) -> None:
    tokens = _pad(make_tokens((7, 12, 5), supervised=0.8), 4)
    layout = build_layout(tokens, pad_anchors(anchors_at(3, 5, 9, 17, 22), 7), block_size=4)
    grid = dense_mask(layout, window)
    rows, keys = grid.shape
    mask_mod = make_mask_mod(layout, window)

    query = torch.arange(rows)[:, None].expand(rows, keys)
    key = torch.arange(keys)[None, :].expand(rows, keys)
    evaluated = mask_mod(0, 0, query, key)

    assert torch.equal(grid, evaluated)
    assert torch.equal(grid, _by_hand(tokens, layout, window))
    assert grid.any(dim=1).all()


@CPU_KERNELS
def test_golden_14_full_layers_look_both_ways_and_sliding_ones_back(attention: str) -> None:
    looks_ahead = {}
    for kind in (FULL, SLIDING):
        drafter = make_drafter(num_hidden_layers=1, layer_types=(kind,), sliding_window=8)
        embeds = torch.randn(1, 4, 64, generator=torch.Generator().manual_seed(9))
        changed = embeds.clone()
        changed[:, 3] += 1.0
        layout = build_layout(make_tokens((20,)), anchors_at(6), block_size=4)

        before, after = (_forward(drafter, layout, block, attention) for block in (embeds, changed))

        looks_ahead[kind] = not torch.equal(before[1], after[1])

    assert looks_ahead == {FULL: True, SLIDING: False}


def test_golden_15_window_ends_where_it_says() -> None:
    window, anchor = 5, 12
    layout = build_layout(make_tokens((20,)), anchors_at(anchor), block_size=4)

    grid = dense_mask(layout, window)

    for offset in range(4):
        visible = grid[offset, :20].nonzero().flatten().tolist()
        assert visible == list(range(anchor + offset - (window - 1), anchor))


@CPU_KERNELS
def test_golden_15_only_states_inside_the_window_reach_the_output(attention: str) -> None:
    window, anchor = 5, 12
    drafter = make_drafter(num_hidden_layers=1, layer_types=(SLIDING,), sliding_window=window)
    tokens, ends = make_tokens((20,)), make_ends()
    pack = make_pack(tokens)
    before = block_hidden(drafter, ends, pack, anchors_at(anchor), attention=attention)

    for distance in (window - 1, window):
        changed = pack.features_TLD.clone()
        changed[anchor - distance] += 1.0
        after = block_hidden(
            drafter, ends, make_pack(tokens, features=changed), anchors_at(anchor), attention=attention
        )
        assert torch.equal(before[0], after[0]) == (distance == window)


def _sums(drafter, pack, anchors, ends, attention, objective=OBJECTIVES["ce"]):
    labels = block_labels(pack.tokens, anchors, block_size=4, gamma=4.0)
    return microbatch_sums(
        drafter,
        ends,
        pack,
        anchors,
        labels,
        noise_sigma=0.0,
        noise_seed=0,
        head_chunk_rows=16,
        attention=attention,
        objective=objective,
    )


def _forward(drafter, layout, embeds, attention):
    from trainer.drafter.masks import build_masks

    masks = build_masks(
        layout,
        drafter.config.layer_types,
        sliding_window=drafter.config.sliding_window,
        implementation=attention,
        device="cpu",
    )
    features = torch.randn(1, layout.context_rows, 128, generator=torch.Generator().manual_seed(4))
    return drafter(
        features,
        embeds,
        context_positions_BT=layout.context_position_T[None].long(),
        block_positions_BQ=layout.block_positions[None],
        attention_mask=masks,
    )[0]


def _slice(tokens: PackedTokens, start: int, end: int) -> PackedTokens:
    return PackedTokens(
        input_ids_T=tokens.input_ids_T[start:end],
        loss_mask_T=tokens.loss_mask_T[start:end],
        doc_id_T=tokens.doc_id_T[start:end],
        position_T=tokens.position_T[start:end],
    )


def _pad(tokens: PackedTokens, extra: int) -> PackedTokens:
    pad = torch.nn.functional.pad
    return PackedTokens(
        input_ids_T=pad(tokens.input_ids_T, (0, extra), value=5),
        loss_mask_T=pad(tokens.loss_mask_T, (0, extra), value=True),
        doc_id_T=pad(tokens.doc_id_T, (0, extra), value=-1),
        position_T=pad(tokens.position_T, (0, extra)),
    )


def _by_hand(tokens: PackedTokens, layout, window: int | None) -> torch.Tensor:
    docs, positions = tokens.doc_id_T.tolist(), tokens.position_T.tolist()
    anchors, valid, size = layout.anchor_index_A.tolist(), layout.valid_A.tolist(), layout.block_size
    context = len(docs)
    grid = torch.zeros(len(anchors) * size, context + len(anchors) * size, dtype=torch.bool)
    for block, anchor in enumerate(anchors):
        for offset in range(size):
            row = block * size + offset
            if not valid[block]:
                grid[row, context + row] = True
                continue
            for j in range(context):
                distance = positions[anchor] + offset - positions[j]
                near = window is None or distance < window
                grid[row, j] = j < anchor and docs[j] == docs[anchor] and docs[j] >= 0 and near
            for other in range(size):
                back = window is None or 0 <= offset - other < window
                grid[row, context + block * size + other] = back
    return grid
