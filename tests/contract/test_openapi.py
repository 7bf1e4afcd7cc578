"""The OpenAPI document against the running routes: who may call what, and what every answer looks like."""

from __future__ import annotations

import re

import pytest
from starlette.testclient import TestClient

from tests.support.api_app import build_api

OPEN = {("get", "/healthz"), ("post", "/v1/session")}
OWN = {("delete", "/v1/session")}
"""Ends the caller's own session and nothing else, so every scope may."""

ADMIN_READS = {("get", "/v1/tokens")}
SAMPLE = {"node": "n1", "run": "r1", "number": "1", "operation": "op_1", "token": "t1", "name": "NAME"}


@pytest.fixture(scope="module")
def api(tmp_path_factory):
    built = build_api(tmp_path_factory.mktemp("api"))
    yield built
    built.state.store.close()


@pytest.fixture(scope="module")
def client(api):
    with TestClient(api.app, base_url="http://127.0.0.1:8420") as client:
        yield client


def operations(api):
    return [(method, path) for path, methods in api.app.openapi()["paths"].items() for method in methods]


def url_of(path):
    return re.sub(r"\{(\w+)\}", lambda match: SAMPLE[match[1]], path)


def bearer(api, scope):
    return {"Authorization": f"Bearer {api.tokens[scope]}"}


def test_every_route_but_the_open_ones_refuses_a_caller_without_token(api, client):
    for method, path in operations(api):
        if (method, path) in OPEN:
            continue
        response = client.request(method, url_of(path))
        assert response.status_code == 401, f"{method} {path}: {response.status_code}"
        assert response.headers["www-authenticate"].startswith("Bearer")


@pytest.mark.parametrize("token", ["", "x", "dfs_0_0", "é", "a" * 5000], ids=lambda text: text[:8] or "empty")
def test_every_route_refuses_a_wrong_token(api, client, token):
    for method, path in operations(api):
        if (method, path) in OPEN:
            continue
        headers = {"Authorization": f"Bearer {token}".encode()}
        assert client.request(method, url_of(path), headers=headers).status_code == 401, f"{method} {path}"


def test_every_write_refuses_a_read_only_token(api, client):
    writes = [found for found in operations(api) if found[0] != "get" and found not in OPEN | OWN]

    assert len(writes) > 10
    for method, path in writes:
        response = client.request(method, url_of(path), headers=bearer(api, "read"))
        assert response.status_code == 403, f"{method} {path}: {response.status_code}"
        assert response.json()["reason"] == "ScopeTooSmall"


def test_reads_are_open_to_a_read_only_token_but_for_those_of_rights(api, client):
    for method, path in operations(api):
        if method != "get" or path.endswith("/stream"):
            continue
        response = client.request(method, url_of(path), headers=bearer(api, "read"))
        expected = {403} if (method, path) in ADMIN_READS else {200, 404}
        assert response.status_code in expected, f"{path}: {response.status_code} {response.text[:200]}"


@pytest.mark.parametrize(
    "method_path", [("post", "/v1/tokens"), ("delete", "/v1/tokens/x"), ("put", "/v1/secrets/X")]
)
def test_rights_and_secrets_need_admin(api, client, method_path):
    method, path = method_path

    response = client.request(method, path, json={}, headers=bearer(api, "operate"))

    assert response.status_code == 403


def test_no_read_changes_state(api, client):
    before = client.get("/v1/events?limit=200", headers=bearer(api, "read")).json()

    for method, path in operations(api):
        if method == "get" and not path.endswith("/stream"):
            client.get(url_of(path), headers=bearer(api, "admin"))

    assert client.get("/v1/events?limit=200", headers=bearer(api, "read")).json() == before


def test_unknown_versioned_routes_need_a_token_and_are_problems_even_for_browsers(api, client):
    headers = {"Accept": "text/html"}

    assert client.get("/v1/nothing", headers=headers).status_code == 401
    response = client.get("/v1/nothing", headers=headers | bearer(api, "read"))

    assert response.status_code == 404
    assert response.headers["content-type"] == "application/problem+json"


def test_every_operation_documents_the_problem_and_its_summary(api):
    for path, methods in api.app.openapi()["paths"].items():
        for method, operation in methods.items():
            assert "application/problem+json" in operation["responses"]["default"]["content"], path
            assert operation.get("description"), f"{method} {path} has no description"


def test_all_references_of_the_document_exist(api):
    document = api.app.openapi()
    names = set(re.findall(r"#/components/schemas/([\w-]+)", str(document)))

    assert names <= set(document["components"]["schemas"])
    assert "RunSpec" in names


def test_document_and_listing_need_a_token(api, client):
    for path in ("/openapi.json", "/docs", "/metrics", "/readyz"):
        assert client.get(path).status_code == 401
        assert client.get(path, headers=bearer(api, "read")).status_code == 200


def test_health_says_ok_and_nothing_else(client):
    response = client.get("/healthz")

    assert (response.status_code, response.text) == (200, "ok")


def test_built_in_documentation_pages_are_gone(api, client):
    assert client.get("/redoc", headers=bearer(api, "read")).status_code == 404
    assert "<script" not in client.get("/docs", headers=bearer(api, "read")).text
