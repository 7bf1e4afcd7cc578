"""Sums over the drafter's replicas in one process: always in the same order, to the same bits everywhere.

Called by `optim.replicas`: each replica's thread offers tensors and accepts the sum, the first replica's
thread adds. On the CPU this is plain addition. On CUDA the others' tensors come to the first device by peer
copies and the sum goes back the same way; everything is queued behind events and no host thread waits for a
device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.pipeline.timers import new_event


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Tensors of one replica, complete on its stream behind `ready` (None on the CPU)."""

    tensors: Sequence[Tensor]
    ready: torch.cuda.Event | None


def offer(tensors: Sequence[Tensor]) -> Offer:
    """Offer tensors of one device; called on the thread whose current stream wrote them."""
    return Offer(tensors=tensors, ready=_mark(tensors[0].device))


class ReplicaSum:
    """Adds the tensors of all replicas into those of the first and copies the sum to the others.

    Args:
        across: adds over other machines what this process has summed; works in place, on the first
            replica's tensors.
    """

    def __init__(self, across: Callable[[Sequence[Tensor]], None] | None = None) -> None:
        self._across = across
        self._scratch: dict[torch.dtype, Tensor] = {}

    @torch.no_grad()
    def add(self, offers: Sequence[Offer]) -> torch.cuda.Event | None:
        """Queue the whole sum; returns the event behind it (None on the CPU, where it is done).

        Shapes and dtypes must agree between replicas. Addition goes from the first replica to the last.
        """
        first, others = offers[0], offers[1:]
        for other in others:
            accept(first.tensors[0].device, other.ready)
        for place, total in enumerate(first.tensors):
            for other in others:
                total.add_(self._bring_near(other.tensors[place], total))
        if self._across is not None:
            self._across(first.tensors)
        for other in others:
            for total, copy in zip(first.tensors, other.tensors, strict=True):
                copy.copy_(total, non_blocking=True)
        return _mark(first.tensors[0].device)

    def _bring_near(self, remote: Tensor, like: Tensor) -> Tensor:
        """Return the tensor on the first device; one buffer per dtype serves all, in stream order.

        That order holds because every drafter works on the default stream of its device: a copy between
        devices waits for what both current streams hold, and the thread that adds has the first device's
        default stream as its current one, with the default stream of each other device beside it. Work on
        another stream would need events of its own around the copy and around the buffer's next use.
        """
        if remote.device == like.device:
            return remote
        buffer = self._scratch.get(like.dtype)
        if buffer is None or buffer.numel() < like.numel():
            buffer = self._scratch[like.dtype] = torch.empty(
                like.numel(), dtype=like.dtype, device=like.device
            )
        near = buffer[: like.numel()].view(like.shape)
        return near.copy_(remote, non_blocking=True)


def accept(device: torch.device, done: torch.cuda.Event | None) -> None:
    """Order everything that the current stream does from here on behind the event."""
    if done is not None:
        torch.cuda.current_stream(device).wait_event(done)


def _mark(device: torch.device) -> torch.cuda.Event | None:
    if device.type != "cuda":
        return None
    event = new_event()
    event.record(torch.cuda.current_stream(device))
    return event
