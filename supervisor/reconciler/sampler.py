"""Takes in what the agents report: GPU samples, status records, metrics lines, log sizes.

Live data goes to the hub at once, to bounded rings for the loop's own look, and to the store in one
transaction a tick. A full disk or a slow store costs the oldest waiting samples, never memory or an attempt;
nothing here decides or waits for a node.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol

import structlog
from sqlmodel import Session, col, select

from supervisor.clock import Clock
from supervisor.domain.errors import StoreError
from supervisor.domain.metrics import finite
from supervisor.domain.reports import clean_metrics, clean_status
from supervisor.domain.run import TERMINAL
from supervisor.reconciler.apply import record_status
from supervisor.reconciler.connections import NodeConnection
from supervisor.store.attempts import bump
from supervisor.store.events import now_of
from supervisor.store.tables import Attempt, GpuSample, MetricLine
from supervisor.store.writer import Store

log = structlog.get_logger(__name__)

TICK_S = 1.0
RING = 600
MAX_PENDING = 5000
STALE_AFTER_S = 15.0
_TERMINAL = frozenset(state.value for state in TERMINAL)


class Publish(Protocol):
    """`Hub.publish`."""

    def __call__(
        self, topic: str, data: dict[str, Any], *, node: str | None = None, run: str | None = None
    ) -> None:
        """Offer to every client; never blocks."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Tracked:
    """An attempt whose reports are wanted."""

    attempt_id: str
    run_id: str
    run_name: str
    node_id: str
    newest_metric_t: float = 0.0
    """Lines up to here are stored already; a new agent sends them again."""


@dataclass(slots=True)
class GpuView:
    """Newest GPU sample of a node with its age."""

    sample: dict[str, Any]
    received_s: float

    def is_stale(self, monotonic_s: float) -> bool:
        """Whether it is too old to say anything about now."""
        return monotonic_s - self.received_s > STALE_AFTER_S


@dataclass(slots=True)
class AttemptView:
    """Newest reports of one attempt."""

    status: dict[str, Any] | None = None
    status_s: float | None = None
    metrics: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=RING))
    log_size: int | None = None
    offset: int = 0
    """Byte offset in metrics.ndjson up to which lines were taken in."""


@dataclass(slots=True)
class _Pending:
    metrics: deque[tuple[Tracked, dict[str, Any]]] = field(default_factory=lambda: deque(maxlen=MAX_PENDING))
    gpu: deque[tuple[str, dict[str, Any]]] = field(default_factory=lambda: deque(maxlen=MAX_PENDING))
    statuses: dict[str, tuple[dict[str, Any], datetime]] = field(default_factory=dict)
    log_sizes: dict[str, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.metrics or self.gpu or self.statuses or self.log_sizes)


