"""Events as rows: written in the transaction of the change they tell, and the transaction's own time.

Called by services and the reconciler inside `Store.write`. Delivery happens after commit, elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from sqlmodel import Session

from supervisor.domain.environment import redact
from supervisor.domain.metrics import finite
from supervisor.store.tables import Event

MAX_MESSAGE = 2000

_NOW = "now"
_EVENTS = "events"
_HIDDEN = "hidden"


def set_now(session: Session, now: datetime) -> None:
    """Fix the time of a transaction."""
    session.info[_NOW] = now


def now_of(session: Session) -> datetime:
    """Wall time at which the transaction began; the same for all rows it writes."""
    now: datetime = session.info[_NOW]
    return now


def set_hidden(session: Session, hidden: set[str]) -> None:
    """Hand over the store's set of secret values, which are blanked in everything that is written."""
    session.info[_HIDDEN] = hidden


def hide(session: Session, values: Iterable[str]) -> None:
    """Remember secret values from now on, in this process; they are kept nowhere else."""
    hidden: set[str] = session.info.setdefault(_HIDDEN, set())
    hidden.update(values)


def blank(session: Session, value: Any) -> Any:
    """Copy JSON-like data or text with known secret values and secret-looking keys blanked."""
    return redact(value, secrets=tuple(session.info.get(_HIDDEN, ())))


def recorded_events(session: Session) -> list[Event]:
    """Events written through this session, in order."""
    return list(session.info.get(_EVENTS, ()))


def record_event(
    session: Session,
    *,
    actor: str,
    subject: str,
    reason: str,
    message: str,
    data: Mapping[str, Any] | None = None,
    level: str = "info",
    run_id: str | None = None,
    node_id: str | None = None,
    attempt_id: str | None = None,
    operation_id: str | None = None,
    request_id: str | None = None,
    cause_id: int | None = None,
) -> Event:
    """Append one event; its id is known at once, so that later ones can name it as their cause.

    Args:
        session: the open write transaction.
        actor: `token/ID`, `session/…`, `supervisor`, `policy`.
        subject: `run/NAME`, `node/NAME` ...
        reason: stable CamelCase word.
        message: past tense; names are in the subject.
        data: figures; secrets are blanked by key name, infinities become null.
        level: info, warning or error.
        run_id: for filters, as are the other ids; kept after the object is gone.
        node_id: see above.
        attempt_id: see above.
        operation_id: see above.
        request_id: of the HTTP request, if one caused it.
        cause_id: id of the event that led to this one.
    """
    event = Event(
        at=now_of(session),
        actor=actor,
        subject=subject,
        level=level,
        reason=reason,
        message=blank(session, message)[:MAX_MESSAGE],
        data=finite(blank(session, dict(data or {}))),
        run_id=run_id,
        node_id=node_id,
        attempt_id=attempt_id,
        operation_id=operation_id,
        request_id=request_id,
        cause_id=cause_id,
    )
    session.add(event)
    session.flush()
    session.info.setdefault(_EVENTS, []).append(event)
    return event
