"""Packed products: the same numbers, or a reason why not."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from trainer.data import cpu_products
from trainer.data.cpu_products import pack_linears, why_not_packed

DTYPES = [torch.float32, torch.bfloat16]


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 40), nn.SiLU(), nn.Linear(40, 16, bias=False)).requires_grad_(False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 24), (3, 24), (1, 4, 24), (2, 9, 24)], ids=str)
def test_a_packed_model_computes_what_it_did(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    model, rows = _model().to(dtype), torch.randn(shape).to(dtype)
    expected = model(rows)

    pack_linears(model)

    assert model(rows).shape == expected.shape
    torch.testing.assert_close(model(rows), expected, atol=5 * torch.finfo(dtype).eps, rtol=1e-2)
    is_packed = why_not_packed(dtype) is None
    assert all((module.forward.__name__ == "multiply") == is_packed for module in (model[0], model[2]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
def test_other_dtypes_are_not_packed(dtype: torch.dtype) -> None:
    assert "no packed products for" in str(why_not_packed(dtype))


def test_what_cannot_be_packed_goes_on_as_before_and_says_so(monkeypatch, caplog) -> None:
    monkeypatch.setattr(cpu_products, "why_not_packed", lambda dtype: "no such instructions")
    model, rows = _model(), torch.randn(3, 24)
    expected = model(rows)

    with caplog.at_level(logging.WARNING):
        pack_linears(model)

    assert torch.equal(model(rows), expected)
    assert caplog.messages == ["products on the CPU are slow: no such instructions"]
