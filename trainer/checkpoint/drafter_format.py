"""The format of an exported drafter: config keys, tensor names and shapes; pure, no files.

Used by `checkpoint.export` only. Every value is written in each place and spelling that some reader looks at
(z-lab's code, SGLang, vLLM, transformers 4 and 5), and read back from any of them. Must not know the class of
drafters, which sits above this layer: a config is the mapping of its fields.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from typing import Any

from trainer.checkpoint.config_values import check_values
from trainer.errors import CheckpointError

ARCHITECTURE = "DFlashDraftModel"
SLIDING = "sliding_attention"
MOST_NAMES = 40
"""Tensors that an error names; a wrong number of layers concerns hundreds."""

CONFIG_KEYS = (
    *("architectures", "model_type", "block_size", "dflash_config", "num_target_layers", "num_hidden_layers"),
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *(
        "hidden_act",
        "rms_norm_eps",
        "attention_bias",
        "attention_dropout",
        "initializer_range",
        "layer_types",
    ),
    *("sliding_window", "use_sliding_window", "max_window_layers", "rope_theta", "rope_scaling"),
    *("rope_parameters", "max_position_embeddings", "vocab_size", "bos_token_id", "eos_token_id"),
    *("pad_token_id", "tie_word_embeddings", "dtype", "torch_dtype", "use_cache", "transformers_version"),
)
"""Top-level keys of an export, in the order written."""

SECTION_KEYS = ("block_size", "mask_token_id", "target_layer_ids")
"""Keys that `dflash_config` always has."""

_COPIED = (
    *("num_target_layers", "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "rms_norm_eps", "attention_bias", "initializer_range", "rope_theta"),
    *("max_position_embeddings", "vocab_size", "bos_token_id", "pad_token_id", "block_size"),
)

_REQUIRED = (
    *("num_target_layers", "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings", "vocab_size"),
)


def render_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Build `config.json` from the fields of a drafter config."""
    scaling = plain_scaling(fields["rope_scaling"])
    has_sliding = SLIDING in fields["layer_types"]
    eos = fields["eos_token_id"]
    values: dict[str, Any] = {name: fields[name] for name in _COPIED}
    values |= {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "dflash_config": _render_section(fields),
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "layer_types": list(fields["layer_types"]),
        "sliding_window": fields["sliding_window"] if has_sliding else None,
        "use_sliding_window": has_sliding,
        "max_window_layers": fields["num_hidden_layers"],
        "rope_scaling": scaling,
        "rope_parameters": (scaling or {"rope_type": "default"}) | {"rope_theta": fields["rope_theta"]},
        "eos_token_id": list(eos) if isinstance(eos, tuple) else eos,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "transformers_version": importlib.metadata.version("transformers"),
    }
    return {key: values[key] for key in CONFIG_KEYS}


