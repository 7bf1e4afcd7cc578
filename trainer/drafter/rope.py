"""Rotary position embedding: inverse frequencies of every scaling type we accept, and the rotation itself.

Called by the drafter model; `checkpoint.export` writes the same settings in both spellings. The frequencies
are plain fp32 tensors, never module buffers: casting a model to bf16 would round a buffer and shift every
angle. Must not import transformers (its functions are the oracle in the tests).

Dimension suffixes: B batch, T rows, H heads; E is the head dimension.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trainer.errors import ConfigError

ROPE_TYPES = ("default", "linear", "llama3", "yarn")


class RotaryTable:
    """Angles for one model: inverse frequencies per device, in fp32 whatever the model's dtype is."""

    def __init__(self, head_dim: int, *, theta: float, scaling: Mapping[str, Any] | None) -> None:
        self.inv_freq, self.attention_factor = inverse_frequencies(head_dim, theta=theta, scaling=scaling)
        self._by_device: dict[torch.device, Tensor] = {self.inv_freq.device: self.inv_freq}

    def __call__(self, positions_BT: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosine and sine [B, 1, T, E] for the positions, rounded to `dtype` after fp32 arithmetic."""
        inv_freq = self._on(positions_BT.device)
        angle_BTF = positions_BT[..., None].to(torch.float32) * inv_freq
        angle_BTE = torch.cat([angle_BTF, angle_BTF], dim=-1)[:, None]
        return (
            (angle_BTE.cos() * self.attention_factor).to(dtype),
            (angle_BTE.sin() * self.attention_factor).to(dtype),
        )

    def _on(self, device: torch.device) -> Tensor:
        if device not in self._by_device:
            self._by_device[device] = self.inv_freq.to(device)
        return self._by_device[device]


def rotate(x_BHTE: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
    """Apply the rotation in the half-split layout (pairs are e and e + E/2)."""
    cos, sin = cos_sin
    first, second = x_BHTE.chunk(2, dim=-1)
    return x_BHTE * cos + torch.cat([-second, first], dim=-1) * sin


def rope_type(scaling: Mapping[str, Any] | None) -> str:
    """Name the scaling type of a `rope_scaling` or `rope_parameters` mapping (also in the old spelling)."""
    if not scaling:
        return "default"
    return str(scaling.get("rope_type", scaling.get("type", "default")))


def check_scaling(scaling: Mapping[str, Any] | None) -> None:
    """Refuse a scaling type or a missing value now rather than train with wrong angles."""
    kind = rope_type(scaling)
    if kind not in ROPE_TYPES:
        raise ConfigError(f"rope scaling type is not supported: {kind}; use one of {', '.join(ROPE_TYPES)}")
    needed = {
        "default": (),
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        "yarn": ("factor", "original_max_position_embeddings"),
    }[kind]
    missing = [key for key in needed if not scaling or scaling.get(key) is None]
    if missing:
        raise ConfigError(
            f"rope scaling {kind} lacks {', '.join(missing)}: complete rope_scaling in the config"
        )


def inverse_frequencies(
    head_dim: int, *, theta: float, scaling: Mapping[str, Any] | None
) -> tuple[Tensor, float]:
    """Compute the inverse frequencies (fp32 [E/2], on the CPU) and the factor on cosine and sine.

    Raises:
        ConfigError: the scaling type is unknown or lacks a value.
    """
    check_scaling(scaling)
    # `device` is explicit: models are built on the meta device, where this must still be a real tensor.
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    plain = 1.0 / (theta**exponent)
    kind = rope_type(scaling)
    if scaling is None or kind == "default":
        return plain, 1.0
    if kind == "linear":
        return plain / float(scaling["factor"]), 1.0
    if kind == "llama3":
        return _llama3(plain, scaling), 1.0
    return _yarn(plain, head_dim, theta, scaling)


def _llama3(plain: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Keep short wavelengths, divide long ones by the factor, blend between (Llama 3.1)."""
    factor = float(scaling["factor"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    trained = float(scaling["original_max_position_embeddings"])
    wavelength = 2 * math.pi / plain
    blend = ((trained / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    mixed = (1 - blend) * plain / factor + blend * plain
    stretched = torch.where(wavelength > trained / low, plain / factor, mixed)
    return torch.where(wavelength < trained / high, plain, stretched)


def _yarn(plain: Tensor, head_dim: int, theta: float, scaling: Mapping[str, Any]) -> tuple[Tensor, float]:
    """Interpolate slow dimensions, keep fast ones, ramp between (arXiv 2309.00071)."""
    factor = float(scaling["factor"])
    trained = float(scaling["original_max_position_embeddings"])
    low = _turns_to_dim(float(scaling.get("beta_fast") or 32), head_dim, theta, trained)
    high = _turns_to_dim(float(scaling.get("beta_slow") or 1), head_dim, theta, trained)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    span = high - low if high != low else 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32, device="cpu") - low) / span).clamp(0.0, 1.0)
    return plain / factor * ramp + plain * (1 - ramp), _yarn_attention_factor(factor, scaling)


def _turns_to_dim(turns: float, head_dim: int, theta: float, trained: float) -> float:
    return head_dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta))


def _yarn_attention_factor(factor: float, scaling: Mapping[str, Any]) -> float:
    given = scaling.get("attention_factor")
    if given is not None:
        return float(given)

    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    upper, lower = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if upper and lower:
        return magnitude(float(upper)) / magnitude(float(lower))
    return magnitude(1.0)
