"""Many sequences of one target side by side: keys and values in slots, each at its own length.

Called by `eval.batched`. A slot's rows behind its length hold rubbish that no mask shows and that the next
step overwrites, so rolling back after a verify is nothing but not counting. Only for targets whose layers
keep plain keys and values (`Target.has_plain_cache`). Must not know the drafter.

Dimension suffixes: B slots, T tokens of a prompt, K block positions, S cached positions, G key/value heads,
E head dimension, L captured layers, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from trainer.errors import ConfigError
from trainer.target.capture import Target

_GRAIN = 64
"""Cached positions that take part are rounded up to it: fewer distinct shapes for kernels and allocator."""


class TargetSlots:
    """A fixed number of sequences that a target decodes together.

    Args:
        target: with a plain cache.
        slots: sequences at once.
        capacity: positions that each slot has room for.
    """

    def __init__(self, target: Target, *, slots: int, capacity: int, layer_ids: Sequence[int]) -> None:
        if not target.has_plain_cache:
            raise ConfigError(
                f"target cannot decode several sequences at once: {target.info.model_type} has layers whose "
                "state cannot be cut back; decode one prompt at a time"
            )
        self._target = target
        self._layer_ids = tuple(layer_ids)
        self._capacity = -(-capacity // _GRAIN) * _GRAIN
        self._entries = _SlotEntries(slots, self._capacity)

    @torch.no_grad()
    def prefill(self, slot: int, prompt_ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Start a sequence in a slot, whatever was there; `(logits_V of the last token, features_TLD)`."""
        device, length = self._target.device, len(prompt_ids)
        ids_1T = torch.tensor([prompt_ids], dtype=torch.int64, device=device)
        position_1T = torch.arange(length, device=device)[None]
        self._entries.place(slice(slot, slot + 1), position_1T, length)
        logits, hidden = self._target.run_rows(
            ids_1T,
            self._entries,
            self._layer_ids,
            positions_BT=position_1T,
            visible_BTS=position_1T[0][None, None, :] <= position_1T[..., None],
            logits_to_keep=1,
        )
        return logits[0, -1], hidden[0]

    @torch.no_grad()
    def step(self, ids_BK: Tensor, starts_B: Tensor, *, longest: int) -> tuple[Tensor, Tensor]:
        """Run a block of every slot at its own position.

        Args:
            ids_BK: tokens of all slots, free ones included.
            starts_B: position of each slot's first token.
            longest: upper bound of all starts, known on the host.

        Returns:
            `(logits_BKV, features_BKLD)`.
        """
        size, device = ids_BK.shape[1], ids_BK.device
        seen = min(-(-(longest + size) // _GRAIN) * _GRAIN, self._capacity)
        position_BK = starts_B[:, None] + torch.arange(size, device=device)
        self._entries.place(slice(0, len(starts_B)), position_BK, seen)
        return self._target.run_rows(
            ids_BK,
            self._entries,
            self._layer_ids,
            positions_BT=position_BK,
            visible_BTS=torch.arange(seen, device=device)[None, None, :] <= position_BK[..., None],
            logits_to_keep=0,
        )


class _SlotEntries(DynamicCache):  # type: ignore[misc]
    """What the target's layers take for their cache: writes rows in place, returns the slots' keys."""

    def __init__(self, slots: int, capacity: int) -> None:
        super().__init__()
        self._shape = slots, capacity
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}

    def place(self, slots: slice, position_BT: Tensor, seen: int) -> None:
        """Say where the next forward's rows go, and how many positions its layers see."""
        self._slots, self._positions, self._seen = slots, position_BT, seen
        self._rows = torch.arange(slots.start, slots.stop, device=position_BT.device)[:, None]

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *_args: Any,
        **_options: Any,
    ) -> tuple[Tensor, Tensor]:
        """Store one layer's new rows [B, G, T, E] and return what its attention may look at."""
        return (
            self._store(self._keys, layer_idx, key_states),
            self._store(self._values, layer_idx, value_states),
        )

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002 (the base class's signature)
        """Positions are given explicitly; nothing is to be derived from a common length."""
        return 0

    def _store(self, buffers: dict[int, Tensor], layer: int, rows_BGTE: Tensor) -> Tensor:
        if layer not in buffers:
            _, heads, _, width = rows_BGTE.shape
            # zeros, not rubbish: hidden keys get weight 0, and 0 times NaN would be NaN
            buffers[layer] = rows_BGTE.new_zeros((*self._shape, heads, width))
        buffers[layer][self._rows, self._positions] = rows_BGTE.transpose(1, 2)
        return buffers[layer][self._slots, : self._seen].transpose(1, 2)
