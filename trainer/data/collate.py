"""From samples to what a forward pass takes: a right-padded batch, and its valid tokens packed to one row.

Called by target workers, evaluation, planning and tests. The target runs on the padded batch; its hidden
states are then gathered with `valid_rows_T`, which lines them up with `tokens` for the drafter. CPU tensors
only; must not know models.

Dimension suffixes: B batch, S padded length, T packed valid tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trainer.data.corpus import Sample
from trainer.errors import DataError
from trainer.pipeline.messages import PackedTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetBatch:
    """One batch for the target, with the map from its padded grid to the packed row."""

    input_ids_BS: Tensor
    """int64, right-padded"""
    attention_mask_BS: Tensor
    """bool, True on real tokens"""
    valid_rows_T: Tensor
    """int64, positions in the flattened [B*S] grid of the packed tokens, in packed order"""
    tokens: PackedTokens

    @property
    def padding_ratio(self) -> float:
        """Share of the grid that is padding."""
        return 1.0 - self.valid_rows_T.numel() / self.input_ids_BS.numel()


def collate(samples: Sequence[Sample], *, pad_id: int, pad_to: int | None = None) -> TargetBatch:
    """Pad `samples` on the right and pack their valid tokens.

    Args:
        samples: documents of one batch, in order.
        pad_id: any valid token id; what it is never changes a valid row.
        pad_to: width of the grid where static shapes are wanted; default the longest sample.

    Raises:
        DataError: no sample, an empty one, or one longer than `pad_to`.
    """
    lengths = [len(sample.input_ids_T) for sample in samples]
    if not lengths or min(lengths) == 0:
        raise DataError(f"a batch needs non-empty samples, lengths: {lengths}")
    width = max(lengths) if pad_to is None else pad_to
    if max(lengths) > width:
        raise DataError(f"sample of {max(lengths)} tokens does not fit a batch padded to {width}")
    input_ids = np.full((len(samples), width), pad_id, dtype=np.int64)
    for row, sample in enumerate(samples):
        input_ids[row, : lengths[row]] = sample.input_ids_T
    valid = np.arange(width)[None] < np.asarray(lengths)[:, None]
    return TargetBatch(
        input_ids_BS=torch.from_numpy(input_ids),
        attention_mask_BS=torch.from_numpy(valid),
        valid_rows_T=torch.from_numpy(np.flatnonzero(valid)),
        tokens=pack_tokens(samples),
    )


def pack_tokens(samples: Sequence[Sample]) -> PackedTokens:
    """Concatenate documents to one row without padding."""
    lengths = [len(sample.input_ids_T) for sample in samples]
    return PackedTokens(
        input_ids_T=torch.from_numpy(np.concatenate([s.input_ids_T for s in samples]).astype(np.int64)),
        loss_mask_T=torch.from_numpy(np.concatenate([s.loss_mask_T for s in samples]).astype(np.bool_)),
        doc_id_T=torch.from_numpy(np.repeat(np.arange(len(samples), dtype=np.int32), lengths)),
        position_T=torch.from_numpy(np.concatenate([np.arange(n, dtype=np.int64) for n in lengths])),
    )


def made_up_documents(lengths: Sequence[int], input_ids_T: Tensor | None = None) -> PackedTokens:
    """Pack documents that no data set holds, for measurements and checks.

    Args:
        lengths: tokens of each document.
        input_ids_T: int64, their tokens in a row; None for zeros.

    Returns:
        Tokens of which all but the first of each document are supervised.
    """
    counts = torch.tensor(lengths)
    position_T = torch.cat([torch.arange(length) for length in lengths])
    if input_ids_T is None:
        input_ids_T = torch.zeros_like(position_T)
    return PackedTokens(
        input_ids_T=input_ids_T,
        loss_mask_T=position_T >= 1,
        doc_id_T=torch.repeat_interleave(torch.arange(len(lengths)), counts).to(torch.int32),
        position_T=position_T,
    )
