"""Log-in, cookie, tokens: who gets in, how, how often, and what leaks."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from starlette.testclient import TestClient

from supervisor.api.access import COOKIE_NAME
from supervisor.api.limits import LOGINS_PER_MINUTE
from supervisor.domain.errors import StoreBusyError
from supervisor.services import auth
from tests.support.api_app import build_api, seed_node, seed_run

ORIGIN = {"Origin": "http://127.0.0.1:8420", "Sec-Fetch-Site": "same-origin"}


class Clock:
    """Wall and monotonic time that tests move."""

    def __init__(self):
        self.seconds = 0.0

    def now(self):
        return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=self.seconds)

    def monotonic(self):
        return self.seconds

    async def sleep(self, seconds):
        self.seconds += seconds


@pytest.fixture
def api(tmp_path):
    built = build_api(tmp_path / "state", clock=Clock())
    yield built
    built.state.store.close()


@pytest.fixture
def browser(api):
    with TestClient(api.app, base_url="http://127.0.0.1:8420", headers=ORIGIN) as client:
        yield client


def bearer(value):
    return {"Authorization": f"Bearer {value}"}


def log_in(browser, value):
    return browser.post("/v1/session", json={}, headers=bearer(value))


def test_a_token_opens_a_session_with_its_own_scope(api, browser):
    response = log_in(browser, api.tokens["read"])
    cookie = response.headers["set-cookie"]

    assert (response.status_code, response.json()["scope"]) == (201, "read")
    for attribute in ("HttpOnly", "SameSite=strict", "Path=/"):
        assert attribute in cookie
    assert api.tokens["read"] not in cookie
    assert browser.get("/v1/runs").status_code == 200
    assert browser.get("/v1/session").json()["actor"].startswith("session/")
    assert browser.post("/v1/nodes", json={"name": "x", "transport": "local"}).status_code == 403


def test_the_cookie_is_secure_behind_tls(api):
    with TestClient(api.app, base_url="https://127.0.0.1:8420") as client:
        cookie = log_in(client, api.tokens["read"]).headers["set-cookie"]

    assert "Secure" in cookie


def test_a_login_code_works_once(api, browser):
    code = api.state.store.write_sync(auth.create_login_code)

    first = log_in(browser, code)
    browser.cookies.clear()
    second = log_in(browser, code)

    assert (first.status_code, first.json()["scope"]) == (201, "admin")
    assert second.status_code == 401


def test_a_login_code_is_no_token(api, browser):
    code = api.state.store.write_sync(auth.create_login_code)

    assert browser.get("/v1/runs", headers=bearer(code)).status_code == 401


def test_a_login_code_ages(api, browser):
    code = api.state.store.write_sync(auth.create_login_code)
    api.state.clock.seconds += auth.LOGIN_CODE_LIFE.total_seconds() + 1

    assert log_in(browser, code).status_code == 401


def test_log_ins_are_limited_for_right_and_wrong_values_alike(api, browser):
    for _ in range(LOGINS_PER_MINUTE):
        assert log_in(browser, "wrong").status_code == 401

    refused = log_in(browser, api.tokens["admin"])
    api.state.clock.seconds += 61

    assert refused.status_code == 429
    assert int(refused.headers["Retry-After"]) > 0
    assert log_in(browser, api.tokens["admin"]).status_code == 201


def test_a_log_in_without_anything_says_what_to_bring(browser):
    response = browser.post("/v1/session", json={})

    assert response.status_code == 401
    assert "one-time code" in response.json()["hint"]


def test_logging_out_makes_the_cookie_worthless(api, browser):
    log_in(browser, api.tokens["read"])
    value = browser.cookies[COOKIE_NAME]

    response = browser.delete("/v1/session")
    browser.cookies.set(COOKIE_NAME, value)

    assert response.status_code == 204
    assert browser.get("/v1/runs").status_code == 401


def test_revoking_a_token_ends_its_sessions(api, browser):
    log_in(browser, api.tokens["read"])
    token_id = api.tokens["read"].split("_")[1]

    revoked = browser.delete(f"/v1/tokens/{token_id}", headers=bearer(api.tokens["admin"]))

    assert revoked.status_code == 204
    assert browser.get("/v1/runs").status_code == 401
    assert browser.get("/v1/runs", headers=bearer(api.tokens["read"])).status_code == 401


def test_sessions_end_by_themselves(api, browser):
    log_in(browser, api.tokens["read"])
    api.state.clock.seconds += auth.SESSION_LIFE.total_seconds() + 1

    assert browser.get("/v1/runs").status_code == 401


@pytest.mark.parametrize(
    "foreign",
    [{"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}, {"Origin": "null"}],
    ids=["origin", "site", "null"],
)
def test_a_foreign_page_cannot_act_with_the_operators_cookie(api, browser, foreign):
    seed_node(api.state)
    seed_run(api.state)
    log_in(browser, api.tokens["admin"])

    response = browser.post("/v1/runs/slammed/start", json={}, headers=foreign)

    assert response.status_code == 403
    assert browser.get("/v1/runs/slammed").json()["desired"] == "stopped"


def test_a_new_token_is_shown_once_and_works_until_it_expires(api, browser):
    admin = bearer(api.tokens["admin"])
    created = browser.post("/v1/tokens", json={"name": "ci", "expires_days": 1}, headers=admin).json()

    listed = browser.get("/v1/tokens", headers=admin)
    before = browser.get("/v1/runs", headers=bearer(created["token"]))
    api.state.clock.seconds += 86_401
    after = browser.get("/v1/runs", headers=bearer(created["token"]))

    assert created["scope"] == "read"
    assert created["token"] not in listed.text
    assert created["token"].encode() not in api.state.store.path.read_bytes()
    assert (before.status_code, after.status_code) == (200, 401)


def test_the_last_use_of_a_token_is_recorded(api, browser):
    admin = bearer(api.tokens["admin"])
    browser.get("/v1/runs", headers=bearer(api.tokens["read"]))

    uses = {
        item["name"]: item["last_used_at"]
        for item in browser.get("/v1/tokens", headers=admin).json()["items"]
    }

    assert uses["read"] is not None
    assert uses["operate"] is None


def test_reads_go_on_while_the_database_cannot_be_written(api, browser, monkeypatch):
    async def refuse(_function):
        raise StoreBusyError("database is locked", waited_s=5.0)

    monkeypatch.setattr(api.state.store, "write", refuse)

    read = browser.get("/v1/runs", headers=bearer(api.tokens["admin"]))
    write = browser.post(
        "/v1/nodes", json={"name": "x", "transport": "local"}, headers=bearer(api.tokens["admin"])
    )

    assert read.status_code == 200
    assert (write.status_code, write.headers["Retry-After"]) == (503, "1")


def test_tokens_are_never_taken_from_the_address(api, browser):
    assert browser.get("/v1/runs", params={"token": api.tokens["admin"]}).status_code == 401
    assert browser.get("/v1/runs", params={"access_token": api.tokens["admin"]}).status_code == 401


def test_a_wrong_token_beside_a_good_cookie_is_refused(api, browser):
    log_in(browser, api.tokens["read"])

    assert browser.get("/v1/runs", headers=bearer("wrong")).status_code == 401
