"""The copy of a training state in host memory, taken between two optimizer steps.

Called by `checkpoint.saver` on the drafter's thread. Owns the host buffers, which stay allocated: pinning
tens of gigabytes anew for each checkpoint would take longer than the copy. A snapshot is overwritten by the
next one, so whoever writes it to disk must have finished before. Must not know what the tensors mean.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from torch import Tensor

_LOG = logging.getLogger(__name__)


class HostSnapshot:
    """Host buffers for one state: pinned where the source is on CUDA, so that the copy runs at full speed."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._may_pin = True

    def take(self, sources: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy every tensor; returns when the values are on the host.

        Args:
            sources: by name, on any devices; read on each device's current stream.

        Returns:
            Contiguous CPU tensors that nothing but the next `take` changes.
        """
        devices: set[torch.device] = set()
        taken: dict[str, Tensor] = {}
        for name, source in sources.items():
            buffer = self._buffer(name, source)
            buffer.copy_(source.detach(), non_blocking=source.is_cuda)
            if source.is_cuda:
                devices.add(source.device)
            taken[name] = buffer
        for device in devices:
            # host sync: the next step may change the sources; once per checkpoint, between steps
            torch.cuda.current_stream(device).record_event().synchronize()
        self._buffers = taken
        return dict(taken)

    def _buffer(self, name: str, source: Tensor) -> Tensor:
        known = self._buffers.get(name)
        if known is not None and known.shape == source.shape and known.dtype == source.dtype:
            return known
        if source.is_cuda and self._may_pin:
            try:
                return torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
            except RuntimeError as error:
                self._may_pin = False
                _LOG.warning(
                    "host memory for checkpoints cannot be pinned, copies will be slower: %s",
                    " ".join(str(error).split())[:200],
                )
        return torch.empty(source.shape, dtype=source.dtype)
