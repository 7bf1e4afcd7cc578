"""One shared SSH connection: made when needed, given up when dead, made afresh for the next caller.

`Lane` holds the connection and its channel budget, `Launch` sends one command on a new channel and knows at
any moment whether the host may have got it. Called by `ssh.transport`; must not read or interpret output.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Coroutine

import paramiko

from supervisor.domain.errors import ConnectError
from supervisor.transport.deadline import Deadline
from supervisor.transport.ssh.channels import Gate, Threads
from supervisor.transport.ssh.connect import SshTarget, connect

LINK_ERRORS = (paramiko.SSHException, EOFError, OSError)

_LIVENESS_S = 5.0
_OPEN_LIMIT_S = 15.0
_BUSY_CODES = (2, 4)  # connect failed, resource shortage: what sshd says above MaxSessions

_log = logging.getLogger(__name__)


class BusyError(Exception):
    """The server refused a further session on this connection."""


class AbandonedError(Exception):
    """The caller left before the command was sent, so it was not."""


class Launch:
    """Opens a channel and sends one command on it, unless the caller has left by then."""

    def __init__(self, text: str, stdin: bytes | None) -> None:
        self._text = text
        self._stdin = stdin
        self._lock = threading.Lock()
        self._channel: paramiko.Channel | None = None
        self._is_abandoned = False
        self.is_sent = False

    def run(self, transport: paramiko.Transport) -> paramiko.Channel:
        """Blocks, for longer than the caller waits: a channel that opens late must be closed, or it leaks.

        A short stdin and its EOF go out at once, as a new channel's window has room for them.
        """
        if self._is_abandoned:
            raise AbandonedError
        channel = open_session(transport, _OPEN_LIMIT_S)
        with self._lock:
            self.is_sent = not self._is_abandoned
            self._channel = channel
        if not self.is_sent:
            self.close()
            raise AbandonedError
        channel.exec_command(self._text)
        if self._stdin is not None:
            with contextlib.suppress(OSError):  # the command may have ended already, without reading it
                if self._stdin:
                    channel.sendall(self._stdin)
                channel.shutdown_write()
        return channel

    def abandon(self) -> None:
        """The caller leaves. From here on `is_sent` is final; a command that was sent goes on without us."""
        with self._lock:
            self._is_abandoned = True

    def close(self) -> None:
        """Close what was opened. Blocks."""
        if self._channel is not None:
            with contextlib.suppress(*LINK_ERRORS):
                self._channel.close()


class Lane:
    """One connection of a kind (control, bulk), shared by all callers."""

    def __init__(self, name: str, target: SshTarget, threads: Threads, channels: int) -> None:
        self.name = name
        self.gate = Gate(channels)
        self._target = target
        self._threads = threads
        self._transport: paramiko.Transport | None = None
        self._connecting: asyncio.Task[paramiko.Transport] | None = None
        self._background: set[asyncio.Task[None]] = set()
        self._is_suspect = False
        self._is_closed = False

    async def connection(self, deadline: Deadline) -> paramiko.Transport:
        """The live connection; all callers wait for the same attempt to make one.

        Raises:
            ConnectError, AuthError, HostKeyError.
        """
        where = f"{self._target.host}:{self._target.port}"
        if self._is_closed:
            raise ConnectError(f"transport to {where} is closed", reason="TransportClosed")
        if self._transport is not None and self._transport.is_active():
            return self._transport
        if self._transport is not None:
            self.discard(self._transport)
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._connect(), name=f"ssh-connect-{self.name}")
            self._connecting.add_done_callback(_mark_seen)
        try:
            async with asyncio.timeout(deadline.remaining()):
                return await asyncio.shield(self._connecting)
        except TimeoutError as error:
            message = f"no connection to {where} within {deadline.seconds:g} s"
            raise ConnectError(message, reason="ConnectTimeout", deadline_s=deadline.seconds) from error

    def check_alive(self) -> None:
        """After a missed deadline: was the command slow or the link dead? A live server answers at once."""
        if self._is_suspect or self._transport is None:
            return
        self._is_suspect = True
        self.spawn(self._prove_alive(self._transport))

    def discard(self, transport: paramiko.Transport) -> None:
        """Forget a connection and close it; every channel on it ends."""
        if self._transport is transport:
            self._transport = None
        self.spawn(self._threads.on_pool(transport.close))

    def spawn(self, work: Coroutine[None, None, None]) -> None:
        """Run cleaning work that no caller waits for; `close` does."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def close(self) -> None:
        """Close the connection; there will be no other."""
        self._is_closed = True
        if self._connecting is not None:
            await asyncio.gather(self._connecting, return_exceptions=True)
        if self._transport is not None:
            self.discard(self._transport)
        await asyncio.gather(*self._background, return_exceptions=True)

    async def _connect(self) -> paramiko.Transport:
        try:
            self._transport = await self._threads.on_pool(lambda: connect(self._target))
            _log.info("connected", extra={"host": self._target.host, "lane": self.name})
            return self._transport
        finally:
            self._connecting = None

    async def _prove_alive(self, transport: paramiko.Transport) -> None:
        try:
            channel = await self._threads.on_pool(lambda: open_session(transport, _LIVENESS_S))
            await self._threads.on_pool(channel.close)
        except BusyError:
            return
        except LINK_ERRORS as error:
            _log.warning("connection is dead", extra={"host": self._target.host, "cause": str(error)})
            self.discard(transport)
        finally:
            self._is_suspect = False


def open_session(transport: paramiko.Transport, timeout_s: float) -> paramiko.Channel:
    """Open a session channel.

    Raises:
        BusyError: the server allows no more of them now.
        TimeoutError: no answer.
        paramiko.SSHException, EOFError, OSError: the connection is broken.
    """
    try:
        return transport.open_session(timeout=timeout_s)
    except paramiko.ChannelException as error:
        if error.code in _BUSY_CODES:
            raise BusyError(str(error)) from error
        raise
    except paramiko.SSHException as error:
        if "Timeout" in str(error):
            raise TimeoutError(str(error)) from error
        if transport.is_active():
            # Refusals of calls in parallel share one slot in paramiko: all but one lose their code.
            raise BusyError(str(error)) from error
        raise


def _mark_seen(task: asyncio.Task[paramiko.Transport]) -> None:
    """Take note of the error: every waiter may have left by its own deadline."""
    if not task.cancelled():
        task.exception()
