"""Same key, same answer, one effect.

The API calls `begin` and the service in one transaction and `finish` with the answer; a key that is replayed
never reaches the service. Keys belong to the actor that sent them.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from sqlalchemy import delete
from sqlmodel import Session, col

from supervisor.domain.errors import ConflictError, RequestError
from supervisor.store.events import now_of
from supervisor.store.tables import IdempotencyKey

MAX_KEY = 255
KEPT = timedelta(hours=24)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredAnswer:
    """The first answer to a key."""

    status: int
    headers: dict[str, Any]
    body: dict[str, Any] | None


def request_fingerprint(method: str, path: str, body: Any) -> str:
    """SHA-256 over method, path and canonical body."""
    text = json.dumps([method.upper(), path, body], sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def begin(session: Session, *, actor: str, key: str, fingerprint: str) -> StoredAnswer | None:
    """Claim a key.

    Returns:
        None when the request is new and must be carried out; else the first answer.

    Raises:
        RequestError: reason IdempotencyKeyReused (422): same key, another request; or a key that is no key.
        ConflictError: reason StillRunning (409): the first one has no answer yet.
    """
    if not key or len(key) > MAX_KEY or not key.isprintable():
        raise RequestError(
            f"idempotency key must be 1 to {MAX_KEY} printable characters", reason="BadIdempotencyKey"
        )
    row = session.get(IdempotencyKey, (actor, key))
    if row is not None and row.created_at < now_of(session) - KEPT:
        session.delete(row)
        session.flush()
        row = None
    if row is None:
        session.add(
            IdempotencyKey(
                actor=actor, key=key, fingerprint=fingerprint, status="running", created_at=now_of(session)
            )
        )
        session.flush()
        return None
    if row.fingerprint != fingerprint:
        raise RequestError(
            "this idempotency key was used for another request",
            reason="IdempotencyKeyReused",
            hint="use a new key for a new request",
        )
    if row.status != "done" or row.response_status is None:
        raise ConflictError(
            "the first request with this idempotency key is still running",
            reason="StillRunning",
            hint="wait and send it again with the same key",
        )
    return StoredAnswer(
        status=row.response_status, headers=row.response_headers or {}, body=row.response_body
    )


def finish(
    session: Session,
    *,
    actor: str,
    key: str,
    status: int,
    body: dict[str, Any] | None,
    headers: dict[str, Any] | None = None,
) -> None:
    """Keep the answer."""
    row = session.get(IdempotencyKey, (actor, key))
    if row is None:
        return
    row.status = "done"
    row.response_status = status
    row.response_body = body
    row.response_headers = headers or {}
    session.add(row)


def release(session: Session, *, actor: str, key: str) -> None:
    """Give a key back after a request that failed before it had any effect."""
    row = session.get(IdempotencyKey, (actor, key))
    if row is not None and row.status == "running":
        session.delete(row)


def abandon_running(session: Session) -> int:
    """At start: keys whose request died with the former daemon can be sent again; returns how many."""
    result = session.execute(delete(IdempotencyKey).where(col(IdempotencyKey.status) == "running"))
    return int(result.rowcount)  # type: ignore[attr-defined]


def prune_keys(session: Session, *, keep: timedelta = KEPT) -> int:
    """Remove keys older than `keep`; returns how many."""
    result = session.execute(
        delete(IdempotencyKey).where(col(IdempotencyKey.created_at) < now_of(session) - keep)
    )
    return int(result.rowcount)  # type: ignore[attr-defined]
