"""A check at the start of a run: does a batch give each sequence the hidden states that it has alone?

Called by `trainer.assembly` once the target is loaded. Training reads right-padded batches, serving reads one
sequence: a target that mixes rows, looks at padding or carries state from row to row would train a drafter on
hidden states that it never meets again. Must not change the target or know the drafter.

Dimension suffixes: B batch, T tokens, L captured layers, D hidden size.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.data.collate import collate
from trainer.data.corpus import Corpus, Sample
from trainer.errors import ConfigError
from trainer.pipeline.devices import on_device
from trainer.target.capture import Target

CHECKED_TOKENS = 192
"""Longer samples are cut to this: enough to see a leak, and a fraction of a second."""

TOLERANCES = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}
"""Largest mean over tokens of the relative difference; kernels round differently for other batch shapes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCheck:
    """How far a batch was from single sequences: per layer, mean over tokens of |batch - alone| / |alone|."""

    by_layer: dict[int, float]
    tolerance: float
    lengths: tuple[int, ...]

    @property
    def worst(self) -> tuple[int, float]:
        """The layer that differs most, and by how much."""
        # a NaN compares with nothing, so it is looked for first
        return max(self.by_layer.items(), key=lambda item: (math.isnan(item[1]), item[1]))


def check_batching(target: Target, corpus: Corpus, layer_ids: Sequence[int]) -> BatchCheck:
    """Run a few samples of different length together and alone, and compare.

    Raises:
        ConfigError: they differ beyond rounding; names layer, difference and tolerance.
    """
    with on_device(target.device):  # kernels of linear attention start on the current device
        check = measure_batching(target, pick_samples(corpus), layer_ids)
    layer, difference = check.worst
    # not <=: a NaN must be refused as well
    if not difference <= check.tolerance:
        raise ConfigError(
            f"target {target.info.model_type} gives other hidden states in a batch than alone: layer {layer} "
            f"differs by {difference:.2g} of its size, tolerance {check.tolerance:g} for "
            f"{str(target.dtype).removeprefix('torch.')}, lengths {list(check.lengths)}; set "
            'data.max_batch_size = 1, try target.attention = "eager", or another transformers version'
        )
    return check


def pick_samples(corpus: Corpus) -> list[Sample]:
    """Choose three samples of clearly different length; with few samples, parts of the same one."""
    order = corpus.lengths.argsort(kind="stable")
    long, middle, short = (corpus[int(order[place])] for place in (-1, len(order) // 2, 0))
    whole = min(len(long.input_ids_T), CHECKED_TOKENS)
    return [_cut(long, whole), _cut(middle, whole * 2 // 3), _cut(short, whole // 3)]


def measure_batching(target: Target, samples: Sequence[Sample], layer_ids: Sequence[int]) -> BatchCheck:
    """Compare without judging."""
    pad_id = target.info.pad_token_id if target.info.pad_token_id is not None else 0
    batch = collate(samples, pad_id=pad_id)
    together_BTLD, _ = target.hidden_states(batch.input_ids_BS, batch.attention_mask_BS, layer_ids)
    errors: list[Tensor] = []
    for row, sample in enumerate(samples):
        alone = collate([sample], pad_id=pad_id)
        alone_BTLD, _ = target.hidden_states(alone.input_ids_BS, None, layer_ids)
        errors.append(_relative_errors(together_BTLD[row, : alone_BTLD.shape[1]], alone_BTLD[0]))
    # host sync: once, while loading
    mean_L = torch.cat(errors).mean(dim=0).tolist()
    return BatchCheck(
        by_layer=dict(zip(layer_ids, mean_L, strict=True)),
        tolerance=TOLERANCES.get(target.dtype, TOLERANCES[torch.float32]),
        lengths=tuple(len(sample.input_ids_T) for sample in samples),
    )


def _relative_errors(found_TLD: Tensor, expected_TLD: Tensor) -> Tensor:
    # token by token: the first one's states are often a thousand times larger and would hide all others
    difference = (found_TLD.float() - expected_TLD.float()).norm(dim=-1)
    relative: Tensor = difference / expected_TLD.float().norm(dim=-1).clamp(min=1e-12)
    return relative


def _cut(sample: Sample, length: int) -> Sample:
    kept = slice(0, max(1, length))
    return dataclasses.replace(
        sample, input_ids_T=sample.input_ids_T[kept], loss_mask_T=sample.loss_mask_T[kept]
    )
