"""The SSH transport: one control connection and one for bulk copies, each with its own channel budget.

A broken connection is thrown away and the next call connects afresh; a call that certainly has not run yet
tries once more by itself. Every wait has a deadline. Commands are framed (`argv.Frame`), as neither exit
status 255 nor -1 says whether a command ran. `pct` is stacked on `execute` and `start_channel`.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import paramiko

from supervisor.clock import Clock, SystemClock
from supervisor.domain.errors import (
    ConnectError,
    OutcomeUnknownError,
    SupervisorError,
    TransportError,
)
from supervisor.transport import files
from supervisor.transport.argv import BASE_ENV, Frame, HostCommand, check_argv, host_command
from supervisor.transport.base import DEFAULT_MAX_OUTPUT, CommandResult, NodeProbe, Progress
from supervisor.transport.deadline import Deadline
from supervisor.transport.framing import FramedOutcome, StreamCollector, conclude
from supervisor.transport.ssh.channels import SshChannel, Stream
from supervisor.transport.ssh.connect import SshTarget, translate
from supervisor.transport.ssh.lanes import LINK_ERRORS, BusyError, Lane, Launch

T = TypeVar("T")

CHANNELS_PER_CONNECTION = 6
"""OpenSSH refuses the 11th session of a connection; the rest is room for sessions that are still closing."""

_POOL_THREADS = 8
_FEEDER_THREADS = 12
_RETRY_BUSY_S = 0.05
_QUICK_STDIN_BYTES = 16 << 10
_FRESH_TRIES = 2


class _NotSentError(Exception):
    """The connection failed before the command was sent; `cause` says how."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(str(cause))
        self.cause = cause


class _Call:
    """One framed command on its way."""

    def __init__(self, argv: tuple[str, ...], deadline: Deadline, max_output: int) -> None:
        self.argv = argv
        self.deadline = deadline
        self.frame = Frame()
        self.stdout = StreamCollector(self.frame, max_output)
        self.stderr = StreamCollector(self.frame, max_output)
        self.is_expired = False
        self.cause: BaseException | None = None

    @property
    def is_complete(self) -> bool:
        """Both end markers arrived: nothing of the command's own can follow."""
        return self.stdout.exit_code is not None and self.stderr.exit_code is not None

    def outcome(self, status: int | None) -> FramedOutcome:
        self.stdout.finish()
        self.stderr.finish()
        return FramedOutcome(
            argv=self.argv,
            stdout=self.stdout,
            stderr=self.stderr,
            channel_status=status,
            is_expired=self.is_expired,
            deadline_s=self.deadline.seconds,
            cause=self.cause,
        )


