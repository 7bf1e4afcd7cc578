"""Opens the frozen target: its weights, its tokenizer, and the facts a drafter copies from it.

Called by `trainer.train` (one `load_target` per target device), `trainer.eval` and tests. Describes any
decoder-only language model that transformers can build, text part only; the model itself is wrapped by
`trainer.target.capture`. Must not know the drafter, and never changes a weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainer.data.pretrained import find_tokenizer, load_causal_lm, outline_causal_lm, stop_token_ids
from trainer.errors import ConfigError
from trainer.target.capture import Target

MASK_TEXT = "<|MASK|>"
KNOWN_MASK_IDS = {"qwen3": 151669, "qwen3_moe": 151669, "qwen3_5_text": 248070, "qwen3_5_moe_text": 248070}
"""Ids that published drafters of these target families use (`model_type` of the text config)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetInfo:
    """What the rest of the trainer may know about a target."""

    path: Path
    model_type: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    """rows of the embedding table, padding rows included"""
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None
    """None for plain RoPE; else the scaling block with its `rope_type`"""
    max_position_embeddings: int
    tie_word_embeddings: bool
    embed_scale: float | None
    """factor on embedding rows (Gemma), None for 1"""
    logit_softcap: float | None
    bos_token_id: int | None
    eos_token_id: int | None
    """the first end-of-text id"""
    pad_token_id: int | None
    stop_ids: frozenset[int]
    """every id that ends a generation"""
    mask_token_id: int
    mask_token_reason: str
    layer_types: tuple[str, ...]


def load_target(
    path: Path | str,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    attn: str = "sdpa",
    mask_token_id: int | None = None,
) -> Target:
    """Load the frozen target onto one device.

    Args:
        path: model directory with config, safetensors weights and (usually) tokenizer.
        device: where the weights go.
        dtype: of weights and hidden states.
        attn: attention implementation of transformers (`sdpa`, `eager`, …).
        mask_token_id: the embedding row to use for masked positions; None chooses one.

    Raises:
        ConfigError: not a usable model directory, or no usable mask token.
        CheckpointError: damaged or incomplete weights.
    """
    directory = Path(path)
    model = load_causal_lm(directory, device=device, dtype=dtype, attn=attn)
    tokenizer = find_tokenizer(directory)
    info = describe_target(directory, model, tokenizer, mask_token_id=mask_token_id)
    return Target(model, info, tokenizer)


def outline_target(
    path: Path | str, *, dtype: torch.dtype, attn: str = "sdpa", mask_token_id: int | None = None
) -> Target:
    """Build the target without its weights, on the meta device: its facts and shapes, for planning.

    Raises:
        ConfigError: as `load_target`.
    """
    directory = Path(path)
    model = outline_causal_lm(directory, dtype=dtype, attn=attn)
    tokenizer = find_tokenizer(directory)
    return Target(model, describe_target(directory, model, tokenizer, mask_token_id=mask_token_id), tokenizer)


