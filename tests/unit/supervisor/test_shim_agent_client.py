"""The agent's client against a channel that the test plays."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from supervisor.domain.errors import (
    DeadlineError,
    OutcomeUnknownError,
    ShimError,
    TransportError,
    VersionMismatchError,
)
from supervisor.transport.agent import AgentClient, parse_start_reply

HELLO = {"ev": "hello", "api": 1, "capabilities": ["list"], "boot_id": "b", "init_ticks": 1, "pid": 2}


class PlayedChannel:
    """Bytes that the test feeds, and what the client sent."""

    def __init__(self, *lines: Any) -> None:
        self.sent: list[dict[str, Any]] = []
        self.is_closed = False
        self.is_cut = False
        self._incoming: asyncio.Queue[bytes] = asyncio.Queue()
        for line in lines:
            self.feed(line)

    def feed(self, line: Any) -> None:
        self._incoming.put_nowait(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n")

    async def send(self, data: bytes, *, deadline_s: float) -> None:
        if self.is_cut:
            raise TransportError("cut", reason="ChannelClosed")
        self.sent.append(json.loads(data))

    async def receive(self) -> bytes:
        return await self._incoming.get()

    def stderr_tail(self) -> bytes:
        return b"python3: can't open file\n"

    async def close(self) -> None:
        self.is_closed = True


class StoppedClock:
    """Time that only the test moves; sleeps end when it says so."""

    def __init__(self) -> None:
        self.wake = asyncio.Event()

    def monotonic(self) -> float:
        return 0.0

    async def sleep(self, seconds: float) -> None:
        await self.wake.wait()
        self.wake.clear()


async def connect(channel: PlayedChannel, **options: Any) -> tuple[AgentClient, StoppedClock]:
    clock = StoppedClock()

    async def factory() -> PlayedChannel:
        return channel

    client = AgentClient(factory, clock, **options)  # type: ignore[arg-type]
    await client.open(deadline_s=60.0)
    return client, clock


async def sent(channel: PlayedChannel, count: int) -> list[dict[str, Any]]:
    async with asyncio.timeout(60):
        while len(channel.sent) < count:
            await asyncio.sleep(0)
    return channel.sent


async def test_noise_before_the_hello_is_skipped() -> None:
    noise = b'Welcome to pve1\n{"ev":"other"}\n\xff\xfe{broken\n{"id":1,"ok":true}\nlast login: \n'
    channel = PlayedChannel(noise, HELLO)

    client, _ = await connect(channel)

    assert client.is_open
    assert client.hello == HELLO
    await client.aclose()
    assert channel.is_closed
    assert not client.is_open


async def test_answers_find_their_requests_in_any_order_and_any_pieces() -> None:
    channel = PlayedChannel(HELLO)
    client, _ = await connect(channel)

    first = asyncio.create_task(client.request("status", attempt_id="a"))
    second = asyncio.create_task(client.request("list"))
    frames = await sent(channel, 2)
    answers = b"".join(
        json.dumps({"id": frame["id"], "ok": True, "result": {"op": frame["op"]}}).encode() + b"\n"
        for frame in reversed(frames)
    )
    for at in range(0, len(answers), 7):
        channel.feed(answers[at : at + 7])

    assert (await first, await second) == ({"op": "status"}, {"op": "list"})
    assert frames[0]["attempt_id"] == "a"
    await client.aclose()


async def test_refusal_keeps_the_shims_reason_and_data() -> None:
    channel = PlayedChannel(HELLO)
    client, _ = await connect(channel)
    task = asyncio.create_task(client.request("status", attempt_id="a"))
    frame = (await sent(channel, 1))[0]

    error = {"reason": "NoSuchAttempt", "message": "no attempt a", "errno": None, "data": {"attempt_id": "a"}}
    channel.feed({"id": frame["id"], "ok": False, "error": error})

    with pytest.raises(ShimError, match="no attempt a") as refusal:
        await task
    assert refusal.value.reason == "NoSuchAttempt"
    assert refusal.value.data["detail"] == {"attempt_id": "a"}
    assert client.is_open
    await client.aclose()


async def test_events_reach_subscribers_in_order_and_a_bad_one_harms_nobody() -> None:
    channel = PlayedChannel(HELLO)
    client, _ = await connect(channel)
    seen: list[int] = []

    def broken(_event: Any) -> None:
        raise RuntimeError("listener")

    client.subscribe(broken)
    unsubscribe = client.subscribe(lambda event: seen.append(event["n"]))
    for n in range(3):
        channel.feed({"ev": "log", "n": n})
    task = asyncio.create_task(client.request("ping"))
    frame = (await sent(channel, 1))[0]
    channel.feed({"id": frame["id"], "ok": True, "result": {}})
    await task
    unsubscribe()

    assert seen == [0, 1, 2]
    await client.aclose()


@pytest.mark.parametrize(
    ("op", "error"),
    [
        pytest.param("stop", OutcomeUnknownError, id="stop"),
        pytest.param("signal", OutcomeUnknownError, id="signal"),
        pytest.param("status", TransportError, id="status"),
    ],
)
async def test_cut_link_leaves_effects_unknown_and_questions_failed(op: str, error: type[Exception]) -> None:
    channel = PlayedChannel(HELLO)
    client, _ = await connect(channel)
    task = asyncio.create_task(client.request(op, attempt_id="a"))
    await sent(channel, 1)

    channel.feed(b"")

    with pytest.raises(TransportError) as failure:
        await task
    assert isinstance(failure.value, error)
    assert isinstance(failure.value, OutcomeUnknownError) == (op != "status")
    assert not client.is_open
    assert await client.wait_closed() is client.failure
    with pytest.raises(TransportError) as late:
        await client.request(op, attempt_id="a")
    assert not isinstance(late.value, OutcomeUnknownError), "nothing was sent, so nothing is unknown"
    await client.aclose()


@pytest.mark.parametrize(("op", "error"), [("stop", OutcomeUnknownError), ("list", DeadlineError)])
async def test_silence_ends_by_the_deadline(op: str, error: type[Exception]) -> None:
    channel = PlayedChannel(HELLO)
    client, _ = await connect(channel)

    with pytest.raises(error):
        await client.request(op, deadline_s=0.01, attempt_id="a")

    channel.feed({"id": channel.sent[0]["id"], "ok": True, "result": {}})
    assert client.is_open
    await client.aclose()


async def test_silent_link_is_noticed_by_the_clients_own_pings() -> None:
    channel = PlayedChannel(HELLO)
    client, clock = await connect(channel, ping_deadline_s=0.01)

    clock.wake.set()

    failure = await asyncio.wait_for(client.wait_closed(), 60)
    assert failure is not None
    assert failure.reason == "ShimSilent"
    assert channel.sent[0]["op"] == "ping"
    await client.aclose()


async def test_send_on_a_dead_channel_ends_the_client() -> None:
    channel = PlayedChannel(HELLO)
    client, _ = await connect(channel)
    channel.is_cut = True

    with pytest.raises(OutcomeUnknownError):
        await client.request("stop", attempt_id="a")

    assert not client.is_open
    await client.aclose()


async def test_another_api_is_a_version_mismatch() -> None:
    with pytest.raises(VersionMismatchError) as failure:
        await connect(PlayedChannel({**HELLO, "api": 99}))

    assert failure.value.data["shim_api"] == 99


async def test_agent_that_ends_before_its_hello_shows_its_stderr() -> None:
    with pytest.raises(TransportError, match="can't open file"):
        await connect(PlayedChannel(b"some noise\n", b""))


async def test_agent_that_says_nothing_is_given_up() -> None:
    channel = PlayedChannel()

    async def factory() -> PlayedChannel:
        return channel

    client = AgentClient(factory, StoppedClock())  # type: ignore[arg-type]
    with pytest.raises(DeadlineError):
        await client.open(deadline_s=0.01)

    assert channel.is_closed


async def test_endless_noise_is_not_an_agent() -> None:
    with pytest.raises(ShimError):
        await connect(PlayedChannel(*[b"x" * 100_000 + b"\n"] * 12))


def test_start_reply_is_found_behind_noise() -> None:
    reply = {"v": 1, "ok": True, "existing": False, "state": {"phase": "running"}}

    assert parse_start_reply(b"motd\n" + json.dumps(reply).encode() + b"\n")["state"]["phase"] == "running"


def test_start_refusal_and_silence_are_shim_errors() -> None:
    error = {"reason": "ExecFailed", "message": "cannot execute x", "errno": 2, "data": {"path": "x"}}

    with pytest.raises(ShimError) as refusal:
        parse_start_reply(json.dumps({"v": 1, "ok": False, "error": error}).encode())
    with pytest.raises(ShimError) as silence:
        parse_start_reply(b"bash: python3: command not found\n")

    assert (refusal.value.reason, refusal.value.data["errno"]) == ("ExecFailed", 2)
    assert silence.value.reason == "ShimSilent"
