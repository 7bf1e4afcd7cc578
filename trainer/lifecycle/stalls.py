"""A trainer that stands still: show where every thread stands, and end a start that hangs.

Used by `trainer.train`. Three guards: the board of the pipeline raises `StalledError` (it calls `log_stacks`
first), `StartWatch` ends a start whose main thread is stuck itself, and `NativeDump` writes the stacks even
when a thread holds the interpreter's lock and no Python code can run. `StartWatch` also looks for a stop
while the main thread reads or compiles. Must not decide what a stall is.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator

from trainer.errors import StalledError
from trainer.lifecycle.exits import describe

_LOG = logging.getLogger(__name__)

LOOK_S = 0.25
"""How often a stop request is looked for during the start."""
REARM_S = 5.0
"""Longest time between two settings of the native timer."""


def render_stacks() -> str:
    """Return the Python stack of every thread under its name."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        parts.append(f"thread {names.get(ident, 'unknown')} ({ident}):\n")
        parts += traceback.format_stack(frame)
    return "".join(parts)


def log_stacks() -> None:
    """Write the stacks of all threads into the log."""
    _LOG.error("the run stands still; stacks of all threads:\n%s", render_stacks())


class NativeDump:
    """A timer outside of the interpreter that writes all stacks to standard output when nobody resets it."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._armed_s = float("-inf")
        self._is_possible = True

    def rearm(self) -> None:
        """Set the timer again; to be called a few times a second."""
        now_s = time.monotonic()
        if not self._is_possible or now_s - self._armed_s < min(REARM_S, self._limit_s / 4):
            return
        self._armed_s = now_s
        try:
            faulthandler.dump_traceback_later(self._limit_s, file=sys.stdout)
        except (io.UnsupportedOperation, AttributeError, ValueError, RuntimeError) as error:
            # standard output is no file: only the stacks of a thread that holds the lock are lost
            self._is_possible = False
            _LOG.warning("stacks of a thread that blocks all others cannot be written: %s", error)

    def cancel(self) -> None:
        """Stop the timer."""
        faulthandler.cancel_dump_traceback_later()


class StartWatch:
    """Ends the process when a phase of the start takes longer than its limit.

    The main thread reads data and models itself and may be stuck in a system call, so that an exception
    would never arrive: the process is left at once, with the exit code of a stalled pipeline.

    Args:
        limit_s: seconds that one part of the start may take.
        say: gets the line that the process ends with.
        look_for_stop: tells whether a stop was requested just now; the main thread then gets SIGTERM, which
            it cannot overlook while it reads or compiles.
        leave: ends the process with an exit code.
    """

    def __init__(
        self,
        limit_s: float,
        *,
        say: Callable[[str], None],
        look_for_stop: Callable[[], bool] = lambda: False,
        leave: Callable[[int], object] = os._exit,
    ) -> None:
        self._limit_s = limit_s
        self._say = say
        self._look_for_stop = look_for_stop
        self._leave = leave
        self._what = "start"
        self._since_s = time.monotonic()
        self._is_over = threading.Event()

    def enter(self, what: str) -> None:
        """Begin the next part of the start; the limit counts from here."""
        self._what, self._since_s = what, time.monotonic()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the block."""
        thread = threading.Thread(target=self._run, name="start-watch", daemon=True)
        self._is_over.clear()
        self.enter("start")
        thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            thread.join()

    def _run(self) -> None:
        while not self._is_over.wait(LOOK_S):
            if self._look_for_stop():
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
            idle_s = time.monotonic() - self._since_s
            if idle_s >= self._limit_s:
                self._end(idle_s)
                return

    def _end(self, idle_s: float) -> None:
        log_stacks()
        error = StalledError(
            f"the start stands still for {idle_s:.0f} s at: {self._what} "
            f"(limit {self._limit_s:g} s, queue.start_stall_s); its stacks are above"
        )
        _LOG.error("%s", describe(error))
        self._say(describe(error))
        logging.shutdown()
        sys.stdout.flush()
        self._leave(error.exit_code)
