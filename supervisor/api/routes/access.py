"""Tokens, browser sessions, secrets."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Request, Response
from fastapi.security import HTTPAuthorizationCredentials
from sqlmodel import Session

from supervisor.api import schemas
from supervisor.api.access import COOKIE_NAME, bearer_scheme, require_admin
from supervisor.api.deps import Api, Caller, Cursor, Limit, State
from supervisor.api.paging import page_of
from supervisor.api.writes import Reply, WriteDep
from supervisor.domain.errors import UnauthorizedError
from supervisor.services import auth, secrets
from supervisor.services.auth import Principal
from supervisor.store.events import now_of
from supervisor.store.tables import BrowserSession

router = APIRouter()
open_router = APIRouter()
"""Log-in: takes its token or code itself."""

own_router = APIRouter()
"""What everybody may do with their own session, whatever the scope."""

Admin = Annotated[Principal, Depends(require_admin)]
SecretName = Annotated[str, Path(max_length=128, description="Name of an environment variable.")]


@router.get("/tokens", response_model=schemas.Page[schemas.TokenView], tags=["tokens"])
async def list_tokens(state: State, _: Admin, limit: Limit = 50, cursor: Cursor = None) -> Any:
    """Tokens, oldest first, never their values."""

    def read(session: Session) -> Any:
        found = [auth.token_view(token) for token in auth.list_tokens(session)]
        return page_of(
            found, key=lambda view: f"{view['created_at']} {view['id']}", limit=limit, cursor=cursor
        )

    return await state.store.read(read)


@router.post("/tokens", response_model=schemas.TokenCreated, status_code=201, tags=["tokens"])
async def create_token(body: schemas.TokenCreate, state: State, caller: Admin) -> Any:
    """Create a token; its value is in this answer only, so the answer is kept under no idempotency key."""

    def effect(session: Session) -> dict[str, Any]:
        days = body.expires_days
        expires_at = now_of(session) + timedelta(days=days) if days is not None else None
        row, value = auth.create_token(
            session, name=body.name, scope=body.scope, actor=caller.actor, expires_at=expires_at
        )
        return {**auth.token_view(row), "token": value}

    return await state.store.write(effect)


@router.delete("/tokens/{token}", status_code=204, response_model=None, tags=["tokens"])
async def revoke_token(
    token: Annotated[str, Path(max_length=128, description="Id of a token.")], state: State, caller: Admin
) -> Response:
    """Make a token invalid at once; repeating it is harmless."""
    await state.store.write(lambda session: auth.revoke_token(session, token, actor=caller.actor) and None)
    return Response(status_code=204)


@open_router.post("/session", response_model=schemas.SessionView, status_code=201, tags=["session"])
async def open_session(
    request: Request,
    response: Response,
    state: State,
    api: Api,
    bearer: Annotated[HTTPAuthorizationCredentials | None, Depends(bearer_scheme)],
) -> Any:
    """Log a browser in with a token or a one-time code as bearer; sets the session cookie."""
    api.logins.check(request.client.host if request.client else "unknown")
    if bearer is None:
        raise UnauthorizedError(
            "no token: a log-in takes a token or a one-time code as bearer",
            hint="`dflashctl serve` prints a one-time code; the admin token is in the state folder",
        )

    def effect(session: Session) -> tuple[BrowserSession, str]:
        return auth.open_session(session, bearer.credentials)

    row, cookie = await state.store.write(effect)
    response.set_cookie(
        COOKIE_NAME,
        cookie,
        max_age=int(auth.SESSION_LIFE.total_seconds()),
        path="/",
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https" or state.settings.is_behind_proxy,
    )
    return {"actor": row.actor, "scope": row.scope, "expires_at": row.expires_at}


@router.get("/session", response_model=schemas.SessionView, tags=["session"])
async def get_session(caller: Caller) -> Any:
    """Who is asking, and what they may do."""
    return {"actor": caller.actor, "scope": caller.scope.value, "expires_at": None}


@own_router.delete("/session", status_code=204, response_model=None, tags=["session"])
async def close_session(request: Request, state: State) -> Response:
    """Log out; the cookie is worthless from now on."""
    cookie = request.cookies.get(COOKIE_NAME)
    if cookie:
        await state.store.write(lambda session: auth.close_session(session, cookie))
    response = Response(status_code=204)
    response.delete_cookie(COOKIE_NAME, path="/", httponly=True, samesite="strict")
    return response


@router.get("/secrets", response_model=schemas.Page[schemas.SecretView], tags=["secrets"])
async def list_secrets(state: State, limit: Limit = 50, cursor: Cursor = None) -> Any:
    """Names of secrets, never values."""

    def read(session: Session) -> Any:
        found = secrets.list_secrets(session)
        return page_of(found, key=lambda view: view["name"], limit=limit, cursor=cursor)

    return await state.store.read(read)


@router.put("/secrets/{name}", status_code=204, response_model=None, tags=["secrets"])
async def put_secret(name: SecretName, body: schemas.SecretBody, write: WriteDep, _: Admin) -> Any:
    """Store a value (encrypted at rest) or a reference that the daemon reads when a run needs it."""

    def effect(session: Session) -> Reply:
        secrets.put_secret(
            session,
            write.state.secret_box,
            name=name,
            actor=write.actor,
            value=body.value,
            reference=body.reference,
        )
        return Reply(204, None)

    return await write.answer(effect)


@router.delete("/secrets/{name}", status_code=204, response_model=None, tags=["secrets"])
async def delete_secret(name: SecretName, write: WriteDep, _: Admin) -> Any:
    """Delete a secret."""

    def effect(session: Session) -> Reply:
        secrets.delete_secret(session, name, actor=write.actor)
        return Reply(204, None)

    return await write.answer(effect)
