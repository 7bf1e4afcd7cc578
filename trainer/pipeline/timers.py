"""Where time goes: mean milliseconds per stage, and counters per worker, all read without waiting for a GPU.

Owned by the workers, read by the telemetry thread. On CUDA a stage is a pair of events that are looked at
only after they have completed; on the CPU it is wall time.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def new_event(*, timing: bool = False) -> torch.cuda.Event:
    """Make a CUDA event."""
    return torch.cuda.Event(enable_timing=timing)  # type: ignore[no-untyped-call]


def has_happened(event: torch.cuda.Event) -> bool:
    """Tell whether the device has passed the event, without waiting."""
    return bool(event.query())  # type: ignore[no-untyped-call]


class StageTimers:
    """Mean duration of each named stage since the last `take`."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._is_cuda = device.startswith("cuda")
        self._lock = threading.Lock()
        self._sums: dict[str, float] = defaultdict(float)
        self._counts: dict[str, int] = defaultdict(int)
        self._pending: deque[tuple[str, torch.cuda.Event, torch.cuda.Event]] = deque(maxlen=4096)
        self._last: dict[str, float] = {}

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time device work that is queued inside the block (on the CPU: the block itself)."""
        if not self._is_cuda:
            with self.wait(name):
                yield
            return
        start, end = new_event(timing=True), new_event(timing=True)
        start.record()
        yield
        end.record()
        with self._lock:
            self._pending.append((name, start, end))

    @contextlib.contextmanager
    def wait(self, name: str) -> Iterator[None]:
        """Time a wait on the host by the clock."""
        started = time.perf_counter()
        yield
        self._add(name, (time.perf_counter() - started) * 1000.0)

    def take(self) -> Mapping[str, float]:
        """Return `<stage>_ms` means since the last call; a stage without a new value keeps its former one."""
        with self._lock:
            while self._pending and has_happened(self._pending[0][2]):
                name, start, end = self._pending.popleft()
                self._sums[name] += start.elapsed_time(end)
                self._counts[name] += 1
            fresh = {f"{name}_ms": round(self._sums[name] / n, 3) for name, n in self._counts.items() if n}
            self._sums.clear()
            self._counts.clear()
            self._last |= fresh
            return dict(self._last)

    def clear(self) -> None:
        """Forget everything timed so far (warm-up: it holds compilation)."""
        with self._lock:
            self._pending.clear()
            for sums in (self._sums, self._counts, self._last):
                sums.clear()

    def _add(self, name: str, ms: float) -> None:
        with self._lock:
            self._sums[name] += ms
            self._counts[name] += 1


class WorkerStats:
    """Counters of one worker; `busy_ratio` is its working share of the time since the last reading."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.batches = 0
        self.tokens = 0
        self._busy_s = 0.0
        self._seen_busy_s = 0.0
        self._seen_s = time.monotonic()

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Count the block as busy time."""
        started = time.monotonic()
        yield
        self._busy_s += time.monotonic() - started

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Take the block out of the busy time it lies in (same thread or not)."""
        started = time.monotonic()
        yield
        self._busy_s -= time.monotonic() - started

    def add(self, tokens: int) -> None:
        """Count one finished batch."""
        self.batches += 1
        self.tokens += tokens

    def take(self) -> Mapping[str, Any]:
        """Return the record of the metrics line."""
        now, busy = time.monotonic(), self._busy_s
        ratio = (busy - self._seen_busy_s) / max(now - self._seen_s, 1e-9)
        self._seen_s, self._seen_busy_s = now, busy
        return {
            "name": self.name,
            "batches": self.batches,
            "tokens": self.tokens,
            "busy_ratio": round(min(1.0, max(0.0, ratio)), 4),
        }


class DeferredScalars:
    """Device scalars on their way to the host: started without waiting, read when they have arrived."""

    def __init__(self, scalars: Mapping[str, Tensor]) -> None:
        self._names = tuple(scalars)
        packed = torch.stack([value.detach().double() for value in scalars.values()])
        self._event: torch.cuda.Event | None = None
        if packed.device.type == "cuda":
            self._host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            self._host.copy_(packed, non_blocking=True)
            self._event = new_event()
            self._event.record()
            self._packed = packed  # the source must outlive the copy
        else:
            self._host = packed

    def is_ready(self) -> bool:
        """Tell whether `read` returns at once."""
        return self._event is None or has_happened(self._event)

    def read(self) -> dict[str, float]:
        """Return the values by name; waits only when called before the copy has finished."""
        if self._event is not None:
            self._event.synchronize()  # host sync: the copy was started an interval ago, or training is over
        return dict(zip(self._names, self._host.tolist(), strict=True))


def find_uuid(device: str) -> str | None:
    """Return the card behind a CUDA device as NVML names it (`GPU-…`); None where torch does not say."""
    found = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return None if found is None else f"GPU-{str(found).removeprefix('GPU-')}"


def cuda_memory(devices: Sequence[str]) -> list[Mapping[str, Any]]:
    """Return the allocator's figures of each CUDA device in use (host counters, no sync)."""
    records: list[Mapping[str, Any]] = []
    for device in devices:
        if not device.startswith("cuda"):
            continue
        stats = torch.cuda.memory_stats(device)
        allocated = stats.get("allocated_bytes.all.current", 0)
        reserved = stats.get("reserved_bytes.all.current", 0)
        records.append(
            {
                "index": torch.device(device).index,
                "uuid": find_uuid(device),
                "allocated_bytes": allocated,
                "reserved_bytes": reserved,
                "fragmentation_bytes": reserved - allocated,
                "peak_bytes": stats.get("allocated_bytes.all.peak", 0),
                "alloc_retries": stats.get("num_alloc_retries", 0),
                "ooms": stats.get("num_ooms", 0),
            }
        )
    return records
