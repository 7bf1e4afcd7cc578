"""What lies in a channel is read, whatever its descriptor says: paramiko clears that for both streams."""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable
from typing import Any, cast

import paramiko
import pytest

from supervisor.transport.ssh.channels import Gate, Stream

pytestmark = pytest.mark.anyio

LIMIT_S = 20.0


class Pool:
    """Threads for what may block."""

    async def on_pool(self, function: Callable[[], Any]) -> Any:
        return await asyncio.to_thread(function)


@pytest.fixture
def channel():
    """A real channel without a connection, its window not yet used."""
    channel = paramiko.Channel(1)
    channel.in_window_threshold = 1 << 20
    yield channel
    channel._pipe.close()
    channel._pipe = None


def while_it_is_cleared(channel: paramiko.Channel, happens: Callable[[], None]) -> None:
    """Let something arrive at the moment at which paramiko has decided to clear the descriptor."""
    pipe, real = channel._pipe, channel._pipe.clear

    def clear() -> None:
        pipe.clear = real
        happens()
        real()

    pipe.clear = clear


async def test_output_that_arrives_while_the_other_stream_is_emptied_is_read(
    channel: paramiko.Channel,
) -> None:
    stream = Stream(cast(Any, Pool()), Gate(1), channel)
    channel.in_stderr_buffer.feed(b"first")
    while_it_is_cleared(channel, lambda: channel.in_buffer.feed(b"second"))

    async with asyncio.timeout(LIMIT_S):
        assert await stream.read() == (b"", b"first", False)
        assert not select.select([channel.fileno()], [], [], 0)[0], "paramiko is mended: this can go"
        assert await stream.read() == (b"second", b"", False)
