"""The drafter on CUDA: fast attention against the dense reference, and steady steps that never wait.

CPU twins: `test_golden_13` (mask_mod against the dense grid), `test_golden_22` (chunked loss, every
objective), `test_golden_23` (equal target), `test_golden_15` (window), and the tests of the same names,
`test_full_logits_never_exist_and_no_product_is_formed_twice` for the head's memory.
"""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

from tests.support.plain_loss import OBJECTIVES, plain_sums
from tests.support.tiny_drafter import anchors_at, make_drafter, make_last_hidden, make_pack, make_tokens
from trainer.drafter.anchors import block_labels, select_anchors
from trainer.drafter.head import SoftLabels, head_losses
from trainer.drafter.loss import FrozenEnds, block_hidden, microbatch_sums
from trainer.drafter.masks import FULL, SLIDING

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    # The compiler warns about its own internals.
    pytest.mark.filterwarnings("ignore"),
]


every_objective = pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)


def _ends(dtype: torch.dtype, **overrides: float) -> FrozenEnds:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(97, 64, generator=generator).to("cuda", dtype)
    return FrozenEnds(embed_weight_VD=weight, head_weight_VD=weight * 0.2, **overrides)


def _pack_of(tokens, dtype: torch.dtype):
    """A pack whose hidden states are on the device already, as the prefetch thread leaves it."""
    return make_pack(
        tokens,
        features=make_pack(tokens).features_TLD.to("cuda", dtype),
        last_hidden=make_last_hidden(tokens).to("cuda", dtype),
    )


def _run(dtype: torch.dtype, attention: str, *, lengths=(150, 90, 200), seed: int = 0):
    drafter = make_drafter(layer_types=(SLIDING, FULL), sliding_window=40).to("cuda", dtype)
    tokens = make_tokens(lengths, supervised=0.95)
    anchors = select_anchors(tokens, 60, block_size=4, rng=np.random.default_rng(seed))
    labels = block_labels(tokens, anchors, block_size=4, gamma=4.0)
    sums = microbatch_sums(
        drafter,
        _ends(dtype),
        make_pack(tokens),
        anchors,
        labels,
        noise_sigma=0.0,
        noise_seed=0,
        head_chunk_rows=64,
        attention=attention,
    )
    sums.numerator.backward()
    return sums, {name: parameter.grad for name, parameter in drafter.named_parameters()}


@pytest.mark.parametrize("attention", ["flex", "sdpa"])
def test_fast_attention_equals_the_dense_reference_in_fp32(attention: str) -> None:
    reference, wanted = _run(torch.float32, "dense")
    sums, grads = _run(torch.float32, attention)

    torch.testing.assert_close(sums.numerator, reference.numerator, atol=1e-3, rtol=1e-4)
    assert torch.equal(sums.denominator, reference.denominator)
    assert (sums.blocks, sums.rows) == (reference.blocks, reference.rows)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, wanted[name], atol=1e-3, rtol=1e-2, msg=name)


def test_many_pack_lengths_stay_on_the_compiled_kernel() -> None:
    """The compiler gives up after 8 shapes by default; each length is one, times two layer types."""
    for tokens in range(128, 128 * 7, 128):
        sums, _ = _run(torch.bfloat16, "flex", lengths=(tokens,))

        assert torch.isfinite(sums.numerator)


def test_flex_in_bf16_stays_near_the_fp32_reference() -> None:
    reference, _ = _run(torch.float32, "dense")
    sums, grads = _run(torch.bfloat16, "flex")

    torch.testing.assert_close(sums.numerator, reference.numerator, atol=0, rtol=2e-2)
    assert all(torch.isfinite(grad).all() for grad in grads.values())


@pytest.mark.parametrize("ends", [{}, {"logit_softcap": 3.0, "embed_scale": 1.7}], ids=["plain", "capped"])
@every_objective
def test_every_objective_equals_its_plain_reference(objective, ends) -> None:
    tokens = make_tokens((150, 90), supervised=0.95)
    pack, anchors = (
        _pack_of(tokens, torch.float32),
        select_anchors(tokens, 40, block_size=4, rng=np.random.default_rng(0)),
    )
    drafters = [make_drafter().to("cuda") for _ in range(2)]

    plain = plain_sums(drafters[0], _ends(torch.float32, **ends), pack, anchors, objective)
    plain.numerator.backward()
    sums = _sums(drafters[1], _ends(torch.float32, **ends), pack, anchors, objective=objective)
    sums.numerator.backward()

    torch.testing.assert_close(sums.numerator, plain.numerator, atol=1e-3, rtol=1e-4)
    assert sums.denominator.item() == pytest.approx(plain.denominator, rel=1e-5)
    gradients = {name: parameter.grad for name, parameter in drafters[1].named_parameters()}
    for name, parameter in drafters[0].named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-3, rtol=1e-2, msg=name)


@every_objective
def test_every_objective_in_bf16_stays_near_fp32(objective) -> None:
    tokens = make_tokens((150, 90), supervised=0.95)
    anchors = select_anchors(tokens, 40, block_size=4, rng=np.random.default_rng(0))
    values = []
    for dtype in (torch.float32, torch.bfloat16):
        drafter = make_drafter().to("cuda", dtype)
        sums = _sums(drafter, _ends(dtype), _pack_of(tokens, dtype), anchors, objective=objective)
        sums.numerator.backward()
        values.append((sums.numerator / sums.denominator).detach())
        assert all(torch.isfinite(parameter.grad).all() for parameter in drafter.parameters())

    torch.testing.assert_close(values[1], values[0], atol=2e-2, rtol=5e-2)


