"""The store: one writer thread, a few read-only readers, short transactions, events told after commit.

Services and the reconciler get a `Store` from the composition root and pass it functions of a session. The
session's `info` carries the transaction's time, so nothing below reads a clock. No network wait may happen
inside such a function.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlmodel import Session

from supervisor.clock import Clock, SystemClock
from supervisor.domain.errors import StoreBusyError, StoreError
from supervisor.store import migrate as migrations
from supervisor.store.engine import (
    READERS,
    build_read_engine,
    build_write_engine,
    create_file,
    database_path,
    parse_url,
    translate_error,
)
from supervisor.store.events import recorded_events, set_hidden, set_now
from supervisor.store.tables import Event

T = TypeVar("T")
Listener = Callable[[Sequence[Event]], None]

MAX_WAITING_WRITES = 2000
BUSY_TIMEOUT_S = 5.0


class Store:
    """Access to the database. Open it with `migrate()`, end it with `close()`."""

    def __init__(
        self, target: str | Path, *, clock: Clock | None = None, busy_timeout_s: float = BUSY_TIMEOUT_S
    ) -> None:
        self.url = parse_url(target)
        self.path = database_path(self.url)
        self._clock = clock or SystemClock()
        self._busy_timeout_s = busy_timeout_s
        if self.path is not None:
            create_file(self.path)
        self._write_engine = build_write_engine(self.url, busy_timeout_s=busy_timeout_s)
        self._read_engine = build_read_engine(self.url, busy_timeout_s=busy_timeout_s)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="store-writer")
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="store-reader")
        self._waiting = threading.BoundedSemaphore(MAX_WAITING_WRITES)
        self._listeners: list[Listener] = []
        self._hidden: set[str] = set()

    def migrate(self, *, folder: Path | None = None) -> str | None:
        """Bring the schema up to date; returns the backup's path if one was made. See `migrate.migrate`."""
        return migrations.migrate(self.url, busy_timeout_s=self._busy_timeout_s, folder=folder)

    def add_commit_listener(self, listener: Listener) -> None:
        """Call `listener` on the writer thread with the events of each commit; it must not raise."""
        self._listeners.append(listener)

    async def write(self, function: Callable[[Session], T]) -> T:
        """Run `function` in one immediate transaction on the writer thread; commit when it returns.

        Raises:
            StoreBusyError, StoreFullError, StoreCorruptError: nothing was kept.
        """
        return await asyncio.wrap_future(self._submit_write(function))

    async def read(self, function: Callable[[Session], T]) -> T:
        """Run `function` on a reader; its session cannot write."""
        return await asyncio.wrap_future(self._readers.submit(self._read, function))

    def write_sync(self, function: Callable[[Session], T]) -> T:
        """`write` for callers outside the event loop."""
        return self._submit_write(function).result()

    def read_sync(self, function: Callable[[Session], T]) -> T:
        """`read` for callers outside the event loop."""
        return self._read(function)

    def is_writable(self) -> bool:
        """Whether a write gets through now, for readiness; waits at most the busy timeout."""
        try:
            probe = self._submit_write(lambda session: session.exec(sa.text("SELECT 1")).first())  # type: ignore[call-overload]
        except StoreError:
            return False
        try:
            probe.result(timeout=self._busy_timeout_s)
        except (StoreError, TimeoutError):
            return False
        finally:
            probe.cancel()  # it waits behind other writes: the next question must not wait behind it
        return True

    def close(self) -> None:
        """Finish the writes under way and close all connections."""
        self._writer.shutdown(wait=True)
        self._readers.shutdown(wait=True)
        self._read_engine.dispose()
        self._write_engine.dispose()

    def _submit_write(self, function: Callable[[Session], T]) -> Future[T]:
        if not self._waiting.acquire(blocking=False):
            raise StoreBusyError(f"{MAX_WAITING_WRITES} writes are waiting already", waited_s=0.0)
        try:
            future = self._writer.submit(self._write, function)
        except RuntimeError as error:
            self._waiting.release()
            raise StoreError("store is closed", reason="StoreClosed") from error
        future.add_done_callback(lambda _: self._waiting.release())
        return future

    def _write(self, function: Callable[[Session], T]) -> T:
        try:
            with Session(self._write_engine, expire_on_commit=False) as session:
                set_now(session, self._clock.now())
                set_hidden(session, self._hidden)
                with session.begin():
                    session.connection()
                    result = function(session)
                events = recorded_events(session)
        except DBAPIError as error:
            raise translate_error(error, path=self.path, busy_timeout_s=self._busy_timeout_s) from error
        if events:
            for listener in self._listeners:
                listener(events)
        return result

    def _read(self, function: Callable[[Session], T]) -> T:
        try:
            with Session(self._read_engine, expire_on_commit=False) as session:
                set_now(session, self._clock.now())
                set_hidden(session, self._hidden)
                return function(session)
        except DBAPIError as error:
            raise translate_error(error, path=self.path, busy_timeout_s=self._busy_timeout_s) from error
