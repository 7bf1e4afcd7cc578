"""One connection per node: its transport, its agent on a lasting channel, and what is known of the way there.

Built by `app`, used by the loop, preflight, deploy and the log reader. A connection starts the agent, asks it
for a sign of life every few seconds, reconnects for ever with jittered backoff, and hands every frame to the
sampler. It never concludes anything about processes: a link that fails is a condition, not an end.
"""

from __future__ import annotations

import asyncio
import contextlib
import posixpath
import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import structlog

from supervisor.clock import Clock
from supervisor.domain.errors import (
    ConnectError,
    ContainerError,
    DeployError,
    NotRunningError,
    ShimError,
    SupervisorError,
    TransportError,
)
from supervisor.domain.layout import Layout
from supervisor.reconciler.reachability import Reachability, reconnect_delay_s
from supervisor.reconciler.scripts import ensure_folder, no_python
from supervisor.transport.agent import AgentClient, build_shim_argv
from supervisor.transport.base import Channel, Transport
from supervisor.transport.bundle import ShimArchive

log = structlog.get_logger(__name__)

PING_INTERVAL_S = 4.0
PING_DEADLINE_S = 10.0
"""Together: a frozen link is reported within 15 s."""

PROBE_DEADLINE_S = 10.0
OPEN_DEADLINE_S = 20.0
PUSH_DEADLINE_S = 120.0
TCP_TRY_PERIOD_S = 5.0
TCP_TRY_DEADLINE_S = 3.0

_NO_SHIM = "can't open file"
"""What every Python says of a missing program file."""
_NOT_STARTED = r"""['"’]?: (?:not found|No such file or directory|Permission denied)"""
"""What shells and systems say right after the name of a program that they cannot start."""

Frame = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAddress:
    """What a connection needs of a node's row; a changed address means a new connection."""

    id: str
    name: str
    transport: str
    root: str
    log_dir: str
    python: str
    host: str | None = None
    port: int = 22
    user: str | None = None
    vmid: int | None = None
    identity_file: str | None = None
    host_key: str | None = None
    host_key_fingerprint: str | None = None

    @property
    def layout(self) -> Layout:
        """Paths below this node's root."""
        return Layout(self.root)


class ConnectionListener:
    """What a connection tells its owner; the defaults do nothing."""

    async def on_open(self, connection: NodeConnection) -> None:
        """A new agent answers: set up watches, adopt what runs there."""

    async def on_change(self, connection: NodeConnection) -> None:
        """Reachability changed."""

    def on_frame(self, connection: NodeConnection, frame: Frame) -> None:
        """The agent reported something; must not block."""


