"""Operations as rows: created pending, moved on, ended exactly once with an event.

Services create them in the transaction of the intent; the reconciler reports progress and the end.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from sqlmodel import Session

from supervisor.domain.environment import redact
from supervisor.domain.errors import InvalidTransitionError, SupervisorError
from supervisor.domain.metrics import finite
from supervisor.store.attempts import bump
from supervisor.store.events import blank, now_of, record_event
from supervisor.store.queries import OPEN_OPERATIONS, list_open_operations
from supervisor.store.tables import Node, Operation, Run

ENDS = ("done", "failed", "superseded")


def new_id(prefix: str) -> str:
    """A random id that is also a valid file name."""
    return f"{prefix}{secrets.token_hex(8)}"


def create_operation(
    session: Session,
    *,
    kind: str,
    actor: str,
    run: Run | None = None,
    node: Node | None = None,
    intent: int | None = None,
    params: Mapping[str, Any] | None = None,
    request_id: str | None = None,
) -> Operation:
    """Record a request as pending; the caller writes the event of the intent itself."""
    operation = Operation(
        id=new_id("op"),
        kind=kind,
        status="pending",
        run_id=run.id if run else None,
        node_id=node.id if node else None,
        intent=intent,
        actor=actor,
        request_id=request_id,
        params=blank(session, dict(params or {})),
        created_at=now_of(session),
    )
    session.add(operation)
    session.flush()
    return operation


def begin_operation(session: Session, operation: Operation) -> None:
    """Mark as running; harmless when it runs already."""
    _check_open(operation)
    if operation.status == "pending":
        operation.status = "running"
        operation.started_at = now_of(session)
        bump(session, operation)


def report_progress(
    session: Session,
    operation: Operation,
    *,
    step: str,
    message: str = "",
    done: int | None = None,
    total: int | None = None,
) -> None:
    """Tell how far it is; no event, this is for whoever watches."""
    begin_operation(session, operation)
    operation.progress = {"step": step, "message": message, "done": done, "total": total}
    bump(session, operation)


def finish_operation(
    session: Session,
    operation: Operation,
    *,
    status: str,
    result: Mapping[str, Any] | None = None,
    error: SupervisorError | Mapping[str, Any] | None = None,
    attempt_id: str | None = None,
) -> None:
    """End it: done, failed or superseded, with an event.

    Raises:
        InvalidTransitionError: it has ended already, or the status is no end.
    """
    _check_open(operation)
    if status not in ENDS:
        raise InvalidTransitionError(f"no end of an operation: {status!r}", old=operation.status, new=status)
    operation.status = status
    operation.finished_at = now_of(session)
    operation.started_at = operation.started_at or operation.finished_at
    operation.result = finite(blank(session, dict(result))) if result is not None else None
    operation.error = blank(session, _error_json(error))
    operation.attempt_id = attempt_id or operation.attempt_id
    bump(session, operation)
    record_event(
        session,
        actor=operation.actor,
        subject=_subject(session, operation),
        reason=f"Operation{status.capitalize()}",
        message=f"{operation.kind} {status}{_why(operation)}",
        data={"operation": operation.id, "kind": operation.kind, "error": operation.error},
        level="warning" if status == "failed" else "info",
        run_id=operation.run_id,
        node_id=operation.node_id,
        attempt_id=operation.attempt_id,
        operation_id=operation.id,
        request_id=operation.request_id,
    )


def supersede_operations(
    session: Session, *, kinds: Sequence[str], by: str, run_id: str | None = None, node_id: str | None = None
) -> int:
    """End the open operations of these kinds because a newer request replaces them; returns how many."""
    found = list_open_operations(session, kinds=kinds, run_id=run_id, node_id=node_id)
    for operation in found:
        finish_operation(
            session,
            operation,
            status="superseded",
            error={
                "reason": "Superseded",
                "message": f"replaced by a newer request: {by}",
                "hint": None,
                "data": {},
            },
        )
    return len(found)


def error_json(error: SupervisorError) -> dict[str, Any]:
    """An error as it is stored with an operation and shown."""
    return {
        "reason": error.reason,
        "message": error.message,
        "hint": error.hint,
        "retryable": error.retryable,
        "data": finite(redact({key: value for key, value in error.data.items() if _is_json(value)})),
    }


def _error_json(error: SupervisorError | Mapping[str, Any] | None) -> dict[str, Any] | None:
    if error is None:
        return None
    return error_json(error) if isinstance(error, SupervisorError) else finite(redact(dict(error)))


def _is_json(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(_is_json(item) for item in value.values())
    if isinstance(value, list | tuple):
        return all(_is_json(item) for item in value)
    return value is None or isinstance(value, str | int | float | bool)


def _check_open(operation: Operation) -> None:
    if operation.status not in OPEN_OPERATIONS:
        raise InvalidTransitionError(
            f"operation {operation.id} is {operation.status}, which is final", old=operation.status, new=None
        )


def _subject(session: Session, operation: Operation) -> str:
    if operation.run_id is not None:
        run = session.get(Run, operation.run_id)
        return f"run/{run.name if run else operation.run_id}"
    if operation.node_id is not None:
        node = session.get(Node, operation.node_id)
        return f"node/{node.name if node else operation.node_id}"
    return f"operation/{operation.id}"


def _why(operation: Operation) -> str:
    return f": {operation.error['message']}" if operation.error and operation.error.get("message") else ""
