"""History and live data: events as pages or as a stream, telemetry as a stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Query, Request
from sqlmodel import Session
from starlette.responses import Response

from supervisor.api import schemas
from supervisor.api.deps import Api, Caller, Cursor, Limit, State, SupervisorState
from supervisor.api.errors import HttpError
from supervisor.api.paging import decode_number, encode_cursor
from supervisor.api.streams import CATCH_UP_PAGE, EventFeed, LiveResponse
from supervisor.services import events, views
from supervisor.services.hub import Message, TooManySubscribersError
from supervisor.store import queries
from supervisor.store.tables import Node

router = APIRouter(tags=["events"])

SSE = "text/event-stream"
Json = dict[str, Any]

RunFilter = Annotated[str | None, Query(max_length=128, description="Only of this run, by name or id.")]
NodeFilter = Annotated[str | None, Query(max_length=128, description="Only of this node, by name or id.")]
LastEventId = Annotated[
    str | None, Header(alias="Last-Event-ID", max_length=20, description="Resume behind this event.")
]
LastEventIdQuery = Annotated[
    int | None,
    Query(ge=0, le=2**53, description="As Last-Event-ID, for a client's first connection."),
]
STREAM_RESPONSE: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "A stream that ends only with the daemon.",
        "content": {SSE: {"schema": {"type": "string"}}},
    }
}


@router.get("/events", response_model=schemas.Page[schemas.EventView], responses=STREAM_RESPONSE)
async def list_events(
    request: Request,
    state: State,
    api: Api,
    caller: Caller,
    run: RunFilter = None,
    node: NodeFilter = None,
    reason: Annotated[str | None, Query(max_length=64, description="Only with exactly this reason.")] = None,
    since: Annotated[datetime | None, Query(description="Not older than this.")] = None,
    order: Annotated[Literal["asc", "desc"], Query(description="Oldest or newest first.")] = "asc",
    limit: Limit = 50,
    cursor: Cursor = None,
    last_event_id: LastEventId = None,
    last_event_id_query: Annotated[int | None, Query(alias="last_event_id", ge=0, le=2**53)] = None,
) -> Any:
    """A page of the history, or with `Accept: text/event-stream` its continuation as it happens."""
    if SSE in request.headers.get("accept", ""):
        last = _last_id(last_event_id, last_event_id_query)
        return await _stream(
            state, api, caller, run=run, node=node, last_id=last, has_events=True, has_live=False
        )
    if since is not None and since.tzinfo is None:
        raise HttpError(422, "since needs a UTC offset", hint="for example 2026-01-31T12:00:00Z")
    position = decode_number(cursor)

    def read(session: Session) -> Json:
        found = events.list_events(
            session,
            **_ids(session, run, node),
            after_id=(position or 0) if order == "asc" else None,
            before_id=position if order == "desc" else None,
            reason=reason,
            since=since,
            limit=limit,
        )
        shown = [views.event_view(event) for event in found]
        has_more = len(shown) == limit
        return {"items": shown, "next_cursor": encode_cursor(str(shown[-1]["id"])) if has_more else None}

    return await state.store.read(read)


@router.get("/telemetry/stream", response_class=Response, responses=STREAM_RESPONSE)
async def stream_telemetry(
    state: State,
    api: Api,
    caller: Caller,
    run: RunFilter = None,
    node: NodeFilter = None,
    with_events: Annotated[bool, Query(alias="events", description="The history too.")] = False,
    last_event_id: LastEventId = None,
    last_event_id_query: Annotated[int | None, Query(alias="last_event_id", ge=0, le=2**53)] = None,
) -> Response:
    """Live data: status, metrics, GPU samples, log growth; `event:` names the kind."""
    last = _last_id(last_event_id, last_event_id_query)
    return await _stream(
        state, api, caller, run=run, node=node, last_id=last, has_events=with_events, has_live=True
    )


async def _stream(
    state: SupervisorState,
    api: Api,
    caller: Caller,
    *,
    run: str | None,
    node: str | None,
    last_id: int | None,
    has_events: bool,
    has_live: bool,
) -> Response:
    def resolve(session: Session) -> tuple[Json, str | None, str | None]:
        found = queries.get_run(session, run) if run is not None else None
        where = queries.get_node(session, node) if node is not None else None
        # A run's GPU samples carry the name of its node only.
        home = session.get(Node, found.node_id) if found is not None else where
        return (
            _ids(session, run, node),
            found.name if found is not None else None,
            home.name if home is not None else None,
        )

    ids, run_name, node_name = await state.store.read(resolve)
    place = api.streams.hold(caller.actor)
    try:
        subscription = state.hub.subscribe()
    except TooManySubscribersError as error:
        raise HttpError(503, str(error), hint="close other streams, or try again later") from error
    try:
        oldest, newest = await state.store.read(
            lambda session: (events.oldest_event_id(session), events.newest_event_id(session))
        )
    except BaseException:
        subscription.close()
        raise
    is_gap = last_id is not None and (last_id > newest or (oldest is not None and last_id < oldest - 1))
    reset = {"snapshot": "/v1/runs", "newest_event_id": newest} if is_gap and has_events else None

    async def fetch(position: int) -> Sequence[Json]:
        def read(session: Session) -> list[Json]:
            found = events.list_events(session, **ids, after_id=position, limit=CATCH_UP_PAGE)
            return [views.event_view(event) for event in found]

        return await state.store.read(read)

    feed = EventFeed(
        subscription,
        accepts=_filter(ids, run_name, node_name, has_events=has_events, has_live=has_live),
        last_id=newest if last_id is None or is_gap else last_id,
        fetch=fetch if has_events else None,
        reset=reset,
    )
    return LiveResponse(feed.frames(), place, media_type=SSE)


def _filter(
    ids: Json, run: str | None, node: str | None, *, has_events: bool, has_live: bool
) -> Callable[[Message], bool]:
    def accepts(message: Message) -> bool:
        if message.topic == "event":
            return has_events and all(
                wanted is None or message.data.get(name) == wanted for name, wanted in ids.items()
            )
        if not has_live:
            return False
        if run is not None:
            # GPU samples concern a node as a whole, so they belong to the picture of each of its runs.
            return message.run == run or (message.topic == "gpu" and message.node == node)
        return node is None or message.node == node

    return accepts


def _ids(session: Session, run: str | None, node: str | None) -> Json:
    return {
        "run_id": queries.get_run(session, run).id if run is not None else None,
        "node_id": queries.get_node(session, node).id if node is not None else None,
    }


def _last_id(header: str | None, query: int | None) -> int | None:
    """The header wins: a browser sends it when it reconnects by itself, with a query that is old by then."""
    if header is None or not header.strip():
        return query
    if not header.strip().isdecimal():
        raise HttpError(400, f"not an event id: {header[:20]!r}", reason="BadEventId")
    return int(header)
