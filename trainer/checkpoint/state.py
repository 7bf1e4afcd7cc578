"""The training state: everything a resumed run needs to go on as if it had never stopped.

Owns the content of a `state/step-*` folder (`state.json` and `tensors.safetensors`) and the comparison of a
stored state with the run that wants to continue it. Called by `trainer.train`. No pickle, ever.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from trainer.config import SECTIONS
from trainer.errors import CheckpointError

STATE_VERSION = 1
STATE_FILE = "state.json"
TENSOR_FILE = "tensors.safetensors"

REFUSED_FIELDS = (
    "data.",
    "drafter.",
    "target.mask_token_id",
    "target.target_layer_ids",
    "optim.seed",
    "optim.grad_accum",
)
"""Key prefixes whose change makes a stored state meaningless: other shapes, or another plan of packs."""
RECORDED_FIELDS = ("drafter.split_fc_layers", "loss.", "optim.", "target.", "queue.", "devices.")
"""Key prefixes whose change is allowed and recorded field by field."""


class ConsumedPacks:
    """Which packs of which epoch went into completed optimizer steps: one bitmap per epoch."""

    def __init__(self, packs_per_epoch: int, epochs: int) -> None:
        self._bits = np.zeros((epochs, packs_per_epoch), dtype=np.bool_)

    def add(self, epoch: int, pack_id: int) -> None:
        """Mark a pack; marking one twice is a defect of the pipeline and refused."""
        if self._bits[epoch, pack_id]:
            raise CheckpointError(f"pack {pack_id} of epoch {epoch} was consumed twice")
        self._bits[epoch, pack_id] = True

    def has(self, epoch: int, pack_id: int) -> bool:
        """Tell whether a pack was consumed."""
        return bool(self._bits[epoch, pack_id])

    def count(self) -> int:
        """Return how many packs were consumed in all epochs."""
        return int(self._bits.sum())

    def tensors(self) -> dict[str, Tensor]:
        """Return the bitmaps of the epochs that were begun, eight packs to a byte."""
        return {
            f"consumed.epoch-{epoch:04d}": torch.from_numpy(np.packbits(bits))
            for epoch, bits in enumerate(self._bits)
            if bits.any()
        }

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take stored bitmaps back; epochs beyond the planned ones are an error."""
        packs = self._bits.shape[1]
        for name, packed in tensors.items():
            if not name.startswith("consumed.epoch-"):
                continue
            epoch = int(name.rsplit("-", 1)[1])
            if epoch >= len(self._bits) or packed.numel() != -(-packs // 8):
                raise CheckpointError(
                    f"the state has consumed packs of epoch {epoch} in {packed.numel()} bytes, the plan has "
                    f"{len(self._bits)} epochs of {packs} packs; raise --epochs or use --resume scratch"
                )
            self._bits[epoch] = np.unpackbits(packed.numpy(), count=packs).astype(np.bool_)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainState:
    """One stored state. `meta` is plain JSON, `tensors` are on the CPU."""

    step: int
    tokens: int
    meta: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


def write_state(state: TrainState, folder: Path) -> None:
    """Write a state into a new folder (the store adds the manifest and publishes it).

    Raises:
        OSError: the disk refused.
    """
    folder.mkdir(parents=True)
    try:
        save_file(dict(state.tensors), folder / TENSOR_FILE)
    except SafetensorError as error:
        # the library's own class for a full disk; as OSError it is treated like every other refusal
        raise OSError(str(error)) from error
    record = {"v": STATE_VERSION, "step": state.step, "tokens": state.tokens, **state.meta}
    (folder / STATE_FILE).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def read_state(folder: Path) -> TrainState:
    """Read a folder that `store.verify` accepted.

    Raises:
        CheckpointError: not a training state, or of a newer version.
    """
    record = read_record(folder)
    try:
        tensors = load_file(folder / TENSOR_FILE)
        step, tokens = int(record.pop("step")), int(record.pop("tokens"))
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise _not_a_state(folder, error) from error
    return TrainState(step=step, tokens=tokens, meta=record, tensors=tensors)


def read_record(folder: Path) -> dict[str, Any]:
    """Read the small half of a state, without its tensors (these may be tens of gigabytes).

    Raises:
        CheckpointError: not a training state, or of a newer version.
    """
    try:
        record: dict[str, Any] = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
        version = record.pop("v")
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise _not_a_state(folder, error) from error
    if version != STATE_VERSION:
        raise CheckpointError(
            f"training state {folder} has version {version}, this trainer reads {STATE_VERSION}"
        )
    return record


def check_state(folder: Path) -> None:
    """Look whether this trainer can read a state that verifies, without loading its tensors.

    Raises:
        CheckpointError: not a training state, or of a newer version.
    """
    record = read_record(folder)
    try:
        int(record["step"]), int(record["tokens"])
        with safe_open(folder / TENSOR_FILE, framework="pt", device="cpu"):
            pass
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise _not_a_state(folder, error) from error


def _not_a_state(folder: Path, error: Exception) -> CheckpointError:
    reason = f"{type(error).__name__}: {error}"
    if isinstance(error, FileNotFoundError) and error.filename is not None:
        reason = f"it has no {Path(error.filename).name}"
    return CheckpointError(f"not a training state: {folder} ({reason}); name a state/step-* folder")


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One field in which the stored run and the present one differ."""

    field: str
    was: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.field} was {self.was!r}, is {self.now!r}"


def compare(stored: Mapping[str, Any], present: Mapping[str, Any]) -> list[Difference]:
    """Compare the run that wrote a state with the run that wants to continue it.

    Args:
        stored: `meta` of the state: `config` (nested tables), `data`, `target`, `world` ...
        present: the same of this run.

    Returns:
        The differences that are allowed, to be logged and recorded.

    Raises:
        CheckpointError: names every difference that cannot be continued.
    """
    refused: list[Difference] = []
    recorded: list[Difference] = []
    for part in ("data", "target"):
        known = stored.get(part, {})
        for difference in _differences(part, known, present.get(part, {})):
            # what an older trainer did not look at cannot be held against its state
            (refused if difference.field.partition(".")[2] in known else recorded).append(difference)
    old_config, new_config = stored.get("config", {}), present.get("config", {})
    for table in sorted({*old_config, *new_config}):
        new = new_config.get(table, {})
        for difference in _differences(table, _as_it_was(table, old_config.get(table, {}), new), new):
            if _matches(difference.field, REFUSED_FIELDS) and difference.field not in RECORDED_FIELDS:
                refused.append(difference)
            elif _matches(difference.field, RECORDED_FIELDS):
                recorded.append(difference)
    for part in ("world", "dtypes", "plan", "versions", "code"):
        recorded += _differences(part, stored.get(part, {}), present.get(part, {}))
    if refused:
        raise CheckpointError(
            f"the checkpoint belongs to another run: {'; '.join(map(str, refused))}; "
            "restore these or use --resume scratch"
        )
    return recorded


def _as_it_was(table: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Mapping[str, Any]:
    """Complete a stored table: a key that did not exist then had the effect of its default."""
    later = new.keys() - old.keys()
    defaults = {
        item.name: json.loads(json.dumps(item.default))
        for item in (dataclasses.fields(SECTIONS[table]) if later else ())
        if item.name in later
    }
    return {**defaults, **old}


def _differences(part: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Difference]:
    return [
        Difference(field=f"{part}.{key}", was=old.get(key), now=new.get(key))
        for key in sorted({*old, *new})
        if old.get(key) != new.get(key)
    ]


def _matches(key: str, prefixes: Sequence[str]) -> bool:
    return any(key == prefix or (prefix.endswith(".") and key.startswith(prefix)) for prefix in prefixes)
