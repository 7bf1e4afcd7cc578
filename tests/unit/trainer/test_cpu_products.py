"""Packed products: the same numbers, or a reason why not."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor, nn

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


def test_this_torch_packs_fp32() -> None:
    assert why_not_packed(torch.float32) is None


class Halved(nn.Linear):
    """A linear layer that does more than multiply."""

    def forward(self, rows: Tensor) -> Tensor:
        return super().forward(rows) / 2


def test_layers_with_a_forward_of_their_own_are_left_alone() -> None:
    model = nn.Sequential(Halved(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)).requires_grad_(False)
    model[2].forward = lambda rows: rows + 1
    rows = torch.randn(2, 4)
    expected = model(rows)

    pack_linears(model)

    torch.testing.assert_close(model(rows), expected)
    assert "forward" not in vars(model[0])
    assert model[2](rows).equal(rows + 1)


def test_copies_that_have_no_room_are_not_made_and_it_is_said(monkeypatch, caplog) -> None:
    monkeypatch.setattr(cpu_products, "available_bytes", lambda: 2 * 6400 - 2)
    model = nn.Sequential(nn.Linear(40, 40, bias=False), nn.ReLU()).requires_grad_(False)

    pack_linears(model)

    assert "forward" not in vars(model[0])
    assert "a packed copy of 0.0 GiB has no room in 0.0 GiB" in caplog.text


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
