"""Bounded queues between the threads of the pipeline.

Owns `FeedQueue` (batch plans for the target workers) and `HiddenStatesQueue` (hidden states for the drafters:
one deque per length bucket, mixing, depth and byte limits). Every wait is short and looks at the board again.
Must not import torch: an item only needs `bucket` and `nbytes`.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from trainer.errors import ConfigError
from trainer.pipeline.workers import WAIT_S, Board

_LOG = logging.getLogger(__name__)


class QueueItem(Protocol):
    """What the hidden-states queue must know of an item."""

    @property
    def bucket(self) -> int:
        """Index of the length bucket, shortest first."""

    @property
    def nbytes(self) -> int:
        """Bytes that wait with this item."""


ItemT = TypeVar("ItemT", bound=QueueItem)
PlanT = TypeVar("PlanT")


class FeedQueue(Generic[PlanT]):
    """Plain bounded FIFO from the feeder to the target workers."""

    def __init__(self, depth: int, board: Board) -> None:
        self._depth = depth
        self._board = board
        self._items: deque[PlanT] = deque()
        self._changed = threading.Condition()
        self._closed = False

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: PlanT) -> bool:
        """Add an item; False when the run stops before there is room."""
        with self._changed:
            while len(self._items) >= self._depth:
                if self._board.stop.is_set():
                    return False
                self._board.check()
                self._changed.wait(WAIT_S)
            self._items.append(item)
            self._changed.notify_all()
            return True

    def get(self) -> PlanT | None:
        """Take the oldest item; None when the feeder is done and nothing is left."""
        with self._changed:
            while not self._items:
                if self._closed:
                    return None
                self._board.check()
                self._changed.wait(WAIT_S)
            item = self._items.popleft()
            self._changed.notify_all()
            return item

    def close(self) -> None:
        """Say that no further item comes."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSnapshot:
    """State of the hidden-states queue at one moment.

    Seconds are summed over the threads that waited; ratios are shares of their wall time since the start.
    """

    depth: int
    buckets: tuple[int, ...]
    nbytes: int
    min_ready: int
    max_depth: int
    put_blocked_s: float
    get_blocked_s: float
    starved_ratio: float
    full_ratio: float


