"""Golden properties 16 to 22, 26 (drafter side) and 27: labels, anchors, weights, loss, noise."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch

from tests.support.tiny_drafter import (
    anchors_at,
    make_drafter,
    make_ends,
    make_last_hidden,
    make_pack,
    make_tokens,
)
from trainer.drafter.anchors import (
    INVALID_LABEL,
    anchor_candidates,
    block_labels,
    decay_weights,
    pad_anchors,
    select_anchors,
)
from trainer.drafter.head import head_losses
from trainer.drafter.loss import microbatch_sums
from trainer.drafter.noise import add_noise, noise_sigma
from trainer.drafter.objective import Objective


def test_golden_16_labels_are_unshifted_and_weigh_only_reachable_answers() -> None:
    tokens = make_tokens((12, 10))
    mask = tokens.loss_mask_T.clone()
    mask[6] = False
    tokens = dataclasses.replace(tokens, loss_mask_T=mask)
    anchors = pad_anchors(anchors_at(4, 9, 19), 4)

    labels = block_labels(tokens, anchors, block_size=4, gamma=4.0)

    ids = tokens.input_ids_T
    assert torch.equal(labels.labels_AK[0], ids[4:8])
    assert labels.labels_AK[1].tolist() == [*ids[9:12].tolist(), INVALID_LABEL]
    assert labels.labels_AK[2].tolist() == [*ids[19:22].tolist(), INVALID_LABEL]
    # Block 0 meets an unsupervised token at offset 2 and stops there; blocks 1 and 2 end with their document.
    expected = [[0, 1, 0, 0], [0, 1, 1, 0], [0, 1, 1, 0], [0, 0, 0, 0]]
    assert labels.mask_AK.int().tolist() == expected
    assert torch.equal(labels.weights_AK > 0, labels.mask_AK)
    assert labels.complete_A.tolist() == [False, False, False, False]
    assert block_labels(tokens, anchors_at(15), block_size=4, gamma=4.0).complete_A.tolist() == [True]


@pytest.mark.parametrize("limit", [5, 40])
def test_golden_17_anchors_are_supervised_distinct_and_bounded(limit: int) -> None:
    tokens = make_tokens((30, 25), supervised=0.7)

    anchors = select_anchors(tokens, limit, block_size=4, rng=np.random.default_rng(1))

    chosen = anchors.position_A[anchors.valid_A]
    assert anchors.position_A.numel() == limit
    assert len(chosen) == min(limit, len(anchor_candidates(tokens)))
    assert torch.equal(chosen, chosen.unique())
    assert tokens.loss_mask_T[chosen].all()
    assert tokens.loss_mask_T[chosen + 1].all()
    assert torch.equal(tokens.doc_id_T[chosen], tokens.doc_id_T[chosen + 1])
    assert (tokens.position_T[chosen] >= 1).all()


@pytest.mark.parametrize("source", ["numpy", "torch"])
def test_golden_17_anchors_are_drawn_uniformly(source: str) -> None:
    tokens = make_tokens((30, 25), supervised=0.7)
    candidates = anchor_candidates(tokens)
    rng = np.random.default_rng(7) if source == "numpy" else torch.Generator().manual_seed(7)
    counts, draws, limit = torch.zeros(55), 2000, 5

    for _ in range(draws):
        counts[select_anchors(tokens, limit, block_size=4, rng=rng).position_A] += 1

    expected = draws * limit / len(candidates)
    # Draws without replacement vary less than independent ones: the statistic lies below the usual one.
    statistic = ((counts[candidates] - expected) ** 2 / expected).sum().item()
    assert counts.sum() == draws * limit
    assert counts[candidates].sum() == draws * limit
    assert statistic < _chi_square_999(len(candidates) - 1)


@pytest.mark.parametrize(
    ("gamma", "size", "last", "total"),
    [(7.0, 16, 0.13534, 6.63061), (10.0, 32, 0.04979, 10.03494), (4.0, 8, 0.22313, None)],
)
def test_golden_18_decay_weights(gamma: float, size: int, last: float, total: float | None) -> None:
    weights = decay_weights(size, gamma)

    assert weights[0] == 0.0
    assert weights[1] == 1.0
    assert weights[-1].item() == pytest.approx(last, abs=1e-5)
    assert total is None or weights.sum().item() == pytest.approx(total, abs=1e-5)


def test_golden_19_uniform_logits_cost_ln_v_for_any_weights() -> None:
    hidden = torch.randn(10, 64, generator=torch.Generator().manual_seed(0))
    weights = torch.rand(10, generator=torch.Generator().manual_seed(1)) + 0.01

    rows = head_losses(hidden, torch.zeros(97, 64), torch.arange(10), chunk_rows=4)

    loss = (rows.loss_R * weights).sum() / weights.sum()
    assert loss.item() == pytest.approx(math.log(97), abs=1e-5)


@pytest.mark.parametrize("attention", ["dense", "sdpa"])
def test_golden_20_microbatches_add_up_to_the_undivided_gradient(attention: str) -> None:
    lengths, ends = (15, 25, 9), make_ends()
    whole = make_tokens(lengths, supervised=0.9)
    pack = make_pack(whole)
    undivided, divided = make_drafter(), make_drafter()
    anchors = select_anchors(whole, 100, block_size=4, rng=np.random.default_rng(0))
    reference = _sums(undivided, ends, whole, anchors, attention=attention)
    (reference.numerator / reference.denominator).backward()

    denominator, start = torch.zeros(()), 0
    for length in lengths:
        rows = slice(start, start + length)
        fields = {field.name: getattr(whole, field.name)[rows] for field in dataclasses.fields(whole)}
        part = type(whole)(**fields)
        inside = anchors.position_A[anchors.valid_A]
        inside = inside[(inside >= start) & (inside < start + length)] - start
        sums = _sums(
            divided,
            ends,
            part,
            anchors_at(*inside.tolist()),
            attention=attention,
            features=pack.features_TLD[rows],
        )
        sums.numerator.backward()
        denominator += sums.denominator
        start += length

    assert denominator.item() == pytest.approx(reference.denominator.item(), rel=1e-6)
    for one, other in zip(undivided.parameters(), divided.parameters(), strict=True):
        torch.testing.assert_close(other.grad / denominator, one.grad, atol=1e-6, rtol=1e-5)


def test_golden_21_pack_without_any_block_contributes_nothing() -> None:
    tokens = make_tokens((15,), supervised=0.0)
    drafter, ends = make_drafter(), make_ends()
    anchors = select_anchors(tokens, 8, block_size=4, rng=np.random.default_rng(0))

    sums = _sums(drafter, ends, tokens, anchors)
    sums.numerator.backward()

    assert sums.numerator.item() == 0.0
    assert sums.denominator.item() == 0.0
    assert sums.counts.complete_blocks.item() == 0
    assert all(parameter.grad is None for parameter in drafter.parameters())


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("chunk", [1, 7, 4096])
def test_golden_22_chunked_loss_equals_plain_cross_entropy(chunk: int, softcap: float | None) -> None:
    ends = make_ends(logit_softcap=softcap)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(20, 64, generator=generator, requires_grad=True)
    labels = torch.randint(0, 97, (20,), generator=generator)
    weights = torch.rand(20, generator=generator)

    plain = torch.nn.functional.cross_entropy(ends.logits(hidden), labels, reduction="none") * weights
    (wanted,) = torch.autograd.grad(plain.sum() * 0.5, hidden)
    rows = head_losses(hidden, ends.head_weight_VD, labels, chunk_rows=chunk, softcap=softcap)
    losses = rows.loss_R * weights
    (grad,) = torch.autograd.grad(losses.sum() * 0.5, hidden)

    torch.testing.assert_close(losses, plain, atol=1e-5, rtol=0)
    torch.testing.assert_close(grad, wanted, atol=1e-5, rtol=0)
    assert torch.equal(rows.cross_entropy_R, rows.loss_R)
    assert torch.equal(rows.correct_R, ends.logits(hidden).argmax(dim=1) == labels)


@pytest.mark.parametrize("attention", ["dense", "sdpa"])
def test_golden_22_chunk_size_does_not_change_a_microbatch(attention: str) -> None:
    tokens, ends = make_tokens((15, 25), supervised=0.9), make_ends()
    anchors = select_anchors(tokens, 20, block_size=4, rng=np.random.default_rng(0))
    grads, values = [], []

    for chunk in (3, 1000):
        drafter = make_drafter()
        sums = _sums(drafter, ends, tokens, anchors, chunk=chunk, attention=attention)
        sums.numerator.backward()
        values.append(sums.numerator.item())
        grads.append([parameter.grad for parameter in drafter.parameters()])

    assert values[0] == pytest.approx(values[1], rel=1e-6)
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_golden_26_the_targets_tensors_stay_as_they_are() -> None:
    tokens, drafter = make_tokens((15, 25)), make_drafter()
    ends = make_ends()
    before = [tensor.clone() for tensor in (ends.embed_weight_VD, ends.head_weight_VD)]
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-2)
    first = [parameter.clone() for parameter in drafter.parameters()]

    for step in range(3):
        anchors = select_anchors(tokens, 8, block_size=4, rng=np.random.default_rng(step))
        _sums(drafter, ends, tokens, anchors).numerator.backward()
        optimizer.step()

    assert torch.equal(before[0], ends.embed_weight_VD)
    assert torch.equal(before[1], ends.head_weight_VD)
    assert ends.embed_weight_VD.grad is None
    assert ends.head_weight_VD.grad is None
    assert not any(torch.equal(old, new) for old, new in zip(first, drafter.parameters(), strict=True))


def test_golden_27_no_noise_is_the_identity() -> None:
    hidden = torch.randn(8, 2, 64)

    assert add_noise(hidden, sigma=0.0, seed=1) is hidden


def test_golden_27_noise_is_uniform_within_its_amplitude() -> None:
    hidden = torch.randn(400, 2, 64, generator=torch.Generator().manual_seed(0))
    before, sigma = hidden.clone(), 0.05

    noisy = add_noise(hidden, sigma=sigma, seed=1)

    delta = (noisy - hidden).double()
    assert torch.equal(hidden, before)
    assert delta.abs().max() <= sigma + 1e-6
    assert delta.mean().abs() < 5 * sigma / math.sqrt(3 * delta.numel())
    assert delta.var().item() == pytest.approx(sigma**2 / 3, rel=0.02)
    assert torch.equal(noisy, add_noise(hidden, sigma=sigma, seed=1))
    assert not torch.equal(noisy, add_noise(hidden, sigma=sigma, seed=2))


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0], ids=["ce", "mixed", "kl"])
def test_golden_27_noise_touches_only_the_captured_layers(share: float) -> None:
    """A noisy pass equals, to the bit, a clean one over noisy captured states and the same last hidden."""
    tokens, ends, drafter = make_tokens((15, 25)), make_ends(), make_drafter()
    last_hidden = make_last_hidden(tokens)
    pack = make_pack(tokens, last_hidden=last_hidden)
    copies = (last_hidden.clone(), pack.features_TLD.clone(), ends.embed_weight_VD.clone())
    noisy_features = add_noise(pack.features_TLD.flatten(1), sigma=0.05, seed=5).view_as(pack.features_TLD)
    by_hand = make_pack(tokens, features=noisy_features, last_hidden=last_hidden.clone())
    noisy_last = make_pack(
        tokens, features=noisy_features, last_hidden=add_noise(last_hidden, sigma=0.05, seed=5)
    )

    noisy = _noisy_loss(drafter, ends, pack, share, sigma=0.05)

    assert noisy == _noisy_loss(drafter, ends, by_hand, share, sigma=0.0)
    assert noisy != _noisy_loss(drafter, ends, pack, share, sigma=0.0)
    assert (noisy != _noisy_loss(drafter, ends, noisy_last, share, sigma=0.0)) == (share > 0.0)
    assert torch.equal(copies[0], last_hidden)
    assert torch.equal(copies[1], pack.features_TLD)
    assert torch.equal(copies[2], ends.embed_weight_VD)


def _noisy_loss(drafter, ends, pack, share: float, *, sigma: float) -> float:
    anchors = anchors_at(5, 20)
    return microbatch_sums(
        drafter,
        ends,
        pack,
        anchors,
        block_labels(pack.tokens, anchors, block_size=4, gamma=4.0),
        noise_sigma=sigma,
        noise_seed=5,
        head_chunk_rows=8,
        attention="dense",
        objective=Objective(soft_label_share=share),
    ).numerator.item()


def test_golden_27_schedule_goes_from_start_to_end() -> None:
    values = [noise_sigma(step, 101, start=0.05, end=0.01) for step in range(101)]

    assert values[0] == 0.05
    assert values[-1] == pytest.approx(0.01, abs=1e-12)
    assert values[50] == pytest.approx(0.03, abs=1e-12)
    assert values == sorted(values, reverse=True)


@pytest.mark.parametrize(("total", "start", "end"), [(1, 0.05, 0.01), (2, 0.05, 0.0), (1000, 0.1, 0.1)])
def test_golden_27_schedule_is_a_straight_line_of_any_length(total: int, start: float, end: float) -> None:
    values = [noise_sigma(step, total, start=start, end=end) for step in range(total)]

    falls = [before - after for before, after in itertools.pairwise(values)]
    assert values[0] == start
    assert values[-1] == pytest.approx(start if total == 1 else end, abs=1e-15)
    assert falls == pytest.approx([(start - end) / max(1, total - 1)] * (total - 1), abs=1e-15)
    assert noise_sigma(total + 5, total, start=start, end=end) == values[-1]


def _sums(drafter, ends, tokens, anchors, *, chunk=16, attention="sdpa", features=None):
    labels = block_labels(tokens, anchors, block_size=4, gamma=4.0)
    return microbatch_sums(
        drafter,
        ends,
        make_pack(tokens, features=features),
        anchors,
        labels,
        noise_sigma=0.0,
        noise_seed=0,
        head_chunk_rows=chunk,
        attention=attention,
    )


def _chi_square_999(freedom: int) -> float:
    """Upper 0.1 % point, Wilson and Hilferty's approximation."""
    return freedom * (1 - 2 / (9 * freedom) + 3.0902 * math.sqrt(2 / (9 * freedom))) ** 3
