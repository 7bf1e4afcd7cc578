"""Rate and concurrency limits, held in memory: log-ins, requests per token, open streams per token.

A restart of the daemon forgets them, which is fine: they protect the daemon's life, not a quota.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from supervisor.api.errors import HttpError

LOGINS_PER_MINUTE = 5
STREAMS_PER_TOKEN = 20
REQUESTS_PER_S = 100.0
REQUEST_BURST = 400.0
MAX_TRACKED = 4096
"""Clients remembered at once; the longest unseen is forgotten first."""


class LoginLimit:
    """At most five log-in attempts a minute for one client address, right or wrong."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._attempts: OrderedDict[str, deque[float]] = OrderedDict()

    def check(self, client: str) -> None:
        """Count one attempt.

        Raises:
            HttpError: 429 with `Retry-After` when the minute is used up.
        """
        now = self._monotonic()
        times = self._attempts.setdefault(client, deque())
        self._attempts.move_to_end(client)
        if len(self._attempts) > MAX_TRACKED:
            self._attempts.popitem(last=False)
        while times and now - times[0] >= 60:
            times.popleft()
        if len(times) >= LOGINS_PER_MINUTE:
            wait_s = 60 - (now - times[0])
            raise _too_many(f"more than {LOGINS_PER_MINUTE} log-ins a minute", wait_s)
        times.append(now)


class RequestLimit:
    """A token bucket for each token, far above what people and scripts do."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def check(self, token_id: str) -> None:
        """Take one from the bucket, or raise 429."""
        now = self._monotonic()
        level, since = self._buckets.pop(token_id, (REQUEST_BURST, now))
        level = min(REQUEST_BURST, level + (now - since) * REQUESTS_PER_S)
        is_empty = level < 1
        self._buckets[token_id] = (level if is_empty else level - 1, now)
        if len(self._buckets) > MAX_TRACKED:
            self._buckets.popitem(last=False)
        if is_empty:
            raise _too_many(f"more than {REQUESTS_PER_S:.0f} requests a second", 1)


class StreamLimit:
    """Open streams of each token; browsers and scripts that leak streams hit this, others do not."""

    def __init__(self) -> None:
        self._open: defaultdict[str, int] = defaultdict(int)

    @property
    def count(self) -> int:
        """Streams open at present, of all tokens."""
        return sum(self._open.values())

    @contextmanager
    def hold(self, token_id: str) -> Iterator[None]:
        """Hold one place for as long as the stream is open, or raise 429."""
        if self._open[token_id] >= STREAMS_PER_TOKEN:
            raise _too_many(f"{STREAMS_PER_TOKEN} streams are open with this token", 10)
        self._open[token_id] += 1
        try:
            yield
        finally:
            self._open[token_id] -= 1
            if not self._open[token_id]:
                del self._open[token_id]


def _too_many(what: str, wait_s: float) -> HttpError:
    seconds = max(1, round(wait_s + 0.5))
    return HttpError(
        429,
        f"too many requests: {what}",
        hint=f"wait {seconds} s",
        headers={"Retry-After": str(seconds)},
    )
