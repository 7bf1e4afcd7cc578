"""The budget of channels on one connection: bounded, fair, and it learns what the server allows."""

from __future__ import annotations

import asyncio

import pytest

from supervisor.domain.errors import ConnectError
from supervisor.transport.deadline import Deadline
from supervisor.transport.ssh.channels import Gate

pytestmark = pytest.mark.anyio

LIMIT_S = 30.0


async def fill(gate: Gate) -> int:
    """Enter until nothing is free, and say how often that went."""
    count = 0
    while True:
        try:
            await gate.enter(Deadline(0.05))
        except ConnectError:
            return count
        count += 1


async def empty(gate: Gate, count: int) -> None:
    for _ in range(count):
        await gate.leave()


async def test_no_more_than_the_limit_and_an_error_by_the_deadline() -> None:
    gate = Gate(3)
    assert await fill(gate) == 3
    with pytest.raises(ConnectError, match="3 of 3 in use") as caught:
        await gate.enter(Deadline(0.0))
    assert (caught.value.reason, caught.value.retryable) == ("ChannelsBusy", True)


async def test_those_who_wait_enter_in_their_order() -> None:
    gate = Gate(1)
    await gate.enter(Deadline(LIMIT_S))
    order: list[int] = []

    async def one(number: int) -> None:
        await gate.enter(Deadline(LIMIT_S))
        order.append(number)
        await gate.leave()

    waiting = [asyncio.create_task(one(number)) for number in range(5)]
    await asyncio.sleep(0.02)
    await gate.leave()
    await asyncio.gather(*waiting)
    assert order == [0, 1, 2, 3, 4]


async def test_a_refusal_lowers_the_limit_and_use_raises_it_again() -> None:
    gate = Gate(6)
    assert await fill(gate) == 6
    gate.learn_limit()
    await empty(gate, 6)
    assert await fill(gate) == 5
    await empty(gate, 5)
    for _ in range(200):
        await gate.enter(Deadline(LIMIT_S))
        await gate.leave()
    assert await fill(gate) == 6


async def test_the_limit_never_falls_below_one() -> None:
    gate = Gate(2)
    await gate.enter(Deadline(LIMIT_S))
    for _ in range(5):
        gate.learn_limit()
    await gate.leave()
    assert await fill(gate) == 1


async def test_a_waiter_that_is_cancelled_takes_no_place() -> None:
    gate = Gate(1)
    await gate.enter(Deadline(LIMIT_S))
    waiting = asyncio.create_task(gate.enter(Deadline(LIMIT_S)))
    await asyncio.sleep(0.01)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await gate.leave()
    assert await fill(gate) == 1