def test_an_equal_target_gives_exactly_nothing() -> None:
    hidden = torch.randn(300, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    head = torch.randn(5000, 64, device="cuda", dtype=torch.bfloat16)
    index = torch.arange(300, device="cuda")
    soft = SoftLabels(last_hidden_TD=hidden.detach(), row_R=index, share=1.0)

    rows = head_losses(hidden, head, index, chunk_rows=128, soft=soft)
    rows.loss_R.sum().backward()

    assert not rows.loss_R.any()
    assert not hidden.grad.any()


@pytest.mark.parametrize("share", [None, 1.0, 0.5], ids=["ce", "kl", "mixed"])
def test_the_head_never_holds_full_logits(share) -> None:
    rows, width, vocabulary, chunk = 8192, 256, 32_768, 512
    hidden = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    head = torch.randn(vocabulary, width, device="cuda", dtype=torch.bfloat16)
    index = torch.arange(rows, device="cuda")
    soft = share and SoftLabels(last_hidden_TD=torch.randn_like(hidden), row_R=index, share=share)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()

    head_losses(hidden, head, index, chunk_rows=chunk, soft=soft).loss_R.sum().backward()

    peak = torch.cuda.max_memory_allocated() - before
    assert peak < 4 * chunk * vocabulary * 4  # full logits would be 16 chunks in fp32
    assert torch.isfinite(hidden.grad).all()


@pytest.mark.parametrize("attention", ["flex", "sdpa"])
def test_split_fc_equals_the_fused_product(attention: str) -> None:
    tokens = make_tokens((150, 90), supervised=0.95)
    pack = _pack_of(tokens, torch.float32)
    anchors = select_anchors(tokens, 40, block_size=4, rng=np.random.default_rng(0))
    results = []
    for split_fc in (False, True):
        drafter = make_drafter(split_fc=split_fc).to("cuda")
        sums = _sums(drafter, _ends(torch.float32), pack, anchors, attention=attention)
        sums.numerator.backward()
        results.append((sums.numerator.detach(), {n: p.grad for n, p in drafter.named_parameters()}))

    torch.testing.assert_close(results[1][0], results[0][0], atol=1e-3, rtol=1e-4)
    for name, gradient in results[0][1].items():
        torch.testing.assert_close(results[1][1][name], gradient, atol=1e-3, rtol=1e-2, msg=name)


@pytest.mark.parametrize("attention", ["flex", "sdpa", "dense"])
def test_only_states_inside_the_window_reach_the_output(attention: str) -> None:
    window, anchor = 50, 120
    drafter = make_drafter(num_hidden_layers=1, layer_types=(SLIDING,), sliding_window=window).to("cuda")
    tokens, ends = make_tokens((200,)), _ends(torch.float32)
    pack = _pack_of(tokens, torch.float32)

    def first_row(features: torch.Tensor) -> torch.Tensor:
        changed = make_pack(tokens, features=features)
        return block_hidden(drafter, ends, changed, anchors_at(anchor), attention=attention)[0]

    before = first_row(pack.features_TLD)
    for distance in (window - 1, window):
        features = pack.features_TLD.clone()
        features[anchor - distance] += 1.0
        assert torch.equal(before, first_row(features)) == (distance == window)


@every_objective
def test_a_steady_step_of_every_objective_never_waits_for_the_gpu(objective) -> None:
    _check_no_waits(make_drafter(), "flex", objective=objective)


@pytest.mark.parametrize("split_fc", [False, True], ids=["fused", "split"])
@pytest.mark.parametrize("attention", ["flex", "sdpa", "dense"])
def test_a_steady_step_never_waits_for_the_gpu(attention: str, split_fc: bool) -> None:
    shape = {"layer_types": (SLIDING, FULL), "sliding_window": 40}
    _check_no_waits(make_drafter(split_fc=split_fc, **shape), attention)


def _check_no_waits(drafter, attention: str, **options) -> None:
    drafter, ends = drafter.to("cuda", torch.bfloat16), _ends(torch.bfloat16)
    tokens = make_tokens((150, 90, 200), supervised=0.95)
    pack = _pack_of(tokens, torch.bfloat16)

    def step(seed: int) -> torch.Tensor:
        anchors = select_anchors(tokens, 64, block_size=4, rng=np.random.default_rng(seed))
        sums = _sums(drafter, ends, pack, anchors, attention=attention, sigma=0.05, **options)
        sums.numerator.backward()
        return sums.numerator.detach()

    step(0), step(1)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loss = step(2)
    finally:
        torch.cuda.set_sync_debug_mode("default")

    assert torch.isfinite(loss)


def _sums(drafter, ends, pack, anchors, *, attention: str = "flex", sigma: float = 0.0, **options):
    return microbatch_sums(
        drafter,
        ends,
        pack,
        anchors,
        block_labels(pack.tokens, anchors, block_size=4, gamma=4.0),
        noise_sigma=sigma,
        noise_seed=0,
        head_chunk_rows=64,
        attention=attention,
        **options,
    )
