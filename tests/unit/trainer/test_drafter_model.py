"""The drafter's config, initial weights, cache, acceptance counts and seeds."""

from __future__ import annotations

import pytest
import torch

from tests.support.tiny import tiny_target
from tests.support.tiny_drafter import (
    anchors_at,
    drafter_config,
    make_drafter,
    make_ends,
    make_pack,
    make_tokens,
)
from trainer.config import DrafterSection
from trainer.drafter import shape
from trainer.drafter.acceptance import BlockCounts, DeferredCounts, count_blocks, summarize
from trainer.drafter.anchors import block_labels, pad_anchors
from trainer.drafter.cache import DraftCache
from trainer.drafter.loss import _pad_for_flex, block_hidden, coarse_length, microbatch_sums
from trainer.drafter.masks import FULL, SLIDING
from trainer.drafter.model import build_drafter, default_target_layer_ids
from trainer.drafter.noise import noise_sigma, pack_seed
from trainer.errors import ConfigError
from trainer.target.loader import load_target


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_hidden_layers": 0, "layer_types": ()}, "num_hidden_layers must be at least 1"),
        ({"num_attention_heads": 3}, "multiple of key/value heads 2"),
        ({"head_dim": 15}, "must be even"),
        ({"mask_token_id": 97}, "mask token 97 is outside"),
        ({"target_layer_ids": ()}, "empty"),
        ({"target_layer_ids": (1, 7)}, "target layer 7 cannot be captured: use 0 to 6"),
        ({"target_layer_ids": (-1, 2)}, "target layer -1"),
        ({"target_layer_ids": (2, 2)}, "twice"),
        ({"layer_types": ("full_attention",)}, "1 entries for 2"),
        ({"layer_types": ("full_attention", "linear")}, "unknown layer types"),
        ({"layer_types": ("full_attention", "sliding_attention")}, "window of at least 1, not None"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "not supported: dynamic"),
    ],
)
def test_impossible_configs_are_refused_with_the_value(change: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        drafter_config(**change)


@pytest.mark.parametrize(("layers", "count"), [(5, 5), (3, 2), (8, 0)])
def test_too_few_layers_to_spread_over_are_refused(layers: int, count: int) -> None:
    with pytest.raises(ConfigError):
        default_target_layer_ids(layers, count)


def test_weights_depend_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    first = build_drafter(drafter_config(), seed=5, dtype=torch.float32)
    state = torch.get_rng_state()
    second = build_drafter(drafter_config(), seed=5, dtype=torch.float32)
    other = build_drafter(drafter_config(), seed=6, dtype=torch.float32)
    rounded = build_drafter(drafter_config(), seed=5, dtype=torch.bfloat16)

    assert torch.equal(state, torch.get_rng_state())
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name])
        assert torch.equal(tensor.bfloat16(), rounded.state_dict()[name])
    assert not torch.equal(first.fc.weight, other.fc.weight)


def test_initial_weights_are_normal_and_norms_one() -> None:
    drafter = build_drafter(drafter_config(attention_bias=True), seed=0, dtype=torch.float32)

    for name, tensor in drafter.state_dict().items():
        if tensor.dim() == 2:
            assert tensor.std().item() == pytest.approx(0.02, rel=0.1), name
            assert abs(tensor.mean().item()) < 0.002, name
        else:
            assert torch.equal(tensor, torch.full_like(tensor, 0.0 if name.endswith("bias") else 1.0)), name


@pytest.mark.parametrize("captured", [1, 2, 3])
def test_split_fc_equals_the_fused_product(captured: int) -> None:
    ids = (1, 3, 5)[:captured]
    fused, split = make_drafter(target_layer_ids=ids), make_drafter(target_layer_ids=ids, split_fc=True)
    tokens, anchors = make_tokens((15, 25)), anchors_at(5, 9, 20, 30)
    pack = make_pack(tokens, captured=captured)

    wanted, found = (
        block_hidden(drafter, make_ends(), pack, anchors, noise_sigma=0.05, noise_seed=1)
        for drafter in (fused, split)
    )
    for hidden in (wanted, found):
        (hidden * torch.linspace(-1, 1, hidden.numel()).view_as(hidden)).sum().backward()

    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    gradients = {name: parameter.grad for name, parameter in split.named_parameters()}
    assert gradients.keys() == dict(fused.named_parameters()).keys()
    for name, parameter in fused.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-4, rtol=1e-4, msg=name)


