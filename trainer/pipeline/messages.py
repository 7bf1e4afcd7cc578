"""What crosses threads in the training pipeline: frozen, plain messages.

The feeder hands `BatchPlanItem`s to target workers, target workers hand `FeaturePack`s to drafter workers.
Nothing else is shared. Tensors in a message live on the CPU (pinned when CUDA is present) and are complete:
a message is only ever put into a queue after its copies have finished.

Dimension suffixes: T packed tokens, L captured layers, D hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlanItem:
    """One batch of the epoch plan: which samples are run through the target together.

    `pack_id` is unique and stable within an epoch (0..n-1 in plan order); `bucket` indexes the length
    buckets.
    """

    epoch: int
    pack_id: int
    bucket: int
    sample_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedTokens:
    """Documents of one pack, concatenated to one row without padding; all tensors on the CPU.

    `position_T` restarts at 0 in each document; `doc_id_T` counts documents from 0.
    """

    input_ids_T: Tensor
    """int64 [T]"""
    loss_mask_T: Tensor
    """bool [T], True on supervised (assistant) tokens"""
    doc_id_T: Tensor
    """int32 [T]"""
    position_T: Tensor
    """int64 [T]"""


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenStates:
    """What a target hands over for some tokens, padded [B, S, ...] or packed [T, ...]."""

    features: Tensor
    """target dtype [..., L, D]: residual stream after each tapped layer"""
    last_hidden: Tensor | None = None
    """[..., D] last hidden state, after the final norm; only when soft labels are used"""

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return self.features.nbytes + (0 if self.last_hidden is None else self.last_hidden.nbytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class FeaturePack:
    """Hidden states of one batch, ready for a drafter. `nbytes` counts the tensors that wait in the queue."""

    epoch: int
    pack_id: int
    bucket: int
    tokens: PackedTokens
    features_TLD: Tensor
    """target dtype [T, L, D]: residual stream after each tapped layer, in `target_layer_ids` order"""
    last_hidden_TD: Tensor | None
    """[T, D] last hidden state (after the final norm), only when soft labels are used"""
    nbytes: int

    @classmethod
    def unplanned(cls, tokens: PackedTokens, states: HiddenStates) -> FeaturePack:
        """Wrap states [T, ...] that no epoch plan asked for: of a measurement, a check, an evaluation."""
        return cls(
            epoch=0,
            pack_id=0,
            bucket=0,
            tokens=tokens,
            features_TLD=states.features,
            last_hidden_TD=states.last_hidden,
            nbytes=states.nbytes,
        )

    @property
    def states(self) -> HiddenStates:
        """Both tensors as one value."""
        return HiddenStates(features=self.features_TLD, last_hidden=self.last_hidden_TD)
