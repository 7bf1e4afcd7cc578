"""The right to act on a run or a node: claimed for a while, fenced by a token, checked at every apply.

Used by the loop (runs) and deploy (nodes). Slow work happens outside any transaction; its result is written
only while the token still matches, so a worker that was overtaken cannot write over its successor. One daemon
holds the state folder, therefore leases of a former daemon are void at start.
"""

from __future__ import annotations

import secrets
from datetime import timedelta

from sqlmodel import Session, col, select

from supervisor.domain.errors import LeaseLostError
from supervisor.store.events import now_of
from supervisor.store.tables import Node, Run

LEASE_S = 60.0

Leased = type[Run] | type[Node]


def _get(session: Session, kind: Leased, row_id: str) -> Run | Node | None:
    return session.get(Run, row_id) if kind is Run else session.get(Node, row_id)


def claim(session: Session, kind: Leased, row_id: str, owner: str, *, for_s: float = LEASE_S) -> str | None:
    """Take the lease of a row; None when another owner holds it or the row is gone."""
    row = _get(session, kind, row_id)
    if row is None:
        return None
    now = now_of(session)
    is_held = row.lease_token is not None and row.lease_expires_at is not None and row.lease_expires_at > now
    if is_held and row.lease_owner != owner:
        return None
    row.lease_owner = owner
    row.lease_token = secrets.token_hex(16)
    row.lease_expires_at = now + timedelta(seconds=for_s)
    session.add(row)
    return row.lease_token


def require(session: Session, kind: Leased, row_id: str, token: str) -> Run | Node:
    """The row, if the token still matches.

    Raises:
        LeaseLostError: another worker owns it now, or it is gone; the caller drops its result.
    """
    row = _get(session, kind, row_id)
    if row is None or row.lease_token != token:
        raise LeaseLostError(f"lease of {kind.__name__.lower()} {row_id} was lost; the result is dropped")
    return row


def renew(session: Session, kind: Leased, row_id: str, token: str, *, for_s: float = LEASE_S) -> None:
    """Extend the lease.

    Raises:
        LeaseLostError: see `require`.
    """
    row = require(session, kind, row_id, token)
    row.lease_expires_at = now_of(session) + timedelta(seconds=for_s)
    session.add(row)


def release(session: Session, kind: Leased, row_id: str, token: str) -> None:
    """Give the lease back; harmless when it was lost."""
    row = _get(session, kind, row_id)
    if row is not None and row.lease_token == token:
        row.lease_owner = row.lease_token = row.lease_expires_at = None
        session.add(row)


def void_all(session: Session) -> int:
    """Void every lease: called once at start, by the daemon that holds the state folder."""
    runs = session.exec(select(Run).where(col(Run.lease_token).is_not(None)))
    nodes = session.exec(select(Node).where(col(Node.lease_token).is_not(None)))
    rows: list[Run | Node] = [*runs, *nodes]
    for row in rows:
        row.lease_owner = row.lease_token = row.lease_expires_at = None
        session.add(row)
    return len(rows)
