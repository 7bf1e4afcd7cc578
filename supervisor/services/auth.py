"""Who may do what: tokens, browser sessions, one-time login codes, scopes.

Values are 256 random bits, shown once and kept as SHA-256. Random values come in as arguments' defaults from
`secrets`; time comes from the session's transaction. The API calls `authenticate_*` on each request.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from sqlalchemy import delete, or_
from sqlmodel import Session, col, select

from supervisor.domain.errors import ConflictError, NotFoundError, RequestError, UnauthorizedError
from supervisor.store.events import now_of, record_event
from supervisor.store.tables import BrowserSession, LoginCode, Token

TOKEN_BYTES = 32
PREFIX = "dfs"
SESSION_LIFE = timedelta(hours=12)
LOGIN_CODE_LIFE = timedelta(minutes=15)
USE_RESOLUTION = timedelta(minutes=1)
MAX_NAME = 100


class Scope(StrEnum):
    """What a token may do; each includes the ones before it."""

    READ = "read"
    OPERATE = "operate"
    ADMIN = "admin"

    def includes(self, needed: Scope) -> bool:
        """Whether this scope is enough for `needed`."""
        order = list(Scope)
        return order.index(self) >= order.index(needed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """An authenticated caller."""

    actor: str
    """`token/ID` or `session/ID`, as it stands in events."""
    scope: Scope
    token_id: str | None
    is_browser: bool = False
    needs_touch: bool = False
    """Whether the last use should be written (at most once a minute)."""

    def require(self, needed: Scope) -> None:
        """Raise UnauthorizedError, reason ScopeTooSmall, unless the scope is enough."""
        if not self.scope.includes(needed):
            raise UnauthorizedError(
                f"this needs scope {needed.value}, the token has {self.scope.value}",
                reason="ScopeTooSmall",
                hint=f"use a token created with --scope {needed.value}",
                needed=needed.value,
            )


def parse_scope(text: str) -> Scope:
    """Scope by name; RequestError otherwise."""
    try:
        return Scope(text)
    except ValueError as error:
        raise RequestError(
            f"unknown scope: {text!r}, known are read, operate, admin", reason="BadScope"
        ) from error


def create_token(
    session: Session,
    *,
    name: str,
    scope: Scope | str,
    actor: str,
    expires_at: datetime | None = None,
    value: str | None = None,
) -> tuple[Token, str]:
    """Create a token; returns the row and the value, which is not kept anywhere.

    Raises:
        RequestError: bad name, scope, or an expiry in the past.
    """
    scope = parse_scope(scope)
    if not name or len(name) > MAX_NAME or not name.isprintable():
        raise RequestError(
            f"token name must be 1 to {MAX_NAME} printable characters: {name!r}", reason="BadName"
        )
    if expires_at is not None and expires_at <= now_of(session):
        raise RequestError(f"expiry lies in the past: {expires_at.isoformat()}", reason="BadExpiry")
    token_id = secrets.token_hex(6)
    value = value or f"{PREFIX}_{token_id}_{secrets.token_urlsafe(TOKEN_BYTES)}"
    row = Token(
        id=token_id,
        name=name,
        sha256=_digest(value),
        scope=scope.value,
        created_by=actor,
        created_at=now_of(session),
        expires_at=expires_at,
    )
    session.add(row)
    record_event(
        session,
        actor=actor,
        subject=f"token/{token_id}",
        reason="TokenCreated",
        message=f"created with scope {scope.value}",
        data={"name": name, "scope": scope.value, "expires_at": expires_at and expires_at.isoformat()},
    )
    return row, value


def list_tokens(session: Session) -> list[Token]:
    """All tokens, oldest first, revoked ones too."""
    return list(session.exec(select(Token).order_by(col(Token.created_at), col(Token.id))).all())


def revoke_token(session: Session, token_id: str, *, actor: str) -> Token:
    """Revoke for good; its browser sessions end with it. Revoking twice is harmless.

    Raises:
        NotFoundError: no such token.
        ConflictError: it is the last admin token that works.
    """
    row = session.get(Token, token_id)
    if row is None:
        raise NotFoundError(
            f"no token has id {token_id}",
            hint="list them with `dflashctl token ls`",
            kind="token",
            name=token_id,
        )
    if row.revoked_at is not None:
        return row
    if row.scope == Scope.ADMIN and len(_working_admins(session)) == 1 and row in _working_admins(session):
        raise ConflictError(
            "this is the last admin token, nobody could administer the daemon without it",
            reason="LastAdminToken",
            hint="create another admin token first",
        )
    row.revoked_at = now_of(session)
    session.add(row)
    session.execute(delete(BrowserSession).where(col(BrowserSession.token_id) == token_id))
    record_event(session, actor=actor, subject=f"token/{token_id}", reason="TokenRevoked", message="revoked")
    return row


def authenticate_token(session: Session, value: str) -> Principal:
    """Check a bearer value.

    Raises:
        UnauthorizedError: unknown, revoked or expired; the message does not tell an outsider which.
    """
    digest = _digest(value)
    row = session.exec(select(Token).where(Token.sha256 == digest)).first()
    if row is None or not hmac.compare_digest(row.sha256, digest):
        raise _refused("token is not valid")
    _check_token(row, now_of(session))
    return Principal(
        actor=f"token/{row.id}",
        scope=Scope(row.scope),
        token_id=row.id,
        needs_touch=_is_due(row.last_used_at, now_of(session)),
    )


def authenticate_session(session: Session, value: str) -> Principal:
    """Check a session cookie's value.

    Raises:
        UnauthorizedError: unknown, expired, or its token no longer works.
    """
    row = session.get(BrowserSession, _digest(value))
    if row is None or row.expires_at <= now_of(session):
        raise _refused("browser session is over, log in again", reason="SessionOver")
    if row.token_id is not None:
        token = session.get(Token, row.token_id)
        if token is None:
            raise _refused("browser session is over, log in again", reason="SessionOver")
        _check_token(token, now_of(session))
    return Principal(
        actor=row.actor,
        scope=Scope(row.scope),
        token_id=row.token_id,
        is_browser=True,
        needs_touch=_is_due(row.last_used_at, now_of(session)),
    )


def touch(session: Session, principal: Principal, *, session_value: str | None = None) -> None:
    """Write the last use; the caller does so when `needs_touch` says that it is due."""
    if session_value is not None:
        browser = session.get(BrowserSession, _digest(session_value))
        if browser is not None:
            browser.last_used_at = now_of(session)
            session.add(browser)
    if principal.token_id is not None:
        token = session.get(Token, principal.token_id)
        if token is not None:
            token.last_used_at = now_of(session)
            session.add(token)


def create_login_code(session: Session, *, scope: Scope | str = Scope.ADMIN) -> str:
    """A code that opens one browser session; put it in the URL's fragment only."""
    value = secrets.token_urlsafe(TOKEN_BYTES)
    session.add(
        LoginCode(
            sha256=_digest(value),
            scope=parse_scope(scope).value,
            created_at=now_of(session),
            expires_at=now_of(session) + LOGIN_CODE_LIFE,
        )
    )
    return value