def describe_target(
    directory: Path, model: Any, tokenizer: Any | None, *, mask_token_id: int | None
) -> TargetInfo:
    """Collect a `TargetInfo` from a loaded model."""
    config = model.config.get_text_config()
    embedding = model.get_input_embeddings()
    theta, scaling = rope_settings(config)
    vocab_size = int(embedding.weight.shape[0])
    stop_ids = stop_token_ids(directory, tokenizer)
    mask_id, reason = choose_mask_token(
        tokenizer,
        vocab_size=vocab_size,
        model_type=config.model_type,
        explicit=mask_token_id,
        stop_ids=stop_ids,
    )
    heads = int(config.num_attention_heads)
    # the buffer beside it is rounded to the dtype of the weights, which is not what engines multiply with
    scale = getattr(embedding, "scalar_embed_scale", getattr(embedding, "embed_scale", None))
    if isinstance(scale, torch.Tensor) and scale.device.type == "meta":
        scale = embedding.scalar_embed_scale  # an outline holds no values, this attribute is the same number
    return TargetInfo(
        path=directory,
        model_type=config.model_type,
        hidden_size=int(config.hidden_size),
        num_layers=int(config.num_hidden_layers),
        vocab_size=vocab_size,
        num_attention_heads=heads,
        num_key_value_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        intermediate_size=int(config.intermediate_size),
        rms_norm_eps=float(getattr(config, "rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=int(config.max_position_embeddings),
        tie_word_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
        embed_scale=None if scale is None else float(scale),
        logit_softcap=getattr(config, "final_logit_softcapping", None),
        bos_token_id=_first_id(config.bos_token_id),
        eos_token_id=_first_id(config.eos_token_id),
        pad_token_id=_first_id(config.pad_token_id),
        stop_ids=stop_ids,
        mask_token_id=mask_id,
        mask_token_reason=reason,
        layer_types=tuple(
            getattr(config, "layer_types", None) or ("full_attention",) * config.num_hidden_layers
        ),
    )


def rope_settings(config: Any) -> tuple[float, Mapping[str, Any] | None]:
    """Theta and scaling block of a text config, in the older or the newer spelling.

    Fractions of partial rotary and the sections of multi-axis RoPE are left out: a drafter rotates plainly,
    and for text alone the multi-axis form equals the plain one.
    """
    parameters = dict(getattr(config, "rope_parameters", None) or {})
    if "full_attention" in parameters:
        parameters = dict(parameters["full_attention"])
    if not parameters:
        parameters = dict(getattr(config, "rope_scaling", None) or {})
    theta = parameters.pop("rope_theta", None) or getattr(config, "rope_theta", None)
    if theta is None:
        raise ConfigError(
            f"target's config names no rope_theta, so a drafter cannot copy it: {config.model_type}"
        )
    for name in ("partial_rotary_factor", "mrope_section", "mrope_interleaved", "type"):
        parameters.pop(name, None)
    kind = parameters.get("rope_type", "default")
    return float(theta), None if kind in ("default", "mrope") else parameters


def choose_mask_token(
    tokenizer: Any | None, *, vocab_size: int, model_type: str, explicit: int | None, stop_ids: frozenset[int]
) -> tuple[int, str]:
    """Choose the embedding row that stands for "not drafted yet", and say why.

    In this order: the explicit id; the token `<|MASK|>`; the id that published drafters of this family use;
    the first row behind the tokenizer's last token; the last special token that no chat uses.

    Raises:
        ConfigError: the explicit id is no row, or nothing suits (give one explicitly).
    """
    if explicit is not None:
        if not 0 <= explicit < vocab_size:
            raise ConfigError(
                f"mask_token_id is not a row of the target's embedding (0..{vocab_size - 1}): {explicit}"
            )
        return explicit, "given explicitly"
    vocabulary: dict[str, int] = {} if tokenizer is None else tokenizer.get_vocab()
    if MASK_TEXT in vocabulary:
        return vocabulary[MASK_TEXT], f"the tokenizer has {MASK_TEXT}"
    known = KNOWN_MASK_IDS.get(model_type)
    if known is not None and known < vocab_size and known not in vocabulary.values():
        return known, f"customary for {model_type}"
    if tokenizer is None:
        raise ConfigError("target has no tokenizer to find an unused embedding row with: set mask_token_id")
    first_unused = max(vocabulary.values(), default=-1) + 1
    if first_unused < vocab_size:
        return first_unused, "first embedding row behind the tokenizer's last token"
    spare = _spare_special_tokens(tokenizer, stop_ids)
    if spare:
        token_id, text = spare[-1]
        return token_id, f"special token that chats do not use: {text}"
    raise ConfigError("every row of the target's embedding is a token that text can use: set mask_token_id")


def _spare_special_tokens(tokenizer: Any, stop_ids: frozenset[int]) -> list[tuple[int, str]]:
    template = tokenizer.chat_template or ""
    template = template if isinstance(template, str) else str(template)
    named = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    return sorted(
        (token_id, str(token))
        for token_id, token in tokenizer.added_tokens_decoder.items()
        if token.special and token_id not in named | stop_ids and str(token) not in template
    )


def _first_id(value: int | list[int] | None) -> int | None:
    if isinstance(value, list | tuple):
        return int(value[0]) if value else None
    return None if value is None else int(value)
