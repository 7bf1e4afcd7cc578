"""The exit status of a channel: it may follow the end of the output, within the call's deadline."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest

from supervisor.transport.deadline import Deadline
from supervisor.transport.ssh import channels
from supervisor.transport.ssh.channels import Gate, Stream

pytestmark = pytest.mark.anyio

LIMIT_S = 60.0


class Channel:
    """What `status` reads of a paramiko channel."""

    closed = False

    def __init__(self) -> None:
        self.exit_status = -1
        self.status_event = threading.Event()

    def fileno(self) -> int:
        return 0

    def end(self, code: int) -> None:
        """The server's word on how the command ended."""
        self.exit_status = code
        self.status_event.set()


class Pool:
    """Threads for waits; `waiting` is set once one has begun."""

    def __init__(self) -> None:
        self.waiting = threading.Event()

    async def on_pool(self, function: Callable[[], Any]) -> Any:
        def begin() -> Any:
            self.waiting.set()
            return function()

        return await asyncio.to_thread(begin)


def stream_of(channel: Channel, pool: Pool) -> Stream:
    return Stream(cast(Any, pool), Gate(1), cast(Any, channel))


async def test_a_status_that_follows_the_output_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "_STATUS_GRACE_S", LIMIT_S)
    channel, pool = Channel(), Pool()
    asked = asyncio.create_task(stream_of(channel, pool).status(Deadline(LIMIT_S)))
    await asyncio.to_thread(pool.waiting.wait, LIMIT_S)

    channel.end(7)

    assert await asked == 7


@pytest.mark.parametrize(
    ("grace_s", "deadline_s"), [(LIMIT_S, 0.0), (0.0, LIMIT_S)], ids=["deadline", "grace"]
)
async def test_a_status_that_never_comes_is_unknown_by_the_nearer_limit(
    monkeypatch: pytest.MonkeyPatch, grace_s: float, deadline_s: float
) -> None:
    monkeypatch.setattr(channels, "_STATUS_GRACE_S", grace_s)
    limits: list[float | None] = []
    channel = Channel()
    monkeypatch.setattr(channel.status_event, "wait", limits.append)

    assert await stream_of(channel, Pool()).status(Deadline(deadline_s)) is None
    assert limits == [0.0]


async def test_a_closed_channel_is_not_waited_for() -> None:
    channel, pool = Channel(), Pool()
    channel.closed = True

    assert await stream_of(channel, pool).status() is None
    assert not pool.waiting.is_set()
