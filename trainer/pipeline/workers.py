"""Threads of the pipeline: started together, joined together, the first error wins.

Owns the `Board`, the one object that all threads share: stop, first failure, last sign of life. Every wait
in the pipeline calls `Board.check`, so nobody waits for a dead thread or in a pipeline that stands still.
Called by `trainer.train`. Must not import torch.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from trainer.errors import StalledError, TrainerError, WorkerDiedError

_LOG = logging.getLogger(__name__)

WAIT_S = 0.25
"""Longest single wait on a condition before stop and health are looked at again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The first error of the pipeline and the thread it came from."""

    thread: str
    error: BaseException


class Board:
    """What the threads know of each other.

    `stop` asks for an orderly end at the next optimizer step; `abort` ends everything at once. `on_stall` is
    called once, before the first `StalledError` is raised.
    """

    def __init__(
        self,
        *,
        stall_s: float,
        on_stall: Callable[[], None] = lambda: None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stop = threading.Event()
        self.abort = threading.Event()
        self._stall_s = stall_s
        self._on_stall = on_stall
        self._is_dumped = False
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._failure: Failure | None = None
        self._last_beat_s = monotonic()
        self._last_worker = "start"
        self._quiet: list[tuple[float | None, str]] = []

    @property
    def failure(self) -> Failure | None:
        """The first error, if any thread failed."""
        return self._failure

    def beat(self, worker: str) -> None:
        """Record that `worker` finished a unit of work."""
        self._last_worker = worker
        self._last_beat_s = self._monotonic()

    def fail(self, thread: str, error: BaseException) -> None:
        """Keep the first error and release every wait."""
        with self._lock:
            if self._failure is None:
                self._failure = Failure(thread=thread, error=error)
        self.abort.set()

    @contextlib.contextmanager
    def guarding(self, thread: str) -> Iterator[None]:
        """Stand at a thread's outermost edge: what it raises is logged, kept, and ends the run."""
        try:
            yield
        except BaseException as error:  # noqa: BLE001 - the thread boundary
            if self._failure is None:
                _LOG.exception("%s died", thread)
            self.fail(thread, error)

    def check(self) -> None:
        """Raise when the pipeline cannot go on.

        Raises:
            WorkerDiedError: another thread failed, or the run was aborted.
            StalledError: nothing moved for longer than the limit.
        """
        if self._failure is not None:
            raise WorkerDiedError(f"{self._failure.thread} ended the run") from self._failure.error
        if self.abort.is_set():
            raise WorkerDiedError("the run was aborted")
        limit_s, key = self._limit()
        idle_s = self._monotonic() - self._last_beat_s
        if limit_s is not None and idle_s > limit_s:
            self._dump_once()
            raise StalledError(
                f"nothing moved for {idle_s:.0f} s (limit {limit_s:g} s, {key}); "
                f"last sign of life from {self._last_worker}"
            )

    @contextlib.contextmanager
    def quiet(self, worker: str, *, limit_s: float | None = None, key: str = "") -> Iterator[None]:
        """Replace the stall limit while `worker` does something that is known to take long.

        Args:
            worker: who; the limit counts from here and from its beats.
            limit_s: seconds without a beat until the run counts as stalled; None suspends the limit.
            key: the setting that `limit_s` comes from.
        """
        limit = (limit_s, key)
        self.beat(worker)
        with self._lock:
            self._quiet.append(limit)
        try:
            yield
        finally:
            self.beat(worker)
            with self._lock:
                self._quiet.remove(limit)

    def _limit(self) -> tuple[float | None, str]:
        """Return the present limit and the key that sets it: the widest of what goes on."""
        with self._lock:
            quiet = list(self._quiet)
        if not quiet:
            return self._stall_s, "queue.stall_s"
        return max(quiet, key=lambda limit: float("inf") if limit[0] is None else limit[0])

    def _dump_once(self) -> None:
        """Show where every thread stands while they still stand there."""
        with self._lock:
            if self._is_dumped:
                return
            self._is_dumped = True
            self._on_stall()


class WorkerGroup:
    """Runs named functions in threads and hands their first error to the caller."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._threads: list[threading.Thread] = []

    def add(self, name: str, work: Callable[[], None]) -> None:
        """Register `work` under a thread name; nothing runs before `start`."""
        thread = threading.Thread(target=self._guard, args=(name, work), name=name, daemon=True)
        self._threads.append(thread)

    def start(self) -> None:
        """Start all threads."""
        for thread in self._threads:
            thread.start()

    @property
    def alive(self) -> tuple[str, ...]:
        """Names of the threads that still run."""
        return tuple(thread.name for thread in self._threads if thread.is_alive())

    def join(self, *, timeout_s: float) -> bool:
        """Wait at most `timeout_s` for all threads; tell whether all ended."""
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not self.alive

    def raise_first(self) -> None:
        """Raise the first error with its thread's name; an error of ours keeps its class and exit code."""
        failure = self._board.failure
        if failure is None:
            return
        if isinstance(failure.error, TrainerError):
            failure.error.add_note(f"in thread {failure.thread}")
            raise failure.error
        text = " ".join(str(failure.error).split())
        raise WorkerDiedError(
            f"{failure.thread} died: {type(failure.error).__name__}: {text}; its traceback is above"
        ) from failure.error

    def _guard(self, name: str, work: Callable[[], None]) -> None:
        with self._board.guarding(name):
            work()
