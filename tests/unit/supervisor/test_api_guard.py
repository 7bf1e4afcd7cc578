"""The outermost middleware: host names, origins, media types, body sizes, headers."""

from __future__ import annotations

import pytest
from fastapi import FastAPI, Request
from starlette.testclient import TestClient

from supervisor.api.errors import install_error_handlers
from supervisor.api.guard import MAX_BODY_BYTES, SECURITY_HEADERS, Guard, Rules, host_of


@pytest.fixture
def client():
    app = FastAPI()
    install_error_handlers(app)
    app.add_middleware(Guard, rules=lambda: Rules.of(["supervisor.lan"]))

    @app.get("/v1/thing")
    async def read() -> dict[str, str]:
        return {"ok": "yes"}

    @app.post("/v1/thing")
    @app.delete("/v1/thing")
    @app.patch("/v1/thing")
    async def write(request: Request) -> dict[str, int]:
        return {"bytes": len(await request.body())}

    with TestClient(app, base_url="http://127.0.0.1:8420") as client:
        yield client


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.0.0.1:8420", "localhost:1", "LOCALHOST", "[::1]:8420", "supervisor.lan:443"]
)
def test_own_host_names_are_answered_with_and_without_port(client, host):
    assert client.get("/v1/thing", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8420", "127.0.0.1.evil.example", "localhost.evil", "[::2]", ""]
)
def test_foreign_host_names_are_refused_on_reads_too(client, host):
    response = client.get("/v1/thing", headers={"Host": host})

    assert response.status_code == 421
    assert response.json()["reason"] == "HostNotAllowed"
    assert response.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize("method", ["POST", "DELETE", "PATCH"])
@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "http://127.0.0.1:3000"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
    ids=lambda headers: "-".join(headers.values()),
)
def test_writes_from_another_origin_are_refused(client, method, headers):
    response = client.request(method, "/v1/thing", headers=headers)

    assert response.status_code == 403
    assert response.json()["reason"] == "CrossSite"


@pytest.mark.parametrize("method", ["POST", "DELETE", "PATCH"])
def test_writes_from_our_own_page_and_from_programs_pass(client, method):
    own = {"Origin": "http://127.0.0.1:8420", "Sec-Fetch-Site": "same-origin"}

    assert client.request(method, "/v1/thing", headers=own).status_code == 200
    assert client.request(method, "/v1/thing").status_code == 200


@pytest.mark.parametrize(
    "media_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""]
)
def test_bodies_that_a_form_could_send_are_refused(client, media_type):
    response = client.post("/v1/thing", content=b"{}", headers={"Content-Type": media_type})

    assert response.status_code == 415
    assert "application/json" in response.json()["hint"]


def test_largest_body_passes_and_one_byte_more_does_not(client):
    headers = {"Content-Type": "application/json"}

    largest = client.post("/v1/thing", content=b" " * MAX_BODY_BYTES, headers=headers)
    larger = client.post("/v1/thing", content=b" " * (MAX_BODY_BYTES + 1), headers=headers)

    assert largest.json() == {"bytes": MAX_BODY_BYTES}
    assert larger.status_code == 413


def test_undeclared_length_is_counted_while_it_arrives(client):
    pieces = (b" " * 65_536 for _ in range(17))

    response = client.post("/v1/thing", content=pieces, headers={"Content-Type": "application/json"})

    assert response.status_code == 413
    assert response.json()["reason"] == "BodyTooLarge"


def test_length_that_is_no_number_is_refused(client):
    headers = {"Content-Type": "application/json", "Content-Length": "-1"}

    assert client.post("/v1/thing", content=b"{}", headers=headers).status_code == 413


@pytest.mark.parametrize("path", ["/v1/thing", "/v1/nothing"])
def test_every_answer_has_the_security_headers_and_its_id(client, path):
    response = client.get(path)

    for name, value in SECURITY_HEADERS.items():
        assert response.headers[name] == value
    assert response.headers["X-Request-Id"].startswith("req_")
    assert response.headers["Cache-Control"] == "no-store"
    assert "access-control-allow-origin" not in response.headers


def test_refusals_carry_the_headers_and_the_same_id_in_the_body(client):
    response = client.get("/v1/thing", headers={"Host": "evil.example"})

    assert response.headers["X-Frame-Options"] == "DENY"
    assert response.json()["instance"] == response.headers["X-Request-Id"]


def test_policy_has_no_inline_script_and_no_frames():
    policy = SECURITY_HEADERS["Content-Security-Policy"]

    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy


@pytest.mark.parametrize(
    ("netloc", "host"), [("[::1]:80", "[::1]"), ("[::1]", "[::1]"), ("A.b:1", "a.b"), (" a ", "a"), ("", "")]
)
def test_host_of_drops_the_port(netloc, host):
    assert host_of(netloc) == host
