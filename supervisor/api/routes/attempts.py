"""Attempts of a run and the bytes of their logs."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query
from sqlmodel import Session
from starlette.responses import Response

from supervisor.api import schemas
from supervisor.api.conditional import tagged
from supervisor.api.deps import Api, Caller, Cursor, Limit, State, SupervisorState
from supervisor.api.errors import HttpError
from supervisor.api.paging import decode_number, encode_cursor
from supervisor.api.routes.runs import RunName
from supervisor.api.streams import LOG_PIECE_BYTES, LiveResponse, follow_log, log_bytes
from supervisor.domain.run import TERMINAL
from supervisor.services import runs, views
from supervisor.store.tables import Attempt

router = APIRouter(prefix="/runs/{run}/attempts", tags=["attempts"])

AttemptNumber = Annotated[int, Path(ge=1, le=10**9, description="Number of the attempt, from 1.")]
MAX_LOG_PIECE_BYTES = 1 << 20
LOG_MEDIA_TYPE = "text/plain; charset=utf-8"
LOG_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The bytes as the process wrote them.",
        "content": {"text/plain": {"schema": {"type": "string", "format": "binary"}}},
        "headers": {
            "X-Log-Offset": {"description": "Offset of the first byte.", "schema": {"type": "integer"}},
            "X-Log-Size": {"description": "Size of the log when asked.", "schema": {"type": "integer"}},
        },
    }
}


@router.get("", response_model=schemas.Page[schemas.AttemptView])
async def list_attempts(run: RunName, state: State, limit: Limit = 50, cursor: Cursor = None) -> Any:
    """Attempts of a run, newest first."""
    before = decode_number(cursor)

    def read(session: Session) -> Any:
        found = runs.list_attempts(session, runs.get_run(session, run), before=before, limit=limit)
        next_cursor = encode_cursor(str(found[-1].number)) if len(found) == limit else None
        shown = [views.attempt_view(session, attempt, state.clock) for attempt in found]
        return {"items": shown, "next_cursor": next_cursor}

    return await state.store.read(read)


@router.get("/{number}", response_model=schemas.AttemptView)
async def get_attempt(run: RunName, number: AttemptNumber, state: State, response: Response) -> Any:
    """One attempt with its exit record."""

    def read(session: Session) -> Any:
        attempt = runs.get_attempt(session, runs.get_run(session, run), number)
        return views.attempt_view(session, attempt, state.clock)

    view = await state.store.read(read)
    response.headers.update(tagged(view))
    return view


@router.get("/{number}/log", response_class=Response, responses=LOG_RESPONSES)
async def get_log(
    run: RunName,
    number: AttemptNumber,
    state: State,
    api: Api,
    caller: Caller,
    offset: Annotated[
        int, Query(ge=-(2**53), le=2**53, description="First byte; a negative one counts from the end.")
    ] = 0,
    limit: Annotated[
        int | None,
        Query(ge=0, le=MAX_LOG_PIECE_BYTES, description="At most so many bytes; without it all there is."),
    ] = None,
    follow: Annotated[bool, Query(description="Go on as it grows, until the attempt has ended.")] = False,
) -> Response:
    """Log bytes by offset. Without `limit` the whole log is streamed; offsets stay valid for ever."""
    if follow and limit is not None:
        raise HttpError(422, "limit and follow exclude each other", hint="leave limit out to follow")
    attempt = await state.store.read(
        lambda session: runs.get_attempt(session, runs.get_run(session, run), number)
    )
    read = partial(state.logs.read, attempt)
    if offset < 0:
        _, _, size = await read(0, 0)
        offset = max(0, size + offset)
    first = await read(offset, LOG_PIECE_BYTES if limit is None else limit)
    headers = {"X-Log-Offset": str(first[1]), "X-Log-Size": str(first[2])}
    if limit is not None:
        return Response(first[0], headers=headers, media_type=LOG_MEDIA_TYPE)
    body = (
        follow_log(read, first, is_over=partial(_is_over, state, attempt), stopping=api.stopping)
        if follow
        else log_bytes(read, first)
    )
    if follow:
        # Said by us so that the compression, which would hold pieces back, leaves it alone.
        headers["Content-Encoding"] = "identity"
    place = api.streams.hold(caller.actor)
    return LiveResponse(body, place, media_type=LOG_MEDIA_TYPE, headers=headers)


async def _is_over(state: SupervisorState, attempt: Attempt) -> bool:
    """Whether the attempt has ended, or was deleted with its run."""

    def read(session: Session) -> bool:
        found = session.get(Attempt, attempt.id)
        return found is None or found.state in TERMINAL

    return await state.store.read(read)
