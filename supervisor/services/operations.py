"""Recorded requests: created with the change they ask for, ended exactly once.

Services create them; the reconciler moves them on through the functions of `store.operations`. Reads for the
API are here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlmodel import Session

from supervisor.store.operations import create_operation, finish_operation, supersede_operations
from supervisor.store.queries import get_operation
from supervisor.store.tables import Node, Operation, Run

__all__ = ["create_done", "create_operation", "finish_operation", "get_operation", "supersede_operations"]


def create_done(
    session: Session,
    *,
    kind: str,
    actor: str,
    result: Mapping[str, Any],
    run: Run | None = None,
    node: Node | None = None,
    params: Mapping[str, Any] | None = None,
    request_id: str | None = None,
) -> Operation:
    """An operation for a request that was already fulfilled when it came."""
    operation = create_operation(
        session, kind=kind, actor=actor, run=run, node=node, params=params, request_id=request_id
    )
    finish_operation(session, operation, status="done", result=result)
    return operation
