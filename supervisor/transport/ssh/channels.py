"""Open SSH channels: how many one connection may have, and how one is read, written and closed.

paramiko blocks, so its calls run on the owner's threads; waiting for data does not (a channel shows
readiness on a file descriptor), so an idle agent channel costs no thread. Called by `ssh.transport` and
`pct`; must not open connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

import paramiko

from supervisor.domain.errors import ConnectError, DeadlineError, TransportError
from supervisor.transport.argv import Frame
from supervisor.transport.deadline import Deadline

T = TypeVar("T")

_READ_BYTES = 256 << 10
_STDERR_KEPT = 64 << 10
_STATUS_GRACE_S = 5.0  # a lost packet alone costs a second or two
_SEND_TICK_S = 0.25
_GROW_AFTER = 64
_PACKET_BYTES = 32 << 10  # sshd takes no larger ones, and whatever more is offered is copied in vain


class Threads(Protocol):
    """The threads that blocking calls run on."""

    async def on_pool(self, function: Callable[[], T]) -> T:
        """Run a short blocking call."""
        ...

    async def on_feeders(self, function: Callable[[], T]) -> T:
        """Run a call that may block for as long as the peer takes no data."""
        ...


class Gate:
    """Counts the open channels of one connection; further callers queue, first come first served."""

    def __init__(self, limit: int) -> None:
        self._most = limit
        self._limit = limit
        self._in_use = 0
        self._granted = 0
        self._changed = asyncio.Condition()

    async def enter(self, deadline: Deadline) -> None:
        """Take a place, or raise ConnectError (reason ChannelsBusy) when none became free in time."""
        try:
            async with asyncio.timeout(deadline.remaining()), self._changed:
                await self._changed.wait_for(lambda: self._in_use < self._limit)
                self._in_use += 1
                self._granted += 1
                if self._granted % _GROW_AFTER == 0:
                    self._limit = min(self._most, self._limit + 1)
        except TimeoutError as error:
            raise ConnectError(
                f"no free channel within {deadline.seconds:g} s ({self._in_use} of {self._limit} in use)",
                reason="ChannelsBusy",
            ) from error

    async def leave(self) -> None:
        """Give the place back."""
        async with self._changed:
            self._in_use -= 1
            self._changed.notify_all()

    def learn_limit(self) -> None:
        """The server refused a session (its MaxSessions): for a while, have fewer open than now.

        Sessions that are still closing count as well, so one refusal says little: it grows back slowly.
        """
        self._limit = max(1, min(self._limit, self._in_use - 1))
        self._granted = 0


class Stream:
    """An open session channel; one task reads it."""

    def __init__(self, threads: Threads, gate: Gate, channel: paramiko.Channel) -> None:
        self._threads = threads
        self._gate = gate
        self.channel = channel
        self._fd = channel.fileno()
        self._closed = asyncio.Event()
        self._stop_feeding = threading.Event()
        self._pending: asyncio.Future[tuple[bytes, bytes, bool]] | None = None

    async def read(self) -> tuple[bytes, bytes, bool]:
        """Wait for (stdout, stderr, at end); "at end" comes alone, after everything was read."""
        if self._pending is None:  # else a cancelled reader left its bytes there
            await self._readable()
        if self._closed.is_set():
            return b"", b"", True
        # Reading blocks only when it has to announce more window, that is after a tenth of it was read.
        room = (self.channel.in_window_threshold - self.channel.in_window_sofar) // 2
        if room > 0 and self._pending is None:
            return self._read_available(room)
        if self._pending is None:
            reading = self._threads.on_pool(lambda: self._read_available(_READ_BYTES))
            self._pending = asyncio.ensure_future(reading)
        result = await asyncio.shield(self._pending)
        self._pending = None
        return result

    def _read_available(self, limit: int) -> tuple[bytes, bytes, bool]:
        channel = self.channel
        is_over = bool(channel.eof_received or channel.closed)
        out = channel.recv(limit) if channel.recv_ready() else b""
        err = channel.recv_stderr(limit) if channel.recv_stderr_ready() else b""
        return out, err, is_over and not out and not err

    async def _readable(self) -> None:
        # paramiko's descriptor stays silent where data of one stream comes while the other is being emptied:
        # it clears for both without a lock. So what is there is asked for first, and only more is waited for.
        if self._closed.is_set() or self._has_news():
            return
        loop = asyncio.get_running_loop()
        ready = asyncio.ensure_future(self._closed.wait())
        loop.add_reader(self._fd, ready.cancel)
        try:
            await asyncio.wait([ready])
        finally:
            if not self._closed.is_set():
                loop.remove_reader(self._fd)
            ready.cancel()

    def _has_news(self) -> bool:
        channel = self.channel
        return bool(
            channel.recv_ready() or channel.recv_stderr_ready() or channel.eof_received or channel.closed
        )

    async def status(self, deadline: Deadline | None = None) -> int | None:
        """Exit status; None when the server sent none (signal, cut link). It may follow EOF by a moment."""
        event = self.channel.status_event
        if not event.is_set() and not self.channel.closed:
            limit_s = _STATUS_GRACE_S if deadline is None else min(_STATUS_GRACE_S, deadline.remaining())
            await self._threads.on_pool(lambda: event.wait(limit_s))
        return self.channel.exit_status if self.channel.exit_status >= 0 else None

    async def feed(self, pieces: Iterable[bytes], deadline: Deadline) -> None:
        """Send everything, then EOF; ends early without an error when the command takes no more."""
        await self._threads.on_feeders(lambda: self._feed(pieces, deadline))

    def _feed(self, pieces: Iterable[bytes], deadline: Deadline) -> None:
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            for piece in pieces:
                if not self.send_all(piece, deadline):
                    return
            self.channel.shutdown_write()

    def send_all(self, data: bytes, deadline: Deadline) -> bool:
        """Send all of `data`, blocking; False when the channel closed or the deadline passed first."""
        left = memoryview(data)
        self.channel.settimeout(_SEND_TICK_S)
        while left:
            if self._stop_feeding.is_set() or deadline.has_passed():
                return False
            try:
                sent = self.channel.send(bytes(left[:_PACKET_BYTES]))
            except TimeoutError:
                continue
            if sent == 0:
                return False
            left = left[sent:]
        return True

    async def close(self) -> None:
        """Close the channel and give its place back; the remote command may go on."""
        if self._closed.is_set():
            return
        asyncio.get_running_loop().remove_reader(self._fd)
        self._closed.set()
        self._stop_feeding.set()
        try:
            await asyncio.shield(self._threads.on_pool(self._close_quietly))
        finally:
            await self._gate.leave()

    def _close_quietly(self) -> None:
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            self.channel.close()


class SshChannel:
    """A long-lived remote command; see `transport.base.Channel`."""

    def __init__(self, threads: Threads, stream: Stream, frame: Frame, argv: tuple[str, ...]) -> None:
        self._threads = threads
        self._stream = stream
        self._frame = frame
        self._argv = argv
        self._noise = bytearray()
        self._stderr = bytearray()
        self._ready = b""
        self._has_begun = False
        self._is_over = False

    async def wait_begun(self) -> bool:
        """Read up to the begin marker; False when the channel ended without it."""
        while not self._has_begun and not self._is_over:
            out, err, self._is_over = await self._stream.read()
            self._take_stderr(err)
            self._noise += out
            position = self._noise.find(self._frame.begin)
            if position >= 0:
                self._has_begun = True
                self._ready = bytes(self._noise[position + len(self._frame.begin) :])
        return self._has_begun

    @property
    def early_text(self) -> str:
        """What was said before the command started."""
        return (self._stderr + b"\n" + self._noise).decode("utf-8", "replace").strip()

    async def exit_status(self) -> int | None:
        """Status of the outer command, once the channel is over."""
        return await self._stream.status()

    async def send(self, data: bytes, *, deadline_s: float) -> None:
        """Write all of `data`; a partly written message is of no use to the other side, so failure closes."""
        deadline = Deadline(deadline_s)
        try:
            is_sent = await self._threads.on_feeders(lambda: self._stream.send_all(data, deadline))
        except (OSError, EOFError, paramiko.SSHException) as error:
            await self.close()
            raise self._closed_error() from error
        if is_sent:
            return
        await self.close()
        if not deadline.has_passed():
            raise self._closed_error()
        raise DeadlineError(
            f"{self._argv[0]} took no input for {deadline_s:g} s, channel closed", deadline_s=deadline_s
        )

    async def receive(self) -> bytes:
        """Next bytes from stdout; b"" at the end."""
        while not self._ready and not self._is_over:
            self._ready, err, self._is_over = await self._stream.read()
            self._take_stderr(err)
        data, self._ready = self._ready, b""
        return data

    def stderr_tail(self) -> bytes:
        """Last 64 KiB of stderr."""
        return bytes(self._stderr)

    async def close(self) -> None:
        """Close; the remote command sees EOF and may go on."""
        self._is_over = True
        await self._stream.close()

    def _closed_error(self) -> TransportError:
        return TransportError(f"channel to {self._argv[0]} is closed", reason="ChannelClosed")

    def _take_stderr(self, chunk: bytes) -> None:
        self._stderr += chunk
        begin = self._stderr.find(self._frame.begin)
        if begin >= 0:
            del self._stderr[: begin + len(self._frame.begin)]
        del self._stderr[: max(0, len(self._stderr) - _STDERR_KEPT)]
