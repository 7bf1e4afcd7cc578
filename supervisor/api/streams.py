"""Live streams: server-sent events and growing logs, each bounded, each ended when the daemon stops.

A stream takes one place of its token's allowance, reads from the hub's bounded queue, and repeats from the
store what the client missed. A client that does not read is dropped and resumes by event id or byte offset.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from fastapi.sse import format_sse_event
from starlette.responses import StreamingResponse

from supervisor.api.jsonsafe import render_json

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from starlette.types import Send

    from supervisor.services.hub import Message, Subscription

RETRY_MS = 3000
KEEPALIVE_S = 15.0
SEND_DEADLINE_S = 30.0
"""A client whose socket takes nothing for this long is dropped."""

CATCH_UP_PAGE = 200

Json = dict[str, Any]
FetchEvents = Callable[[int], Awaitable[Sequence[Json]]]
"""Views of the next events after an id, oldest first, at most `CATCH_UP_PAGE`."""


class LiveResponse(StreamingResponse):
    """A stream that gives up on a stuck client and always closes its source."""

    def __init__(
        self,
        body: AsyncIterator[bytes],
        place: AbstractContextManager[None],
        *,
        media_type: str,
        headers: dict[str, str] | None = None,
    ) -> None:
        live = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(body, media_type=media_type, headers={**live, **(headers or {})})
        self._body = body
        self._place = place

    async def stream_response(self, send: Send) -> None:
        """Send piece by piece; return early, which closes the connection, when the client takes nothing."""
        with self._place:
            try:
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                async for piece in self._body:
                    async with asyncio.timeout(SEND_DEADLINE_S):
                        await send({"type": "http.response.body", "body": piece, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            except TimeoutError:
                return
            finally:
                close = getattr(self._body, "aclose", None)
                if close is not None:
                    await close()


class EventFeed:
    """The frames of one client's event stream, until its queue is closed.

    Args:
        subscription: opened before the caller looked for the newest id, so that nothing falls between.
        accepts: which messages this client wants.
        last_id: of the newest event that the client has.
        fetch: reads events from the store; None when the client wants live data only.
        reset: sent first when the client's id is older than what is kept: it must read a snapshot.
    """

    def __init__(
        self,
        subscription: Subscription,
        *,
        accepts: Callable[[Message], bool],
        last_id: int = 0,
        fetch: FetchEvents | None = None,
        reset: Json | None = None,
    ) -> None:
        self._subscription = subscription
        self._accepts = accepts
        self._position = last_id
        self._fetch = fetch
        self._reset = reset

    async def frames(self) -> AsyncIterator[bytes]:
        """Everything to send, in order."""
        try:
            yield format_sse_event(retry=RETRY_MS, comment="open")
            if self._reset is not None:
                yield _frame("reset", self._reset)
            async for frame in self._backlog():
                yield frame
            while True:
                message, is_closed = await _next(self._subscription)
                if is_closed:
                    return
                if message is not None:
                    live = self._frame_of(message)
                    if live is not None:
                        yield live
                    continue
                # Nothing for a while: say so, and make sure that a message lost on the way costs time only.
                yield format_sse_event(comment="keepalive")
                async for frame in self._backlog():
                    yield frame
        finally:
            self._subscription.close()

    async def _backlog(self) -> AsyncIterator[bytes]:
        if self._fetch is None:
            return
        while True:
            page = await self._fetch(self._position)
            for event in page:
                self._position = event["id"]
                yield _frame("event", event, self._position)
            if len(page) < CATCH_UP_PAGE:
                return

    def _frame_of(self, message: Message) -> bytes | None:
        if not self._accepts(message):
            return None
        if message.topic != "event":
            return _frame(message.topic, {"run": message.run, "node": message.node, **message.data})
        event_id = message.data["id"]
        if event_id <= self._position:
            return None
        self._position = event_id
        return _frame("event", message.data, event_id)


async def _next(subscription: Subscription) -> tuple[Message | None, bool]:
    """Next message; `(None, False)` after a silence, `(None, True)` at the end."""
    try:
        async with asyncio.timeout(KEEPALIVE_S):
            message = await subscription.get()
    except TimeoutError:
        return None, False
    # What an overflowed queue still holds has a hole in it: the client gets it whole when it resumes by id.
    return message, message is None or subscription.is_overflowed


def _frame(kind: str, data: Any, event_id: int | None = None) -> bytes:
    return format_sse_event(
        event=kind, data_str=render_json(data), id=None if event_id is None else str(event_id)
    )


ReadLog = Callable[[int, int], Awaitable[tuple[bytes, int, int]]]
IsOver = Callable[[], Awaitable[bool]]

LOG_PIECE_BYTES = 262_144
LOG_POLL_S = 0.5


async def log_bytes(read: ReadLog, first: tuple[bytes, int, int]) -> AsyncIterator[bytes]:
    """The log from the first piece on to the size it had when asked, never beyond."""
    data, offset, end = first
    while data:
        yield data
        offset += len(data)
        if offset >= end:
            return
        data, offset, _ = await read(offset, min(LOG_PIECE_BYTES, end - offset))


async def follow_log(
    read: ReadLog, first: tuple[bytes, int, int], *, is_over: IsOver, stopping: asyncio.Event
) -> AsyncIterator[bytes]:
    """Go on as the log grows; end when the attempt has ended and all was sent, or the daemon stops.

    A node that cannot be asked ends the stream: the client resumes by offset and learns why.
    """
    data, offset, _ = first
    was_over = False
    while not stopping.is_set():
        if data:
            yield data
            offset += len(data)
        elif was_over:
            return
        else:
            # Asked before the last read, so that bytes written between the two are not missed.
            was_over = await is_over()
            if not was_over:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOG_POLL_S):
                        await stopping.wait()
        data, offset, _ = await read(offset, LOG_PIECE_BYTES)
