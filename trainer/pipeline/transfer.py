"""How hidden states travel from a target device through host memory to a drafter device.

Owns streams, events, pack slots, pinned buffers and the threads that wait for copies. The target worker calls
a sender, the drafter worker a receiver. On the CPU both are plain; on CUDA the rules are:

- packing runs on the compute stream, into a preallocated slot; nothing is allocated for a copy;
- an item enters the hidden-states queue only after its copy to pinned memory has completed;
- a buffer is written again only behind an event that its reader recorded, never because the host moved on.

Dimension suffixes: B batch, S padded length, T packed tokens, L captured layers, D hidden size.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from trainer.pipeline.messages import FeaturePack
from trainer.pipeline.queues import HiddenStatesQueue
from trainer.pipeline.timers import new_event
from trainer.pipeline.workers import WAIT_S, Board

DEVICE_SLOTS = 2


class PinnedPool:
    """Reusable pinned host buffers; one buffer serves one pack at a time.

    Buffers are only handed back after the event that ends their last reader has completed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[Tensor] = []

    def acquire(self, nbytes: int) -> Tensor:
        """Return a uint8 buffer of at least `nbytes`."""
        with self._lock:
            fitting = [buffer for buffer in self._free if nbytes <= buffer.numel() <= 2 * nbytes]
            if fitting:
                best = min(fitting, key=Tensor.numel)
                self._free = [buffer for buffer in self._free if buffer is not best]
                return best
        # rounded up so that packs of similar length share buffers
        return torch.empty(-(-nbytes // (1 << 20)) << 20, dtype=torch.uint8, pin_memory=True)

    def release(self, buffer: Tensor) -> None:
        """Take a buffer back."""
        with self._lock:
            self._free.append(buffer)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedPack:
    """A pack in the hidden-states queue, with the pinned buffer that its tensors live in (None on CPU)."""

    pack: FeaturePack
    pinned: Tensor | None

    @property
    def bucket(self) -> int:
        """Length bucket."""
        return self.pack.bucket

    @property
    def nbytes(self) -> int:
        """Bytes that wait."""
        return self.pack.nbytes


Deliver = Callable[[Tensor, Tensor | None], None]
"""Receives finished hidden states [T, L, D] on the host and their pinned buffer."""


class Sender(Protocol):
    """Brings the valid rows of a target's output to the host."""

    def send(self, hidden_BSLD: Tensor, valid_rows_T: Tensor, deliver: Deliver) -> None:
        """Start the transfer; `deliver` is called when the bytes are complete."""

    def finish(self) -> None:
        """Wait until everything sent has been delivered."""


class CpuSender:
    """Gathers and delivers at once."""

    def send(self, hidden_BSLD: Tensor, valid_rows_T: Tensor, deliver: Deliver) -> None:
        """Deliver the valid rows."""
        deliver(hidden_BSLD.flatten(0, 1).index_select(0, valid_rows_T), None)

    def finish(self) -> None:
        """Nothing is ever in flight."""


class _Slot:
    """One preallocated device buffer and the event behind its last reader."""

    def __init__(self, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        self.buffer_TLD = torch.empty(shape, dtype=dtype, device=device)
        self.read_done: torch.cuda.Event | None = None


class CudaSender:
    """Packs on the compute stream, copies on a second stream, delivers from a completion thread."""

    def __init__(
        self, *, board: Board, pool: PinnedPool, device: str, shape: tuple[int, int, int], dtype: torch.dtype
    ) -> None:
        self._board = board
        self._pool = pool
        self._device = torch.device(device)
        self._copy_stream = _new_stream(self._device)
        self._slots = [_Slot(shape, dtype, self._device) for _ in range(DEVICE_SLOTS)]
        self._turn = 0
        self._in_flight: queue.Queue[tuple[torch.cuda.Event, Tensor, Tensor, Deliver] | None] = queue.Queue(
            maxsize=DEVICE_SLOTS
        )
        self._thread = threading.Thread(target=self._complete, name=f"copies-{device}", daemon=True)
        self._thread.start()

    def send(self, hidden_BSLD: Tensor, valid_rows_T: Tensor, deliver: Deliver) -> None:
        """Queue pack and copy; waits only when too many copies are in flight."""
        slot = self._slots[self._turn]
        self._turn = (self._turn + 1) % len(self._slots)
        compute = torch.cuda.current_stream(self._device)
        if slot.read_done is not None:
            compute.wait_event(slot.read_done)
        packed_TLD = slot.buffer_TLD[: valid_rows_T.numel()]
        rows = valid_rows_T.pin_memory().to(self._device, non_blocking=True)
        torch.index_select(hidden_BSLD.flatten(0, 1), 0, rows, out=packed_TLD)
        packed = new_event()
        packed.record(compute)
        buffer = self._pool.acquire(packed_TLD.numel() * packed_TLD.element_size())
        host_TLD = _view(buffer, packed_TLD)
        with torch.cuda.stream(self._copy_stream):
            self._copy_stream.wait_event(packed)
            host_TLD.copy_(packed_TLD, non_blocking=True)
            copied = new_event()
            copied.record(self._copy_stream)
        slot.read_done = copied
        self._enqueue((copied, host_TLD, buffer, deliver))

    def finish(self) -> None:
        """Wait for the completion thread to deliver all."""
        self._enqueue(None)
        while self._thread.is_alive():
            self._thread.join(WAIT_S)
            self._board.check()

    def _enqueue(self, entry: tuple[torch.cuda.Event, Tensor, Tensor, Deliver] | None) -> None:
        while True:
            try:
                self._in_flight.put(entry, timeout=WAIT_S)
            except queue.Full:
                self._board.check()
            else:
                return

    def _complete(self) -> None:
        try:
            while (entry := self._in_flight.get()) is not None:
                copied, host_TLD, buffer, deliver = entry
                copied.synchronize()  # host sync: in this thread only, it exists to wait for copies
                deliver(host_TLD, buffer)
        except BaseException as error:  # noqa: BLE001 - the thread boundary: kept, ends the run
            self._board.fail(self._thread.name, error)


class Receiver(Protocol):
    """Hands packs to a drafter, on its device."""

    def next(self, *, stop_empties: bool) -> FeaturePack | None:
        """Return the next pack; None when none will come (or, if asked so, when the run stops)."""

    def done(self, pack: FeaturePack) -> None:
        """Say that all work that reads this pack has been queued on the compute stream."""


class CpuReceiver:
    """Takes packs straight from the queue."""

    def __init__(self, source: HiddenStatesQueue[QueuedPack]) -> None:
        self._source = source

    def next(self, *, stop_empties: bool) -> FeaturePack | None:
        """Return the next pack."""
        item = self._source.get(stop_empties=stop_empties)
        return None if item is None else item.pack

    def done(self, pack: FeaturePack) -> None:
        """Nothing to give back."""


class CudaReceiver:
    """Copies the next pack to the device while the present one is used; runs a prefetch thread."""

    def __init__(
        self,
        source: HiddenStatesQueue[QueuedPack],
        *,
        board: Board,
        pool: PinnedPool,
        device: str,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
    ) -> None:
        self._source = source
        self._board = board
        self._pool = pool
        self._device = torch.device(device)
        self._copy_stream = _new_stream(self._device)
        self._free: queue.Queue[_Slot] = queue.Queue()
        for _ in range(DEVICE_SLOTS):
            self._free.put(_Slot(shape, dtype, self._device))
        self._ready: queue.Queue[tuple[FeaturePack, _Slot, torch.cuda.Event] | None] = queue.Queue()
        self._in_use: dict[tuple[int, int], _Slot] = {}
        self._is_drained = False
        self._thread = threading.Thread(target=self._prefetch, name=f"prefetch-{device}", daemon=True)
        self._thread.start()

    def next(self, *, stop_empties: bool) -> FeaturePack | None:
        """Return the next pack; its device tensor is ordered behind the copy on the current stream."""
        while not self._is_drained:
            try:
                entry = self._ready.get(timeout=WAIT_S)
            except queue.Empty:
                if stop_empties and self._board.stop.is_set():
                    return None
                self._board.check()
                continue
            if entry is None:
                self._is_drained = True
                break
            pack, slot, copied = entry
            torch.cuda.current_stream(self._device).wait_event(copied)
            self._in_use[pack.epoch, pack.pack_id] = slot
            return pack
        return None

    def done(self, pack: FeaturePack) -> None:
        """Give the device slot back behind everything queued so far."""
        slot = self._in_use.pop((pack.epoch, pack.pack_id))
        slot.read_done = new_event()
        slot.read_done.record(torch.cuda.current_stream(self._device))
        self._free.put(slot)

    def _prefetch(self) -> None:
        try:
            while (item := self._source.get()) is not None:
                slot = self._take_slot()
                if slot is None:
                    break
                self._ready.put(self._copy(item, slot))
            self._ready.put(None)
        except BaseException as error:  # noqa: BLE001 - the thread boundary: kept, ends the run
            self._board.fail(self._thread.name, error)

    def _take_slot(self) -> _Slot | None:
        """Wait for a device slot; None when the drafter takes nothing any more."""
        while not self._source.is_closed:
            try:
                return self._free.get(timeout=WAIT_S)
            except queue.Empty:
                self._board.check()
        return None

    def _copy(self, item: QueuedPack, slot: _Slot) -> tuple[FeaturePack, _Slot, torch.cuda.Event]:
        host_TLD = item.pack.features_TLD
        device_TLD = slot.buffer_TLD[: host_TLD.shape[0]]
        with torch.cuda.stream(self._copy_stream):
            if slot.read_done is not None:
                self._copy_stream.wait_event(slot.read_done)
            device_TLD.copy_(host_TLD, non_blocking=True)
            copied = new_event()
            copied.record(self._copy_stream)
        copied.synchronize()  # host sync: in this thread only; the pinned buffer is free from here on
        if item.pinned is not None:
            self._pool.release(item.pinned)
        return replace(item.pack, features_TLD=device_TLD), slot, copied


def open_sender(
    *, board: Board, pool: PinnedPool, device: torch.device, shape: tuple[int, int, int], dtype: torch.dtype
) -> Sender:
    """Return the sender for a target's device; `shape` is the largest pack [T, L, D]."""
    if device.type == "cpu":
        return CpuSender()
    return CudaSender(board=board, pool=pool, device=str(device), shape=shape, dtype=dtype)


def open_receiver(
    source: HiddenStatesQueue[QueuedPack],
    *,
    board: Board,
    pool: PinnedPool,
    device: torch.device,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
) -> Receiver:
    """Return the receiver for a drafter's device; `shape` and `dtype` are those of the packs."""
    if device.type == "cpu":
        return CpuReceiver(source)
    return CudaReceiver(source, board=board, pool=pool, device=str(device), shape=shape, dtype=dtype)


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _view(buffer: Tensor, like: Tensor) -> Tensor:
    nbytes = like.numel() * like.element_size()
    return buffer[:nbytes].view(like.dtype).view(like.shape)
