"""A point in monotonic time by which a call must have ended; shared by the transports."""

from __future__ import annotations

from supervisor.clock import Clock, SystemClock


class Deadline:
    """`seconds` from now. `remaining()` never goes below zero, so it can be handed to any timeout."""

    def __init__(self, seconds: float, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self.seconds = seconds
        self._end = self._clock.monotonic() + seconds

    def remaining(self) -> float:
        """Seconds left, 0.0 when it has passed."""
        return max(0.0, self._end - self._clock.monotonic())

    def has_passed(self) -> bool:
        """True once nothing is left."""
        return self.remaining() <= 0.0
