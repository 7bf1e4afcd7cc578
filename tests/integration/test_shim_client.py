"""The agent's client and the real agent together, over the local transport."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from supervisor.clock import SystemClock
from supervisor.domain.errors import ShimError
from supervisor.transport.agent import AgentClient, build_shim_argv, parse_start_reply
from supervisor.transport.base import Channel
from supervisor.transport.local import LocalTransport
from tests.support.shim_bench import ShimBench

LIMIT_S = 60.0


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[ShimBench]:
    bench = ShimBench(tmp_path)
    yield bench
    bench.close()


@pytest.fixture
async def transport() -> AsyncIterator[LocalTransport]:
    transport = LocalTransport()
    yield transport
    await transport.close()


async def connect(bench: ShimBench, transport: LocalTransport) -> AgentClient:
    argv = build_shim_argv(bench.python, str(bench.pyz), "serve", str(bench.root))

    async def open_channel() -> Channel:
        return await transport.open_channel(argv, deadline_s=LIMIT_S)

    client = AgentClient(open_channel, SystemClock(), ping_deadline_s=LIMIT_S)
    await client.open(deadline_s=LIMIT_S)
    return client


async def start(bench: ShimBench, transport: LocalTransport, body: dict[str, Any]) -> dict[str, Any]:
    argv = build_shim_argv(bench.python, str(bench.pyz), "start", str(bench.root))
    result = await transport.run(argv, stdin=json.dumps(body).encode(), deadline_s=LIMIT_S)
    return parse_start_reply(result.stdout)


async def test_start_watch_and_stop_through_the_transport(
    bench: ShimBench, transport: LocalTransport
) -> None:
    started = await start(bench, transport, bench.body("a1"))
    client = await connect(bench, transport)
    events: asyncio.Queue[Any] = asyncio.Queue()
    client.subscribe(events.put_nowait)
    await client.request("watch", deadline_s=LIMIT_S, attempt_ids=["a1"], gpu=None, log=True)

    async with asyncio.timeout(LIMIT_S):
        while (await events.get())["ev"] != "metrics":
            pass
        request = {"attempt_id": "a1", "stop_id": "s1", "reason": "r", "actor": "me", "save": True}
        state = (await client.request("stop", deadline_s=LIMIT_S, **request))["state"]
        while (event := await events.get())["ev"] != "exit":
            pass

    assert started["existing"] is False
    assert state["stop"]["id"] == "s1"
    assert event["exit"]["code"] == 9
    assert (await client.request("ack", deadline_s=LIMIT_S, attempt_id="a1"))["acked"] is True
    await client.aclose()


async def test_refusals_of_the_shim_arrive_as_shim_errors(
    bench: ShimBench, transport: LocalTransport
) -> None:
    with pytest.raises(ShimError) as refusal:
        await start(bench, transport, bench.body("a1", argv=["/no/such/program"]))
    client = await connect(bench, transport)
    with pytest.raises(ShimError) as unknown:
        await client.request("status", deadline_s=LIMIT_S, attempt_id="nobody")
    await client.aclose()

    assert refusal.value.reason == "ExecFailed"
    assert refusal.value.data["errno"] == 2
    assert unknown.value.reason == "NoSuchAttempt"


async def test_killed_agent_ends_the_client_and_the_next_one_finds_the_attempt(
    bench: ShimBench, transport: LocalTransport
) -> None:
    await start(bench, transport, bench.body("a1", "--hang"))
    client = await connect(bench, transport)
    assert client.hello is not None

    os.kill(client.hello["pid"], signal.SIGKILL)

    failure = await asyncio.wait_for(client.wait_closed(), LIMIT_S)
    assert failure is not None
    assert failure.reason == "AgentGone"
    await client.aclose()
    second = await connect(bench, transport)
    assert (await second.request("status", deadline_s=LIMIT_S, attempt_id="a1"))["alive"] is True
    await second.aclose()
