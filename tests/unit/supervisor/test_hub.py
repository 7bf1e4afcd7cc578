"""The hub: bounded queues, overflow ends one client only, closing ends all."""

from __future__ import annotations

import pytest

from supervisor.services.hub import Hub, TooManySubscribersError


async def test_a_slow_client_is_dropped_and_the_others_go_on() -> None:
    hub = Hub()
    slow, quick = hub.subscribe(max_queue=2), hub.subscribe(max_queue=10)

    for number in range(4):
        hub.publish("metrics", {"n": number}, run="r")

    assert slow.is_overflowed
    seen = [message.data["n"] for _ in range(4) if (message := await quick.get())]
    assert seen == [0, 1, 2, 3]
    assert hub.subscriber_count == 1


async def test_a_dropped_client_reaches_the_end_of_its_queue() -> None:
    hub = Hub()
    slow = hub.subscribe(max_queue=2)
    for number in range(5):
        hub.publish("gpu", {"n": number})

    got = []
    while (message := await slow.get()) is not None:
        got.append(message.data["n"])

    assert got == [1]
    assert await slow.get() is None


async def test_closing_the_hub_ends_streams_and_refuses_new_ones() -> None:
    hub = Hub()
    client = hub.subscribe()

    hub.close()

    assert await client.get() is None
    with pytest.raises(TooManySubscribersError):
        hub.subscribe()


async def test_the_number_of_clients_is_bounded() -> None:
    hub = Hub(max_subscribers=1)
    first = hub.subscribe()
    with pytest.raises(TooManySubscribersError):
        hub.subscribe()

    first.close()
    first.close()

    assert hub.subscribe() is not None


def test_an_unknown_topic_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(ValueError, match="nonsense"):
        Hub().publish("nonsense", {})