def parse_config(raw: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Read a `config.json`, written by us or published by others, into the fields of a drafter config.

    Raises:
        CheckpointError: a value is missing or unsupported, or two places that must agree do not.
    """
    check_values(raw, source)
    if raw.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"{source}: hidden_act must be silu, not {raw['hidden_act']}")
    section = raw.get("dflash_config") or {}
    fields = {name: need(raw, name, source) for name in _REQUIRED}
    theta, scaling = parse_rope(raw, source)
    eos = raw.get("eos_token_id")
    return fields | {
        "rope_theta": theta,
        "rope_scaling": scaling,
        "block_size": _one_block_size(raw, section, source),
        # older drafters have these two outside of the section
        "mask_token_id": int(need({**raw, **section}, "mask_token_id", f"{source}, dflash_config")),
        "target_layer_ids": tuple(need({**raw, **section}, "target_layer_ids", f"{source}, dflash_config")),
        "layer_types": tuple(raw.get("layer_types") or ["full_attention"] * fields["num_hidden_layers"]),
        "sliding_window": raw.get("sliding_window"),
        "attention_bias": bool(raw.get("attention_bias", False)),
        "embed_scale": section.get("input_embedding_scale", raw.get("input_embedding_scale")),
        "logit_softcap": section.get("final_logit_softcapping", raw.get("final_logit_softcapping")),
        "initializer_range": float(raw.get("initializer_range", 0.02)),
        "bos_token_id": raw.get("bos_token_id"),
        "eos_token_id": tuple(eos) if isinstance(eos, list) else eos,
        "pad_token_id": raw.get("pad_token_id"),
    }


def parse_rope(raw: Mapping[str, Any], source: str) -> tuple[float, dict[str, Any] | None]:
    """Read theta and scaling from the older pair of keys, the newer mapping, or both if they agree."""
    found: list[tuple[float, dict[str, Any] | None]] = []
    parameters = raw.get("rope_parameters") or {}
    if parameters.get("rope_theta") is not None:
        found.append((float(parameters["rope_theta"]), plain_scaling(parameters)))
    if raw.get("rope_theta") is not None:
        found.append((float(raw["rope_theta"]), plain_scaling(raw.get("rope_scaling"))))
    if not found:
        raise CheckpointError(f"{source}: neither rope_theta nor rope_parameters.rope_theta is set")
    if found[0] != found[-1]:
        raise CheckpointError(
            f"{source}: rope_parameters {found[0]} and rope_theta/rope_scaling {found[-1]} disagree"
        )
    return found[0]


def plain_scaling(scaling: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Bring a scaling block to one form: `rope_type` first, no theta, None for plain rotary embedding."""
    values = dict(scaling or {})
    old_name = values.pop("type", None)
    kind = values.pop("rope_type", None) or old_name or "default"
    values.pop("rope_theta", None)
    return None if kind == "default" else {"rope_type": kind} | values


def expected_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Compute name and shape of every tensor from a `config.json`."""
    hidden = int(config["hidden_size"])
    captured = len({**config, **(config.get("dflash_config") or {})}["target_layer_ids"])
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, captured * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for index in range(int(config["num_hidden_layers"])):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in _layer_shapes(config).items()}
    return shapes


def tensor_faults(config: Mapping[str, Any], found: Mapping[str, tuple[int, ...]]) -> list[str]:
    """List what is missing, unexpected or misshapen among the tensors of an export."""
    check_values(config, "config.json")
    expected = expected_shapes(config)
    misshapen = [
        f"{name} {found[name]} instead of {shape}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    kinds = {
        "missing": sorted(expected.keys() - found.keys()),
        "unexpected": sorted(found.keys() - expected.keys()),
        "wrong shape": misshapen,
    }
    return [f"{kind}: {_listed(names)}" for kind, names in kinds.items() if names]


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


def need(mapping: Mapping[str, Any], key: str, source: str) -> Any:
    """Get a value that must be there.

    Raises:
        CheckpointError: absent or null.
    """
    if mapping.get(key) is None:
        raise CheckpointError(f"{source}: {key} is missing")
    return mapping[key]


def _render_section(fields: Mapping[str, Any]) -> dict[str, Any]:
    section: dict[str, Any] = {
        "block_size": fields["block_size"],
        "mask_token_id": fields["mask_token_id"],
        "target_layer_ids": list(fields["target_layer_ids"]),
    }
    # Engines apply this flag to every layer, so it can only be stated where all layers agree. Without it they
    # take sliding layers as causal and full ones as not, which is what we train.
    if set(fields["layer_types"]) == {SLIDING}:
        section["causal"] = True
    if fields["embed_scale"] is not None:
        section["input_embedding_scale"] = fields["embed_scale"]
    if fields["logit_softcap"] is not None:
        section["final_logit_softcapping"] = fields["logit_softcap"]
    return section


def _layer_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, mlp, head = (int(config[name]) for name in ("hidden_size", "intermediate_size", "head_dim"))
    wide, narrow = int(config["num_attention_heads"]) * head, int(config["num_key_value_heads"]) * head
    projections = {"q_proj": (wide, hidden), "k_proj": (narrow, hidden), "v_proj": (narrow, hidden)}
    projections["o_proj"] = (hidden, wide)
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_norm.weight": (head,),
        "self_attn.k_norm.weight": (head,),
        "mlp.gate_proj.weight": (mlp, hidden),
        "mlp.up_proj.weight": (mlp, hidden),
        "mlp.down_proj.weight": (hidden, mlp),
    }
    for name, shape in projections.items():
        shapes[f"self_attn.{name}.weight"] = shape
        if config.get("attention_bias"):
            shapes[f"self_attn.{name}.bias"] = shape[:1]
    return shapes


def _one_block_size(raw: Mapping[str, Any], section: Mapping[str, Any], source: str) -> int:
    found = {int(place["block_size"]) for place in (raw, section) if place.get("block_size") is not None}
    if len(found) != 1:
        raise CheckpointError(
            f"{source}: block_size must be one number in both places, found {sorted(found) or 'none'}"
        )
    return found.pop()