class SshTransport:
    """Runs commands on an SSH host as its user."""

    def __init__(
        self, target: SshTarget, *, clock: Clock | None = None, channels: int = CHANNELS_PER_CONNECTION
    ) -> None:
        self.target = target
        self._clock = clock or SystemClock()
        self._lanes = {name: Lane(name, target, self, channels) for name in ("control", "bulk")}
        self._pool = ThreadPoolExecutor(_POOL_THREADS, thread_name_prefix=f"ssh-{target.host}")
        self._feeders = ThreadPoolExecutor(_FEEDER_THREADS, thread_name_prefix=f"ssh-feed-{target.host}")

    async def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        deadline_s: float,
        max_output: int = DEFAULT_MAX_OUTPUT,
        is_read_only: bool = False,
    ) -> CommandResult:
        """Run to the end; see `Transport.run`."""
        outcome = await self.execute(
            check_argv(argv), stdin=stdin, deadline_s=deadline_s, max_output=max_output
        )
        return conclude(outcome, is_read_only=is_read_only)

    async def open_channel(self, argv: Sequence[str], *, deadline_s: float) -> SshChannel:
        """Start a command and keep its streams; returns once the host's shell has reached it."""
        channel = await self.start_channel(check_argv(argv), deadline_s=deadline_s)
        if await wait_begun(channel, argv, deadline_s):
            return channel
        text = channel.early_text or "no text"
        await channel.close()
        raise TransportError(f"{argv[0]} did not start on {self.target.host}: {text}", reason="ChannelClosed")

    async def put(
        self,
        source: Path | bytes,
        target: str,
        *,
        mode: int = 0o644,
        progress: Progress | None = None,
        deadline_s: float,
    ) -> str:
        """Copy to `target` over the bulk connection; see `Transport.put`."""
        place = files.Target.at(target)
        upload = files.Upload(source, on_this_loop(progress))
        argv = files.put_argv(place, size=upload.size, mode=mode)
        outcome = await self.execute(argv, stdin=upload.pieces(), deadline_s=deadline_s, lane="bulk")
        upload.check()
        return files.put_digest(conclude_copy(outcome, target), place, expected=upload.digest)

    async def get(self, source: str, *, max_bytes: int, deadline_s: float) -> bytes:
        """Read a file over the bulk connection; see `Transport.get`."""
        argv = check_argv(files.get_argv(source, max_bytes=max_bytes))
        outcome = await self.execute(argv, deadline_s=deadline_s, lane="bulk", max_output=max_bytes + 1)
        return files.get_content(conclude_copy(outcome, source), source, max_bytes=max_bytes)

    async def probe(self, *, deadline_s: float) -> NodeProbe:
        """Run nothing but `true`, and name what stood in the way."""
        try:
            await self.run(["true"], deadline_s=deadline_s, is_read_only=True)
        except SupervisorError as error:
            return NodeProbe(is_reachable=False, reason=error.reason, message=error.message)
        return NodeProbe(is_reachable=True, reason="Ok", message=f"ssh to {self.target.host} works")

    async def close(self) -> None:
        """Close both connections and end the threads."""
        for lane in self._lanes.values():
            await lane.close()
        self._pool.shutdown(wait=False)
        self._feeders.shutdown(wait=False)

    async def execute(
        self,
        argv: tuple[str, ...],
        *,
        prefix: Sequence[str] = (),
        env: Mapping[str, str] | None = BASE_ENV,
        stdin: bytes | Iterable[bytes] = b"",
        deadline_s: float,
        max_output: int = DEFAULT_MAX_OUTPUT,
        lane: str = "control",
    ) -> FramedOutcome:
        """Run one framed command behind `prefix` and return the evidence, whatever it is.

        Raises:
            ConnectError, AuthError, HostKeyError: it certainly did not run.
        """
        call = _Call(argv, Deadline(deadline_s, self._clock), max_output)
        command = host_command(prefix, call.frame.script(argv, env=env))
        quick = None
        if isinstance(stdin, bytes) and len(command.preamble) + len(stdin) <= _QUICK_STDIN_BYTES:
            quick = command.preamble + stdin
        stream = await self._start(self._lanes[lane], command, quick, call)
        if stream is None:
            return call.outcome(None)
        feeding = None
        if quick is None:
            pieces = [stdin] if isinstance(stdin, bytes) else stdin
            feed = stream.feed(itertools.chain([command.preamble], pieces), call.deadline)
            feeding = asyncio.create_task(feed, name="ssh-stdin")
        try:
            await self._drain(self._lanes[lane], stream, call)
            return call.outcome(
                None if call.is_complete or call.is_expired else await stream.status(call.deadline)
            )
        finally:
            await stream.close()
            if feeding is not None:
                await asyncio.gather(feeding, return_exceptions=True)

    async def start_channel(
        self,
        argv: tuple[str, ...],
        *,
        prefix: Sequence[str] = (),
        env: Mapping[str, str] | None = BASE_ENV,
        deadline_s: float,
    ) -> SshChannel:
        """Open a channel for a long-lived command; the caller waits for its begin marker."""
        call = _Call(argv, Deadline(deadline_s, self._clock), 0)
        command = host_command(prefix, call.frame.channel_script(argv, env=env))
        stream = await self._start(self._lanes["control"], command, None, call)
        if stream is None:
            raise OutcomeUnknownError(f"link lost while {argv[0]} was started", argv=argv) from call.cause
        channel = SshChannel(self, stream, call.frame, argv)
        if command.preamble:
            await channel.send(command.preamble, deadline_s=call.deadline.remaining())
        return channel

    async def on_pool(self, function: Callable[[], T]) -> T:
        """Run a short blocking call on this transport's threads."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, function)

    async def on_feeders(self, function: Callable[[], T]) -> T:
        """Run a call that may block while the peer takes no data."""
        return await asyncio.get_running_loop().run_in_executor(self._feeders, function)

    async def _start(
        self, lane: Lane, command: HostCommand, stdin: bytes | None, call: _Call
    ) -> Stream | None:
        """A channel with the command sent on it; None when the link failed after it may have been sent."""
        tries = _FRESH_TRIES
        while True:
            await lane.gate.enter(call.deadline)
            stream = None
            try:
                stream = await self._start_once(lane, Launch(command.text, stdin), call)
                return stream
            except BusyError as error:
                lane.gate.learn_limit()
                if call.deadline.remaining() <= _RETRY_BUSY_S:
                    message = f"{self.target.host} refuses further sessions (MaxSessions)"
                    raise ConnectError(message, reason="ChannelsBusy") from error
            except _NotSentError as error:
                tries -= 1
                if tries == 0 or call.deadline.has_passed():
                    raise translate(error.cause, self.target, doing="open a channel") from error.cause
            finally:
                if stream is None:
                    await lane.gate.leave()
            await self._clock.sleep(_RETRY_BUSY_S)

    async def _start_once(self, lane: Lane, launch: Launch, call: _Call) -> Stream | None:
        transport = await lane.connection(call.deadline)
        starting = asyncio.ensure_future(self.on_pool(lambda: launch.run(transport)))
        starting.add_done_callback(_mark_seen)
        try:
            async with asyncio.timeout(call.deadline.remaining()):
                return Stream(self, lane.gate, await asyncio.shield(starting))
        except asyncio.CancelledError:
            launch.abandon()
            lane.spawn(self.on_pool(launch.close))
            raise
        except TimeoutError as error:
            launch.abandon()
            lane.spawn(self.on_pool(launch.close))
            lane.check_alive()
            call.is_expired, call.cause = True, error
        except LINK_ERRORS as error:
            if launch.is_sent and transport.is_active():
                lane.check_alive()  # one channel failed: those beside it go on unless the link is dead
            else:
                lane.discard(transport)
            call.cause = error
        if not launch.is_sent:
            assert call.cause is not None
            raise _NotSentError(call.cause) from call.cause
        return None

    async def _drain(self, lane: Lane, stream: Stream, call: _Call) -> None:
        """Read both streams together until both end markers, the end of the channel, or the deadline."""
        try:
            async with asyncio.timeout(call.deadline.remaining()):
                while not call.is_complete:
                    out, err, is_over = await stream.read()
                    call.stdout.feed(out)
                    call.stderr.feed(err)
                    if is_over:
                        return
        except TimeoutError as error:
            call.is_expired, call.cause = True, error
            lane.check_alive()
        except LINK_ERRORS as error:
            call.cause = error


async def wait_begun(channel: SshChannel, argv: Sequence[str], deadline_s: float) -> bool:
    """Wait for the begin marker; False when the channel ended without it.

    Raises:
        OutcomeUnknownError: neither came in time; the channel is closed.
    """
    try:
        async with asyncio.timeout(deadline_s):
            return await channel.wait_begun()
    except TimeoutError as error:
        await channel.close()
        message = f"{argv[0]} did not start within {deadline_s:g} s"
        raise OutcomeUnknownError(message, argv=tuple(argv), deadline_s=deadline_s) from error


def conclude_copy(outcome: FramedOutcome, path: str) -> CommandResult:
    """`conclude` for copies, whose repetition is harmless."""
    try:
        return conclude(outcome, is_read_only=False)
    except SupervisorError as error:
        raise files.harmless(error, path) from error


def on_this_loop(progress: Progress | None) -> Progress | None:
    """Bytes are sent from a thread; progress is told on the caller's event loop."""
    if progress is None:
        return None
    loop = asyncio.get_running_loop()

    def tell(done: int, total: int) -> None:
        loop.call_soon_threadsafe(progress, done, total)

    return tell


def _mark_seen(starting: asyncio.Future[paramiko.Channel]) -> None:
    """Take note of an error that comes after its caller has left."""
    if not starting.cancelled():
        starting.exception()
