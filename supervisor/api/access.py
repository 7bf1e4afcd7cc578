"""Who is asking, and whether they may: bearer token or session cookie, scope by method, limits by token.

Every route under `/v1` hangs on `authorize`, so a new route is closed unless somebody opens it on purpose.
Reading needs `read`, everything else `operate`; routes that hand out or change rights ask for `admin`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from fastapi import Depends, Request, Security
from fastapi.security import APIKeyCookie, HTTPAuthorizationCredentials, HTTPBearer

from supervisor.api.guard import SAFE_METHODS
from supervisor.api.limits import LoginLimit, RequestLimit, StreamLimit
from supervisor.domain.errors import StoreError, UnauthorizedError
from supervisor.services import auth
from supervisor.services.auth import Principal

if TYPE_CHECKING:
    from fastapi import FastAPI

    from supervisor.api.deps import SupervisorState

log = logging.getLogger(__name__)

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
        principal = await state.store.read(
            lambda session: auth.authenticate_token(session, bearer.credentials)
        )
    elif cookie:
        principal = await state.store.read(lambda session: auth.authenticate_session(session, cookie))
    else:
        raise UnauthorizedError(
            "no token: this needs an API token or a browser session",
            hint="send Authorization: Bearer <token>; the first token is in admin.token of the state folder",
        )
    request.app.state.api.requests.check(principal.actor)
    if principal.needs_touch:
        await _touch(state, principal, None if bearer is not None else cookie)
    return principal


async def _touch(state: SupervisorState, principal: Principal, cookie: str | None) -> None:
    try:
        await state.store.write(lambda session: auth.touch(session, principal, session_value=cookie))
    except StoreError as error:
        # Reading goes on while the database cannot be written; only the time of last use is lost.
        log.warning("the last use of %s was not recorded: %s", principal.actor, error.message)


CurrentPrincipal = Annotated[Principal, Depends(authenticate)]


async def require_admin(principal: CurrentPrincipal) -> Principal:
    """Lets pass who may hand out and change rights."""
    principal.require(auth.Scope.ADMIN)
    return principal


async def authorize(request: Request, principal: CurrentPrincipal) -> Principal:
    """The rule for every route: `read` to look, `operate` to act."""
    principal.require(auth.Scope.READ if request.method in SAFE_METHODS else auth.Scope.OPERATE)
    return principal
