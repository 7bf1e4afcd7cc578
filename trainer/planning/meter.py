"""Counts the bytes of live tensors while some code runs, and the most there were at one time.

Used by `planning.outline` around dry runs on the meta device, where tensors have sizes but no memory, and by
tests around real ones. What a kernel allocates inside itself is not seen. Must not know what is run.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ROUNDING = 512
"""The CUDA allocator's smallest unit: every tensor takes a multiple."""


@dataclass(slots=True)
class Phase:
    """Bytes that were live when a part of the work began and ended, and the most in between."""

    name: str
    begin: int
    end: int = 0
    peak: int = 0

    @property
    def workspace(self) -> int:
        """Bytes needed on top of what was there before and of what stays."""
        return self.peak - max(self.begin, self.end)


class PeakMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts storages that come into being on one kind of device while the mode is on.

    Args:
        device: `meta`, `cpu` or `cuda`.
    """

    def __init__(self, device: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.peak = 0
        self.phases: list[Phase] = []
        self._device = device
        self._known: dict[int, int] = {}

    def ignore(self, *tensors: Tensor) -> None:
        """Leave tensors out that exist already and may come back as the output of a view."""
        for tensor in tensors:
            self._known[tensor.untyped_storage()._cdata] = 0

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Mark a part of the work."""
        entry = Phase(name, self.live, peak=self.live)
        outer_peak, self.peak = self.peak, self.live
        yield
        entry.end, entry.peak = self.live, self.peak
        self.peak = max(outer_peak, self.peak)
        self.phases.append(entry)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and look at what came out."""
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.device.type == self._device:
                self._see(leaf)
        return out

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = -(-storage.nbytes() // ROUNDING) * ROUNDING
        self._known[key] = size
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.live -= self._known.pop(key, 0)