class Sampler:
    """Rings, hub and store for everything that the agents send unasked."""

    def __init__(
        self,
        store: Store,
        *,
        publish: Publish,
        hint: Callable[[str], None],
        on_environment: Callable[[str, str], None],
        clock: Clock,
    ) -> None:
        self._store = store
        self._publish = publish
        self._hint = hint
        self._on_environment = on_environment
        self._clock = clock
        self._tracked: dict[str, Tracked] = {}
        self._attempts: dict[str, AttemptView] = {}
        self._gpus: dict[str, GpuView] = {}
        self._pending = _Pending()

    def track(self, node_id: str, attempts: Iterable[Tracked], *, is_letting_go: bool = True) -> None:
        """Take in reports of exactly these attempts of a node from now on.

        Args:
            node_id: of the node.
            attempts: what is watched there.
            is_letting_go: False keeps the others for the time being: their last reports may be on the way.
        """
        wanted = {item.attempt_id: item for item in attempts}
        for attempt_id, item in list(self._tracked.items()):
            if is_letting_go and item.node_id == node_id and attempt_id not in wanted:
                del self._tracked[attempt_id]
                self._attempts.pop(attempt_id, None)
        for attempt_id, item in wanted.items():
            self._tracked.setdefault(attempt_id, item)
            self._attempts.setdefault(attempt_id, AttemptView())

    def offsets(self, node_id: str) -> dict[str, int]:
        """Where a new agent should go on reading each attempt's metrics."""
        return {
            attempt_id: self._attempts[attempt_id].offset
            for attempt_id, item in self._tracked.items()
            if item.node_id == node_id
        }

    def attempt(self, attempt_id: str) -> AttemptView | None:
        """Newest reports of an attempt, if it is tracked."""
        return self._attempts.get(attempt_id)

    def gpus(self, node_id: str) -> GpuView | None:
        """Newest GPU sample of a node, if one ever came."""
        return self._gpus.get(node_id)

    def on_frame(self, connection: NodeConnection, frame: Mapping[str, Any]) -> None:
        """Take in one frame of an agent; unknown ones are left to newer daemons."""
        kind = frame.get("ev")
        if kind == "gpu":
            self._on_gpu(connection, finite(frame["sample"]))
            return
        if kind == "env":
            self._on_environment(connection.address.id, str(frame.get("python")))
            return
        tracked = self._tracked.get(str(frame.get("attempt_id")))
        if tracked is None:
            return
        handler = {
            "metrics": self._on_metrics,
            "status": self._on_status,
            "log": self._on_log,
            "state": self._on_life,
            "exit": self._on_life,
        }.get(str(kind))
        if handler is not None:
            handler(tracked, frame)

    async def run(self) -> None:
        """Write what has come in, once a tick, for ever."""
        while True:
            await self._clock.sleep(TICK_S)
            await self.flush()

    async def flush(self) -> None:
        """Write what is waiting; on a failing store it waits on, bounded."""
        if not self._pending:
            return
        pending, self._pending = self._pending, _Pending()
        try:
            started = await self._store.write(lambda session: write_pending(session, pending))
        except StoreError as error:
            log.warning("telemetry could not be stored", reason=error.reason, error=error.message)
            self._keep(pending)
            return
        except Exception:  # task boundary: one tick that cannot be stored must not end all telemetry
            log.exception("telemetry of one tick was dropped")
            return
        for run_id in started:
            self._hint(run_id)

    def _keep(self, pending: _Pending) -> None:
        newer, self._pending = self._pending, pending
        self._pending.metrics.extend(newer.metrics)
        self._pending.gpu.extend(newer.gpu)
        self._pending.statuses.update(newer.statuses)
        self._pending.log_sizes.update(newer.log_sizes)

    def _on_gpu(self, connection: NodeConnection, sample: dict[str, Any]) -> None:
        node = connection.address
        before = self._gpus.get(node.id)
        self._gpus[node.id] = GpuView(sample, self._clock.monotonic())
        self._pending.gpu.append((node.id, sample))
        self._publish("gpu", {"node": node.name, "sample": sample}, node=node.name)
        if before is None or before.sample.get("reason") != sample.get("reason"):
            for item in self._tracked.values():
                if item.node_id == node.id:
                    self._hint(item.run_id)

    def _on_metrics(self, tracked: Tracked, frame: Mapping[str, Any]) -> None:
        view = self._attempts[tracked.attempt_id]
        view.offset = int(frame.get("offset") or view.offset)
        record = clean_metrics(frame["record"])
        if record is None or record["t"] <= tracked.newest_metric_t:
            return
        if frame.get("nonfinite"):
            record["nonfinite"] = finite(list(frame["nonfinite"]))
            self._hint(tracked.run_id)
        view.metrics.append(record)
        self._pending.metrics.append((tracked, record))
        self._publish("metrics", {"attempt_id": tracked.attempt_id, "record": record}, run=tracked.run_name)

    def _on_status(self, tracked: Tracked, frame: Mapping[str, Any]) -> None:
        view = self._attempts[tracked.attempt_id]
        status = clean_status(frame["status"])
        before = view.status or {}
        view.status, view.status_s = status, self._clock.monotonic()
        self._pending.statuses[tracked.attempt_id] = (status, self._clock.now())
        self._publish("status", {"attempt_id": tracked.attempt_id, "status": status}, run=tracked.run_name)
        has_news = any(before.get(key) != status.get(key) for key in ("phase", "last_checkpoint", "stop"))
        if has_news:
            self._hint(tracked.run_id)

    def _on_log(self, tracked: Tracked, frame: Mapping[str, Any]) -> None:
        view = self._attempts[tracked.attempt_id]
        view.log_size = int(frame["size"])
        self._pending.log_sizes[tracked.attempt_id] = view.log_size
        self._publish("log", {"attempt_id": tracked.attempt_id, "size": view.log_size}, run=tracked.run_name)

    def _on_life(self, tracked: Tracked, frame: Mapping[str, Any]) -> None:
        self._publish("state", {"attempt_id": tracked.attempt_id, "event": frame["ev"]}, run=tracked.run_name)
        self._hint(tracked.run_id)


