"""Thin synchronous HTTP client of the daemon's API, shared by the command line and the tests.

Turns answers into plain dicts and problems into `ApiError`s, repeats what may be repeated (reads, and writes
under the same idempotency key) when a connection breaks, resumes streams by event id and logs by byte offset.
It holds no state but its connection, decides no policy and prints nothing.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import quote

import httpx2

from supervisor.domain.errors import SupervisorError

Json = dict[str, Any]

CONNECT_TRIES = 3
POLL_S = 0.25
LOG_PIECE_BYTES = 262_144
READ_TIMEOUT_S = 60.0
STREAM_SILENCE_S = 45.0
"""Streams send a comment every 15 s; three missing ones mean a dead connection."""

FINISHED = frozenset({"done", "failed", "superseded"})


class DaemonUnreachableError(SupervisorError):
    """No daemon answers at the URL."""

    reason = "DaemonUnreachable"
    retryable = True


class WaitTimeoutError(SupervisorError):
    """The wait ended before the operation did; the operation goes on."""

    reason = "WaitTimeout"
    retryable = True


class ApiError(SupervisorError):
    """The daemon's answer was a problem document."""

    def __init__(self, status: int, body: Mapping[str, Any]) -> None:
        super().__init__(
            str(body.get("detail") or f"HTTP {status}"),
            reason=str(body.get("reason") or "HttpError"),
            hint=body.get("hint"),
            **(body.get("data") or {}),
        )
        self.status = status
        self.kind = str(body.get("type", "")).rpartition(":")[2]
        self.instance = body.get("instance")
        self.retryable = bool(body.get("retryable", False))
        self.body = dict(body)


@dataclass(frozen=True, slots=True)
class Answer:
    """A JSON answer with the headers that matter."""

    status: int
    body: Any
    etag: str | None
    location: str | None


@dataclass(frozen=True, slots=True)
class LogPiece:
    """Bytes of a log, where they start, and how long the log is by now."""

    data: bytes
    offset: int
    size: int


