"""Guarded changes of attempts: the transition table, the event in the same transaction, final means final.

The reconciler and the services change an attempt's state through `apply_transition` and nothing else; a
listener on the mapper refuses what goes past it. `bump` counts a row up, which is what an ETag is made of.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event, inspect
from sqlalchemy.orm import Mapper, object_session
from sqlmodel import Session

from supervisor.domain.errors import InvalidTransitionError
from supervisor.domain.run import TERMINAL, AttemptState, Reason
from supervisor.domain.transitions import check_transition, parse_state
from supervisor.store.events import blank, now_of, record_event
from supervisor.store.tables import Attempt, Node, Operation, Run

EVENT_REASONS: Mapping[AttemptState, str] = {
    AttemptState.PLANNED: "AttemptPlanned",
    AttemptState.PREFLIGHT: "PreflightStarted",
    AttemptState.LAUNCHING: "LaunchRequested",
    AttemptState.STARTED: "AttemptStarted",
    AttemptState.READY: "AttemptReady",
    AttemptState.STOPPING: "StopStarted",
    AttemptState.SUCCEEDED: "AttemptSucceeded",
    AttemptState.STOPPED: "AttemptStopped",
    AttemptState.FAILED: "AttemptFailed",
    AttemptState.LAUNCH_FAILED: "LaunchFailed",
    AttemptState.LOST: "AttemptLost",
    AttemptState.QUARANTINED: "AttemptQuarantined",
}

_STAMPS: Mapping[AttemptState, str] = {
    AttemptState.LAUNCHING: "launching_at",
    AttemptState.STARTED: "started_at",
    AttemptState.READY: "ready_at",
    AttemptState.STOPPING: "stopping_at",
}

_PROBLEMS = frozenset(
    {AttemptState.FAILED, AttemptState.LAUNCH_FAILED, AttemptState.LOST, AttemptState.QUARANTINED}
)

BOOKKEEPING = frozenset(
    {"acknowledged_at", "gpu_clean_at", "observed_at", "log_size", "version", "updated_at", "is_counted"}
)
"""Columns that may still change once an attempt has ended; none of them says how it ended."""

QUOTING = ("exit_record", "launch_error", "message", "last_status", "cause_fingerprint", "preflight")
"""Columns that repeat words of the trainer or of the node."""

LATE_EVIDENCE = frozenset({"exit_record", "exit_code", "exit_signal"})
"""Columns that a lost attempt may gain, once."""


def bump(session: Session, row: Run | Attempt | Node | Operation) -> None:
    """Count the version up; call it with each change that a reader may care for."""
    row.version += 1
    if not isinstance(row, Operation):
        row.updated_at = now_of(session)
    session.add(row)


def apply_transition(
    session: Session,
    attempt: Attempt,
    new: AttemptState | str,
    *,
    reason: Reason | str | None = None,
    message: str | None = None,
    actor: str = "supervisor",
    data: Mapping[str, Any] | None = None,
    request_id: str | None = None,
    cause_id: int | None = None,
) -> int:
    """Change the state and write the event, or change nothing.

    Args:
        session: the open write transaction.
        attempt: a row of this session.
        new: the next state; time stamps of the row follow from it.
        reason: why; kept on the row when the state is final or a quarantine.
        message: past tense; from the reason when it is one of ours.
        actor: who caused it.
        data: evidence for the event.
        request_id: of the HTTP request, if any.
        cause_id: event that led here.

    Returns:
        Id of the event.

    Raises:
        InvalidTransitionError: the table does not list this change.
    """
    old = attempt.state
    state = check_transition(old, new)
    if message is None:
        message = reason.message if isinstance(reason, Reason) else ""
    attempt.state = state.value
    stamp = _STAMPS.get(state)
    if stamp is not None:
        setattr(attempt, stamp, now_of(session))
    if state in TERMINAL:
        attempt.ended_at = now_of(session)
    if reason is not None and (state in TERMINAL or state is AttemptState.QUARANTINED):
        attempt.reason = str(reason)
        attempt.message = message
    bump(session, attempt)
    run = session.get(Run, attempt.run_id)
    written = record_event(
        session,
        actor=actor,
        subject=f"run/{run.name if run else attempt.run_id}",
        reason=EVENT_REASONS[state],
        message=f"attempt {attempt.number} {old} → {state.value}{': ' + message if message else ''}",
        data={"attempt": attempt.number, "old": old, "new": state.value, "reason": reason, **(data or {})},
        level="warning" if state in _PROBLEMS else "info",
        run_id=attempt.run_id,
        node_id=attempt.node_id,
        attempt_id=attempt.id,
        request_id=request_id,
        cause_id=cause_id,
    )
    assert written.id is not None
    return written.id


def add_late_evidence(session: Session, attempt: Attempt, exit_record: Mapping[str, Any]) -> bool:
    """Fill the exit of a lost attempt, once; for any other ended attempt only an event is written.

    Returns:
        Whether the row was filled.
    """
    is_filled = attempt.state == AttemptState.LOST and attempt.exit_record is None
    if is_filled:
        attempt.exit_record = dict(exit_record)
        attempt.exit_code = exit_record.get("code")
        attempt.exit_signal = exit_record.get("signal")
        bump(session, attempt)
    run = session.get(Run, attempt.run_id)
    record_event(
        session,
        actor="supervisor",
        subject=f"run/{run.name if run else attempt.run_id}",
        reason="LateEvidence",
        message=f"exit record of attempt {attempt.number} arrived after it was {attempt.state}",
        data={"code": exit_record.get("code"), "signal": exit_record.get("signal"), "stored": is_filled},
        run_id=attempt.run_id,
        node_id=attempt.node_id,
        attempt_id=attempt.id,
    )
    return is_filled


@event.listens_for(Attempt, "before_update")
def _guard_attempt(_mapper: Mapper[Any], _connection: sa.Connection, attempt: Attempt) -> None:
    """Second line of defence, for code that assigns to `state` or to an ended row directly.

    Also blanks secret values in what the trainer said: a program may print its own key.
    """
    _blank_columns(attempt)
    changed = {attribute.key for attribute in inspect(attempt).attrs if attribute.history.has_changes()}
    if not changed:
        return
    history = inspect(attempt).attrs.state.history
    if history.has_changes():
        check_transition(history.deleted[0] if history.deleted else attempt.state, attempt.state)
        return
    state = parse_state(attempt.state)
    allowed = BOOKKEEPING | LATE_EVIDENCE if state is AttemptState.LOST else BOOKKEEPING
    if state in TERMINAL and not changed <= allowed:
        raise InvalidTransitionError(
            f"attempt {attempt.number} is {state.value}, which is final; refused to change "
            f"{', '.join(sorted(changed - allowed))}",
            old=state.value,
            new=state.value,
        )
    former = inspect(attempt).attrs.exit_record.history.deleted
    if changed & LATE_EVIDENCE and former and former[0] is not None:
        raise InvalidTransitionError(
            f"exit record of lost attempt {attempt.number} was filled already",
            old=state.value,
            new=state.value,
        )


@event.listens_for(Attempt, "before_insert")
def _blank_new(_mapper: Mapper[Any], _connection: sa.Connection, attempt: Attempt) -> None:
    _blank_columns(attempt)


def _blank_columns(attempt: Attempt) -> None:
    session = object_session(attempt)
    if session is None:
        return
    for name in QUOTING:
        value = getattr(attempt, name)
        if value and (clean := blank(session, value)) != value:  # type: ignore[arg-type]
            setattr(attempt, name, clean)
