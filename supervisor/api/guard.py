"""The outermost middleware: what is true of every request and every answer, whatever the route.

Gives each request its id, checks the host name, the origin of writes, the media type and the size of bodies,
and puts the security headers on the answer. It knows nothing of tokens or routes; who may do what is
`api.access`'s question. Plain ASGI, so that streams pass through unbuffered.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders

from supervisor.api.errors import HttpError, problem_of

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_BODY_BYTES = 1 << 20
BODY_DEADLINE_S = 30.0
"""A client that trickles its body is cut off after this."""

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")

CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "font-src 'self'",
        "connect-src 'self'",
        "manifest-src 'self'",
        "base-uri 'none'",
        "form-action 'self'",
        "frame-ancestors 'none'",
    )
)
SECURITY_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
NO_STORE_PREFIXES = ("/v1/", "/metrics", "/openapi.json", "/readyz", "/docs")


@dataclass(frozen=True, slots=True)
class Rules:
    """What the settings decide; hosts are names or addresses without port."""

    allowed_hosts: frozenset[str]
    max_body_bytes: int = MAX_BODY_BYTES

    @classmethod
    def of(cls, hosts: Iterable[str], *, max_body_bytes: int = MAX_BODY_BYTES) -> Self:
        """Loopback names are always among the hosts."""
        return cls(frozenset(host.lower() for host in (*LOOPBACK_NAMES, *hosts)), max_body_bytes)


class Guard:
    """Middleware; the rules are asked for with the first request, when the settings are known."""

    def __init__(self, app: ASGIApp, *, rules: Callable[[], Rules]) -> None:
        self.app = app
        self._find_rules = rules
        self._rules: Rules | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check, then pass on; a refusal is a problem document like any other."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = "req_" + secrets.token_hex(8)
        scope.setdefault("state", {})["request_id"] = request_id
        guarded_send = _with_headers(send, scope["path"], request_id)
        self._rules = rules = self._rules or self._find_rules()
        try:
            headers = Headers(scope=scope)
            _check_host(headers, scope, rules)
            _check_origin(scope["method"], headers)
            _check_media_type(scope["method"], headers)
            receive = await _with_body(headers, receive, rules.max_body_bytes)
        except HttpError as error:
            response = problem_of(error, instance=request_id)
            await response(scope, receive, guarded_send)
            return
        await self.app(scope, receive, guarded_send)


def _check_host(headers: Headers, scope: Scope, rules: Rules) -> None:
    # DNS rebinding: a foreign page's name that resolves to us still carries the foreign name here. The very
    # address that the connection came in on is no name and cannot be rebound.
    host = host_of(headers.get("host", ""))
    own_address = (scope.get("server") or ("",))[0]
    if host not in rules.allowed_hosts and not (host and host.strip("[]") == own_address):
        raise HttpError(
            421,
            f"this daemon does not answer to the host name: {host[:100]!r}",
            hint="use one of its own names, or add the name to allowed_hosts in config.toml",
        )


def host_of(netloc: str) -> str:
    """Lower-case host of a `Host` header, without its port; brackets of an IPv6 address stay."""
    netloc = netloc.strip().lower()
    if netloc.startswith("["):
        return netloc.partition("]")[0] + "]"
    return netloc.partition(":")[0]


def _check_origin(method: str, headers: Headers) -> None:
    """Refuse writes that another site's page caused; programs send neither header."""
    if method in SAFE_METHODS:
        return
    site = headers.get("sec-fetch-site")
    if site is not None and site not in ("same-origin", "none"):
        raise HttpError(403, f"a write from another site is refused: {site[:50]}", reason="CrossSite")
    origin = headers.get("origin")
    if origin is not None and urlsplit(origin).netloc.lower() != headers.get("host", "").lower():
        raise HttpError(403, f"a write from another origin is refused: {origin[:100]}", reason="CrossSite")


def _check_media_type(method: str, headers: Headers) -> None:
    if method in SAFE_METHODS or not _has_body(headers):
        return
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type not in ("application/json", "application/merge-patch+json"):
        raise HttpError(
            415,
            f"the body must be JSON, not: {media_type[:100] or 'undeclared'}",
            hint="send Content-Type: application/json",
        )


def _has_body(headers: Headers) -> bool:
    return "transfer-encoding" in headers or headers.get("content-length", "0") != "0"


async def _with_body(headers: Headers, receive: Receive, limit: int) -> Receive:
    """Read the body here, bounded in size and time, and hand it on in one piece."""
    if not _has_body(headers):
        return receive
    declared = headers.get("content-length", "0")
    if not declared.isdigit() or int(declared) > limit:
        raise _too_large(limit)
    try:
        async with asyncio.timeout(BODY_DEADLINE_S):
            body = await _read_body(receive, limit)
    except TimeoutError as error:
        raise HttpError(400, "the body did not arrive in time", reason="BodyTimeout") from error
    is_delivered = False

    async def replay() -> Message:
        nonlocal is_delivered
        if is_delivered:
            return await receive()
        is_delivered = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


async def _read_body(receive: Receive, limit: int) -> bytes:
    pieces = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise HttpError(400, "the client left before its body was complete", reason="BodyIncomplete")
        pieces += message.get("body", b"")
        if len(pieces) > limit:
            raise _too_large(limit)
        if not message.get("more_body", False):
            return bytes(pieces)


def _too_large(limit: int) -> HttpError:
    return HttpError(413, f"the body is larger than {limit} bytes")


def _with_headers(send: Send, path: str, request_id: str) -> Send:
    async def guarded(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in SECURITY_HEADERS.items():
                headers.setdefault(name, value)
            headers["X-Request-Id"] = request_id
            if path.startswith(NO_STORE_PREFIXES):
                headers.setdefault("Cache-Control", "no-store")
        await send(message)

    return guarded