def open_session(session: Session, value: str) -> tuple[BrowserSession, str]:
    """Log a browser in with a token or a one-time code; returns the row and the cookie's value.

    Raises:
        UnauthorizedError: neither a working token nor an unused code.
    """
    code = session.get(LoginCode, _digest(value))
    if code is not None:
        if code.used_at is not None or code.expires_at <= now_of(session):
            raise _refused("login code was used or is too old, start `dflashctl serve` again or use a token")
        code.used_at = now_of(session)
        session.add(code)
        scope, token_id, origin = Scope(code.scope), None, "a one-time code"
    else:
        principal = authenticate_token(session, value)
        scope, token_id, origin = principal.scope, principal.token_id, f"token {principal.token_id}"
    cookie = secrets.token_urlsafe(TOKEN_BYTES)
    digest = _digest(cookie)
    row = BrowserSession(
        sha256=digest,
        token_id=token_id,
        scope=scope.value,
        actor=f"session/{digest[:12]}",
        created_at=now_of(session),
        expires_at=now_of(session) + SESSION_LIFE,
    )
    session.add(row)
    record_event(
        session,
        actor=row.actor,
        subject=row.actor,
        reason="SessionOpened",
        message=f"logged in with {origin}, scope {scope.value}",
    )
    return row, cookie


def close_session(session: Session, value: str) -> None:
    """Log out; harmless when it is over already."""
    row = session.get(BrowserSession, _digest(value))
    if row is not None:
        session.delete(row)
        record_event(
            session, actor=row.actor, subject=row.actor, reason="SessionClosed", message="logged out"
        )


def prune_sessions(session: Session) -> int:
    """Remove sessions and codes that are over; returns how many."""
    now = now_of(session)
    first = session.execute(delete(BrowserSession).where(col(BrowserSession.expires_at) <= now))
    second = session.execute(delete(LoginCode).where(col(LoginCode.expires_at) <= now))
    return int(first.rowcount) + int(second.rowcount)  # type: ignore[attr-defined]


def token_view(row: Token) -> dict[str, Any]:
    """A token as the API shows it: never its value or hash."""
    return {
        "id": row.id,
        "name": row.name,
        "scope": row.scope,
        "created_by": row.created_by,
        "created_at": _text(row.created_at),
        "expires_at": _text(row.expires_at),
        "revoked_at": _text(row.revoked_at),
        "last_used_at": _text(row.last_used_at),
    }


def _working_admins(session: Session) -> list[Token]:
    query = select(Token).where(
        Token.scope == Scope.ADMIN.value,
        col(Token.revoked_at).is_(None),
        or_(col(Token.expires_at).is_(None), col(Token.expires_at) > now_of(session)),
    )
    return list(session.exec(query).all())


def _check_token(row: Token, now: datetime) -> None:
    if row.revoked_at is not None or (row.expires_at is not None and row.expires_at <= now):
        raise _refused("token is not valid")


def _is_due(last: datetime | None, now: datetime) -> bool:
    return last is None or now - last >= USE_RESOLUTION


def _refused(message: str, *, reason: str = "Unauthorized") -> UnauthorizedError:
    return UnauthorizedError(
        message, reason=reason, hint="the admin token is in the state folder, `admin.token`"
    )


def _digest(value: str) -> str:
    return hashlib.sha256(value.encode("utf-8", "surrogatepass")).hexdigest()


def _text(at: datetime | None) -> str | None:
    return at.isoformat() if at else None
