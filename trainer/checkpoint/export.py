"""The exported drafter on disk: a directory that z-lab's code, SGLang and vLLM load as it is.

Called by the drafter worker (`export_drafter`), by `drafter.exported` (`read_export`) and by the `export`
command (`check_export`, `copy_export`). Must not know the drafter's class, which sits above this layer;
training state is elsewhere.

Serving engines skip tensors that they do not know, which turns a wrong name into random weights and an
acceptance length of 1. Everything here is therefore strict: nothing missing, nothing extra, every shape
right.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from trainer.checkpoint.drafter_format import (
    ARCHITECTURE,
    CONFIG_KEYS,
    SECTION_KEYS,
    need,
    parse_config,
    render_config,
    tensor_faults,
)
from trainer.checkpoint.replacing import check_output, in_use, put_in_place
from trainer.errors import CheckpointError
from trainer.pipeline.devices import dtype_name

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_LOG = logging.getLogger(__name__)

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
SHARD_BYTES = 5_000_000_000
"""Weights above this are split over several files with an index."""


class ExportableDrafter(Protocol):
    """A drafter module, as far as this file needs it; `config` is a dataclass."""

    @property
    def config(self) -> DataclassInstance:
        """Fields as in `drafter.model.DrafterConfig`."""

    def state_dict(self) -> Mapping[str, Tensor]:
        """Tensors by their published names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedDrafter:
    """A verified export: fields of the drafter's config, tensors as stored, `config.json` as read."""

    fields: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    raw: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport:
    """What `check_export` found in a directory that passed."""

    directory: Path
    tensors: int
    parameters: int
    nbytes: int
    dtypes: tuple[str, ...]
    block_size: int
    target_layer_ids: tuple[int, ...]

    def to_text(self) -> str:
        """One line for people."""
        layers = ",".join(map(str, self.target_layer_ids))
        return (
            f"{self.directory}: ok, {self.tensors} tensors, {self.parameters:,} parameters, "
            f"{self.nbytes / 2**20:.1f} MiB {'+'.join(self.dtypes)}, block size {self.block_size}, "
            f"target layers {layers}"
        )


def export_drafter(
    drafter: ExportableDrafter,
    target_meta: Mapping[str, object] | None,
    directory: Path,
    *,
    overwrite: bool = False,
) -> Path:
    """Write a drafter's weights (bf16) and config; the directory appears whole or not at all.

    Args:
        drafter: the module; its tensors may be on any device and in any float dtype.
        target_meta: facts about the target (path, model type ...), kept as text in the weights' metadata.
        directory: where to; its parent is created.
        overwrite: replace an existing directory.

    Returns:
        The directory.

    Raises:
        CheckpointError: the directory exists, or the module's tensors are not those of the format.
        ConfigError: the directory holds something else than an export, so that it cannot be replaced.
    """
    fields = {field.name: getattr(drafter.config, field.name) for field in dataclasses.fields(drafter.config)}
    return write_export(fields, drafter.state_dict(), target_meta, directory, overwrite=overwrite)


def write_export(
    fields: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    target_meta: Mapping[str, object] | None,
    directory: Path,
    *,
    overwrite: bool = False,
) -> Path:
    """Write an export from config fields and tensors (of a training state, say); see `export_drafter`."""
    check_output(directory, overwrite=overwrite)
    rendered = render_config(fields)
    _refuse_faults(rendered, tensors, "drafter")
    stored = {
        name: tensor.detach().to(device="cpu", dtype=torch.bfloat16, copy=True).contiguous()
        for name, tensor in tensors.items()
    }
    metadata = {"format": "pt"} | {f"target.{key}": str(value) for key, value in (target_meta or {}).items()}
    scratch = directory.with_name(f".{directory.name}.tmp-{os.getpid()}")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        with in_use(scratch):
            _save_weights(stored, scratch, metadata)
            (scratch / CONFIG_NAME).write_text(json.dumps(rendered, indent=2) + "\n")
            for path in (*scratch.iterdir(), scratch):
                _fsync(path)
            put_in_place(scratch, directory, overwrite=overwrite)
        _fsync(directory.parent)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"cannot write export {directory}: {error}; free space or name another folder"
        ) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return directory


def read_export(directory: Path) -> ExportedDrafter:
    """Read an export and verify config, names and shapes.

    Raises:
        CheckpointError: anything missing, extra, misnamed or misshapen; the message lists it.
    """
    raw = read_config(directory)
    fields = parse_config(raw, str(directory / CONFIG_NAME))
    tensors = read_weights(directory)
    _refuse_faults(raw, tensors, str(directory))
    return ExportedDrafter(fields=fields, tensors=tensors, raw=raw)


def read_config(directory: Path) -> dict[str, Any]:
    """Read `config.json` as it is.

    Raises:
        CheckpointError: absent, or not a JSON object.
    """
    if not directory.is_dir():
        raise CheckpointError(
            f"no such folder: {directory}, so no {CONFIG_NAME} of a drafter; name an export/step-* folder"
        )
    if not (directory / CONFIG_NAME).is_file():
        raise CheckpointError(
            f"no exported drafter in {directory}: {CONFIG_NAME} is missing; name an export/step-* folder"
        )
    return _read_json(directory / CONFIG_NAME)


