"""Tiny random targets of many families, with the layer layouts that make each of them special.

`save_family(name, folder)` writes a model of 8 layers (H=64, V=97) with fp32 weights and no tokenizer;
`MULTIMODAL` names are saved as whole checkpoints with a vision tower around the text model. Needs no network;
must not be used outside tests.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCAB = 97
MASK_ID = VOCAB - 1

_SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 8,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_SHARED = _EXPERTS | {"shared_expert_intermediate_size": 32}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
_GPT_OSS = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4, "rope_parameters": _YARN}
_VISION = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "depth": 1,
    "num_heads": 2,
    "out_hidden_size": 64,
    "image_size": 28,
    "patch_size": 14,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 4},
    "qwen3": {},
    "qwen3_moe": _EXPERTS,
    "gemma2": {"sliding_window": 4},
    "gemma3_text": {"sliding_window": 4},
    "gpt_oss": _GPT_OSS,
    "qwen3_next": _LINEAR | _SHARED,
    "qwen3_5_text": _LINEAR,
    "qwen3_5_moe_text": _LINEAR | _SHARED,
}
MULTIMODAL = {"gemma3": "gemma3_text", "qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
ALL = (*FAMILIES, *MULTIMODAL)


def save_family(name: str, folder: Path, **overrides: Any) -> Path:
    """Save a random model of that family below `folder` and return its directory."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    text_type = MULTIMODAL.get(name, name)
    config = AutoConfig.for_model(text_type, **(_SHAPE | FAMILIES[text_type] | overrides))
    build = AutoModelForCausalLM
    if name in MULTIMODAL:
        build = AutoModelForImageTextToText
        config = AutoConfig.for_model(name, text_config=config.to_dict(), vision_config=_VISION)
    directory = folder / f"tiny-{name}"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build.from_config(config)
    model.save_pretrained(directory)
    return directory
