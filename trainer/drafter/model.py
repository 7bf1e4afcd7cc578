"""The DFlash drafter: a small transformer whose every layer attends to the target's hidden states.

Built by the drafter worker and the evaluator, exported by `checkpoint.export`. The fused context is
computed once and used as keys and values by all layers; only block rows are queries. Embedding and output
head belong to the target and are not part of this module. Must not know how anchors are drawn or how the
loss is formed.

Source: DFlash (arXiv 2602.06036), section 3; tensor names and shapes are those of the published checkpoints.

Dimension suffixes: B batch, T context tokens, L captured layers, D hidden, F = L times D, Q block rows,
K positions of one block, H query heads, G key/value heads, E head dimension, M MLP width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from trainer.drafter.attention import attend
from trainer.drafter.cache import DraftCache
from trainer.drafter.masks import FULL, SLIDING, AttentionMasks, DenseMask, LayerMask
from trainer.drafter.rope import RotaryTable, check_scaling, rotate
from trainer.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterConfig:
    """Shape of a drafter and what ties it to its target; impossible combinations are refused here."""

    num_hidden_layers: int
    hidden_size: int
    """equal to the target's: the drafter borrows its embedding and head"""
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    """rows of the target's embedding, padding included"""
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None
    """scaling block as in `rope_scaling`, None for plain rotary embedding"""
    max_position_embeddings: int
    block_size: int
    """positions per block, the anchor included"""
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    """0-based decoder layers whose output is captured, in the order of concatenation"""
    num_target_layers: int
    layer_types: tuple[str, ...]
    """`full_attention` or `sliding_attention` per drafter layer"""
    sliding_window: int | None
    """window of sliding layers in positions"""
    attention_bias: bool = False
    embed_scale: float | None = None
    """factor on embeddings for targets that scale theirs"""
    logit_softcap: float | None = None
    """cap of tanh soft-capping for targets that use it"""
    initializer_range: float = 0.02
    bos_token_id: int | None
    eos_token_id: int | tuple[int, ...] | None
    pad_token_id: int | None

    def __post_init__(self) -> None:
        self._check_sizes()
        self._check_target()
        self._check_layers()
        check_scaling(self.rope_scaling)

    def _check_sizes(self) -> None:
        for name in _POSITIVE:
            if getattr(self, name) < 1:
                raise ConfigError(f"drafter {name} must be at least 1, not {getattr(self, name)}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"drafter attention heads {self.num_attention_heads} must be a multiple of "
                f"key/value heads {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(f"drafter head_dim must be even for rotary embedding, not {self.head_dim}")

    def _check_target(self) -> None:
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ConfigError(
                f"mask token {self.mask_token_id} is outside the target's {self.vocab_size} embedding rows"
            )
        if not self.target_layer_ids:
            raise ConfigError("target_layer_ids is empty: name at least one target layer to capture")
        for layer in self.target_layer_ids:
            # The last layer is ambiguous: some engines hand it over before the final norm, some after it.
            if not 0 <= layer < self.num_target_layers - 1:
                raise ConfigError(
                    f"target layer {layer} cannot be captured: use 0 to {self.num_target_layers - 2} "
                    f"for a target of {self.num_target_layers} layers"
                )
        if len(set(self.target_layer_ids)) != len(self.target_layer_ids):
            raise ConfigError(f"target_layer_ids names a layer twice: {list(self.target_layer_ids)}")

    def _check_layers(self) -> None:
        if len(self.layer_types) != self.num_hidden_layers:
            raise ConfigError(
                f"layer_types has {len(self.layer_types)} entries for {self.num_hidden_layers} drafter layers"
            )
        unknown = set(self.layer_types) - {FULL, SLIDING}
        if unknown:
            raise ConfigError(f"unknown layer types: {sorted(unknown)}; use {FULL} or {SLIDING}")
        if SLIDING in self.layer_types and (self.sliding_window is None or self.sliding_window < 1):
            raise ConfigError(f"sliding layers need a window of at least 1, not {self.sliding_window}")


_POSITIVE = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "block_size",
    "max_position_embeddings",
    "num_target_layers",
)