class NodeConnection:
    """The way to one node."""

    def __init__(
        self,
        address: NodeAddress,
        transport: Transport,
        *,
        shim: ShimArchive,
        clock: Clock,
        listener: ConnectionListener,
        rng: random.Random | None = None,
    ) -> None:
        self.address = address
        self.transport = transport
        self.reach = Reachability()
        self._shim = shim
        self._clock = clock
        self._listener = listener
        self._rng = rng or random.Random()  # noqa: S311 - jitter, not a secret
        self._agent: AgentClient | None = None
        self._wake = asyncio.Event()
        self._settled = asyncio.Event()
        self._opened = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.lock = asyncio.Lock()
        """Held while something is being changed in the node: one worker per node at a time."""
        self.watch_lock = asyncio.Lock()
        """Held while the set of watched attempts is read and sent: the newest set must be sent last."""

    @property
    def shim_path(self) -> str:
        """Where this daemon's shim lies in the node."""
        return self.address.layout.shim(self._shim.digest)

    def start(self) -> None:
        """Begin connecting, and go on until `aclose`."""
        self._task = asyncio.create_task(self._run(), name=f"connection-{self.address.name}")

    async def aclose(self) -> None:
        """Close agent and transport; processes in the node go on. Never raises."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await self._drop_agent()
        await self.transport.close()

    def wake(self) -> None:
        """Try to connect now instead of when the backoff ends."""
        self._wake.set()

    async def settled(self, limit_s: float) -> None:
        """Wait until the first attempt to connect has ended either way, at most `limit_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._settled.wait()

    async def wait_open(self, limit_s: float) -> None:
        """Try to connect now and wait until the agent answers, at most `limit_s`; the caller looks again."""
        self.wake()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._opened.wait()

    @property
    def is_open(self) -> bool:
        """Whether an agent answers at present."""
        return self._agent is not None and self._agent.is_open

    @property
    def hello(self) -> Mapping[str, Any] | None:
        """The agent's first frame (boot_id, init_ticks ...), None while there is no agent."""
        return self._agent.hello if self._agent is not None else None

    def agent(self) -> AgentClient:
        """The open agent.

        Raises:
            TransportError: not connected; carries the reason of the last failure.
        """
        if self._agent is not None and self._agent.is_open:
            return self._agent
        raise ConnectError(
            f"node {self.address.name} has no open connection: {self.reach.message or self.reach.reason}",
            reason=self.reach.reason if self.reach.reason != "Ok" else "NotConnected",
            hint=f"`dflashctl node check {self.address.name}` tells what is in the way",
        )

    async def request(self, op: str, *, deadline_s: float = 10.0, **fields: Any) -> dict[str, Any]:
        """One request to the agent; see `AgentClient.request`."""
        return await self.agent().request(op, deadline_s=deadline_s, **fields)

    async def ensure_shim(self) -> None:
        """Push the shim when the node does not have it under its digest."""
        await ensure_folder(self.transport, posixpath.dirname(self.shim_path))
        await self.transport.put(self._shim.data, self.shim_path, mode=0o755, deadline_s=PUSH_DEADLINE_S)

    async def _run(self) -> None:
        while True:
            error = await self._connect()
            self._settled.set()
            if error is None:
                error = await self._stay()
                await self._note_failure(error)  # at once: what follows may take its time on a dead link
                error = await self._explain(error)
            else:
                await self._note_failure(error)
            await self._pause(reconnect_delay_s(self.reach.failures, self._rng, error=error))

    async def _connect(self) -> SupervisorError | None:
        try:
            await self._open_agent()
        except (TransportError, ContainerError, ShimError, DeployError) as error:
            await self._drop_agent()
            return self._without_python(error) or error
        except Exception as error:  # task boundary: a bug in one node must not end its loop
            log.exception("connection failed unexpectedly", node=self.address.name)
            await self._drop_agent()
            return ConnectError(f"internal error while connecting: {error}", reason="InternalError")
        return None

    def _without_python(self, error: SupervisorError) -> SupervisorError | None:
        """The error that says so when what failed is the start of the node's interpreter, else None."""
        text = str(error.data.get("stderr") or error.message)
        python = self.address.python
        return no_python(python, text) if re.search(re.escape(python) + _NOT_STARTED, text) else None

    async def _open_agent(self) -> None:
        """Start the agent; push the shim first where it is missing."""
        try:
            await self._start_agent()
        except TransportError as error:
            if _NO_SHIM not in str(error.data.get("stderr", "")):
                raise
            log.info("pushing the shim", node=self.address.name)
            await self._drop_agent()
            await self.ensure_shim()
            await self._start_agent()
        if self.reach.note_success(self._clock.now()):
            await self._listener.on_change(self)
        self._opened.set()
        await self._listener.on_open(self)

    async def _start_agent(self) -> None:
        argv = build_shim_argv(self.address.python, self.shim_path, "serve", self.address.root)

        async def open_channel() -> Channel:
            return await self.transport.open_channel(argv, deadline_s=OPEN_DEADLINE_S)

        client = AgentClient(
            open_channel, self._clock, ping_interval_s=PING_INTERVAL_S, ping_deadline_s=PING_DEADLINE_S
        )
        client.subscribe(self._on_frame)
        self._agent = client
        await client.open(deadline_s=OPEN_DEADLINE_S)

    def _on_frame(self, frame: Mapping[str, Any]) -> None:
        self._listener.on_frame(self, frame)

    async def _stay(self) -> SupervisorError:
        """Wait for the end of the link, noticed by the agent client's pings; returns the cause."""
        assert self._agent is not None
        failure = await self._agent.wait_closed()
        return failure or TransportError("agent connection closed", reason="AgentGone")

    async def _explain(self, error: SupervisorError) -> SupervisorError:
        """A lost channel says little: ask the transport whether the container is the obstacle."""
        await self._drop_agent()
        probe = await self.transport.probe(deadline_s=PROBE_DEADLINE_S)
        if probe.container_status != "stopped":
            return error
        stopped = NotRunningError(probe.message)
        await self._note_failure(stopped)
        return stopped

    async def _note_failure(self, error: SupervisorError) -> None:
        changed = self.reach.note_failure(error, self._clock.now(), self._clock.monotonic())
        if changed or self.reach.should_alert(self._clock.monotonic()):
            await self._listener.on_change(self)

    async def _pause(self, delay_s: float) -> None:
        """Wait before the next attempt; a TCP connect that works, or `wake`, ends the wait."""
        self._wake.clear()
        if self.reach.is_blocked:
            await self._wake.wait()  # only an operator's act may follow a wrong host key
            return
        ends_at = self._clock.monotonic() + delay_s
        while (left_s := ends_at - self._clock.monotonic()) > 0:
            if await self._nap(min(left_s, TCP_TRY_PERIOD_S)):
                return
            if left_s > TCP_TRY_PERIOD_S and await self._port_answers():
                return

    async def _nap(self, seconds: float) -> bool:
        """Sleep; True when `wake` ended it."""
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            return False
        return True

    async def _port_answers(self) -> bool:
        if self.address.host is None:
            return False
        try:
            async with asyncio.timeout(TCP_TRY_DEADLINE_S):
                _reader, writer = await asyncio.open_connection(self.address.host, self.address.port)
        except (OSError, TimeoutError):
            return False
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        return True

    async def _drop_agent(self) -> None:
        self._opened.clear()
        agent, self._agent = self._agent, None
        if agent is not None:
            await agent.aclose()


BuildTransport = Callable[[NodeAddress], Transport]


class Connections:
    """All nodes' connections, kept equal to the node rows by `refresh`."""

    def __init__(
        self,
        build_transport: BuildTransport,
        *,
        shim: ShimArchive,
        clock: Clock,
    ) -> None:
        self._build_transport = build_transport
        self._shim = shim
        self._clock = clock
        self._listener = ConnectionListener()
        self._broken: dict[str, SupervisorError] = {}
        self._by_id: dict[str, NodeConnection] = {}

    def __iter__(self) -> Iterator[NodeConnection]:
        return iter(tuple(self._by_id.values()))

    def listen(self, listener: ConnectionListener) -> None:
        """Tell this one from now on; set before the first `refresh`."""
        self._listener = listener

    def find(self, node_id: str) -> NodeConnection | None:
        """The node's connection, or None for a node that is unknown here."""
        return self._by_id.get(node_id)

    def get(self, node_id: str) -> NodeConnection:
        """The node's connection.

        Raises:
            ConnectError: there is none (node just deleted, or daemon stopping).
            ConfigError: the node's row lacks what its transport needs.
        """
        connection = self._by_id.get(node_id)
        if connection is None and node_id in self._broken:
            raise self._broken[node_id]
        if connection is None:
            raise ConnectError(f"no connection for node {node_id}", reason="NotConnected")
        return connection

    async def refresh(self, addresses: list[NodeAddress]) -> dict[str, SupervisorError]:
        """Open connections to new nodes, close those of deleted ones, replace those that changed.

        Returns:
            Nodes whose row cannot make a connection, with the reason.
        """
        broken: dict[str, SupervisorError] = {}
        wanted = {address.id: address for address in addresses}
        for node_id, connection in list(self._by_id.items()):
            if wanted.get(node_id) != connection.address:
                del self._by_id[node_id]
                await connection.aclose()
        for node_id, address in wanted.items():
            if node_id in self._by_id:
                continue
            try:
                transport = self._build_transport(address)
            except SupervisorError as error:
                broken[node_id] = error
                continue
            connection = NodeConnection(
                address, transport, shim=self._shim, clock=self._clock, listener=self._listener
            )
            self._by_id[node_id] = connection
            connection.start()
        self._broken = broken
        return broken

    async def aclose(self) -> None:
        """Close all; processes in the nodes go on."""
        connections = list(self._by_id.values())
        self._by_id.clear()
        await asyncio.gather(*(connection.aclose() for connection in connections))
