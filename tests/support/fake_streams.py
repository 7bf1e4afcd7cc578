"""CUDA's streams and events on the CPU: the order of a real device, with delays where a test wants them.

`install` puts stand-ins where `trainer.pipeline.transfer` meets CUDA. Work that a device would queue
(non-blocking copies, gathers into a slot) is queued on a thread per stream and done later, so that a
buffer which is read or written too early shows as wrong bytes. Every thread has the same compute stream,
as on one GPU. Must not be used outside tests.
"""

from __future__ import annotations

import contextlib
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator

import torch

from trainer.pipeline import transfer


class FakeStream:
    """Does what it is given in order, on its own thread.

    Args:
        delay: called before each piece of work.
        obeys: False drops waits for events, as a program that forgot them would.
    """

    def __init__(self, delay: Callable[[], None], *, obeys: bool = True) -> None:
        self._delay = delay
        self._obeys = obeys
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="stream", daemon=True)
        self._thread.start()

    def put(self, work: Callable[[], object]) -> None:
        """Queue device work."""
        self._work.put(work)

    def wait_event(self, event: FakeEvent) -> None:
        """Order what follows behind the event as it was recorded last."""
        flag = event.flag
        if self._obeys:
            self._work.put(lambda: flag.wait(60))

    def end(self) -> None:
        """Finish what is queued and end the thread."""
        self._work.put(None)
        self._thread.join(60)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            self._delay()
            work()


class FakeEvent:
    """A mark in a stream."""

    def __init__(self) -> None:
        self.flag = threading.Event()

    def record(self, stream: FakeStream) -> None:
        """Mark the present end of a stream; an event may be recorded again."""
        self.flag = threading.Event()
        stream.put(self.flag.set)

    def synchronize(self) -> None:
        """Wait on the host."""
        assert self.flag.wait(60)


class FakeDevice:
    """All streams of the stand-in device."""

    def __init__(self, *, seed: int, delay_chance: float, obeys: bool) -> None:
        self._rng = random.Random(seed)
        self._delay_chance = delay_chance
        self._obeys = obeys
        self._streams: list[FakeStream] = []
        self._current = threading.local()
        self.compute = self.new_stream()

    def new_stream(self, _device: object = None) -> FakeStream:
        """Make a stream."""
        self._streams.append(FakeStream(self._delay, obeys=self._obeys))
        return self._streams[-1]

    def current_stream(self, _device: object = None) -> FakeStream:
        """The calling thread's stream."""
        stream: FakeStream = getattr(self._current, "stream", self.compute)
        return stream

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        """Make a stream the calling thread's for a while."""
        self._current.stream = stream
        try:
            yield
        finally:
            del self._current.stream

    def end(self) -> None:
        """End all streams."""
        for stream in self._streams:
            stream.end()

    def _delay(self) -> None:
        if self._rng.random() < self._delay_chance:
            time.sleep(self._rng.random() * 0.001)


def install(monkeypatch, *, seed: int = 0, delay_chance: float = 0.02, obeys: bool = True) -> FakeDevice:
    """Replace CUDA in `transfer` by a fake device; devices are then named `cpu`."""
    device = FakeDevice(seed=seed, delay_chance=delay_chance, obeys=obeys)
    real_copy, real_select, real_empty = torch.Tensor.copy_, torch.index_select, torch.empty

    def copy_(self, source, non_blocking=False):
        if not non_blocking:
            return real_copy(self, source)
        device.current_stream().put(lambda: real_copy(self, source))
        return self

    def index_select(*args, out=None):
        if out is None:
            return real_select(*args)
        device.current_stream().put(lambda: real_select(*args, out=out))
        return out

    monkeypatch.setattr(transfer, "_new_stream", device.new_stream)
    monkeypatch.setattr(transfer, "new_event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", device.current_stream)
    monkeypatch.setattr(torch.cuda, "stream", device.stream)
    monkeypatch.setattr(torch.Tensor, "copy_", copy_, raising=False)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self, raising=False)
    monkeypatch.setattr(torch, "index_select", index_select)
    monkeypatch.setattr(
        torch, "empty", lambda *args, pin_memory=False, **options: real_empty(*args, **options)
    )
    return device
