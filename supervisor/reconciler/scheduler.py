"""Keeps one loop per run and one connection per node, and wakes them: by hint, by event, by clock.

Built by `app`. Level-triggered: a lost hint costs seconds, never a result. Everything runs on the event
loop's thread; `hint` may be called from any thread after the commit that it tells of.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import structlog
from sqlmodel import Session, col, select

from supervisor.domain.errors import SupervisorError
from supervisor.domain.run import ConditionType
from supervisor.reconciler import apply, leases
from supervisor.reconciler.connections import ConnectionListener, Frame, NodeAddress, NodeConnection
from supervisor.reconciler.loop import PassResult, RunLoop
from supervisor.reconciler.node_operations import NodeOperations
from supervisor.reconciler.recovery import adopt_node
from supervisor.reconciler.runtime import Runtime
from supervisor.reconciler.watches import refresh_watch
from supervisor.store.events import now_of, record_event
from supervisor.store.queries import list_node_runs
from supervisor.store.tables import Node, Run

log = structlog.get_logger(__name__)

MIN_WAIT_S = 0.05
ERROR_WAIT_S = 5.0
SETTLE_WAIT_S = 3.0
"""How long a new loop waits for its node's first connection to come up, or to fail."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Periods:
    """How often to look without being told."""

    active_s: float = 5.0
    idle_s: float = 30.0
    gpu_s: float = 1.0
    environment_s: float = 30.0


@dataclass(slots=True)
class _Worker:
    task: asyncio.Task[None]
    wake: asyncio.Event = field(default_factory=asyncio.Event)


