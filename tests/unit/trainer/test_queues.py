"""The queues between threads: limits, mixing, draining, and waits that always end."""

import threading
import time
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.errors import ConfigError, StalledError, WorkerDiedError
from trainer.pipeline.queues import FeedQueue, HiddenStatesQueue
from trainer.pipeline.workers import Board


@dataclass(frozen=True)
class Item:
    name: int
    bucket: int = 0
    nbytes: int = 1


def make_queue(board=None, **overrides):
    arguments = {
        "buckets": 3,
        "min_ready": 2,
        "max_depth": 4,
        "max_bytes": 1_000,
        "producers": 1,
        "seed": 0,
    } | overrides
    return HiddenStatesQueue(board or Board(stall_s=60.0), **arguments)


def start(work):
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def wait_until(condition):
    for _ in range(24_000):
        if condition():
            return
        time.sleep(0.005)
    raise AssertionError("the awaited event did not come")


@given(
    items=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 30)), min_size=1, max_size=40),
    min_ready=st.integers(1, 5),
    extra_depth=st.integers(0, 4),
    max_bytes=st.integers(30, 120),
    seed=st.integers(0, 5),
    ordered=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_golden_38_limits_hold_and_every_pack_is_delivered_once(
    items, min_ready, extra_depth, max_bytes, seed, ordered
):
    packs = [Item(name, bucket, nbytes) for name, (bucket, nbytes) in enumerate(items)]
    queue = make_queue(
        min_ready=min_ready,
        max_depth=min_ready + extra_depth,
        max_bytes=max_bytes,
        seed=seed,
        ordered=ordered,
    )
    queue.open_epoch([sum(item.bucket == bucket for item in packs) for bucket in range(3)])
    seen = []

    def produce():
        for item in packs:
            queue.put(item)
            snapshot = queue.snapshot()
            seen.append((snapshot.depth, snapshot.nbytes))
        queue.producer_done()

    producer = start(produce)
    delivered = []
    while (item := queue.get()) is not None:
        delivered.append(item)
    producer.join(120)

    assert Counter(delivered) == Counter(packs)
    assert all(depth <= min_ready + extra_depth and nbytes <= max_bytes for depth, nbytes in seen)
    for bucket in range(3):
        names = [item.name for item in delivered if item.bucket == bucket]
        assert names == sorted(names)
    if ordered:
        assert [item.name for item in delivered] == sorted(item.name for item in packs)


@given(
    shares=st.lists(st.lists(st.integers(0, 2), max_size=12), min_size=1, max_size=4),
    consumers=st.integers(1, 4),
    max_depth=st.integers(2, 5),
    seed=st.integers(0, 5),
)
@settings(max_examples=25, deadline=None)
def test_golden_38_many_producers_and_consumers_pass_every_pack_on_once(shares, consumers, max_depth, seed):
    packs = [
        [Item(100 * producer + place, bucket) for place, bucket in enumerate(buckets)]
        for producer, buckets in enumerate(shares)
    ]
    queue = make_queue(min_ready=2, max_depth=max_depth, producers=len(packs), consumers=consumers, seed=seed)
    depths, delivered = [], [[] for _ in range(consumers)]

    def produce(share):
        for item in share:
            queue.put(item)
            depths.append(queue.snapshot().depth)
        queue.producer_done()

    def consume(place):
        while (item := queue.get(consumer=place)) is not None:
            delivered[place].append(item)

    threads = [start(lambda share=share: produce(share)) for share in packs]
    threads += [start(lambda place=place: consume(place)) for place in range(consumers)]
    for thread in threads:
        thread.join(120)

    assert not any(thread.is_alive() for thread in threads)
    assert Counter(item for own in delivered for item in own) == Counter(i for share in packs for i in share)
    assert all(depth <= max_depth for depth in depths)
    # in turns: nobody gets ahead of the common step
    assert max(map(len, delivered)) - min(map(len, delivered)) <= 1


def test_consumer_that_a_stop_sends_home_takes_the_others_along():
    board = Board(stall_s=60.0)
    queue = make_queue(board, min_ready=1, consumers=2)
    queue.put(Item(0))
    given = []
    second = start(lambda: given.append(queue.get(consumer=1)))
    second.join(0.2)
    assert second.is_alive(), "it is the first one's turn"
    queue.put(Item(1))
    assert queue.get(consumer=0).name == 0
    second.join(120)
    assert [item.name for item in given] == [1]

    waits_within_a_step = start(lambda: given.append(queue.get(consumer=1)))
    board.stop.set()
    assert queue.get(consumer=0, stop_empties=True) is None
    waits_within_a_step.join(120)

    assert given[1:] == [None]


def test_golden_38_nothing_is_pulled_below_min_ready_until_drained():
    queue = make_queue(min_ready=3)
    pulled = []
    queue.put(Item(0))
    queue.put(Item(1))
    consumer = start(lambda: pulled.append(queue.get()))

    consumer.join(0.4)
    assert pulled == []

    queue.put(Item(2))
    consumer.join(120)
    assert [item.name for item in pulled] == [0]

    queue.producer_done()
    assert [queue.get().name, queue.get().name, queue.get()] == [1, 2, None]


