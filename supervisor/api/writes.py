"""How a write is answered: once for each idempotency key, in one transaction, with its hint after commit.

A route describes its effect as a function of a session that returns a `Reply`; `Write.answer` runs it, stores
the answer under the key in the same transaction, and repeats a stored answer instead of the effect. What can
take long (asking a host for its key) happens before and has no effect of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import Depends, Header, Request
from sqlmodel import Session
from starlette.responses import Response

from supervisor.api.deps import Caller, State, SupervisorState
from supervisor.api.errors import instance_of
from supervisor.api.jsonsafe import SafeJSONResponse, without_non_finite
from supervisor.api.schemas import Plan
from supervisor.services import idempotency
from supervisor.services.auth import Principal

log = logging.getLogger(__name__)

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reply:
    """Status, body and headers of an answer; `hint` names the run or node to look at after the commit."""

    status: int
    body: Json | None
    headers: dict[str, str] = field(default_factory=dict)
    hint: str | None = None


@dataclass(frozen=True, slots=True)
class Write:
    """One request that changes something."""

    request: Request
    state: SupervisorState
    principal: Principal
    key: str | None

    @property
    def actor(self) -> str:
        """Who, for the history."""
        return self.principal.actor

    @property
    def request_id(self) -> str:
        """Which request, for the history."""
        return instance_of(self.request)

    async def answer(self, effect: Callable[[Session], Reply]) -> Response:
        """Run the effect, or repeat the answer that its key already has."""
        fingerprint = await self._fingerprint() if self.key is not None else ""

        def transaction(session: Session) -> Reply:
            if self.key is None:
                return effect(session)
            stored = idempotency.begin(session, actor=self.actor, key=self.key, fingerprint=fingerprint)
            if stored is not None:
                return Reply(stored.status, stored.body, {**stored.headers, "Idempotency-Replayed": "true"})
            reply = effect(session)
            idempotency.finish(
                session,
                actor=self.actor,
                key=self.key,
                status=reply.status,
                headers=reply.headers,
                body=without_non_finite(reply.body),
            )
            return reply

        reply = await self.state.store.write(transaction)
        # The history names actor and request; where the request came from is for the log alone.
        client = self.request.client.host if self.request.client else "unknown"
        route = f"{self.request.method} {self.request.url.path}"
        log.info("%s by %s from %s: %d, %s", route, self.actor, client, reply.status, self.request_id)
        if reply.hint is not None:
            self.state.hint(reply.hint)
        return to_response(reply)

    async def _fingerprint(self) -> str:
        url = self.request.url
        body = (await self.request.body()).decode("utf-8", "replace")
        return idempotency.request_fingerprint(self.request.method, f"{url.path}?{url.query}", body)


class _UndoneError(Exception):
    """Carries a result out of a transaction that must not be kept."""

    def __init__(self, result: Json) -> None:
        super().__init__("undone on purpose")
        self.result = result


async def rehearse(state: SupervisorState, effect: Callable[[Session], Json]) -> Json:
    """Run an effect with all its checks and undo it: what `dry_run` refuses, the request would refuse."""

    def transaction(session: Session) -> None:
        raise _UndoneError(effect(session))

    try:
        await state.store.write(transaction)
    except _UndoneError as undone:
        return undone.result
    raise AssertionError("the transaction always raises")


PLANNED: dict[int | str, dict[str, Any]] = {
    200: {"description": "With `dry_run`: the plan; nothing was changed.", "model": Plan}
}
"""Documents the second answer of an action."""


def to_response(reply: Reply) -> Response:
    """The HTTP answer; a reply without a body has none."""
    if reply.body is None:
        return Response(status_code=reply.status, headers=reply.headers)
    return SafeJSONResponse(reply.body, status_code=reply.status, headers=reply.headers)


def accepted(operation: Json, *, hint: str) -> Reply:
    """202 with the operation and where to watch it."""
    return Reply(202, operation, {"Location": f"/v1/operations/{operation['id']}"}, hint=hint)


async def _write(
    request: Request,
    state: State,
    caller: Caller,
    key: Annotated[
        str | None,
        Header(
            alias="Idempotency-Key",
            min_length=1,
            max_length=255,
            description="Repeats under the same key have one effect and get the first answer.",
        ),
    ] = None,
) -> Write:
    return Write(request, state, caller, key)


WriteDep = Annotated[Write, Depends(_write)]
