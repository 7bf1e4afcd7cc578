"""Hidden states of whole samples, kept in host memory so that later epochs need no target forward.

Called by the target worker when `target.cache_features_bytes` is set. What is kept is what the sample's first
batch produced: mathematically the same in every batch, but not bit for bit (kernels round differently with
the batch's shape). Must not grow above its limit; what does not fit is computed again each time.

Dimension suffixes: T tokens of the sample, L captured layers, D hidden size.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor


class SampleCache:
    """Thread-safe store from sample id to hidden states [T, L, D] on the CPU."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._entries: dict[int, Tensor] = {}
        self.nbytes = 0

    def find_pack(self, sample_ids: Sequence[int]) -> Tensor | None:
        """Return the packed hidden states of these samples in order, or None when one is missing."""
        with self._lock:
            parts = [self._entries.get(sample) for sample in sample_ids]
        if any(part is None for part in parts):
            return None
        return torch.cat([part for part in parts if part is not None])

    def add_pack(self, sample_ids: Sequence[int], lengths: Sequence[int], hidden_TLD: Tensor) -> None:
        """Keep a copy of each sample of a pack as far as there is room."""
        for sample, part in zip(sample_ids, torch.split(hidden_TLD, list(lengths)), strict=True):
            size = part.numel() * part.element_size()
            with self._lock:
                if sample in self._entries or self.nbytes + size > self._max_bytes:
                    continue
                self._entries[sample] = part.clone()
                self.nbytes += size
