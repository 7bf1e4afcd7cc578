"""The error body: one shape for every class of error, stable types, no traceback, nothing secret."""

from __future__ import annotations

import json

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from supervisor.api import errors as api_errors
from supervisor.api.guard import Guard, Rules
from supervisor.domain import errors as domain

MEMBERS = {"type", "title", "status", "detail", "instance", "reason", "retryable", "hint"}

CASES = [
    (domain.SupervisorError, 500, "failed"),
    (domain.ConfigError, 422, "invalid-config"),
    (domain.RequestError, 400, "bad-request"),
    (domain.NotFoundError, 404, "not-found"),
    (domain.ConflictError, 409, "conflict"),
    (domain.InvalidTransitionError, 409, "conflict"),
    (domain.UnauthorizedError, 401, "unauthorized"),
    (domain.LeaseLostError, 409, "conflict"),
    (domain.TransportError, 502, "node-unreachable"),
    (domain.ConnectError, 502, "node-unreachable"),
    (domain.AuthError, 502, "node-refused"),
    (domain.HostKeyError, 502, "host-key"),
    (domain.DeadlineError, 504, "node-unreachable"),
    (domain.OutcomeUnknownError, 504, "outcome-unknown"),
    (domain.CommandFailedError, 502, "node-failed"),
    (domain.ContainerError, 502, "container"),
    (domain.NotRunningError, 502, "container"),
    (domain.MissingError, 502, "container"),
    (domain.LockedError, 502, "container"),
    (domain.DeployError, 502, "deploy"),
    (domain.ChecksumMismatchError, 502, "deploy"),
    (domain.ShimError, 502, "shim"),
    (domain.VersionMismatchError, 502, "shim"),
    (domain.StoreError, 500, "store"),
    (domain.StoreBusyError, 503, "unavailable"),
    (domain.StoreFullError, 507, "insufficient-storage"),
    (domain.StoreCorruptError, 500, "store"),
    (domain.SchemaTooNewError, 500, "store"),
]


@pytest.fixture
def client():
    app = FastAPI()
    api_errors.install_error_handlers(app)
    app.add_middleware(Guard, rules=lambda: Rules.of([]))
    classes = {kind.__name__: kind for kind, _, _ in CASES}

    @app.get("/raise/{name}")
    async def fail(name: str) -> None:
        raise classes[name](
            "it failed: x", hint="do this", path="/tmp/x", items=(1, b"raw"), nan=float("nan")
        )

    @app.get("/bug")
    async def bug() -> None:
        raise RuntimeError("password=hunter2")

    @app.get("/undescribed", response_model=dict[str, int])
    async def undescribed() -> dict[str, object]:
        return {"a": "text", "b": float("nan")}

    @app.get("/number/{value}")
    async def number(value: int) -> int:
        return value

    with TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False) as client:
        yield client


def all_classes():
    found = {domain.SupervisorError}
    waiting = [domain.SupervisorError]
    while waiting:
        for child in waiting.pop().__subclasses__():
            if child.__module__ == domain.__name__:
                found.add(child)
                waiting.append(child)
    return found


def test_every_class_of_the_error_tree_is_listed_here():
    assert {kind for kind, _, _ in CASES} == all_classes()


@pytest.mark.parametrize(
    ("kind", "status", "name"), CASES, ids=lambda value: getattr(value, "__name__", None)
)
def test_each_class_has_its_status_and_type(client, kind, status, name):
    response = client.get(f"/raise/{kind.__name__}")
    body = response.json()

    assert response.status_code == body["status"] == status
    assert response.headers["content-type"] == "application/problem+json"
    assert body["type"] == f"urn:dflash-supervisor:problem:{name}"
    assert set(body) == MEMBERS | {"data"}
    assert (body["detail"], body["hint"]) == ("it failed: x", "do this")
    assert body["reason"] == kind.reason
    assert body["retryable"] is kind.retryable
    assert body["instance"] == response.headers["X-Request-Id"]
    assert body["data"] == {"path": "/tmp/x", "items": [1, "b'raw'"], "nan": None}


def test_unauthorised_answers_say_how_to_authenticate(client):
    assert client.get("/raise/UnauthorizedError").headers["www-authenticate"].startswith("Bearer ")


def test_busy_answers_say_when_to_come_back(client):
    assert client.get("/raise/StoreBusyError").headers["retry-after"] == "1"


def test_a_bug_shows_its_id_and_neither_traceback_nor_message(client, caplog):
    response = client.get("/bug")

    assert response.status_code == 500
    assert set(response.json()) == MEMBERS
    assert "hunter2" not in response.text
    assert "Traceback" not in response.text
    assert response.json()["instance"] in caplog.text


def test_data_that_its_description_forgot_is_answered_and_logged(client, caplog):
    response = client.get("/undescribed")

    assert (response.status_code, response.json()) == (200, {"a": "text", "b": None})
    assert "/undescribed does not fit its schema" in caplog.text


def test_fields_that_do_not_fit_are_named_without_their_value(client):
    response = client.get("/number/secret-value")

    assert response.status_code == 422
    assert response.json()["errors"][0]["field"] == "path.value"
    assert "secret-value" not in response.text


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/nothing", 404), ("PUT", "/bug", 405)])
def test_errors_of_the_framework_have_the_same_shape(client, method, path, status):
    response = client.request(method, path)

    assert response.status_code == status
    assert set(response.json()) == MEMBERS
    assert response.json()["hint"]


def test_every_http_only_status_has_a_stable_type_and_reason():
    for status in api_errors.STATUS_TITLES:
        error = api_errors.HttpError(status, "no")
        body = json.loads(bytes(api_errors.problem_of(error, instance="req_1").body))
        assert body["status"] == status
        assert body["reason"]
        assert body["type"].startswith("urn:dflash-supervisor:problem:")
