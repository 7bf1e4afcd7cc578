"""Carries out checks and deploys: one at a time per node, again after a crash, each to exactly one end.

Started by the scheduler for every open operation. Progress goes to the operation's row, at most twice a
second; the end is written with its event. A failure is the operation's, never the daemon's.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any

import structlog
from sqlmodel import Session

from supervisor.domain.errors import SupervisorError
from supervisor.reconciler.connections import Connections
from supervisor.reconciler.deploy import Deployer
from supervisor.reconciler.deploy_rows import DeploySources, load_request, save_report
from supervisor.reconciler.operations import pending_node_operations
from supervisor.reconciler.preflight import check_agent, check_node
from supervisor.reconciler.runtime import Runtime
from supervisor.store.operations import begin_operation, finish_operation, report_progress
from supervisor.store.queries import OPEN_OPERATIONS
from supervisor.store.tables import Node, Operation
from supervisor.store.writer import Store

log = structlog.get_logger(__name__)

CONNECT_WAIT_S = 30.0
PROGRESS_PERIOD_S = 0.5


class ProgressWriter:
    """Takes progress from any thread or callback and writes the newest now and then."""

    def __init__(self, store: Store, operation_id: str) -> None:
        self._store = store
        self._operation_id = operation_id
        self._newest: dict[str, Any] | None = None
        self._written: dict[str, Any] | None = None

    def report(self, step: str, message: str, done: int | None, total: int | None) -> None:
        """Remember the newest; cheap enough for every piece of an upload."""
        self._newest = {"step": step, "message": message, "done": done, "total": total}

    async def run(self) -> None:
        """Write for ever; cancelled at the end of the operation."""
        while True:
            await asyncio.sleep(PROGRESS_PERIOD_S)
            newest = self._newest
            if newest is not None and newest != self._written:
                self._written = newest
                await self._store.write(functools.partial(self._write, value=newest))

    def _write(self, session: Session, value: dict[str, Any]) -> None:
        operation = session.get(Operation, self._operation_id)
        if operation is not None and operation.status in OPEN_OPERATIONS:
            report_progress(session, operation, **value)


class NodeOperations:
    """Runs what is open for nodes."""

    def __init__(self, runtime: Runtime, sources: DeploySources, *, on_ended: Callable[[str], None]) -> None:
        self._rt = runtime
        self._sources = sources
        self._on_ended = on_ended
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @property
    def _connections(self) -> Connections:
        return self._rt.connections

    async def start_pending(self) -> None:
        """Begin every open operation whose node is not busy with another one."""
        for operation in await self._rt.store.read(pending_node_operations):
            node_id = operation.node_id or ""
            task = self._tasks.get(node_id)
            if task is None or task.done():
                self._tasks[node_id] = asyncio.create_task(
                    self._run(operation), name=f"operation-{operation.id}"
                )

    async def aclose(self) -> None:
        """Cancel what runs; it is begun again by the next daemon."""
        tasks = [task for task in self._tasks.values() if not task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, operation: Operation) -> None:
        progress = ProgressWriter(self._rt.store, operation.id)
        writer = asyncio.create_task(progress.run())
        try:
            await self._rt.store.write(lambda session: self._begin(session, operation.id))
            result = await self._carry_out(operation, progress)
            await self._end(operation.id, status="done", result=result)
        except SupervisorError as error:
            log.warning("operation failed", operation=operation.id, kind=operation.kind, reason=error.reason)
            await self._end(operation.id, status="failed", error=error)
        except Exception as error:  # task boundary: the operation ends, the daemon goes on
            log.exception("operation failed unexpectedly", operation=operation.id)
            failure = SupervisorError(f"internal error: {error}", reason="InternalError")
            await self._end(operation.id, status="failed", error=failure)
        finally:
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)
            asyncio.get_running_loop().call_soon(self._on_ended, operation.node_id or "")

    def _begin(self, session: Session, operation_id: str) -> None:
        operation = session.get(Operation, operation_id)
        if operation is not None:
            begin_operation(session, operation)

    async def _end(
        self,
        operation_id: str,
        *,
        status: str,
        result: dict[str, Any] | None = None,
        error: SupervisorError | None = None,
    ) -> None:
        def write(session: Session) -> None:
            operation = session.get(Operation, operation_id)
            if operation is not None and operation.status in OPEN_OPERATIONS:
                finish_operation(session, operation, status=status, result=result, error=error)

        await self._rt.store.write(write)

    async def _carry_out(self, operation: Operation, progress: ProgressWriter) -> dict[str, Any]:
        connection = self._connections.get(operation.node_id or "")
        await connection.settled(CONNECT_WAIT_S)
        if operation.kind == "check":
            return await self._check(operation)
        request = await self._rt.store.read(lambda session: load_request(session, operation))
        deployer = Deployer(
            self._rt.store,
            connection,
            self._sources,
            owner=self._rt.owner,
            clock=self._rt.clock,
            report=progress.report,
        )
        return await deployer.run(request)

    async def _check(self, operation: Operation) -> dict[str, Any]:
        """A check is done when it was made, whatever it found; the findings are its result."""
        node_id = operation.node_id or ""
        connection = self._connections.get(node_id)
        report = await check_node(connection)
        if report.is_passed:
            if not connection.is_open:
                await connection.wait_open(CONNECT_WAIT_S)
            await check_agent(connection, report)

        def write(session: Session) -> None:
            if session.get(Node, node_id) is not None:
                save_report(session, node_id, report)

        await self._rt.store.write(write)
        return {"passed": report.is_passed, "report": report.to_json()}
