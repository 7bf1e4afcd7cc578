"""Time as an input: the only place that reads the system's clocks.

Everything that waits or stamps takes a `Clock`; tests pass a simulated one. Deadlines use `monotonic`,
wall time is for display and order is by sequence number, so a clock that jumps changes nothing.
"""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
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
    """The real clocks."""

    def now(self) -> datetime:
        """Aware UTC wall time."""
        return datetime.now(UTC)

    def monotonic(self) -> float:
        """`time.monotonic()`."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """`asyncio.sleep`."""
        await asyncio.sleep(seconds)
