"""Context keys and values of one sequence, kept between drafts at inference.

Used by `model.Drafter.draft` and owned by the speculative decoder. Only context rows live here: a block's own
keys and values are used once and never stored, so nothing has to be cropped away, and an entry never changes
after it was written (the context does not pass through the layers).

Dimension suffixes: G key/value heads, T context tokens, E head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor

_FIRST_CAPACITY = 256


class DraftCache:
    """Growing context keys and values, one pair of buffers per drafter layer."""

    def __init__(self, num_layers: int) -> None:
        self.length = 0
        """context tokens stored so far, equal for all layers between drafts"""
        self._keys: list[Tensor | None] = [None] * num_layers
        self._values: list[Tensor | None] = [None] * num_layers

    def extend(self, layer: int, keys_GTE: Tensor, values_GTE: Tensor) -> tuple[Tensor, Tensor]:
        """Append new context rows of one layer and return all of its rows; `length` moves with `advance`."""
        end = self.length + keys_GTE.shape[1]
        keys = self._keys[layer] = self._append(self._keys[layer], keys_GTE, end)
        values = self._values[layer] = self._append(self._values[layer], values_GTE, end)
        return keys[:, :end], values[:, :end]

    def advance(self, count: int) -> None:
        """Count `count` new context tokens as stored, after every layer has appended them."""
        self.length += count

    def rows(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the stored keys and values of one layer (views)."""
        keys, values = self._keys[layer], self._values[layer]
        if keys is None or values is None:
            raise LookupError(f"layer {layer} has no context yet: draft once before reading the cache")
        return keys[:, : self.length], values[:, : self.length]

    def _append(self, buffer: Tensor | None, new_GTE: Tensor, end: int) -> Tensor:
        if buffer is None or buffer.shape[1] < end:
            buffer = self._grow(buffer, new_GTE, end)
        buffer[:, self.length : end] = new_GTE
        return buffer

    def _grow(self, buffer: Tensor | None, new_GTE: Tensor, end: int) -> Tensor:
        """Double the room, so that appending stays linear over a whole generation."""
        room = _FIRST_CAPACITY if buffer is None else 2 * buffer.shape[1]
        grown = torch.empty(
            new_GTE.shape[0], max(room, end), new_GTE.shape[2], dtype=new_GTE.dtype, device=new_GTE.device
        )
        if buffer is not None:
            grown[:, : self.length] = buffer[:, : self.length]
        return grown