def test_split_fc_drafts_with_the_same_stored_weights() -> None:
    fused, split = make_drafter(seed=5), make_drafter(seed=5, split_fc=True)
    features = make_pack(make_tokens((20,))).features_TLD.flatten(1)
    block = make_ends().embed(torch.tensor([5, 96, 96, 96]))

    wanted, found = (drafter.draft(features[:9], block, DraftCache(2), start=9) for drafter in (fused, split))

    assert fused.state_dict().keys() == split.state_dict().keys()
    assert all(torch.equal(value, split.state_dict()[name]) for name, value in fused.state_dict().items())
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_split_fc_in_bf16_differs_by_rounding_only() -> None:
    reference = make_drafter(seed=5)
    features = make_pack(make_tokens((40,))).features_TLD.flatten(1)[None]
    exact = reference.fuse(features)

    errors = [
        (make_drafter(seed=5, dtype=torch.bfloat16, split_fc=split).fuse(features).float() - exact)
        .abs()
        .max()
        for split in (False, True)
    ]

    assert errors[1] < 2 * errors[0]


@pytest.mark.parametrize(
    ("section", "kinds"),
    [
        ({}, "FFFFF"),
        ({"sliding_window": 2048}, "SSSSF"),
        ({"sliding_window": 2048, "sliding_layers": (0, 2)}, "SFSFF"),
        ({"sliding_window": 2048, "sliding_layers": (0, 1, 2, 3, 4)}, "SSSSS"),
    ],
)
def test_sliding_layers_are_all_but_the_last_unless_named(tmp_path, section: dict, kinds: str) -> None:
    target = load_target(tiny_target(tmp_path), device="cpu", dtype=torch.float32)
    names = {"F": FULL, "S": SLIDING}

    config = shape.drafter_config(
        target.info, DrafterSection(num_layers=5, **section), target_layer_ids=(1, 5)
    )

    assert config.layer_types == tuple(names[kind] for kind in kinds)
    assert config.sliding_window == section.get("sliding_window")


def test_draft_refuses_a_gap_in_the_context() -> None:
    drafter, ends = make_drafter(), make_ends()
    features = make_pack(make_tokens((20,))).features_TLD.flatten(1)

    with pytest.raises(ValueError, match="needs 9 new context rows, got 8"):
        drafter.draft(features[:8], ends.embed(torch.tensor([5, 96])), DraftCache(2), start=9)


def test_scaled_embeddings_and_capped_logits_follow_the_target() -> None:
    plain, scaled = make_ends(), make_ends(embed_scale=8.0, logit_softcap=2.0)
    hidden = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))

    assert torch.equal(scaled.embed(torch.tensor([3])), plain.embed(torch.tensor([3])) * 8.0)
    torch.testing.assert_close(scaled.logits(hidden), torch.tanh(plain.logits(hidden) / 2) * 2)


def test_acceptance_is_a_mean_of_products_over_complete_blocks() -> None:
    correct = torch.tensor([[0, 1, 1, 1], [0, 1, 0, 1], [0, 0, 1, 1], [0, 1, 1, 0]]).bool()
    mask = torch.tensor([[0, 1, 1, 1], [0, 1, 1, 1], [0, 1, 1, 1], [0, 1, 1, 0]]).bool()
    complete = torch.tensor([True, True, True, False])

    reading = summarize(count_blocks(correct, mask, complete))

    assert reading.complete_blocks == 3
    assert reading.prefix_acceptance == pytest.approx((2 / 3, 1 / 3, 1 / 3))
    assert reading.expected_acceptance_length == pytest.approx(1 + 4 / 3)
    assert reading.accuracy == pytest.approx((3 / 4, 3 / 4, 1.0))


def test_acceptance_of_nothing_is_unknown() -> None:
    reading = DeferredCounts(BlockCounts.zeros(4, "cpu")).read()

    assert reading.expected_acceptance_length is None
    assert reading.accuracy == (None, None, None)


def test_counts_add_up_and_are_read_later() -> None:
    one = BlockCounts(
        correct_K=torch.tensor([0, 3]),
        supervised_K=torch.tensor([0, 4]),
        prefix_correct_K=torch.tensor([4, 2]),
        complete_blocks=torch.tensor(4),
    )
    deferred = DeferredCounts(one + one)
    one.correct_K.zero_()

    assert deferred.is_ready()
    assert deferred.read().complete_blocks == 8
    assert deferred.read().accuracy == (0.75,)