def test_put_waits_at_max_depth_until_there_is_room():
    queue = make_queue(min_ready=1, max_depth=2)
    for name in range(2):
        queue.put(Item(name))
    producer = start(lambda: queue.put(Item(2)))

    producer.join(0.4)
    assert producer.is_alive()
    assert queue.snapshot().depth == 2

    queue.get()
    producer.join(120)
    assert not producer.is_alive()
    assert queue.snapshot().put_blocked_s > 0


def test_byte_cap_below_min_ready_lowers_it_instead_of_blocking_for_ever(caplog):
    queue = make_queue(min_ready=4, max_depth=9, max_bytes=10)
    queue.put(Item(0, nbytes=5))
    queue.put(Item(1, nbytes=5))
    producer = start(lambda: queue.put(Item(2, nbytes=5)))

    assert queue.get().name == 0
    producer.join(120)

    assert queue.snapshot().min_ready == 2
    assert "hs_min_ready lowered from 4" in caplog.text


def test_item_above_the_byte_cap_is_refused_with_a_remedy():
    with pytest.raises(ConfigError, match="does not fit in --hs-max-bytes 10"):
        make_queue(max_bytes=10).put(Item(0, nbytes=11))


def test_mixing_follows_what_the_plan_still_holds():
    queue = make_queue(min_ready=1, max_depth=400, buckets=2)
    queue.open_epoch([30, 90])
    for name in range(30):
        queue.put(Item(name, bucket=0))
    for name in range(90):
        queue.put(Item(100 + name, bucket=1))

    first_half = Counter(queue.get().bucket for _ in range(60))

    assert 8 <= first_half[0] <= 22


def test_mixing_is_repeatable_for_a_seed():
    def run(seed):
        queue = make_queue(min_ready=1, max_depth=400, seed=seed)
        for name in range(60):
            queue.put(Item(name, bucket=name % 3))
        return [queue.get().name for _ in range(60)]

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_dead_worker_raises_in_a_waiting_consumer():
    board = Board(stall_s=60.0)
    queue = make_queue(board)
    caught = []

    def consume():
        try:
            queue.get()
        except WorkerDiedError as error:
            caught.append(error)

    consumer = start(consume)
    board.fail("target-cpu", ValueError("broken"))
    consumer.join(120)

    assert "target-cpu ended the run" in str(caught[0])
    assert isinstance(caught[0].__cause__, ValueError)


def test_dead_worker_raises_in_a_waiting_producer():
    board = Board(stall_s=60.0)
    queue = make_queue(board, min_ready=1, max_depth=1)
    queue.put(Item(0))
    board.fail("drafter-cpu", ValueError("broken"))

    with pytest.raises(WorkerDiedError):
        queue.put(Item(1))


def test_wait_ends_as_stalled_when_nothing_moves():
    now = [0.0]
    board = Board(stall_s=10.0, monotonic=lambda: now[0])
    queue = make_queue(board)
    now[0] = 10.5

    with pytest.raises(StalledError, match=r"nothing moved for 10 s .* last sign of life from start"):
        queue.get()


def test_known_long_work_does_not_count_as_stalled():
    now = [0.0]
    board = Board(stall_s=10.0, monotonic=lambda: now[0])

    with board.quiet("checkpoint"):
        now[0] = 100.0
        board.check()
    board.check()

    now[0] = 111.0
    with pytest.raises(StalledError, match="checkpoint"):
        board.check()


def test_stop_between_steps_returns_at_once_and_within_a_step_takes_what_is_there():
    board = Board(stall_s=60.0)
    queue = make_queue(board, min_ready=3)
    queue.put(Item(0))
    board.stop.set()

    assert queue.get(stop_empties=True).name == 0
    assert queue.get(stop_empties=True) is None


def test_closed_queue_lets_blocked_producers_go():
    queue = make_queue(min_ready=1, max_depth=1)
    queue.put(Item(0))
    producer = start(lambda: queue.put(Item(1)))

    queue.close()
    producer.join(120)

    assert not producer.is_alive()
    assert queue.snapshot().depth == 1


def test_snapshot_lists_depth_per_bucket():
    queue = make_queue(max_depth=9)
    for name, bucket in enumerate((0, 2, 2)):
        queue.put(Item(name, bucket=bucket, nbytes=7))

    snapshot = queue.snapshot()

    assert (snapshot.depth, snapshot.buckets, snapshot.nbytes) == (3, (1, 0, 2), 21)


def test_min_ready_above_max_depth_is_refused():
    with pytest.raises(ConfigError, match="between 1 and hs_max_depth 4: 5"):
        make_queue(min_ready=5)


def test_feed_queue_is_a_bounded_fifo_that_ends_when_closed():
    feed = FeedQueue(2, Board(stall_s=60.0))
    assert feed.put(1)
    assert feed.put(2)
    producer = start(lambda: (feed.put(3), feed.close()))
    producer.join(0.3)
    assert len(feed) == 2

    assert [feed.get(), feed.get(), feed.get(), feed.get()] == [1, 2, 3, None]


def test_feed_queue_gives_up_when_the_run_stops():
    board = Board(stall_s=60.0)
    feed = FeedQueue(1, board)
    feed.put(1)
    board.stop.set()

    assert not feed.put(2)


def test_closed_queue_gives_nothing_more():
    queue = make_queue(min_ready=1)
    queue.put(Item(0))

    queue.close()

    assert queue.get() is None
    assert queue.is_closed
