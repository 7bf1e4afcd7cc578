"""Packed products: the same numbers, the same for a row whatever stands beside it, or a reason why not."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from trainer.data import cpu_products
from trainer.data.cpu_products import pack_linears, packed_product, why_not_packed

DTYPES = [torch.float32, torch.bfloat16]


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 40), nn.SiLU(), nn.Linear(40, 16, bias=False)).requires_grad_(False)


def _needs_packing(dtype: torch.dtype) -> None:
    # CI's processors all have it; elsewhere `test_what_cannot_be_packed…` is the twin
    assert why_not_packed(torch.float32) is None
    if why_not_packed(dtype) is not None:
        pytest.skip(str(why_not_packed(dtype)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 24), (3, 24), (1, 4, 24), (2, 9, 24)], ids=str)
def test_a_packed_model_computes_what_it_did(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    _needs_packing(dtype)
    model, rows = _model().to(dtype), torch.randn(shape).to(dtype)
    expected = model(rows)

    pack_linears(model)

    assert model(rows).shape == expected.shape
    torch.testing.assert_close(model(rows), expected, atol=5 * torch.finfo(dtype).eps, rtol=1e-2)
    assert all(module.forward.__name__ == "multiply" for module in (model[0], model[2]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_the_rows_beside_it(dtype: torch.dtype) -> None:
    _needs_packing(dtype)
    weight, rows = torch.randn(64, 96).to(dtype), torch.randn(8, 96).to(dtype)
    multiply = packed_product(weight)

    for count in (2, 4, 8):
        assert torch.equal(multiply(rows[:count]), multiply(rows)[:count])
    torch.testing.assert_close(multiply(rows), linear(rows, weight), rtol=1e-2, atol=1e-4)


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