def test_microbatch_counts_equal_counting_by_hand() -> None:
    drafter, ends, tokens = make_drafter(), make_ends(), make_tokens((15, 25), supervised=0.9)
    pack, anchors = make_pack(tokens), pad_anchors(anchors_at(3, 8, 13, 18, 22, 30), 8)
    labels = block_labels(tokens, anchors, block_size=4, gamma=4.0)

    sums = microbatch_sums(
        drafter,
        ends,
        pack,
        anchors,
        labels,
        noise_sigma=0.0,
        noise_seed=0,
        head_chunk_rows=5,
        attention="sdpa",
    )

    hidden = block_hidden(drafter, ends, pack, anchors, attention="dense").view(8, 4, -1)
    best = ends.logits(hidden).argmax(dim=-1)
    by_hand = count_blocks(best == labels.labels_AK, labels.mask_AK, labels.complete_A)
    assert torch.equal(sums.counts.correct_K, by_hand.correct_K)
    assert torch.equal(sums.counts.supervised_K, by_hand.supervised_K)
    assert torch.equal(sums.counts.prefix_correct_K[1:], by_hand.prefix_correct_K[1:])
    assert sums.counts.complete_blocks == by_hand.complete_blocks
    assert sums.rows == int(labels.mask_AK.sum())
    losses = torch.nn.functional.cross_entropy(
        ends.logits(hidden).flatten(0, 1), labels.labels_AK.flatten(), ignore_index=-100, reduction="none"
    )
    assert sums.numerator.item() == pytest.approx(
        (losses * labels.weights_AK.flatten()).sum().item(), rel=1e-5
    )
    assert sums.denominator.item() == pytest.approx(labels.weights_AK.sum().item(), rel=1e-6)


def test_head_chunks_below_one_row_are_refused() -> None:
    tokens = make_tokens()
    anchors = anchors_at(5)
    labels = block_labels(tokens, anchors, block_size=4, gamma=4.0)

    with pytest.raises(ConfigError, match="head_chunk_rows"):
        microbatch_sums(
            make_drafter(),
            make_ends(),
            make_pack(tokens),
            anchors,
            labels,
            noise_sigma=0.0,
            noise_seed=0,
            head_chunk_rows=0,
            attention="sdpa",
        )


def test_flex_shapes_are_few_and_whole_tiles() -> None:
    lengths = {coarse_length(length) for length in range(1, 8193)}

    assert all(length % 128 == 0 for length in lengths)
    assert len(lengths) <= 24
    assert all(length <= coarse_length(length) <= max(128, 1.25 * length + 128) for length in range(1, 8193))


@pytest.mark.parametrize("length", [1, 40, 300, 512])
def test_flex_packs_below_a_least_length_share_one_shape(length: int) -> None:
    tokens = make_tokens((length,))
    features = make_pack(tokens).features_TLD.flatten(1)

    padded_tokens, padded, _ = _pad_for_flex(tokens, features, anchors_at(0), 4, 512)

    assert padded.shape[0] == padded_tokens.doc_id_T.numel() == 512
    assert int((padded_tokens.doc_id_T >= 0).sum()) == length


def test_flex_padding_changes_nothing_that_is_kept() -> None:
    drafter, ends, tokens = make_drafter(), make_ends(), make_tokens((15, 25))
    pack, anchors = make_pack(tokens), anchors_at(5, 20)
    plain = block_hidden(drafter, ends, pack, anchors, attention="dense")

    padded_tokens, features, padded_anchors = _pad_for_flex(tokens, pack.features_TLD.flatten(1), anchors, 4)
    padded = block_hidden(
        drafter,
        ends,
        make_pack(padded_tokens, features=features.view(-1, 2, 64)),
        padded_anchors,
        attention="dense",
    )

    assert features.shape[0] == padded_tokens.doc_id_T.numel() == 128
    assert len(padded_anchors) * 4 == 128
    torch.testing.assert_close(padded[:8], plain, atol=1e-5, rtol=0)


def test_seeds_differ_by_pack_epoch_run_and_purpose() -> None:
    base = {"run_seed": 1, "epoch": 2, "pack_id": 3, "stream": "noise"}
    seeds = {
        pack_seed(**(base | change))
        for change in ({}, {"run_seed": 2}, {"epoch": 3}, {"pack_id": 4}, {"stream": "anchors"})
    }

    assert len(seeds) == 5
    assert pack_seed(**base) == pack_seed(**base)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_noise_schedule_of_one_step_and_refusals() -> None:
    assert noise_sigma(0, 1, start=0.05, end=0.01) == 0.05
    with pytest.raises(ConfigError, match="negative"):
        noise_sigma(0, 10, start=-0.1, end=0.0)
