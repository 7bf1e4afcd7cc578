"""How hidden states travel from a target device through host memory to a drafter device.

Owns streams, events, pack slots, pinned buffers and the threads that wait for copies. The target worker calls
a sender, the drafter worker a receiver. On the CPU both are plain; on CUDA the rules are:

- packing runs on the compute stream, into a preallocated slot; nothing is allocated for a copy;
- an item enters the hidden-states queue only after its copy to pinned memory has completed;
- a buffer is written again only behind an event that its reader recorded, never because the host moved on.

The last hidden state, when soft labels want it, lies behind the captured layers in the same buffer: one slot,
one copy, one event for both.

Dimension suffixes: B batch, S padded length, T packed tokens, L captured layers, D hidden size.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from trainer.pipeline.messages import FeaturePack, HiddenStates
from trainer.pipeline.queues import HiddenStatesQueue
from trainer.pipeline.timers import StageTimers, new_event
from trainer.pipeline.workers import WAIT_S, Board

DEVICE_SLOTS = 2
HOST_COPIES = DEVICE_SLOTS + 2
"""Pinned buffers of a sender outside the queue: copies that wait, one delivered now, one started now."""


class PinnedPool:
    """Reusable pinned host buffers; one buffer serves one pack at a time.

    Buffers are only handed back after the event that ends their last reader has completed. The pool never
    shrinks: pinning is slow, so it keeps whatever was once in flight at one time, of each size for itself.
    Where lengths mix unevenly that is more than the queue holds at once; `plan` counts the full queue and
    `HOST_COPIES` beside it, as if every buffer could serve every length.
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


Deliver = Callable[[HiddenStates, Tensor | None], None]
"""Receives finished, packed hidden states on the host and their pinned buffer."""


class Sender(Protocol):
    """Brings the valid rows of a target's output to the host."""

    timers: StageTimers
    """stages `pack` and `d2h`; the target's worker adds its own"""

    def send(self, states: HiddenStates, valid_rows_T: Tensor, deliver: Deliver) -> None:
        """Start the transfer of padded states; `deliver` is called when the bytes are complete."""

    def finish(self) -> None:
        """Wait until everything sent has been delivered."""


class CpuSender:
    """Gathers and delivers at once."""

    def __init__(self) -> None:
        self.timers = StageTimers("cpu")

    def send(self, states: HiddenStates, valid_rows_T: Tensor, deliver: Deliver) -> None:
        """Deliver the valid rows."""
        with self.timers.stage("pack"):
            packed = pick_rows(states, valid_rows_T)
        deliver(packed, None)

    def finish(self) -> None:
        """Nothing is ever in flight."""


def pick_rows(states: HiddenStates, rows_T: Tensor) -> HiddenStates:
    """Gather the given rows of padded states [B, S, ...] into packed ones [T, ...]."""
    last = states.last_hidden
    return HiddenStates(
        features=states.features.flatten(0, 1).index_select(0, rows_T),
        last_hidden=None if last is None else last.flatten(0, 1).index_select(0, rows_T),
    )


