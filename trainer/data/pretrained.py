"""The one door to model directories: config, tokenizer and weights, read through transformers.

Called by `trainer.target.loader` (training, evaluation) and by the data commands (`prepare` needs the
tokenizer, `generate` the model). Everything is read from the local directory: no hub, no remote code,
safetensors only. Whatever transformers raises is translated here to the trainer's errors; it must not be
caught elsewhere.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
from pathlib import Path
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    Mxfp4Config,
)
from transformers.utils import logging as hf_logging

from trainer.errors import CheckpointError, ConfigError, OutOfMemoryError
from trainer.telemetry.metrics import size_text

_LOG = logging.getLogger(__name__)

OTHER_MODALITIES = (
    *("visual", "vision_tower", "vision_model", "multi_modal_projector", "embed_vision"),
    *("audio_tower", "embed_audio"),
)
"""Parts of multimodal checkpoints that text never reaches."""

_FAULTS = (OSError, ValueError, LookupError, TypeError, AttributeError, ImportError, RecursionError)
"""What transformers raises on files whose content is not what their names say."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def load_config(directory: Path) -> Any:
    """Read the model's config.

    Raises:
        ConfigError: no such directory, no `config.json`, or a model type that transformers does not know.
    """
    if not directory.is_dir():
        raise ConfigError(f"target model is not a directory: {directory}")
    if not (directory / "config.json").is_file():
        hint = " (a GGUF file alone has to be converted first)" if any(directory.glob("*.gguf")) else ""
        raise ConfigError(f"target model has no config.json{hint}: {directory}")
    try:
        return AutoConfig.from_pretrained(directory, local_files_only=True)
    except _FAULTS as error:
        raise ConfigError(f"cannot read the target's config: {directory}: {_told(error)}") from error


def find_tokenizer(directory: Path) -> Any | None:
    """The tokenizer of a model directory, or None when the directory carries none.

    Raises:
        ConfigError: tokenizer files are there but unreadable.
    """
    if not any((directory / name).is_file() for name in TOKENIZER_FILES):
        return None
    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except MemoryError:
        raise
    except Exception as error:
        # the tokenizers package raises nothing more special than this on a damaged file
        raise ConfigError(f"cannot read the target's tokenizer: {directory}: {_told(error)}") from error


def get_tokenizer(directory: Path, *, needs_chat_template: bool = False) -> Any:
    """The tokenizer of a model directory; its absence is a `ConfigError`."""
    if not directory.is_dir():
        raise ConfigError(f"target model is not a directory: {directory}")
    tokenizer = find_tokenizer(directory)
    if tokenizer is None:
        raise ConfigError(f"target model has no tokenizer files, copy them beside its weights: {directory}")
    if needs_chat_template and not tokenizer.chat_template:
        raise ConfigError(f"target's tokenizer has no chat template, add chat_template.jinja: {directory}")
    return tokenizer


def load_causal_lm(
    directory: Path, *, device: torch.device | str, dtype: torch.dtype, attn: str = "sdpa"
) -> torch.nn.Module:
    """Load frozen weights onto `device`, in evaluation mode.

    Raises:
        ConfigError: no safetensors weights, or transformers cannot build this model.
        CheckpointError: weights are damaged, or some of the model's tensors are missing from them
            (transformers would fill those with random numbers).
        OutOfMemoryError: the device is too small.
    """
    config = load_config(directory)
    if not any(directory.glob("*.safetensors")):
        raise ConfigError(f"target model has no *.safetensors weights: {directory}")
    if attn == "sdpa" and not supports_sdpa(config):
        _LOG.warning(
            "transformers has no sdpa attention for %s: eager is used, whose memory grows with the square of "
            "the length",
            config.model_type,
        )
        attn = "eager"
    weights = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    _LOG.info("loading the target onto %s: %s, %s of weights", device, directory, size_text(weights))
    # cuDNN's attention plans anew for each shape, and packs, drafts and prompts change shape all the time
    torch.backends.cuda.enable_cudnn_sdp(enabled=False)
    hf_logging.disable_progress_bar()
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            directory,
            config=config,
            dtype=dtype,
            attn_implementation=attn,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            # Not to ignore them: so that they come back in `info` and are refused below with their names.
            ignore_mismatched_sizes=True,
            **_expansion(config),
        )
    except _FAULTS as error:
        raise ConfigError(f"cannot load the target model: {directory}: {_told(error)}") from error
    except Exception as error:
        # safetensors raises its own class, outside the tree above, on a truncated or damaged file.
        if type(error).__name__ != "SafetensorError":
            raise
        raise CheckpointError(f"target weights are damaged: {directory}: {error}") from error
    missing = sorted(info["missing_keys"]) + sorted(str(entry[0]) for entry in info["mismatched_keys"])
    if missing:
        shown = ", ".join(missing[:5])
        raise CheckpointError(
            f"target weights lack or misshape {len(missing)} tensors of the model: {directory}: {shown}"
        )
    _drop_other_modalities(model)
    try:
        frozen: torch.nn.Module = model.requires_grad_(False).eval().to(device)
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(f"target does not fit on {device}: {directory}: {error}") from error
    return frozen


