"""What can be wrong with an export: rules over `config.json` and tensors, each giving a list of faults.

Used by `eval.export_check`, one rule per line of its table. Pure: values in, texts out. The format itself is
`drafter_format`'s; what is here says which values of it make some engine load or run a drafter otherwise than
it was trained.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint.drafter_format import (
    ARCHITECTURE,
    CONFIG_KEYS,
    SECTION_KEYS,
    SLIDING,
    parse_rope,
    plain_scaling,
    render_config,
)
from trainer.errors import CheckpointError

FULL = "full_attention"
ROUNDING = 5e-3
"""Relative difference of two scales that are the same number in other dtypes."""
_CONSTANTS = {
    "architectures": [ARCHITECTURE],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "torch_dtype": "bfloat16",
}


def refuse(found: list[str], source: str) -> None:
    """Raise what was found, if anything.

    Raises:
        CheckpointError: lists the faults.
    """
    if found:
        raise CheckpointError(f"{source}: {'; '.join(found)}")


def key_faults(raw: Mapping[str, Any]) -> list[str]:
    """Keys that some engine reads and that are not there."""
    missing = [key for key in CONFIG_KEYS if key not in raw]
    missing += [f"dflash_config.{key}" for key in SECTION_KEYS if key not in (raw.get("dflash_config") or {})]
    return [f"missing: {', '.join(missing)}"] if missing else []


def constant_faults(raw: Mapping[str, Any]) -> list[str]:
    """Values that are the same in every export."""
    return [
        f"{key} must be {value!r}, not {raw.get(key)!r}"
        for key, value in _CONSTANTS.items()
        if raw.get(key) != value
    ]


def block_size_faults(raw: Mapping[str, Any]) -> list[str]:
    """Both copies of the block size, since engines read one or the other."""
    top, inner = raw["block_size"], raw["dflash_config"]["block_size"]
    if top != inner:
        return [f"block_size {top} and dflash_config.block_size {inner} disagree"]
    return [] if isinstance(top, int) and top >= 2 else [f"block_size drafts nothing: {top!r}"]


def rope_faults(raw: Mapping[str, Any]) -> list[str]:
    """Both spellings of the rotary embedding, for transformers 4 and 5."""
    if raw.get("rope_theta") is None or not raw.get("rope_parameters"):
        return ["rope_theta and rope_parameters must both be set"]
    try:
        parse_rope(raw, "both spellings")
    except CheckpointError as error:
        return [str(error)]
    inner = raw["rope_parameters"]
    partial = [f"rope_parameters.{key} is not for drafters" for key in _PARTIAL if key in inner]
    return partial + ([] if "rope_type" in inner else ["rope_parameters.rope_type is missing"])


_PARTIAL = ("partial_rotary_factor", "mrope_section", "mrope_interleaved")


def layer_faults(raw: Mapping[str, Any]) -> list[str]:
    """Layer types, and the keys that say the same about windows and direction."""
    types, layers = raw["layer_types"], raw["num_hidden_layers"]
    found = [] if len(types) == layers else [f"{len(types)} layer_types for {layers} layers"]
    found += [f"unknown layer type: {kind}" for kind in sorted(set(types) - {FULL, SLIDING})]
    slides, window = SLIDING in types, raw["sliding_window"]
    if slides and not (isinstance(window, int) and window >= 1):
        found.append(f"sliding layers without a window: sliding_window {window}")
    if not slides and window is not None:
        found.append(f"sliding_window {window} without sliding layers")
    if raw["use_sliding_window"] is not slides:
        found.append(f"use_sliding_window is {raw['use_sliding_window']}, layers say {slides}")
    if raw["max_window_layers"] != layers:
        found.append(f"max_window_layers is {raw['max_window_layers']}, not {layers}")
    return found + _direction_faults(raw, types)


def _direction_faults(raw: Mapping[str, Any], types: list[str]) -> list[str]:
    """Engines apply one flag to every layer, so it may be stated only where all layers agree."""
    section, slide_all = raw["dflash_config"], set(types) == {SLIDING}
    if slide_all and section.get("causal") is not True:
        return ["every layer slides, so dflash_config.causal must be true"]
    stated = {
        "is_causal": raw.get("is_causal"),
        "dflash_config.causal": section.get("causal"),
        "dflash_config.is_causal": section.get("is_causal"),
    }
    wrong = {name: value for name, value in stated.items() if value is not None and value is not slide_all}
    if len(set(types)) > 1:
        wrong = {name: value for name, value in stated.items() if value is not None}
    return [f"{name} {value} is not what the layers were trained as" for name, value in wrong.items()]


def target_layer_faults(raw: Mapping[str, Any]) -> list[str]:
    """Captured layers: within the target, none twice, never the last."""
    ids, layers = raw["dflash_config"]["target_layer_ids"], raw["num_target_layers"]
    found = [
        f"target layer {layer} is outside 0..{layers - 2}"
        for layer in ids
        if not (isinstance(layer, int) and 0 <= layer < layers - 1)
    ]
    return found + ([] if ids and len(set(ids)) == len(ids) else [f"layers missing or twice: {ids}"])


def mask_faults(raw: Mapping[str, Any]) -> list[str]:
    """The mask token: a row of the embedding that is no control token."""
    mask, rows = raw["dflash_config"]["mask_token_id"], raw["vocab_size"]
    if not (isinstance(mask, int) and 0 <= mask < rows):
        return [f"mask token {mask!r} is outside the target's {rows} embedding rows"]
    eos = raw.get("eos_token_id")
    ends = eos if isinstance(eos, list) else [eos]
    if mask in (*ends, raw.get("bos_token_id")):
        return [f"mask token {mask} begins or ends texts"]
    return []


def dtype_faults(tensors: Mapping[str, Tensor]) -> list[str]:
    """Weights as the config says: all bf16."""
    other = sorted({str(t.dtype) for t in tensors.values() if t.dtype != torch.bfloat16})
    return [f"not all bfloat16: {', '.join(other)}"] if other else []


def value_faults(tensors: Mapping[str, Tensor]) -> list[str]:
    """Weights that no training leaves behind."""
    broken = [name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())]
    dead = [name for name, tensor in tensors.items() if tensor.ndim > 1 and not bool(tensor.any())]
    found = [f"not finite: {', '.join(broken)}"] if broken else []
    return found + ([f"all zero: {', '.join(dead)}"] if dead else [])


def rewritten_faults(raw: Mapping[str, Any], fields: Mapping[str, Any]) -> list[str]:
    """Keys whose value would be another one if the loaded drafter were exported again."""
    again = render_config(fields)
    return [
        f"{key} is {raw.get(key)!r}, an export of the loaded drafter says {value!r}"
        for key, value in again.items()
        if key != "transformers_version" and raw.get(key) != value
    ]


def target_faults(raw: Mapping[str, Any], facts: Mapping[str, Any]) -> list[str]:
    """What a drafter copies from its target and would silently draft badly with.

    Args:
        raw: the export's `config.json`.
        facts: of `trainer.target.loader.TargetInfo`.
    """
    section = raw["dflash_config"]
    theta, scaling = parse_rope(raw, "rotary embedding")
    pairs = {
        "hidden_size": (raw["hidden_size"], facts["hidden_size"]),
        "vocab_size": (raw["vocab_size"], facts["vocab_size"]),
        "num_target_layers": (raw["num_target_layers"], facts["num_layers"]),
        "rope_theta": (theta, facts["rope_theta"]),
        "rope_scaling": (scaling, plain_scaling(facts["rope_scaling"])),
        "input_embedding_scale": (section.get("input_embedding_scale"), facts["embed_scale"]),
        "final_logit_softcapping": (section.get("final_logit_softcapping"), facts["logit_softcap"]),
    }
    return [
        f"{name} is {own!r}, the target's is {its!r}"
        for name, (own, its) in pairs.items()
        if not _is_same(name, own, its)
    ]


def _is_same(name: str, own: Any, its: Any) -> bool:
    # published scales are rounded to bf16 here and there
    if name == "input_embedding_scale" and own is not None and its is not None:
        return math.isclose(own, its, rel_tol=ROUNDING)
    return bool(own == its)


CONFIG_CHECKS: Mapping[str, Callable[[Mapping[str, Any]], list[str]]] = {
    "config keys": key_faults,
    "constant values": constant_faults,
    "block sizes": block_size_faults,
    "rotary spellings": rope_faults,
    "layer types": layer_faults,
    "target layers": target_layer_faults,
    "mask token": mask_faults,
}
TENSOR_CHECKS: Mapping[str, Callable[[Mapping[str, Tensor]], list[str]]] = {
    "tensor dtype": dtype_faults,
    "tensor values": value_faults,
}