class Scheduler(ConnectionListener):
    """The reconciler's engine: start it once, stop it once."""

    def __init__(self, runtime: Runtime, *, periods: Periods, default_python: str = "python3") -> None:
        self._rt = runtime
        self._periods = periods
        self._default_python = default_python
        self._workers: dict[str, _Worker] = {}
        self._wake = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._background: set[asyncio.Task[None]] = set()
        self._operations: NodeOperations | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self, operations: NodeOperations) -> None:
        """Void former leases, then begin."""
        self._operations = operations
        await self._rt.store.write(leases.void_all)
        await self.refresh()
        self._task = asyncio.create_task(self._run(), name="scheduler")

    async def aclose(self) -> None:
        """End all loops; trainers live on."""
        tasks = [worker.task for worker in self._workers.values()]
        tasks += [task for task in (self._task, *self._background) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._operations is not None:
            await self._operations.aclose()
        await self._rt.staging.aclose()
        await self._rt.drift.aclose()

    def hint(self, object_id: str) -> None:
        """Look at this run or node now; from any thread, after the commit that changed its intent."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the daemon is ending
            self._loop.call_soon_threadsafe(self._hint, object_id)

    def _hint(self, object_id: str) -> None:
        worker = self._workers.get(object_id)
        if worker is not None:
            worker.wake.set()
            return
        self._wake.set()

    def hint_node(self, node_id: str) -> None:
        """Look at every run of a node now."""
        self._spawn(self._hint_node(node_id))

    async def _hint_node(self, node_id: str) -> None:
        runs = await self._rt.store.read(lambda session: list_node_runs(session, node_id))
        for run in runs:
            self._hint(run.id)
        self._wake.set()

    def _spawn(self, coroutine: object) -> None:
        task = asyncio.ensure_future(coroutine)  # type: ignore[call-overload]
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        task.add_done_callback(_log_failure)

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._periods.idle_s):
                    await self._wake.wait()
            self._wake.clear()
            try:
                await self.refresh()
            except SupervisorError as error:
                log.warning("refresh failed", reason=error.reason, error=error.message)

    async def refresh(self) -> None:
        """Make connections, loops and node operations equal to the rows."""
        nodes, run_ids = await self._rt.store.read(self._load)
        broken = await self._rt.connections.refresh([self._address(node) for node in nodes])
        for node_id, error in broken.items():
            await self._rt.store.write(functools.partial(_save_broken, node_id=node_id, error=error))
        seen = [connection.address.id for connection in self._rt.connections if connection.is_open]
        if seen:
            await self._rt.store.write(functools.partial(_save_seen, node_ids=seen))
        for run_id in set(run_ids) - set(self._workers):
            worker = _Worker(asyncio.create_task(self._work(run_id), name=f"run-{run_id}"))
            self._workers[run_id] = worker
        if self._operations is not None:
            await self._operations.start_pending()

    def _load(self, session: Session) -> tuple[Sequence[Node], Sequence[str]]:
        nodes = session.exec(select(Node).order_by(col(Node.name))).all()
        return nodes, session.exec(select(Run.id)).all()

    def _address(self, node: Node) -> NodeAddress:
        return NodeAddress(
            id=node.id,
            name=node.name,
            transport=node.transport,
            root=node.root,
            log_dir=node.log_dir,
            python=node.python or self._default_python,
            host=node.host,
            port=node.port,
            user=node.user,
            vmid=node.vmid,
            identity_file=node.identity_file,
            host_key=node.host_key,
            host_key_fingerprint=node.host_key_fingerprint,
        )

    async def _work(self, run_id: str) -> None:
        """One run's task: reconcile, wait for a hint or the clock, for ever."""
        loop = RunLoop(run_id, self._rt)
        await asyncio.sleep(0)
        await self._node_settled(run_id)
        worker = self._workers[run_id]
        while True:
            worker.wake.clear()
            wait_s = self._periods.idle_s
            try:
                result = await loop.reconcile()
                if result.is_gone:
                    break
                wait_s = self._wait_s(result)
            except SupervisorError as error:
                log.warning("pass failed", run=run_id, reason=error.reason, error=error.message)
                wait_s = ERROR_WAIT_S
            except Exception:  # task boundary: one run's trouble must not end the others' supervision
                log.exception("pass failed unexpectedly", run=run_id)
                wait_s = ERROR_WAIT_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await worker.wake.wait()
        self._workers.pop(run_id, None)
        self._rt.memories.pop(run_id, None)

    async def _node_settled(self, run_id: str) -> None:
        """At start, look first when there is something to see: a pass without a connection learns nothing."""
        run = await self._rt.store.read(lambda session: session.get(Run, run_id))
        connection = self._rt.connections.find(run.node_id) if run is not None else None
        if connection is not None:
            await connection.settled(SETTLE_WAIT_S)

    def _wait_s(self, result: PassResult) -> float:
        if result.is_changed:
            return MIN_WAIT_S
        wait_s = self._periods.active_s if result.is_active else self._periods.idle_s
        if result.wake_in_s is not None:
            wait_s = min(wait_s, max(MIN_WAIT_S, result.wake_in_s))
        return wait_s

    async def on_open(self, connection: NodeConnection) -> None:
        """A new agent answers: adopt what runs there, watch it, look at all runs of the node."""
        await adopt_node(self._rt, connection)
        await self._watch(connection)
        await self._hint_node(connection.address.id)

    async def _watch(self, connection: NodeConnection) -> None:
        periods = self._periods
        async with connection.watch_lock:
            await refresh_watch(
                self._rt, connection, gpu_s=periods.gpu_s, environment_s=periods.environment_s
            )

    async def on_change(self, connection: NodeConnection) -> None:
        """Reachability changed: the node's condition and event, and a look at its runs."""
        await self._rt.store.write(lambda session: save_reachability(session, connection))
        await self._hint_node(connection.address.id)

    def on_frame(self, connection: NodeConnection, frame: Frame) -> None:
        """Hand a frame to the sampler."""
        self._rt.sampler.on_frame(connection, frame)

    def on_attempts_changed(self, node_id: str) -> None:
        """The set of live attempts of a node changed: watch the new set."""
        connection = self._rt.connections.find(node_id)
        if connection is not None and connection.is_open:
            self._spawn(self._watch(connection))

    def on_environment(self, node_id: str, python: str) -> None:
        """The packages of an interpreter on this node changed: compare it with what runs."""
        self._rt.drift.note_change(node_id, python)
        self.hint_node(node_id)

    def on_node_operation(self, node_id: str) -> None:
        """A check or deploy ended: watch with the new interpreter, look for drift, begin the next one."""
        self.on_attempts_changed(node_id)
        self.hint_node(node_id)


def save_reachability(session: Session, connection: NodeConnection) -> None:
    """Store a node's `Reachable` condition; a wrong host key is a security event of its own."""
    node = session.get(Node, connection.address.id)
    if node is None:
        return
    reach = connection.reach
    if reach.is_reachable:
        node.last_seen_at = now_of(session)
        node.unreachable_since = None
    elif node.unreachable_since is None:
        node.unreachable_since = now_of(session)
    session.add(node)
    changed = apply.set_condition(
        session,
        node,
        ConditionType.REACHABLE,
        reach.is_reachable,
        reason=reach.reason,
        message=reach.message,
    )
    if changed and reach.is_blocked:
        record_event(
            session,
            actor="supervisor",
            subject=f"node/{node.name}",
            reason="HostKeyMismatch",
            message=f"all traffic was stopped: {reach.message}",
            level="error",
            node_id=node.id,
        )
    if reach.is_alerted and not changed:
        record_event(
            session,
            actor="supervisor",
            subject=f"node/{node.name}",
            reason="NodeUnreachable",
            message=f"out of reach for 5 minutes: {reach.message}",
            level="warning",
            node_id=node.id,
        )


def _save_seen(session: Session, *, node_ids: list[str]) -> None:
    """When each node last answered: a fact for people, no change of the node's version."""
    for node_id in node_ids:
        node = session.get(Node, node_id)
        if node is not None:
            node.last_seen_at = now_of(session)
            session.add(node)


def _save_broken(session: Session, *, node_id: str, error: SupervisorError) -> None:
    """A node whose row cannot make a connection is out of reach, for the reason that the row gives."""
    node = session.get(Node, node_id)
    if node is not None:
        apply.set_condition(
            session, node, ConditionType.REACHABLE, False, reason=error.reason, message=error.message
        )


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        error = task.exception()
        if isinstance(error, SupervisorError):
            log.info("background work failed", reason=error.reason, error=error.message)
        else:
            log.error("background work failed unexpectedly", exc_info=error)