class _Slot:
    """One preallocated, flat device buffer and the event behind its last reader.

    `shape` is the largest pack: tokens, vectors per token (captured layers, and one for the last hidden state
    where it travels), width.
    """

    def __init__(self, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        self.buffer = torch.empty(prod(shape), dtype=dtype, device=device)
        self.read_done: torch.cuda.Event | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Copy:
    """A copy to the host on its way, and who gets it."""

    copied: torch.cuda.Event
    states: HiddenStates
    buffer: Tensor
    deliver: Deliver


class CudaSender:
    """Packs on the compute stream, copies on a second stream, delivers from a completion thread."""

    def __init__(
        self, *, board: Board, pool: PinnedPool, device: str, shape: tuple[int, int, int], dtype: torch.dtype
    ) -> None:
        self._board = board
        self._pool = pool
        self._device = torch.device(device)
        self.timers = StageTimers(device)
        self._copy_stream = _new_stream(self._device)
        self._slots = [_Slot(shape, dtype, self._device) for _ in range(DEVICE_SLOTS)]
        self._turn = 0
        self._in_flight: queue.Queue[_Copy | None] = queue.Queue(maxsize=DEVICE_SLOTS)
        self._thread = threading.Thread(target=self._complete, name=f"copies-{device}", daemon=True)
        self._thread.start()

    def send(self, states: HiddenStates, valid_rows_T: Tensor, deliver: Deliver) -> None:
        """Queue pack and copy; waits only when too many copies are in flight."""
        slot = self._slots[self._turn]
        self._turn = (self._turn + 1) % len(self._slots)
        compute = torch.cuda.current_stream(self._device)
        if slot.read_done is not None:
            compute.wait_event(slot.read_done)
        rows = valid_rows_T.pin_memory().to(self._device, non_blocking=True)
        device_states, flat = carve(slot.buffer, states, rows.numel())
        with self.timers.stage("pack"):
            _pack_into(device_states, states, rows)
        packed = new_event()
        packed.record(compute)
        buffer = self._pool.acquire(flat.nbytes)
        host_states, host_flat = carve(buffer.view(flat.dtype), states, rows.numel())
        with torch.cuda.stream(self._copy_stream):
            self._copy_stream.wait_event(packed)
            with self.timers.stage("d2h"):
                host_flat.copy_(flat, non_blocking=True)
            copied = new_event()
            copied.record(self._copy_stream)
        slot.read_done = copied
        self._enqueue(_Copy(copied=copied, states=host_states, buffer=buffer, deliver=deliver))

    def finish(self) -> None:
        """Wait for the completion thread to deliver all."""
        self._enqueue(None)
        while self._thread.is_alive():
            self._thread.join(WAIT_S)
            self._board.check()

    def _enqueue(self, entry: _Copy | None) -> None:
        while True:
            try:
                self._in_flight.put(entry, timeout=WAIT_S)
            except queue.Full:
                self._board.check()
            else:
                return

    def _complete(self) -> None:
        with self._board.guarding(self._thread.name):
            while (entry := self._in_flight.get()) is not None:
                entry.copied.synchronize()  # host sync: in this thread only, it exists to wait for copies
                entry.deliver(entry.states, entry.buffer)


class Receiver(Protocol):
    """Hands packs to a drafter, on its device."""

    timers: StageTimers
    """stage `h2d`; the drafter's worker adds its own"""

    def next(self, *, stop_empties: bool) -> FeaturePack | None:
        """Return the next pack; None when none will come (or, if asked so, when the run stops)."""

    def done(self, pack: FeaturePack) -> None:
        """Say that all work that reads this pack has been queued on the compute stream."""


class CpuReceiver:
    """Takes packs straight from the queue."""

    def __init__(self, source: HiddenStatesQueue[QueuedPack], *, consumer: int = 0) -> None:
        self._source = source
        self.timers = StageTimers("cpu")
        self._consumer = consumer

    def next(self, *, stop_empties: bool) -> FeaturePack | None:
        """Return the next pack."""
        item = self._source.get(consumer=self._consumer, stop_empties=stop_empties)
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
        consumer: int = 0,
    ) -> None:
        self._source = source
        self._consumer = consumer
        self._board = board
        self._pool = pool
        self._device = torch.device(device)
        self.timers = StageTimers(device)
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
                    # this prefetch thread stops taking turns, so no other drafter may wait for them
                    self._source.leave()
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
        with self._board.guarding(self._thread.name):
            while (item := self._source.get(consumer=self._consumer)) is not None:
                slot = self._take_slot()
                if slot is None:
                    break
                self._ready.put(self._copy(item, slot))
            self._ready.put(None)

    def _take_slot(self) -> _Slot | None:
        """Wait for a device slot; None when the drafters take nothing any more."""
        while not (self._source.is_closed or self._source.has_left):
            try:
                return self._free.get(timeout=WAIT_S)
            except queue.Empty:
                self._board.check()
        return None

    def _copy(self, item: QueuedPack, slot: _Slot) -> tuple[FeaturePack, _Slot, torch.cuda.Event]:
        host = item.pack.states
        device, _ = carve(slot.buffer, host, host.features.shape[0])
        with torch.cuda.stream(self._copy_stream):
            if slot.read_done is not None:
                self._copy_stream.wait_event(slot.read_done)
            with self.timers.stage("h2d"):
                device.features.copy_(host.features, non_blocking=True)
                if device.last_hidden is not None and host.last_hidden is not None:
                    device.last_hidden.copy_(host.last_hidden, non_blocking=True)
            copied = new_event()
            copied.record(self._copy_stream)
        copied.synchronize()  # host sync: in this thread only; the pinned buffer is free from here on
        if item.pinned is not None:
            self._pool.release(item.pinned)
        on_device = replace(item.pack, features_TLD=device.features, last_hidden_TD=device.last_hidden)
        return on_device, slot, copied


def open_sender(
    *, board: Board, pool: PinnedPool, device: torch.device, shape: tuple[int, int, int], dtype: torch.dtype
) -> Sender:
    """Return the sender for a target's device; `shape` is the largest pack, see `Lines.slot_shape`."""
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
    consumer: int,
) -> Receiver:
    """Return the receiver of drafter `consumer`; `shape` and `dtype` are those of the packs."""
    if device.type == "cpu":
        return CpuReceiver(source, consumer=consumer)
    return CudaReceiver(
        source, board=board, pool=pool, device=str(device), shape=shape, dtype=dtype, consumer=consumer
    )


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def carve(flat: Tensor, like: HiddenStates, rows: int) -> tuple[HiddenStates, Tensor]:
    """Lay the states of `rows` tokens, shaped as in `like`, into the front of a flat buffer.

    Returns:
        The states as views [T, L, D] and [T, D], and the stretch of the buffer that both cover.
    """
    layers, width = like.features.shape[-2:]
    end = rows * layers * width
    features = flat[:end].view(rows, layers, width)
    if like.last_hidden is None:
        return HiddenStates(features=features), flat[:end]
    last = flat[end : end + rows * width].view(rows, width)
    return HiddenStates(features=features, last_hidden=last), flat[: end + rows * width]


def _pack_into(packed: HiddenStates, states: HiddenStates, rows_T: Tensor) -> None:
    """Gather the valid rows of padded states straight into a slot; allocates nothing."""
    torch.index_select(states.features.flatten(0, 1), 0, rows_T, out=packed.features)
    if states.last_hidden is not None and packed.last_hidden is not None:
        torch.index_select(states.last_hidden.flatten(0, 1), 0, rows_T, out=packed.last_hidden)