class Client:
    """One daemon. Use as a context manager or call `close`."""

    def __init__(self, url: str, token: str | None, *, transport: httpx2.BaseTransport | None = None) -> None:
        self.url = url.rstrip("/")
        headers = {"Accept": "application/json", "User-Agent": "dflashctl"}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        self._http = httpx2.Client(
            base_url=self.url,
            headers=headers,
            transport=transport,
            timeout=httpx2.Timeout(READ_TIMEOUT_S, connect=5.0),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def get(self, path: str, **params: Any) -> Any:
        """Body of a GET; parameters that are None are left out."""
        return self.send("GET", path, params=params).body

    def post(self, path: str, body: Any = None, *, key: str | None = None, **params: Any) -> Any:
        """Body of a POST, sent under an idempotency key so that a repeat has one effect."""
        headers = {"Idempotency-Key": key or secrets.token_hex(16)}
        return self.send("POST", path, params=params, body=body, headers=headers).body

    def put(self, path: str, body: Any) -> Any:
        """Body of a PUT."""
        return self.send("PUT", path, body=body).body

    def patch(self, path: str, body: Any) -> Any:
        """Change an object in the version that is current now."""
        return self.send("PATCH", path, body=body, headers={"If-Match": self._etag(path)}).body

    def delete(self, path: str, *, is_versioned: bool = True) -> None:
        """Delete an object, in the version that is current now where it has versions."""
        headers = {"If-Match": self._etag(path)} if is_versioned else {}
        self.send("DELETE", path, headers=headers)

    def list_all(self, path: str, *, maximum: int | None = None, **params: Any) -> list[Json]:
        """All items of a list, page by page, at most `maximum`."""
        items: list[Json] = []
        cursor: str | None = None
        while True:
            page = self.get(path, cursor=cursor, **params)
            items += page["items"]
            cursor = page.get("next_cursor")
            if cursor is None or (maximum is not None and len(items) >= maximum):
                return items[:maximum]

    def send(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, Any] | None = None,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """One request, repeated on a broken connection where that cannot act twice.

        Raises:
            ApiError: the daemon answered with a problem.
            DaemonUnreachableError: nothing answered.
        """
        headers = dict(headers or {})
        is_repeatable = method == "GET" or "Idempotency-Key" in headers
        query = {name: value for name, value in (params or {}).items() if value is not None}
        response = self._connected(
            lambda: self._http.request(method, path, params=query, json=body, headers=headers),
            tries=CONNECT_TRIES if is_repeatable else 1,
        )
        return _answer(response)

    def log(self, run: str, attempt: int | str, *, offset: int, limit: int = LOG_PIECE_BYTES) -> LogPiece:
        """One piece of a log; a negative offset counts from the end."""
        path = log_path(run, attempt)
        params = {"offset": offset, "limit": limit}
        response = self._connected(lambda: self._http.get(path, params=params), tries=CONNECT_TRIES)
        if response.is_error:
            raise _api_error(response)
        return _log_piece(response, response.content)

    def follow_log(self, run: str, attempt: int | str, *, offset: int) -> Iterator[LogPiece]:
        """Bytes of a live log from `offset` on as they appear, until the attempt has ended and all was read.

        A broken connection is resumed at the next byte; a node that cannot be asked for now is asked again.
        """
        position = offset
        while True:
            with contextlib.suppress(httpx2.TransportError):
                for piece in self._log_stream(run, attempt, position):
                    position = piece.offset + len(piece.data)
                    yield piece
                return
            time.sleep(1)

    def events(
        self, path: str = "/v1/events", *, last_id: int | str | None = None, **params: Any
    ) -> Iterator[tuple[str, Any]]:
        """`(event name, data)` of a stream for ever, resumed after the last id when the connection breaks."""
        query = {name: value for name, value in params.items() if value is not None}
        while True:
            with contextlib.suppress(httpx2.TransportError):
                for event in self._event_stream(path, query, last_id):
                    last_id = event.id or last_id
                    yield event.event or "message", event.json()
            time.sleep(1)

    def wait_operation(
        self,
        operation_id: str,
        *,
        timeout_s: float | None,
        on_progress: Callable[[Json], None] = lambda _operation: None,
    ) -> Json:
        """Poll an operation until it has ended.

        Raises:
            WaitTimeoutError: it goes on, but the time is over.
        """
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            operation: Json = self.get(f"/v1/operations/{quote(operation_id, safe='')}")
            on_progress(operation)
            if operation["status"] in FINISHED:
                return operation
            if end is not None and time.monotonic() >= end:
                raise WaitTimeoutError(
                    f"operation {operation_id} is still {operation['status']} after {timeout_s:g} s",
                    hint="it goes on; look with: dflashctl events",
                    operation_id=operation_id,
                )
            time.sleep(POLL_S)

    def _connected(self, call: Callable[[], httpx2.Response], *, tries: int) -> httpx2.Response:
        for remaining in reversed(range(tries)):
            try:
                return call()
            except httpx2.TransportError as error:
                if not remaining:
                    raise self._unreachable(error) from error
                time.sleep(0.2)
        raise AssertionError("tries is at least 1")

    def _unreachable(self, error: Exception) -> DaemonUnreachableError:
        return DaemonUnreachableError(
            f"no daemon answers at {self.url}: {error}",
            hint="start one with: dflashctl serve; or set DFLASHCTL_URL to where it listens",
        )

    def _etag(self, path: str) -> str:
        return self.send("GET", path).etag or "*"

    def _log_stream(self, run: str, attempt: int | str, offset: int) -> Iterator[LogPiece]:
        params: dict[str, Any] = {"offset": offset, "follow": "true"}
        timeout = httpx2.Timeout(None, connect=5.0)
        with self._http.stream("GET", log_path(run, attempt), params=params, timeout=timeout) as response:
            if response.is_error:
                response.read()
                error = _api_error(response)
                if error.status >= 500 and error.retryable:
                    raise httpx2.ConnectError(error.message)
                raise error
            start = _log_piece(response, b"")
            position = start.offset
            for data in response.iter_raw():
                yield LogPiece(data, position, max(start.size, position + len(data)))
                position += len(data)

    def _event_stream(
        self, path: str, params: Json, last_id: int | str | None
    ) -> Iterator[httpx2.ServerSentEvent]:
        headers = {"Accept": "text/event-stream"}
        if last_id is not None:
            headers["Last-Event-ID"] = str(last_id)
        timeout = httpx2.Timeout(STREAM_SILENCE_S, connect=5.0)
        with self._http.stream("GET", path, params=params, headers=headers, timeout=timeout) as response:
            if response.is_error:
                response.read()
                raise _api_error(response)
            for event in httpx2.EventSource(response):
                if event.data:
                    yield event


def log_path(run: str, attempt: int | str) -> str:
    """Path of an attempt's log."""
    return f"/v1/runs/{quote(str(run), safe='')}/attempts/{quote(str(attempt), safe='')}/log"


def _answer(response: httpx2.Response) -> Answer:
    if response.is_error:
        raise _api_error(response)
    body = response.json() if response.content else None
    return Answer(response.status_code, body, response.headers.get("etag"), response.headers.get("location"))


def _api_error(response: httpx2.Response) -> ApiError:
    body: Any = None
    with contextlib.suppress(ValueError):
        body = response.json()
    if not isinstance(body, dict):
        body = {
            "detail": f"unexpected answer from {response.url}: HTTP {response.status_code}",
            "hint": "is this address really the supervisor's",
        }
    return ApiError(response.status_code, body)


def _log_piece(response: httpx2.Response, data: bytes) -> LogPiece:
    headers = response.headers
    return LogPiece(data, int(headers.get("X-Log-Offset", 0)), int(headers.get("X-Log-Size", 0)))
