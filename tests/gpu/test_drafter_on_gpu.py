"""The drafter on CUDA: fast attention against the dense reference, and steady steps that never wait.

CPU twins: `test_golden_13` (mask_mod against the dense grid) and `test_golden_22` (chunked loss).
"""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

from tests.support.tiny_drafter import make_drafter, make_pack, make_tokens
from trainer.drafter.anchors import block_labels, select_anchors
from trainer.drafter.loss import FrozenEnds, microbatch_sums
from trainer.drafter.masks import FULL, SLIDING

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    # The compiler warns about its own internals.
    pytest.mark.filterwarnings("ignore"),
]


def _ends(dtype: torch.dtype) -> FrozenEnds:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(97, 64, generator=generator).to("cuda", dtype)
    return FrozenEnds(embed_weight_VD=weight, head_weight_VD=weight * 0.2)


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


@pytest.mark.parametrize("attention", ["flex", "sdpa", "dense"])
def test_a_steady_step_never_waits_for_the_gpu(attention: str) -> None:
    drafter, ends = make_drafter().to("cuda", torch.bfloat16), _ends(torch.bfloat16)
    tokens = make_tokens((150, 90, 200), supervised=0.95)
    pack = make_pack(tokens, features=make_pack(tokens).features_TLD.to("cuda", torch.bfloat16))

    def step(seed: int) -> torch.Tensor:
        anchors = select_anchors(tokens, 64, block_size=4, rng=np.random.default_rng(seed))
        labels = block_labels(tokens, anchors, block_size=4, gamma=4.0)
        sums = microbatch_sums(
            drafter,
            ends,
            pack,
            anchors,
            labels,
            noise_sigma=0.05,
            noise_seed=seed,
            head_chunk_rows=64,
            attention=attention,
        )
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
