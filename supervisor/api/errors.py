"""The one place where an error becomes an HTTP answer: RFC 9457 `application/problem+json`.

`type` names the class of the error and never changes, `reason` the precise case, `hint` what to do,
`retryable` whether the same request may succeed later, `instance` the request's id (also in the header
`X-Request-Id` and in the daemon's log). A body never carries a traceback or a value that may be secret.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fastapi.exceptions import RequestValidationError, ResponseValidationError
from starlette.exceptions import HTTPException

from supervisor.api.jsonsafe import SafeJSONResponse
from supervisor.api.wording import field_of, words_of
from supervisor.domain import errors as domain

if TYPE_CHECKING:
    from fastapi import FastAPI, Request
    from starlette.responses import Response

log = logging.getLogger(__name__)

TYPE_PREFIX = "urn:dflash-supervisor:problem:"

STATUS_BY_CLASS: Mapping[type[domain.SupervisorError], tuple[int, str]] = {
    domain.SupervisorError: (500, "failed"),
    domain.ConfigError: (422, "invalid-config"),
    domain.RequestError: (400, "bad-request"),
    domain.NotFoundError: (404, "not-found"),
    domain.ConflictError: (409, "conflict"),
    domain.InvalidTransitionError: (409, "conflict"),
    domain.UnauthorizedError: (401, "unauthorized"),
    domain.LeaseLostError: (409, "conflict"),
    domain.TransportError: (502, "node-unreachable"),
    domain.ConnectError: (502, "node-unreachable"),
    domain.AuthError: (502, "node-refused"),
    domain.HostKeyError: (502, "host-key"),
    domain.DeadlineError: (504, "node-unreachable"),
    domain.OutcomeUnknownError: (504, "outcome-unknown"),
    domain.CommandFailedError: (502, "node-failed"),
    domain.ContainerError: (502, "container"),
    domain.DeployError: (502, "deploy"),
    domain.ShimError: (502, "shim"),
    domain.StoreError: (500, "store"),
    domain.StoreBusyError: (503, "unavailable"),
    domain.StoreFullError: (507, "insufficient-storage"),
}
"""Status and last part of `type`; a class not listed takes its nearest parent's."""

STATUS_BY_REASON: Mapping[str, tuple[int, str]] = {
    "IdempotencyKeyReused": (422, "invalid-request"),
    "ScopeTooSmall": (403, "forbidden"),
}
"""Cases that HTTP tells apart although they share a class."""

STATUS_TITLES: Mapping[int, tuple[str, str]] = {
    400: ("bad-request", "BadRequest"),
    401: ("unauthorized", "Unauthorized"),
    403: ("forbidden", "Forbidden"),
    404: ("not-found", "NotFound"),
    405: ("method-not-allowed", "MethodNotAllowed"),
    406: ("not-acceptable", "NotAcceptable"),
    412: ("stale", "StaleVersion"),
    413: ("too-large", "BodyTooLarge"),
    415: ("unsupported-media-type", "UnsupportedMediaType"),
    421: ("bad-host", "HostNotAllowed"),
    422: ("invalid-request", "InvalidRequest"),
    428: ("precondition-required", "PreconditionRequired"),
    429: ("too-many-requests", "TooManyRequests"),
    500: ("internal", "InternalError"),
    503: ("unavailable", "Unavailable"),
    507: ("insufficient-storage", "DiskFull"),
}
"""For errors that exist in HTTP only."""


class HttpError(domain.RequestError):
    """A refusal that only HTTP knows: precondition, media type, size, rate, origin."""

    def __init__(
        self, status: int, message: str, *, headers: Mapping[str, str] | None = None, **fields: Any
    ) -> None:
        fields.setdefault("reason", STATUS_TITLES[status][1])
        super().__init__(message, **fields)
        self.status = status
        self.headers = dict(headers or {})


