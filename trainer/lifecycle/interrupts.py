"""Ctrl-C and SIGTERM for the commands that are no training run.

Called by `trainer.__main__`. Both signals raise `KeyboardInterrupt` in the main thread, with the name of the
signal, so that files are closed and locks are given back as after any other error. Must not be used by
`train`, which saves before it ends (see `lifecycle.signals`).
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from trainer.errors import EXIT_STOPPED

SAME_STOP_S = 1.0
"""Signals within so short a time are one stop: `timeout` and process groups send it twice."""


class _Interrupter:
    """Raises for the first signal, and again for a later one that finds the process still there."""

    def __init__(self) -> None:
        self._count = 0
        self._last = float("-inf")

    def handle(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if now - self._last < SAME_STOP_S:
            return
        self._last = now
        self._count += 1
        if self._count > 2:
            os._exit(EXIT_STOPPED)
        raise KeyboardInterrupt(signal.Signals(number).name)


@contextmanager
def raising_on_stop() -> Iterator[None]:
    """Raise `KeyboardInterrupt` for SIGINT and SIGTERM inside the block; a third signal ends at once.

    Does nothing outside of the main thread, where handlers cannot be set.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupter = _Interrupter()
    numbers = (signal.SIGTERM, signal.SIGINT)
    previous = {number: signal.signal(number, interrupter.handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
