"""What is refused before torch is imported, a model is loaded or anything is written.

Called by `trainer.__main__` with a resolved configuration. Holds it against what lies on disk: the target's
`config.json` (never its weights), the data folder, the prompts, the output folder and its free space. Every
refusal is one line: what, which value, the way out. Must not import torch.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.checkpoint.drafter_format import expected_shapes
from trainer.config import TrainConfig
from trainer.data.prompts import read_prompts
from trainer.data.sources import SUFFIXES
from trainer.errors import ConfigError, DataError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
STATE_BYTES_PER_PARAMETER = 3 * 4 + 2
"""fp32 masters and two moments, and the export in bf16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetShape:
    """What the target's `config.json` says; None where it leaves a value to its model class."""

    layers: int | None
    hidden: int | None
    vocab: int | None
    heads: int | None
    key_value_heads: int | None
    head_dim: int | None
    mlp: int | None


def check_run(config: TrainConfig, *, has_wandb_key: bool) -> list[str]:
    """Refuse a configuration that cannot work with what is on disk.

    Returns:
        Lines for the log: what can work, but not for long.

    Raises:
        ConfigError: the first thing that is wrong.
    """
    shape = read_target_shape(Path(config.paths.target_model))
    _check_target_folder(config)
    _check_layers(config, shape)
    _check_drafter(config, shape)
    _check_data(config)
    _check_prompts(config)
    _check_resume(config)
    _check_wandb(config, has_wandb_key=has_wandb_key)
    _check_queue_bytes(config, shape)
    return _check_output(config, shape)


