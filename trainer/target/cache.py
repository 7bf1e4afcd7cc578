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

from trainer.pipeline.messages import HiddenStates


class SampleCache:
    """Thread-safe store from sample id to its hidden states, packed, on the CPU."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._entries: dict[int, HiddenStates] = {}
        self.nbytes = 0

    def find_pack(self, sample_ids: Sequence[int]) -> HiddenStates | None:
        """Return the packed hidden states of these samples in order, or None when one is missing."""
        with self._lock:
            found = [self._entries.get(sample) for sample in sample_ids]
        parts = [part for part in found if part is not None]
        if len(parts) < len(found):
            return None
        lasts = [part.last_hidden for part in parts if part.last_hidden is not None]
        return HiddenStates(
            features=torch.cat([part.features for part in parts]),
            last_hidden=torch.cat(lasts) if lasts else None,
        )

    def add_pack(self, sample_ids: Sequence[int], lengths: Sequence[int], states: HiddenStates) -> None:
        """Keep a copy of each sample of a pack as far as there is room."""
        start = 0
        for sample, length in zip(sample_ids, lengths, strict=True):
            self._add(sample, states, slice(start, start + length))
            start += length

    def _add(self, sample: int, states: HiddenStates, rows: slice) -> None:
        last = states.last_hidden
        part = HiddenStates(features=states.features[rows], last_hidden=None if last is None else last[rows])
        with self._lock:
            if sample in self._entries or self.nbytes + part.nbytes > self._max_bytes:
                return
            self._entries[sample] = HiddenStates(
                features=part.features.clone(),
                last_hidden=None if part.last_hidden is None else part.last_hidden.clone(),
            )
            self.nbytes += part.nbytes
