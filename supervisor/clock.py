"""Time as an input: the only place that reads the system's clocks.

Everything that waits or stamps takes a `Clock`; tests pass a simulated one. Deadlines use `monotonic`,
wall time is for display and order is by sequence number, so a clock that jumps changes nothing.
"""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta
from typing import Protocol


class Clock(Protocol):
    """Wall time, monotonic time and sleep."""

    def now(self) -> datetime:
        """Aware UTC wall time, for display and records."""
        ...

    def monotonic(self) -> float:
        """Seconds on a clock that never jumps, for deadlines and ages."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Suspend the calling task."""
        ...


class SystemClock:
    """The real clocks.

    Wall time is read once, when the clock is made, and carried on by the time since boot: stored times are
    compared with later ones, and a wall clock that is set by a year must neither end a wait nor prolong it.
    """

    def __init__(self) -> None:
        self._wall = datetime.now(UTC)
        self._boot_s = _since_boot_s()

    def now(self) -> datetime:
        """Aware UTC wall time as of the start of the daemon, plus what has passed since."""
        return self._wall + timedelta(seconds=_since_boot_s() - self._boot_s)

    def monotonic(self) -> float:
        """`time.monotonic()`."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """`asyncio.sleep`."""
        await asyncio.sleep(seconds)


def _since_boot_s() -> float:
    """Monotonic seconds that also count while the machine sleeps, where the system has such a clock."""
    boot_clock: int | None = getattr(time, "CLOCK_BOOTTIME", None)
    return time.clock_gettime(boot_clock) if boot_clock is not None else time.monotonic()