def problem(
    status: int,
    kind: str,
    reason: str,
    detail: str,
    *,
    instance: str,
    hint: str | None = None,
    retryable: bool = False,
    headers: Mapping[str, str] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> SafeJSONResponse:
    """Build the answer; `extra` adds members, it cannot replace the standard ones."""
    body: dict[str, Any] = {
        **(extra or {}),
        "type": TYPE_PREFIX + kind,
        "title": kind.replace("-", " "),
        "status": status,
        "detail": detail,
        "instance": instance,
        "reason": reason,
        "retryable": retryable,
        "hint": hint,
    }
    return SafeJSONResponse(
        body, status_code=status, headers=dict(headers or {}), media_type="application/problem+json"
    )


def problem_of(error: domain.SupervisorError, *, instance: str) -> SafeJSONResponse:
    """The answer for one of our own errors."""
    status, kind = _status_of(error)
    headers = dict(getattr(error, "headers", {}))
    if status == 503:
        headers.setdefault("Retry-After", "1")
    if status == 401:
        headers.setdefault("WWW-Authenticate", 'Bearer realm="dflash-supervisor"')
    return problem(
        status,
        kind,
        error.reason,
        error.message,
        instance=instance,
        hint=error.hint,
        retryable=error.retryable,
        headers=headers,
        extra={"data": _plain(error.data)} if error.data else None,
    )


def _status_of(error: domain.SupervisorError) -> tuple[int, str]:
    if isinstance(error, HttpError):
        return error.status, STATUS_TITLES[error.status][0]
    if error.reason in STATUS_BY_REASON:
        return STATUS_BY_REASON[error.reason]
    for parent in type(error).__mro__:
        if parent in STATUS_BY_CLASS:
            return STATUS_BY_CLASS[parent]
    return 500, "failed"


def _plain(value: Any) -> Any:
    """Facts of an error as JSON; anything that is not plain data is shown as text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, str | int | float | bool | None):
        return value
    if isinstance(value, Sequence | set | frozenset) and not isinstance(value, bytes):
        return [_plain(item) for item in value]
    return str(value)


def instance_of(request: Request) -> str:
    """The request's id, given by the outermost middleware."""
    return str(request.scope.get("state", {}).get("request_id", "unknown"))


async def _on_supervisor_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, domain.SupervisorError)
    return problem_of(error, instance=instance_of(request))


async def _on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    faults = [
        {"field": ".".join(str(part) for part in fault["loc"]), "message": words_of(fault)}
        for fault in error.errors()
    ]
    if any(fault["type"] == "json_invalid" for fault in error.errors()):
        return problem(
            400,
            "bad-request",
            "MalformedJson",
            "the body is not JSON",
            instance=instance_of(request),
            hint="send one JSON document in UTF-8",
        )
    summary = "; ".join(f"{field_of(fault)} {words_of(fault)}" for fault in error.errors()[:3])
    return problem(
        422,
        "invalid-request",
        "InvalidRequest",
        summary or "the request does not fit the schema",
        instance=instance_of(request),
        hint="see /openapi.json for the fields and their ranges",
        extra={"errors": faults},
    )


async def _on_undescribed_answer(request: Request, error: Exception) -> Response:
    # The fault is in our description, not in the data: the reader gets the data, the log the difference.
    assert isinstance(error, ResponseValidationError)
    log.error("answer of %s does not fit its schema: %s", request.url.path, error.errors()[:3])
    return SafeJSONResponse(error.body)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind, reason = STATUS_TITLES.get(error.status_code, ("http", "HttpError"))
    hints = {404: "see /openapi.json for the routes", 405: "see the Allow header"}
    return problem(
        error.status_code,
        kind,
        reason,
        f"{request.method} {request.url.path}: {error.detail}",
        instance=instance_of(request),
        hint=hints.get(error.status_code),
        headers=error.headers,
    )


async def _on_unexpected(request: Request, error: Exception) -> Response:
    # The request boundary: the error ends this request only, with its traceback in the log under the id.
    log.error("request %s failed", instance_of(request), exc_info=error)
    return problem(
        500,
        "internal",
        "InternalError",
        "the daemon failed while it handled this request",
        instance=instance_of(request),
        hint="look for this instance in the daemon's log and report it",
    )


def install_error_handlers(app: FastAPI) -> None:
    """Register the handlers; called by `api.install`."""
    app.add_exception_handler(domain.SupervisorError, _on_supervisor_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(ResponseValidationError, _on_undescribed_answer)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_unexpected)
