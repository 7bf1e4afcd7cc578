"""In-memory publish and subscribe between the reconciler and the live streams.

The composition root hands `Hub.publish` to the sampler and the loops as a plain callable; the API's streams
subscribe one client each. Everything happens on the event loop's thread. Nothing here is durable and nothing
waits: a client that does not read is closed when its queue is full and resumes from the store by event id, so
watching can never slow what is watched.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

MAX_SUBSCRIBERS = 600

TOPICS = frozenset({"event", "state", "status", "metrics", "gpu", "log", "operation"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One thing that happened, JSON-ready; for topic `event` the data carries the event's integer `id`."""

    topic: str
    data: Mapping[str, Any]
    node: str | None = None
    run: str | None = None


class TooManySubscribersError(Exception):
    """The hub serves no further client; the API answers 503."""


class Subscription:
    """One client's bounded queue."""

    def __init__(self, max_queue: int, on_close: Callable[[Subscription], None]) -> None:
        self._queue: asyncio.Queue[Message | None] = asyncio.Queue(max_queue)
        self._on_close = on_close
        self._is_closed = False
        self.is_overflowed = False
        """True when the client was dropped for being too far behind."""

    async def get(self) -> Message | None:
        """Next message; None once the queue has overflowed, `close()` was called or the hub was closed."""
        if self._is_closed and self._queue.empty():
            return None
        return await self._queue.get()

    def offer(self, message: Message) -> None:
        """Queue the message, or end this subscription when the client is too far behind."""
        if self._is_closed:
            return
        try:
            self._queue.put_nowait(message)
        except asyncio.QueueFull:
            self.is_overflowed = True
            self.close()

    def close(self) -> None:
        """Give the queue back; idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._on_close(self)
        if self._queue.full():
            self._queue.get_nowait()  # the end marker must fit; the client resumes by event id anyway
        self._queue.put_nowait(None)


class Hub:
    """Fans messages out to bounded client queues; losing one costs a client latency only."""

    def __init__(self, *, max_subscribers: int = MAX_SUBSCRIBERS) -> None:
        self._max_subscribers = max_subscribers
        self._subscriptions: set[Subscription] = set()
        self._is_closed = False

    @property
    def subscriber_count(self) -> int:
        """Clients connected at present."""
        return len(self._subscriptions)

    def subscribe(self, *, max_queue: int = 1000) -> Subscription:
        """Start receiving. The caller closes the subscription when its client goes.

        Raises:
            TooManySubscribersError: the limit is reached, or the hub is closing.
        """
        if self._is_closed or len(self._subscriptions) >= self._max_subscribers:
            raise TooManySubscribersError(f"no further stream possible: {len(self._subscriptions)} are open")
        subscription = Subscription(max_queue, self._subscriptions.discard)
        self._subscriptions.add(subscription)
        return subscription

    def publish(
        self, topic: str, data: Mapping[str, Any], *, node: str | None = None, run: str | None = None
    ) -> None:
        """Offer a message to every client; never blocks, never raises for a slow one."""
        if topic not in TOPICS:
            raise ValueError(f"unknown topic: {topic!r}")
        message = Message(topic=topic, data=data, node=node, run=run)
        for subscription in tuple(self._subscriptions):
            subscription.offer(message)

    def close(self) -> None:
        """End every stream; later subscriptions are refused."""
        self._is_closed = True
        for subscription in tuple(self._subscriptions):
            subscription.close()