def default_target_layer_ids(num_target_layers: int, n: int) -> tuple[int, ...]:
    """Spread `n` captured layers evenly from layer 1 to the third from the end (halves round to even).

    Raises:
        ConfigError: the target has too few layers for `n` different ones.
    """
    if n < 1:
        raise ConfigError(f"number of captured layers must be at least 1, not {n}")
    if n == 1:
        return (num_target_layers // 2,)
    ids = tuple(round(1 + i * (num_target_layers - 4) / (n - 1)) for i in range(n))
    if num_target_layers < 4 or len(set(ids)) != n:
        raise ConfigError(
            f"a target of {num_target_layers} layers has no {n} evenly spread ones to capture: "
            "give target_layer_ids explicitly or fewer draft layers"
        )
    return ids


class RMSNorm(nn.Module):
    """Root-mean-square norm with fp32 statistics and a plain multiplicative weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise over the last axis."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)
        return wide.to(x.dtype) * self.weight


class DrafterMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x_BQD: Tensor) -> Tensor:
        """Return the MLP's output, without the residual."""
        out: Tensor = self.down_proj(silu(self.gate_proj(x_BQD)) * self.up_proj(x_BQD))
        return out


class DrafterAttention(nn.Module):
    """Grouped-query attention whose keys and values come from the context and from the block."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        bias = config.attention_bias
        self.head_dim = config.head_dim
        self.scale = config.head_dim**-0.5
        width, kv_width = (
            config.num_attention_heads * config.head_dim,
            config.num_key_value_heads * config.head_dim,
        )
        self.q_proj = nn.Linear(config.hidden_size, width, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=bias)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def keys_values(self, x_BTD: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Project rows, context or block alike, to rotated keys and to values [B, G, T, E]."""
        k = rotate(self.k_norm(self._heads(self.k_proj(x_BTD))), rope)
        return k, self._heads(self.v_proj(x_BTD))

    def queries(self, x_BQD: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """Project block rows to rotated queries [B, H, Q, E]."""
        return rotate(self.q_norm(self._heads(self.q_proj(x_BQD))), rope)

    def attend(
        self, q: Tensor, context: tuple[Tensor, Tensor], block: tuple[Tensor, Tensor], mask: LayerMask | None
    ) -> Tensor:
        """Attend to context keys first, block keys second, and project back to the hidden size."""
        k = torch.cat([context[0], block[0]], dim=2)
        v = torch.cat([context[1], block[1]], dim=2)
        out_BHQE = attend(q, k, v, mask, scale=self.scale)
        out: Tensor = self.o_proj(out_BHQE.transpose(1, 2).flatten(2))
        return out

    def _heads(self, x_BTX: Tensor) -> Tensor:
        return x_BTX.view(*x_BTX.shape[:-1], -1, self.head_dim).transpose(1, 2)


class DrafterLayer(nn.Module):
    """Pre-norm attention and MLP over block rows; the context enters only as keys and values."""

    def __init__(self, config: DrafterConfig, layer_type: str) -> None:
        super().__init__()
        self.layer_type = layer_type
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = DrafterAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = DrafterMLP(config)

    def forward(
        self,
        x_BQD: Tensor,
        context: tuple[Tensor, Tensor],
        block_rope: tuple[Tensor, Tensor],
        mask: LayerMask | None,
    ) -> Tensor:
        """Update the block rows given this layer's context keys and values."""
        h = self.input_layernorm(x_BQD)
        block = self.self_attn.keys_values(h, block_rope)
        x_BQD = x_BQD + self.self_attn.attend(self.self_attn.queries(h, block_rope), context, block, mask)
        out: Tensor = x_BQD + self.mlp(self.post_attention_layernorm(x_BQD))
        return out


class Drafter(nn.Module):
    """Predicts whole blocks from the target's hidden states; its state dict is the exported checkpoint.

    Args:
        split_fc: fuse the captured layers one by one, see `fuse`; weights and their names stay the same.
    """

    def __init__(self, config: DrafterConfig, *, split_fc: bool = False) -> None:
        super().__init__()
        self.config = config
        self.split_fc = split_fc
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DrafterLayer(config, kind) for kind in config.layer_types)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rope = RotaryTable(config.head_dim, theta=config.rope_theta, scaling=config.rope_scaling)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return self.fc.weight.dtype

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.fc.weight.device

    def forward(
        self,
        features_BTF: Tensor,
        block_embeds_BQD: Tensor,
        *,
        context_positions_BT: Tensor,
        block_positions_BQ: Tensor,
        attention_mask: AttentionMasks,
    ) -> Tensor:
        """Run all blocks of a pack at once (training).

        Args:
            features_BTF: captured hidden states, layers concatenated.
            block_embeds_BQD: target embeddings of every block row (anchor token, then mask tokens).
            context_positions_BT: document-local positions of the context.
            block_positions_BQ: document-local positions of the block rows.
            attention_mask: one mask per layer type, see `masks.build_masks`.

        Returns:
            Final hidden states of the block rows; the target's head turns them into logits.
        """
        x_BQD = block_embeds_BQD.to(self.dtype)
        context_BTD = self.fuse(features_BTF)
        context_rope = self.rope(context_positions_BT, self.dtype)
        block_rope = self.rope(block_positions_BQ, self.dtype)
        for layer in self._layers():
            context = layer.self_attn.keys_values(context_BTD, context_rope)
            x_BQD = layer(x_BQD, context, block_rope, attention_mask[layer.layer_type])
        out: Tensor = self.norm(x_BQD)
        return out

    def fuse(self, features_BTF: Tensor) -> Tensor:
        """Fuse the captured layers into the context; the same tensor serves every layer, unchanged.

        With `split_fc` the product is a sum over the captured layers, each with its columns of the weight:
        equal but for the order of summation.
        """
        features_BTF = features_BTF.to(self.dtype)
        fused_BTD = self._fc_by_layer(features_BTF) if self.split_fc else self.fc(features_BTF)
        out: Tensor = self.hidden_norm(fused_BTD)
        return out

    def _fc_by_layer(self, features_BTF: Tensor) -> Tensor:
        width = self.config.hidden_size
        # one split of the weight: its backward joins the layers' gradients instead of adding up whole ones
        first, *rest = zip(
            torch.split(features_BTF.flatten(0, -2), width, dim=-1),
            torch.split(self.fc.weight, width, dim=1),
            strict=True,
        )
        fused = linear(*first)
        for features, weight in rest:
            fused = torch.addmm(fused, features, weight.T)
        return fused.view(*features_BTF.shape[:-1], width)

    @torch.no_grad()
    def draft(
        self, new_features_TF: Tensor, block_embeds_KD: Tensor, cache: DraftCache, *, start: int
    ) -> Tensor:
        """Draft one block (inference): append the new context to the cache, then run the block against it.

        Args:
            new_features_TF: hidden states of the positions not yet in the cache, up to `start` (exclusive).
            block_embeds_KD: embeddings of the newest committed token and of the mask tokens behind it.
            cache: this sequence's context keys and values.
            start: position of the newest committed token.

        Returns:
            Hidden states [K, D] of the block's positions.
        """
        count = new_features_TF.shape[0]
        if cache.length + count != start:
            raise ValueError(
                f"draft at {start} needs {start - cache.length} new context rows, got {count}: "
                "hand over the hidden states of every committed token before it"
            )
        device = block_embeds_KD.device
        x_1KD = block_embeds_KD[None].to(self.dtype)
        context_1TD = self.fuse(new_features_TF[None])
        context_rope = self.rope(torch.arange(cache.length, start, device=device)[None], self.dtype)
        block_rope = self.rope(torch.arange(start, start + x_1KD.shape[1], device=device)[None], self.dtype)
        for index, layer in enumerate(self._layers()):
            new_k, new_v = layer.self_attn.keys_values(context_1TD, context_rope)
            keys, values = cache.extend(index, new_k[0], new_v[0])
            x_1KD = layer(
                x_1KD, (keys[None], values[None]), block_rope, self._draft_mask(layer, start, x_1KD)
            )
        cache.advance(count)
        out: Tensor = self.norm(x_1KD)[0]
        return out

    def _layers(self) -> list[DrafterLayer]:
        return [layer for layer in self.layers if isinstance(layer, DrafterLayer)]

    def _draft_mask(self, layer: DrafterLayer, start: int, x_1KD: Tensor) -> LayerMask | None:
        window = self.config.sliding_window
        if layer.layer_type == FULL or window is None:
            return None
        position_K = torch.arange(start, start + x_1KD.shape[1], device=x_1KD.device)
        position_S = torch.arange(start + x_1KD.shape[1], device=x_1KD.device)
        distance = position_K[:, None] - position_S[None, :]
        return DenseMask((distance >= 0) & (distance < window))


def build_drafter(config: DrafterConfig, *, seed: int, dtype: torch.dtype, split_fc: bool = False) -> Drafter:
    """Create a drafter with random weights on the CPU: normal(0, initializer_range), norms 1, biases 0.

    The draw depends on `seed` alone (own generator, fixed order, fp32 before rounding), so all replicas
    agree.
    """
    with torch.device("meta"):
        drafter = Drafter(config, split_fc=split_fc)
    drafter = drafter.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, config.initializer_range, generator=generator)
        for name, parameter in drafter.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(0.0 if name.endswith(".bias") else 1.0)
    return drafter.to(dtype)