def outline_causal_lm(directory: Path, *, dtype: torch.dtype, attn: str = "sdpa") -> torch.nn.Module:
    """Build the model of a directory on the meta device: all shapes, no weights read, no memory taken.

    Raises:
        ConfigError: transformers cannot build this model.
    """
    config = load_config(directory)
    if attn == "sdpa" and not supports_sdpa(config):
        attn = "eager"
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attn)
    except _FAULTS as error:
        raise ConfigError(f"cannot outline the target model: {directory}: {_told(error)}") from error
    _drop_other_modalities(model)
    outlined: torch.nn.Module = model.requires_grad_(False).eval()
    return outlined


def supports_sdpa(config: Any) -> bool:
    """Tell whether transformers runs this model through torch's fused attention."""
    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return bool(getattr(kind, "_supports_sdpa", True))


def quantization_of(config: Any) -> str | None:
    """Name the method by which the weights on disk are quantized, None for plain ones."""
    settings = getattr(config, "quantization_config", None) or {}
    method = settings.get("quant_method") if isinstance(settings, dict) else settings.quant_method
    return None if method is None else str(getattr(method, "value", method))


def _expansion(config: Any) -> dict[str, Any]:
    """Have 4-bit experts expanded at loading: kernels that run them as they are come from the network."""
    if quantization_of(config) != "mxfp4":
        return {}
    _LOG.warning("mxfp4 weights of %s are expanded to 16 bits, four times their size", config.model_type)
    return {"quantization_config": Mxfp4Config(dequantize=True)}


def _drop_other_modalities(model: Any) -> None:
    """Leave the towers for pictures and sound away: they would take device memory for nothing."""
    for owner in {id(m): m for m in (model, getattr(model, model.base_model_prefix, model))}.values():
        for name in OTHER_MODALITIES:
            if isinstance(getattr(owner, name, None), torch.nn.Module):
                setattr(owner, name, None)


def stop_token_ids(directory: Path, tokenizer: Any | None) -> frozenset[int]:
    """Every id that ends a generation: of the config, of the generation config and of the tokenizer."""
    values = [load_config(directory).get_text_config().eos_token_id, _stops_of_generation(directory)]
    values.append(None if tokenizer is None else tokenizer.eos_token_id)
    found: set[int] = set()
    for value in values:
        found.update(value if isinstance(value, list | tuple) else [] if value is None else [value])
    return frozenset(int(token) for token in found)


def _stops_of_generation(directory: Path) -> int | list[int] | None:
    """Return the stop tokens that `generation_config.json` names, None where it is absent or names none.

    Raises:
        ConfigError: it is there and cannot be read.
    """
    path = directory / "generation_config.json"
    if not os.path.lexists(path):
        return None
    try:
        stops: int | list[int] | None = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        entries = stops if isinstance(stops, list) else [] if stops is None else [stops]
        if not all(isinstance(entry, int) and not isinstance(entry, bool) for entry in entries):
            raise TypeError(f"eos_token_id must be a token id, or a list of them: {stops!r:.80}")
    except _FAULTS as error:
        raise ConfigError(f"cannot read {path}: {_told(error)}; mend or remove it") from error
    return stops


def _told(error: Exception) -> str:
    """Say what was raised; some of these texts mean nothing without their class."""
    text = " ".join(str(error).split())
    return text if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {text}"


def cache_argument(model: Any) -> str:
    """Name of the forward argument that takes a key/value cache.

    transformers renames it within 5.x: the old name warns from 5.24 on and is removed in 5.40.
    """
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
