"""What a new connection finds: attempts of ours that went on, ends that nobody saw, folders nobody knows.

Called when an agent opens, at start of the daemon above all. Live attempts need nothing here: their own loop
asks by attempt id. This module takes in what no loop would ask for, and only reports what is not in the
store: an unknown folder is told as an orphan and never touched.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import structlog
from sqlmodel import Session, select

from supervisor.domain.run import LIVE, AttemptState
from supervisor.reconciler.connections import NodeConnection
from supervisor.reconciler.runtime import Runtime
from supervisor.reconciler.steps import acknowledge
from supervisor.store.attempts import add_late_evidence
from supervisor.store.events import record_event
from supervisor.store.queries import list_unacknowledged_attempts
from supervisor.store.tables import Attempt, Event

log = structlog.get_logger(__name__)

LIST_DEADLINE_S = 60.0


async def adopt_node(runtime: Runtime, connection: NodeConnection) -> None:
    """Compare the node's attempt folders with the store.

    Raises:
        TransportError, ShimError: the link failed again; the next connection begins anew.
    """
    reply = await connection.request("list", deadline_s=LIST_DEADLINE_S)
    entries: list[dict[str, Any]] = reply["attempts"]
    await runtime.store.write(lambda session: _take_in(session, connection, entries))
    node_id = connection.address.id
    waiting = await runtime.store.read(lambda session: list_unacknowledged_attempts(session, node_id))
    for attempt in waiting:
        await acknowledge(runtime.store, connection, attempt.id)


def _take_in(session: Session, connection: NodeConnection, entries: list[dict[str, Any]]) -> None:
    for entry in entries:
        attempt = session.get(Attempt, entry["attempt_id"])
        if attempt is None and entry.get("acked"):
            continue  # it was known and its end was stored; its run has been removed since
        if attempt is None:
            _tell_orphan(session, connection, entry)
        elif AttemptState(attempt.state) not in LIVE:
            _late(session, attempt, entry)
            _tell_survivor(session, connection, attempt, entry)


def _late(session: Session, attempt: Attempt, entry: Mapping[str, Any]) -> None:
    """The exit record of an attempt that was declared lost, seen after all."""
    if attempt.state == AttemptState.LOST and attempt.exit_record is None and entry.get("exit"):
        add_late_evidence(session, attempt, entry["exit"])


def _tell_survivor(
    session: Session, connection: NodeConnection, attempt: Attempt, entry: Mapping[str, Any]
) -> None:
    """A process whose attempt was given up and which lives after all: it is told, and left alone."""
    if attempt.state != AttemptState.LOST or not entry.get("alive"):
        return
    if _is_told(session, "SurvivorFound", attempt.id):
        return
    pid = (attempt.identity or {}).get("pid")
    record_event(
        session,
        actor="supervisor",
        subject=f"node/{connection.address.name}",
        reason="SurvivorFound",
        message=f"attempt {attempt.number} was given up as lost and still runs in the node as pid {pid}; "
        "its locks keep a second copy away until it is ended there",
        data={"attempt_id": attempt.id, "identity": attempt.identity, "log_path": attempt.log_path},
        level="warning",
        node_id=connection.address.id,
        run_id=attempt.run_id,
        attempt_id=attempt.id,
    )


def _is_told(session: Session, reason: str, attempt_id: str) -> bool:
    """The event's own existence is the memory."""
    query = select(Event.id).where(Event.reason == reason, Event.attempt_id == attempt_id)
    return session.exec(query.limit(1)).first() is not None


def _tell_orphan(session: Session, connection: NodeConnection, entry: Mapping[str, Any]) -> None:
    """Once per folder."""
    attempt_id = str(entry["attempt_id"])
    if _is_told(session, "OrphanFound", attempt_id):
        return
    state = entry.get("state") or {}
    record_event(
        session,
        actor="supervisor",
        subject=f"node/{connection.address.name}",
        reason="OrphanFound",
        message=f"attempt folder {attempt_id} belongs to no run known here; it was left alone",
        data={
            "attempt_id": attempt_id,
            "run_id": state.get("run_id"),
            "phase": state.get("phase"),
            "alive": entry.get("alive"),
            "log_path": state.get("log_path"),
        },
        level="warning",
        node_id=connection.address.id,
        attempt_id=attempt_id,
    )
