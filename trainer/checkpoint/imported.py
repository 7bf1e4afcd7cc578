"""A published drafter as the beginning of a run: what its state holds, and how a run takes its shape over.

Written by `eval.import_command`, read by `trainer.train` at start. An imported state is a training state of
step 0: the drafter's weights as masters, no moments, no packs consumed. Its record carries the drafter's
whole config, which every later state of that lineage carries on, so that nobody has to repeat it in a
configuration. Must not know the class of drafters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint.drafter_format import SLIDING
from trainer.checkpoint.state import TrainState, read_record
from trainer.config import TrainConfig
from trainer.errors import ConfigError

KEY = "imported"
_TUPLES = ("target_layer_ids", "layer_types", "eos_token_id")
_COUNTERS = ("skipped", "in_a_row", "longest_row")
"""Of `optim.adamw`, all zero at the beginning."""


def imported_state(
    fields: Mapping[str, Any], tensors: Mapping[str, Tensor], *, source: Path, target: Mapping[str, Any]
) -> TrainState:
    """Make the state of step 0 from a drafter's config fields and weights.

    Args:
        fields: of the drafter's config, as `drafter_format.parse_config` gives them.
        tensors: by published name, in any float dtype.
        source: where they come from, for the record.
        target: fingerprint of the target that it was checked against.
    """
    masters = {f"master.{name}": tensor.float().contiguous() for name, tensor in tensors.items()}
    return TrainState(
        step=0,
        tokens=0,
        meta={KEY: {"from": str(source), "fields": dict(fields)}, "target": dict(target)},
        tensors=masters | {f"counter.{name}": torch.zeros(()) for name in _COUNTERS},
    )


def find_imported(state_dir: Path | None) -> dict[str, Any] | None:
    """Return the record of the drafter that a lineage began with; None when it began from random weights."""
    record = None if state_dir is None else read_record(state_dir).get(KEY)
    return None if record is None else dict(record)


def fields_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the drafter's config fields of a record, as they were before they went through JSON."""
    fields = dict(record["fields"])
    for name in _TUPLES:
        if isinstance(fields[name], list):
            fields[name] = tuple(fields[name])
    return fields


def follow(config: TrainConfig, record: Mapping[str, Any], *, given: Mapping[str, str]) -> TrainConfig:
    """Put the imported drafter's shape into a configuration.

    Args:
        config: as the user gave it.
        record: see `find_imported`.
        given: keys that the user set, with where.

    Raises:
        ConfigError: a key was set to something that the imported drafter is not.
    """
    fields = fields_of(record)
    slides = tuple(index for index, kind in enumerate(fields["layer_types"]) if kind == SLIDING)
    drafter = {
        "num_layers": fields["num_hidden_layers"],
        "block_size": fields["block_size"],
        "num_attention_heads": fields["num_attention_heads"],
        "num_key_value_heads": fields["num_key_value_heads"],
        "head_dim": fields["head_dim"],
        "intermediate_size": fields["intermediate_size"],
        "sliding_window": fields["sliding_window"] if slides else 0,
        "sliding_layers": slides,
    }
    target = {"mask_token_id": fields["mask_token_id"], "target_layer_ids": fields["target_layer_ids"]}
    _refuse_contradictions(config, {"drafter": drafter, "target": target}, given)
    return dataclasses.replace(
        config,
        drafter=dataclasses.replace(config.drafter, **drafter),
        target=dataclasses.replace(config.target, **target),
    )


def as_if_of_this_run(stored: Mapping[str, Any], present: Mapping[str, Any]) -> dict[str, Any]:
    """Complete an imported state's record for comparing: at step 0 it belongs to a target, to no run yet."""
    return dict(present) | dict(stored) if "config" not in stored and KEY in stored else dict(stored)


def _refuse_contradictions(
    config: TrainConfig, shape: Mapping[str, Mapping[str, Any]], given: Mapping[str, str]
) -> None:
    for table, values in shape.items():
        for key, value in values.items():
            wanted = getattr(getattr(config, table), key)
            if f"{table}.{key}" in given and wanted != value:
                raise ConfigError(
                    f"{table}.{key} = {wanted} ({given[f'{table}.{key}']}), but the imported drafter has "
                    f"{value}: leave the key away, or use --resume scratch"
                )