def read_target_shape(directory: Path) -> TargetShape:
    """Read the numbers of a target from its `config.json`; of a multimodal one, those of its text part.

    Raises:
        ConfigError: the file is not a JSON object, or describes no transformer.
    """
    path = directory / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        text = raw.get("text_config") or raw
        values: Mapping[str, Any] = dict(text)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"--target-model has a config.json that cannot be read: {path} ({type(error).__name__}: {error})"
            "; name the folder of a language model"
        ) from error
    if not raw.get("model_type") and not values.get("model_type"):
        raise ConfigError(
            f"--target-model has a config.json without model_type: {path}; "
            "name the folder of a language model"
        )
    hidden, heads = _whole(values, "hidden_size"), _whole(values, "num_attention_heads")
    head_dim = _whole(values, "head_dim") or (hidden // heads if hidden and heads else None)
    return TargetShape(
        layers=_whole(values, "num_hidden_layers"),
        hidden=hidden,
        vocab=_whole(values, "vocab_size"),
        heads=heads,
        key_value_heads=_whole(values, "num_key_value_heads") or heads,
        head_dim=head_dim,
        mlp=_whole(values, "intermediate_size"),
    )


def _whole(values: Mapping[str, Any], name: str) -> int | None:
    value = values.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _check_target_folder(config: TrainConfig) -> None:
    directory = Path(config.paths.target_model)
    if not any(directory.glob("*.safetensors")):
        raise ConfigError(
            f"--target-model holds no weights (*.safetensors): {directory}; name a complete model folder"
        )
    if config.eval.every and not any((directory / name).is_file() for name in TOKENIZER_FILES):
        raise ConfigError(
            f"--eval-every needs the target's tokenizer, none is in --target-model: {directory}; "
            "copy its files there or set --eval-every 0"
        )


def _check_layers(config: TrainConfig, shape: TargetShape) -> None:
    """The last layer cannot be tapped: engines disagree whether its output comes before the final norm."""
    ids, layers = config.target.target_layer_ids, shape.layers
    if len(set(ids)) != len(ids):
        raise ConfigError(f"target.target_layer_ids names a layer twice: {list(ids)}; name each once")
    if layers is None:
        return
    outside = [layer for layer in ids if not 0 <= layer < layers - 1]
    if outside:
        raise ConfigError(
            f"target.target_layer_ids names layer {outside[0]}, a target of {layers} layers can hand over "
            f"0 to {layers - 2}: {list(ids)}"
        )
    if not ids and config.drafter.num_layers > max(1, layers - 3):
        raise ConfigError(
            f"--num-draft-layers wants as many tapped layers of the target, which has {layers}: "
            f"{config.drafter.num_layers}; lower it or set target.target_layer_ids"
        )


def _check_drafter(config: TrainConfig, shape: TargetShape) -> None:
    section, mask_id = config.drafter, config.target.mask_token_id
    heads = section.num_attention_heads or shape.heads
    narrow = section.num_key_value_heads or shape.key_value_heads
    head_dim = section.head_dim or shape.head_dim
    if heads and narrow and heads % narrow:
        raise ConfigError(
            f"drafter.num_attention_heads must be a multiple of drafter.num_key_value_heads: {heads} and "
            f"{narrow}; change one of them"
        )
    if head_dim and head_dim % 2:
        raise ConfigError(f"drafter.head_dim must be even for rotary embedding: {head_dim}; set an even one")
    if mask_id is not None and shape.vocab is not None and mask_id >= shape.vocab:
        raise ConfigError(
            f"target.mask_token_id is no row of the target's embedding: {mask_id}; "
            f"name one of 0 to {shape.vocab - 1} or leave it away"
        )


def _check_data(config: TrainConfig) -> None:
    for name, text in (
        ("--data-dir", config.paths.data_dir),
        ("eval.held_out_data", config.eval.held_out_data),
    ):
        path = Path(text)
        if not text or (path.is_file() and path.suffix in SUFFIXES):
            continue
        if not path.is_dir():
            raise ConfigError(
                f"{name} is neither a folder nor a {', '.join(SUFFIXES)} file: {path}; name one"
            )
        if not any(file.suffix in SUFFIXES for file in path.iterdir() if file.is_file()):
            raise ConfigError(
                f"{name} holds no {', '.join(SUFFIXES)} file: {path}; make one with dflash-train prepare"
            )


def _check_prompts(config: TrainConfig) -> None:
    if not config.eval.every:
        return
    try:
        read_prompts(config.eval.prompts)
    except DataError as error:
        raise ConfigError(f"--eval-prompts cannot be used: {error}") from error


def _check_resume(config: TrainConfig) -> None:
    resume = config.checkpoint.resume
    if resume in ("latest", "scratch"):
        return
    if not (Path(resume) / "manifest.json").is_file():
        raise ConfigError(
            f"--resume names no checkpoint (it has no manifest.json): {resume}; name a state/step-* folder"
        )


def _check_wandb(config: TrainConfig, *, has_wandb_key: bool) -> None:
    """A mode that was asked for by name; `online` by default (a project is named) only degrades."""
    if config.wandb.mode != "online" or has_wandb_key:
        return
    raise ConfigError(
        "--wandb-mode online needs a key, none is in WANDB_API_KEY nor in a netrc file; "
        "give one or take offline or disabled"
    )


def _check_queue_bytes(config: TrainConfig, shape: TargetShape) -> None:
    limit = config.queue.hs_max_bytes
    if not limit or shape.hidden is None:
        return
    # `fast` is settled once torch is there: this is the least that it can need
    is_fp32 = config.devices.target_dtype == "fp32" or (
        config.devices.target_dtype == "auto" and "cpu" in config.devices.targets()
    )
    needed = config.data.max_seq_len * _captured(config) * shape.hidden * (4 if is_fp32 else 2)
    if limit < needed:
        raise ConfigError(
            f"--hs-max-bytes must hold the hidden states of one sample of --max-seq-len: {limit} < {needed}; "
            "raise the first or lower the second"
        )


def _captured(config: TrainConfig) -> int:
    return len(config.target.target_layer_ids) or config.drafter.num_layers


def _check_output(config: TrainConfig, shape: TargetShape) -> list[str]:
    output = Path(config.paths.output_dir).absolute()
    existing = next(path for path in (output, *output.parents) if path.exists())
    if not existing.is_dir():
        raise ConfigError(f"--output-dir cannot be made, {existing} is a file: {output}; name another")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"--output-dir cannot be written: {output}; name another or change its owner")
    needed, free = checkpoint_bytes(config, shape), shutil.disk_usage(existing).free
    if needed is None:
        return []
    if free < needed:
        raise ConfigError(
            f"--output-dir has no room for one checkpoint: {_gib(needed)} needed, {_gib(free)} free at "
            f"{existing}; free space, name another or take a smaller drafter"
        )
    kept = config.checkpoint.keep + config.checkpoint.keep_best + 1
    if free < needed * kept:
        return [
            f"--output-dir has room for {free // needed} checkpoints of {_gib(needed)}, {kept} may exist "
            "at a time: lower --keep-checkpoints or free space"
        ]
    return []


def checkpoint_bytes(config: TrainConfig, shape: TargetShape) -> int | None:
    """Compute the size of one checkpoint, state and export; None when the target's config leaves it open."""
    section = config.drafter
    fields = {
        "hidden_size": shape.hidden,
        "intermediate_size": section.intermediate_size or shape.mlp,
        "head_dim": section.head_dim or shape.head_dim,
        "num_attention_heads": section.num_attention_heads or shape.heads,
        "num_key_value_heads": section.num_key_value_heads or shape.key_value_heads,
    }
    if None in fields.values():
        return None
    shapes = expected_shapes(
        fields
        | {
            "num_hidden_layers": section.num_layers,
            "dflash_config": {"target_layer_ids": list(range(_captured(config)))},
        }
    )
    parameters = 0
    for dimensions in shapes.values():
        size = 1
        for dimension in dimensions:
            size *= dimension
        parameters += size
    return parameters * STATE_BYTES_PER_PARAMETER


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
