"""Reading and writing the history. Writing is `store.events.record_event`, offered here for the API.

Called by routes and by the other services; every function is one short transaction's work on the session it
is given.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from sqlalchemy import delete, func
from sqlmodel import Session, col, select

from supervisor.domain.errors import RequestError
from supervisor.store.events import now_of, record_event
from supervisor.store.tables import Event

__all__ = ["MAX_PAGE", "list_events", "newest_event_id", "oldest_event_id", "prune_events", "record_event"]

MAX_PAGE = 200


def list_events(
    session: Session,
    *,
    after_id: int | None = None,
    before_id: int | None = None,
    run_id: str | None = None,
    node_id: str | None = None,
    subject: str | None = None,
    reason: str | None = None,
    since: datetime | None = None,
    limit: int = 50,
) -> list[Event]:
    """One page of events.

    Args:
        session: open session.
        after_id: only later ones; the page then runs forward from there, else it is the newest, newest first.
        before_id: only earlier ones.
        run_id: of one run.
        node_id: of one node.
        subject: exactly this subject.
        reason: exactly this reason.
        since: not older than this.
        limit: at most 200.

    Raises:
        RequestError: limit out of range.
    """
    if not 1 <= limit <= MAX_PAGE:
        raise RequestError(f"limit must be from 1 to {MAX_PAGE}: {limit}", reason="BadLimit")
    query = select(Event)
    for column, wanted in (
        (Event.run_id, run_id),
        (Event.node_id, node_id),
        (Event.subject, subject),
        (Event.reason, reason),
    ):
        if wanted is not None:
            query = query.where(col(column) == wanted)
    if since is not None:
        query = query.where(col(Event.at) >= since)
    if before_id is not None:
        query = query.where(col(Event.id) < before_id)
    if after_id is not None:
        query = query.where(col(Event.id) > after_id).order_by(col(Event.id))
    else:
        query = query.order_by(col(Event.id).desc())
    return list(session.exec(query.limit(limit)).all())


def newest_event_id(session: Session) -> int:
    """Id of the newest event; 0 when there is none."""
    return session.exec(select(func.max(Event.id))).one() or 0


def oldest_event_id(session: Session) -> int | None:
    """Id of the oldest event kept: a stream that resumes before it must start over."""
    return session.exec(select(func.min(Event.id))).one()


def prune_events(session: Session, *, keep: timedelta) -> int:
    """Remove events older than `keep`; returns how many."""
    result = session.execute(delete(Event).where(col(Event.at) < now_of(session) - keep))
    return int(result.rowcount)  # type: ignore[attr-defined]
