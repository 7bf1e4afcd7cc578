"""Who is asking, and whether they may: bearer token or session cookie, scope by method, limits by token.

Every route under `/v1` hangs on `authorize`, so a new route is closed unless somebody opens it on purpose.
Reading needs `read`, everything else `operate`; routes that hand out or change rights ask for `admin`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import Depends, Request, Security
from fastapi.security import APIKeyCookie, HTTPAuthorizationCredentials, HTTPBearer

from supervisor.api.guard import SAFE_METHODS
from supervisor.api.limits import LoginLimit, RequestLimit, StreamLimit
from supervisor.domain.errors import UnauthorizedError
from supervisor.services import auth

if TYPE_CHECKING:
    from fastapi import FastAPI

    from supervisor.api.deps import SupervisorState
    from supervisor.services.auth import Principal

COOKIE_NAME = "dflash_session"
"""HttpOnly, SameSite=Strict; its value is a random session id, never a token."""

bearer_scheme = HTTPBearer(auto_error=False, description="API token, see `dflashctl token create`.")
cookie_scheme = APIKeyCookie(
    name=COOKIE_NAME, auto_error=False, description="Session cookie of a logged-in browser."
)


@dataclass
class ApiState:
    """What this package itself keeps while the daemon runs; `app.state.api`."""

    monotonic: Callable[[], float]
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    streams: StreamLimit = field(default_factory=StreamLimit)
    logins: LoginLimit = field(init=False)
    requests: RequestLimit = field(init=False)

    def __post_init__(self) -> None:
        self.logins = LoginLimit(self.monotonic)
        self.requests = RequestLimit(self.monotonic)


def begin_shutdown(app: FastAPI) -> None:
    """End every stream; called before the server waits for its connections to close."""
    app.state.api.stopping.set()
    supervisor = getattr(app.state, "supervisor", None)
    if supervisor is not None:
        supervisor.hub.close()


async def authenticate(
    request: Request,
    bearer: Annotated[HTTPAuthorizationCredentials | None, Security(bearer_scheme)],
    cookie: Annotated[str | None, Security(cookie_scheme)],
) -> Principal:
    """Who sent this request; remembered on the request for the log.

    Raises:
        UnauthorizedError: no token and no session, or neither is valid.
    """
    state: SupervisorState = request.app.state.supervisor
    if bearer is not None:
        principal = await state.store.read(lambda session: auth.check_token(session, bearer.credentials))
    elif cookie:
        principal = await state.store.read(lambda session: auth.check_session(session, cookie))
    else:
        raise UnauthorizedError(
            "no token: this needs an API token or a browser session",
            hint="send Authorization: Bearer <token>; the first token is in admin.token of the state folder",
        )
    request.app.state.api.requests.check(principal.actor)
    return principal


CurrentPrincipal = Annotated[Any, Depends(authenticate)]


def require(scope: str) -> Callable[..., Awaitable[Principal]]:
    """A dependency that lets pass who has at least this scope."""

    async def check(principal: CurrentPrincipal) -> Principal:
        auth.check_scope(principal, scope)
        found: Principal = principal
        return found

    return check


async def authorize(request: Request, principal: CurrentPrincipal) -> Principal:
    """The rule for every route: `read` to look, `operate` to act."""
    auth.check_scope(principal, "read" if request.method in SAFE_METHODS else "operate")
    found: Principal = principal
    return found