def read_weights(directory: Path) -> dict[str, Tensor]:
    """Read all tensors, of one file or of the shards that the index names.

    Raises:
        CheckpointError: a file is missing or damaged, or index and shards disagree.
    """
    if (directory / WEIGHTS_NAME).is_file():
        return _read_tensors(directory / WEIGHTS_NAME)
    if not (directory / INDEX_NAME).is_file():
        raise CheckpointError(f"no drafter weights in {directory}: expected {WEIGHTS_NAME} or {INDEX_NAME}")
    places = need(_read_json(directory / INDEX_NAME), "weight_map", INDEX_NAME)
    tensors: dict[str, Tensor] = {}
    for shard in sorted(set(places.values())):
        found = _read_tensors(directory / Path(shard).name)
        strange = found.keys() ^ {name for name, place in places.items() if place == shard}
        if strange:
            raise CheckpointError(
                f"{directory / INDEX_NAME} and {shard} disagree: {', '.join(sorted(strange)[:5])}"
            )
        tensors |= found
    return tensors


def read_target_meta(directory: Path) -> dict[str, str]:
    """Return what an export's weights say about its target, as `export_drafter` got it; empty if nothing.

    Raises:
        CheckpointError: the weights cannot be read.
    """
    prefix = "target."
    for path in sorted(directory.glob("*.safetensors"))[:1]:
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                found = file.metadata() or {}
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot read weights {path}: {error}") from error
        return {key.removeprefix(prefix): text for key, text in found.items() if key.startswith(prefix)}
    return {}


def check_export(directory: Path) -> ExportReport:
    """Verify that serving engines will load an export as it was trained.

    Beyond what loading needs: every key that some engine reads is present, and every weight is finite.

    Raises:
        CheckpointError: the first kind of fault found, with all its instances.
    """
    exported = read_export(directory)
    raw, source = exported.raw, str(directory / CONFIG_NAME)
    section = raw["dflash_config"]
    missing = [key for key in CONFIG_KEYS if key not in raw]
    missing += [f"dflash_config.{key}" for key in SECTION_KEYS if key not in section]
    if missing:
        raise CheckpointError(f"{source}: missing keys: {', '.join(missing)}; export again")
    if raw["architectures"] != [ARCHITECTURE] or raw["tie_word_embeddings"]:
        raise CheckpointError(f"{source}: needs architectures [{ARCHITECTURE}] and tie_word_embeddings false")
    layers = int(raw["num_target_layers"])
    outside = [layer for layer in section["target_layer_ids"] if not 0 <= layer < layers]
    if outside:
        raise CheckpointError(f"{source}: target layers {outside} are outside the target's {layers} layers")
    broken = [name for name, tensor in exported.tensors.items() if not bool(torch.isfinite(tensor).all())]
    if broken:
        raise CheckpointError(f"{directory}: weights are not finite: {', '.join(broken)}")
    tensors = exported.tensors.values()
    return ExportReport(
        directory=directory,
        tensors=len(tensors),
        parameters=sum(tensor.numel() for tensor in tensors),
        nbytes=sum(tensor.nbytes for tensor in tensors),
        dtypes=tuple(sorted({dtype_name(tensor.dtype) for tensor in tensors})),
        block_size=int(exported.fields["block_size"]),
        target_layer_ids=tuple(exported.fields["target_layer_ids"]),
    )


def copy_export(source: Path, output: Path, *, overwrite: bool = False) -> ExportReport:
    """Write an export again, in the full format: a published drafter may lack keys that some engine reads.

    Raises:
        CheckpointError: the source does not verify, or the output exists.
        ConfigError: the output is no export that may be replaced, or overlaps with the source.
    """
    check_output(output, source=source, overwrite=overwrite)
    _LOG.info("export: copying %s to %s", source, output)
    exported = read_export(source)
    meta = read_target_meta(source) | {"source": str(source)}
    write_export(exported.fields, exported.tensors, meta, output, overwrite=overwrite)
    return check_export(output)


def _refuse_faults(config: Mapping[str, Any], tensors: Mapping[str, Tensor], source: str) -> None:
    faults = tensor_faults(config, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    if faults:
        raise CheckpointError(f"{source} does not hold the tensors of its config ({'; '.join(faults)})")


def _save_weights(tensors: Mapping[str, Tensor], folder: Path, metadata: Mapping[str, str]) -> None:
    """Write one file, or shards below `SHARD_BYTES` with their index."""
    total = sum(tensor.nbytes for tensor in tensors.values())
    if total <= SHARD_BYTES:
        save_file(dict(tensors), folder / WEIGHTS_NAME, metadata=dict(metadata))
        return
    shards: list[dict[str, Tensor]] = [{}]
    room = SHARD_BYTES
    for name, tensor in tensors.items():
        if tensor.nbytes > room and shards[-1]:
            shards.append({})
            room = SHARD_BYTES
        shards[-1][name] = tensor
        room -= tensor.nbytes
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata=dict(metadata))
        places |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read weights {path}: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read {path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"cannot read {path}: not a JSON object")
    return value


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
