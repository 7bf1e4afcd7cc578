"""Tokens, sessions and login codes: hashed, scoped, expiring, revocable, shown once."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlmodel import select

from supervisor.domain.errors import ConflictError, NotFoundError, RequestError, UnauthorizedError
from supervisor.services import auth
from supervisor.services.auth import Principal, Scope
from supervisor.store.tables import BrowserSession, Event, LoginCode, Token
from supervisor.store.writer import Store
from tests.support.domain_builders import T0, FakeClock, open_store


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def store(tmp_path: Path, clock: FakeClock) -> Iterator[Store]:
    with open_store(tmp_path, clock=clock) as opened:
        yield opened


def create(store: Store, scope: str = "operate", **changes: Any) -> tuple[Token, str]:
    return store.write_sync(
        lambda session: auth.create_token(session, name="ci", scope=scope, actor="test", **changes)
    )


def check(store: Store, value: str) -> Principal:
    return store.read_sync(lambda session: auth.authenticate_token(session, value))


def test_a_token_has_256_random_bits_and_is_kept_as_a_hash(store: Store, tmp_path: Path) -> None:
    row, value = create(store)
    random_part = value.removeprefix(f"dfs_{row.id}_")
    assert len(base64.urlsafe_b64decode(random_part + "=")) == 32
    store.close()
    assert not any(value.encode() in path.read_bytes() for path in tmp_path.iterdir())


def test_a_token_authenticates_with_its_scope(store: Store) -> None:
    row, value = create(store)
    principal = check(store, value)
    assert (principal.actor, principal.scope, principal.needs_touch) == (
        f"token/{row.id}",
        Scope.OPERATE,
        True,
    )
    assert "created with scope operate" in store.read_sync(lambda s: s.exec(select(Event)).one()).message


@pytest.mark.parametrize("value", ["", "dfs_x_y", "ä", "\udcff", "x" * 10_000])
def test_anything_else_is_refused(store: Store, value: str) -> None:
    create(store)
    with pytest.raises(UnauthorizedError):
        check(store, value)


@pytest.mark.parametrize(
    ("scope", "allowed"),
    [("read", {"read"}), ("operate", {"read", "operate"}), ("admin", {"read", "operate", "admin"})],
)
def test_scopes_include_the_smaller_ones(scope: str, allowed: set[str]) -> None:
    principal = Principal(actor="a", scope=Scope(scope), token_id=None)
    for needed in Scope:
        if needed.value in allowed:
            principal.require(needed)
        else:
            with pytest.raises(UnauthorizedError) as caught:
                principal.require(needed)
            assert caught.value.reason == "ScopeTooSmall"


def test_expiry_and_revocation_end_a_token_and_look_alike(store: Store, clock: FakeClock) -> None:
    _, expiring = create(store, expires_at=T0 + timedelta(seconds=60))
    row, revoked = create(store)
    clock.move(59)
    check(store, expiring)
    clock.move(1)
    store.write_sync(lambda session: auth.revoke_token(session, row.id, actor="test"))
    messages = set()
    for value in (expiring, revoked, "nonsense"):
        with pytest.raises(UnauthorizedError) as caught:
            check(store, value)
        messages.add(caught.value.message)
    assert len(messages) == 1


def test_the_last_admin_token_stays(store: Store) -> None:
    first, _ = create(store, "admin")
    with pytest.raises(ConflictError) as caught:
        store.write_sync(lambda session: auth.revoke_token(session, first.id, actor="test"))
    assert caught.value.reason == "LastAdminToken"
    create(store, "admin")
    store.write_sync(lambda session: auth.revoke_token(session, first.id, actor="test"))
    again = store.write_sync(lambda session: auth.revoke_token(session, first.id, actor="test"))
    assert again.revoked_at == T0


def test_bad_requests_are_refused(store: Store) -> None:
    for changes in ({"scope": "root"}, {"expires_at": T0}):
        with pytest.raises(RequestError):
            create(store, **changes)
    with pytest.raises(RequestError):
        store.write_sync(lambda s: auth.create_token(s, name="a\nb", scope="read", actor="t"))
    with pytest.raises(NotFoundError):
        store.write_sync(lambda session: auth.revoke_token(session, "none", actor="t"))


def test_last_use_is_written_at_most_once_a_minute(store: Store, clock: FakeClock) -> None:
    _, value = create(store)
    store.write_sync(lambda session: auth.touch(session, check_in(session, value)))
    clock.move(30)
    assert not check(store, value).needs_touch
    clock.move(30)
    assert check(store, value).needs_touch
    shown = auth.token_view(store.read_sync(auth.list_tokens)[0])
    assert shown["last_used_at"] == T0.isoformat()
    assert "sha256" not in shown


def check_in(session: Any, value: str) -> Principal:
    return auth.authenticate_token(session, value)


def test_a_browser_session_ends_by_time_logout_or_its_token(store: Store, clock: FakeClock) -> None:
    row, value = create(store)
    _, cookie = store.write_sync(lambda session: auth.open_session(session, value))
    principal = store.read_sync(lambda session: auth.authenticate_session(session, cookie))
    assert (principal.scope, principal.is_browser) == (Scope.OPERATE, True)
    _, second = store.write_sync(lambda session: auth.open_session(session, value))
    store.write_sync(lambda session: auth.close_session(session, second))
    _, third = store.write_sync(lambda session: auth.open_session(session, value))
    store.write_sync(lambda session: auth.revoke_token(session, row.id, actor="t"))
    for dead in (cookie, second, third, "nonsense"):
        with pytest.raises(UnauthorizedError):
            store.read_sync(lambda session, dead=dead: auth.authenticate_session(session, dead))
    _, other = create(store, "read")
    _, fourth = store.write_sync(lambda session: auth.open_session(session, other))
    clock.move(13 * 3600)
    with pytest.raises(UnauthorizedError, match="over"):
        store.read_sync(lambda session: auth.authenticate_session(session, fourth))
    assert store.write_sync(auth.prune_sessions) == 1


def test_a_login_code_opens_one_session_within_its_time(store: Store, clock: FakeClock) -> None:
    code = store.write_sync(auth.create_login_code)
    _, cookie = store.write_sync(lambda session: auth.open_session(session, code))
    assert store.read_sync(lambda session: auth.authenticate_session(session, cookie)).scope is Scope.ADMIN
    with pytest.raises(UnauthorizedError, match="was used"):
        store.write_sync(lambda session: auth.open_session(session, code))
    late = store.write_sync(auth.create_login_code)
    clock.move(901)
    with pytest.raises(UnauthorizedError, match="too old"):
        store.write_sync(lambda session: auth.open_session(session, late))
    rows = store.read_sync(lambda s: (s.exec(select(LoginCode)).all(), s.exec(select(BrowserSession)).all()))
    assert code not in str(rows)
    assert cookie not in str(rows)