def write_pending(session: Session, pending: _Pending) -> list[str]:
    """One transaction for one tick; returns the runs whose first output has just come."""
    _write_metrics(session, pending.metrics)
    for node_id, sample in pending.gpu:
        session.add(
            GpuSample(
                node_id=node_id,
                t=float(sample.get("t") or now_of(session).timestamp()),
                gpus=sample.get("gpus") or [],
                reason=sample.get("reason"),
                message=sample.get("message"),
            )
        )
    started = []
    for attempt_id in {*pending.statuses, *pending.log_sizes}:
        attempt = session.get(Attempt, attempt_id)
        if attempt is not None and _update_attempt(session, attempt, pending):
            started.append(attempt.run_id)
    return started


def _write_metrics(session: Session, lines: Iterable[tuple[Tracked, dict[str, Any]]]) -> None:
    by_attempt: dict[str, list[tuple[Tracked, dict[str, Any]]]] = {}
    for tracked, record in lines:
        by_attempt.setdefault(tracked.attempt_id, []).append((tracked, record))
    for attempt_id, items in by_attempt.items():
        if session.get(Attempt, attempt_id) is None:
            continue
        first = min(float(record["t"]) for _, record in items)
        known_rows = session.exec(
            select(MetricLine.t, MetricLine.step).where(
                MetricLine.attempt_id == attempt_id, col(MetricLine.t) >= first
            )
        )
        known = {(t, step) for t, step in known_rows}
        for tracked, record in items:
            key = (float(record["t"]), _step_of(record))
            if key in known:
                continue
            known.add(key)
            session.add(
                MetricLine(run_id=tracked.run_id, attempt_id=attempt_id, t=key[0], step=key[1], record=record)
            )


def _step_of(record: dict[str, Any]) -> int:
    step = record.get("step")
    return step if isinstance(step, int) and not isinstance(step, bool) else -1


def _update_attempt(session: Session, attempt: Attempt, pending: _Pending) -> bool:
    """Copy the newest reports to a live row; True when this was its first sign of output."""
    size = pending.log_sizes.get(attempt.id)
    if size is not None:
        attempt.log_size = size
    if attempt.state in _TERMINAL:
        bump(session, attempt)
        return False
    reported = pending.statuses.get(attempt.id)
    if reported is not None:
        status, attempt.last_status_at = reported
        record_status(attempt, status)
    is_first = attempt.first_output_at is None and (reported is not None or (size or 0) > 0)
    if is_first:
        attempt.first_output_at = now_of(session)
    bump(session, attempt)
    return is_first


def utc(timestamp: float) -> datetime:
    """An epoch float of the node as aware time, for display."""
    return datetime.fromtimestamp(timestamp, UTC)


async def flush_forever(sampler: Sampler) -> None:
    """The sampler's task; ends with the daemon after one last write."""
    try:
        await sampler.run()
    except asyncio.CancelledError:
        await sampler.flush()
        raise