class HiddenStatesQueue(Generic[ItemT]):
    """Holds finished hidden states until a drafter takes them.

    `put` waits at `max_depth` or the byte cap; `get` waits until `min_ready` items are there, unless the
    producers are done or the run stops. Among the non-empty buckets, `get` draws with probability
    proportional to the packs that the plan still holds for each bucket; inside a bucket the order is kept.
    Ordered mode is one FIFO. Several consumers take turns, so that each gets as many items as the others:
    they train one model in common steps, and a step must not end with one of them too far ahead.

    Args:
        buckets: number of length buckets.
        max_bytes: no sum of `nbytes` above this is ever held.
        producers: number of `producer_done` calls after which the queue drains.
        consumers: how many take turns at `get`.
    """

    def __init__(
        self,
        board: Board,
        *,
        buckets: int,
        min_ready: int,
        max_depth: int,
        max_bytes: int,
        producers: int,
        seed: int,
        consumers: int = 1,
        ordered: bool = False,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        if not 1 <= min_ready <= max_depth:
            raise ConfigError(f"hs_min_ready must lie between 1 and hs_max_depth {max_depth}: {min_ready}")
        self._board = board
        self._min_ready = min_ready
        self._max_depth = max_depth
        self._max_bytes = max_bytes
        self._producers = self._all_producers = producers
        self._consumers = consumers
        self._turn = 0
        self._has_left = False
        self._ordered = ordered
        self._monotonic = monotonic
        self._rng = random.Random(seed)  # noqa: S311 - mixing of training data, not a secret
        self._changed = threading.Condition()
        self._deques: list[deque[tuple[int, ItemT]]] = [deque() for _ in range(buckets)]
        self._remaining = [0] * buckets
        self._closed = False
        self._sequence = 0
        self._depth = 0
        self._bytes = 0
        self._put_blocked_s = 0.0
        self._get_blocked_s = 0.0
        self._started_s = monotonic()

    def open_epoch(self, counts: Sequence[int]) -> None:
        """Add the packs per bucket that a new epoch will bring; they weigh the mixing."""
        with self._changed:
            for bucket, count in enumerate(counts):
                self._remaining[bucket] += count

    def put(self, item: ItemT) -> None:
        """Add a finished item, waiting for room; dropped when the consumers have closed the queue.

        Raises:
            ConfigError: the item alone is above the byte cap.
            WorkerDiedError, StalledError: from the board, while waiting.
        """
        if item.nbytes > self._max_bytes:
            raise ConfigError(
                f"one pack of {item.nbytes} bytes does not fit in --hs-max-bytes {self._max_bytes}; "
                "raise it or lower --token-budget"
            )
        with self._changed:
            waited_from = self._monotonic()
            while not self._has_room(item):
                if self._closed:
                    return
                self._lower_min_ready_if_stuck()
                self._board.check()
                self._changed.wait(WAIT_S)
            self._put_blocked_s += self._monotonic() - waited_from
            self._deques[item.bucket].append((self._sequence, item))
            self._sequence += 1
            self._depth += 1
            self._bytes += item.nbytes
            self._changed.notify_all()

    def get(self, *, consumer: int = 0, stop_empties: bool = False) -> ItemT | None:
        """Take the next item; None when the queue is closed, or the producers are done and nothing is left.

        Args:
            consumer: number of the caller; it waits for its turn.
            stop_empties: when the run stops, return None at once (for use between optimizer steps). The
                others then get None too instead of waiting for a turn that this consumer will not take.
        """
        with self._changed:
            waited_from = self._monotonic()
            while not (self._is_ready() and self._turn == consumer):
                if self._is_over(stop_empties=stop_empties):
                    self._get_blocked_s += self._monotonic() - waited_from
                    return None
                self._board.check()
                self._changed.wait(WAIT_S)
            self._turn = (self._turn + 1) % self._consumers
            self._get_blocked_s += self._monotonic() - waited_from
            bucket = self._choose_bucket()
            _, item = self._deques[bucket].popleft()
            self._remaining[bucket] = max(0, self._remaining[bucket] - 1)
            self._depth -= 1
            self._bytes -= item.nbytes
            self._changed.notify_all()
            return item

    def producer_done(self) -> None:
        """Say that one producer brings nothing more; after the last one the queue drains."""
        with self._changed:
            self._producers -= 1
            self._changed.notify_all()

    def close(self) -> None:
        """Say that no consumer takes anything any more, so that producers do not wait for room."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def leave(self) -> None:
        """Say that a consumer went home at a stop: nobody must wait for the turn that it will not take."""
        with self._changed:
            self._has_left = True
            self._changed.notify_all()

    @property
    def is_closed(self) -> bool:
        """True once no consumer takes anything any more."""
        return self._closed

    @property
    def has_left(self) -> bool:
        """True once a consumer went home at a stop."""
        return self._has_left

    def snapshot(self) -> QueueSnapshot:
        """Return depth, bytes and blocked time as they are now."""
        with self._changed:
            elapsed_s = max(self._monotonic() - self._started_s, 1e-9)
            return QueueSnapshot(
                depth=self._depth,
                buckets=tuple(len(entries) for entries in self._deques),
                nbytes=self._bytes,
                min_ready=self._min_ready,
                max_depth=self._max_depth,
                put_blocked_s=self._put_blocked_s,
                get_blocked_s=self._get_blocked_s,
                starved_ratio=min(1.0, self._get_blocked_s / (elapsed_s * self._consumers)),
                full_ratio=min(1.0, self._put_blocked_s / (elapsed_s * self._all_producers)),
            )

    def _has_room(self, item: ItemT) -> bool:
        return self._depth < self._max_depth and self._bytes + item.nbytes <= self._max_bytes

    def _is_over(self, *, stop_empties: bool) -> bool:
        """Tell a consumer that waits to go home."""
        if stop_empties and self._board.stop.is_set():
            self.leave()
        return self._closed or self._has_left or self._is_drained()

    def _is_drained(self) -> bool:
        return self._producers <= 0 and self._depth == 0

    def _is_ready(self) -> bool:
        if self._depth == 0 or self._closed:
            return False
        return self._depth >= self._min_ready or self._producers <= 0 or self._board.stop.is_set()

    def _lower_min_ready_if_stuck(self) -> None:
        """Keep the byte cap from blocking both sides: what fits is then enough to pull from."""
        if 0 < self._depth < self._min_ready and self._depth < self._max_depth:
            _LOG.warning(
                "the byte cap of the hidden-states queue (%d) holds %d packs: hs_min_ready lowered from %d; "
                "raise --hs-max-bytes for better mixing",
                self._max_bytes,
                self._depth,
                self._min_ready,
            )
            self._min_ready = self._depth
            self._changed.notify_all()

    def _choose_bucket(self) -> int:
        filled = [bucket for bucket, entries in enumerate(self._deques) if entries]
        if self._ordered:
            return min(filled, key=lambda bucket: self._deques[bucket][0][0])
        weights = [max(self._remaining[bucket], len(self._deques[bucket])) for bucket in filled]
        return self._rng.choices(filled, weights=weights)[0]
