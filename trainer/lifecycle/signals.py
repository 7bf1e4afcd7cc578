"""Being asked to stop: signals and `control/stop.json`.

Signal handlers only count; `trainer.train` looks at the counters between waits. A first SIGTERM or SIGINT
asks for an orderly stop, a second one abandons the save; while models load, nothing is there to save and the
first one ends the run. The file asks once, whatever it is rewritten to.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import signal
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from trainer.errors import EXIT_STOPPED, ConfigError

_LOG = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
MOST_BYTES = 65_536
"""Of a stop request: it is looked for several times a second."""


def leave_on_stop_signals() -> None:
    """Until a `SignalCounter` takes over (while libraries load), end at once as stopped on request."""

    def leave(_number: int, _frame: FrameType | None) -> None:
        raise SystemExit(EXIT_STOPPED)

    for number in STOP_SIGNALS:
        signal.signal(number, leave)


class StoppedEarlyError(BaseException):
    """A stop was asked for before the first step; nothing is there to save.

    Not an `Exception`: it may be raised inside a library, which must not take it for a failure of its own.
    """


class SignalCounter:
    """Counts stop signals; must be installed by the main thread."""

    def __init__(self) -> None:
        self.count = 0
        self.last = ""
        self._is_interrupting = False
        self._previous: dict[signal.Signals, Any] = {}

    def install(self) -> None:
        """Take the stop signals over."""
        for number in STOP_SIGNALS:
            self._previous[number] = signal.signal(number, self._handle)

    def restore(self) -> None:
        """Give the signals back to who had them."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    @contextlib.contextmanager
    def interrupting(self) -> Iterator[None]:
        """Let a signal end the block at once: reading a large model takes longer than a stop may.

        Raises:
            StoppedEarlyError: in the main thread, wherever it is.
        """
        self._is_interrupting = True
        try:
            if self.count:  # it came just before: nobody would look at the counter in here
                raise StoppedEarlyError
            yield
        finally:
            self._is_interrupting = False

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self.count += 1
        self.last = signal.Signals(number).name
        if self._is_interrupting:
            self._is_interrupting = False
            raise StoppedEarlyError


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequest:
    """What somebody asked for; `id` is null for a bare signal."""

    id: str | None
    reason: str
    deadline_s: float | None
    save: bool


class StopFile:
    """Watches `control/stop.json` of the run folder."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / "control" / "stop.json"
        self._has_complained = False

    def clear_stale(self) -> None:
        """Remove a request that an earlier process in the same folder was meant to read.

        Raises:
            ConfigError: it cannot be removed, and would end this run too.
        """
        try:
            self.path.unlink()
        except FileNotFoundError:
            return
        except OSError as error:
            raise ConfigError(
                f"a stop request of an earlier run cannot be removed: {self.path} ({error.strerror}); "
                "remove it"
            ) from error
        _LOG.warning("removed a stop request of an earlier run: %s", self.path)

    def read(self) -> StopRequest | None:
        """Return the request, or None; a file that cannot be used is reported once and ignored."""
        try:
            raw = _read_whole(self.path)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._complain(f"{error}")
            return None
        try:
            return _parse_request(json.loads(raw))
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            self._complain(f"{type(error).__name__}: {error}"[:200])
            return None

    def _complain(self, why: str) -> None:
        if not self._has_complained:
            _LOG.error("stop request cannot be used, it is ignored: %s (%s)", self.path, why)
            self._has_complained = True


def _read_whole(path: Path) -> bytes:
    """Read a small file without ever waiting for one (a pipe keeps whoever opens it)."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError("it is not a file")
        content = os.read(descriptor, MOST_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(content) > MOST_BYTES:
        raise OSError(f"it has more than {MOST_BYTES} bytes")
    return content


def _parse_request(body: dict[str, Any]) -> StopRequest:
    deadline = body.get("deadline_s")
    if deadline is not None and not math.isfinite(float(deadline)):
        raise ValueError(f"deadline_s is no number of seconds: {deadline}")
    return StopRequest(
        id=str(body["id"]),
        reason=str(body.get("reason") or "stop.json"),
        deadline_s=None if deadline is None else float(deadline),
        save=body.get("save", True) is not False,  # whatever else was meant: what is saved is not lost
    )
