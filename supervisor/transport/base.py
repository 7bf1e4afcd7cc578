"""The transport seam: what the supervisor may do to a node, and nothing else.

Implemented by `local`, `ssh` and `pct` (stacked on `ssh`), tested by one contract suite. Callers pass argv
lists and bytes; quoting for each shell on the way happens below this line. Every call has a deadline and
every failure is one of `domain.errors` (TransportError, ContainerError and their children).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

DEFAULT_MAX_OUTPUT = 4 << 20

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes total) during copies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """A command that ran to its end in the node. `exit_code` is its own; 128+n after signal n."""

    argv: tuple[str, ...]
    exit_code: int
    stdout: bytes
    stderr: bytes
    is_truncated: bool = False
    """True when stdout or stderr exceeded `max_output` and was cut there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeProbe:
    """Evidence about the way to the node and its container, gathered with as few calls as possible."""

    is_reachable: bool
    reason: str
    """`Ok`, or the reason word of the error met: ConnectRefused, AuthFailed, HostKeyChanged ..."""
    message: str
    container_status: str | None = None
    """`running`, `stopped`, None where there is no container or it is not known."""
    container_lock: str | None = None


class Channel(Protocol):
    """A long-lived command with its streams, used for the shim's agent protocol."""

    async def send(self, data: bytes, *, deadline_s: float) -> None:
        """Write all of `data`; raises TransportError when the channel is gone."""
        ...

    async def receive(self) -> bytes:
        """Next bytes from stdout; b"" once the channel has ended. Cancel-safe, has no deadline of its own."""
        ...

    def stderr_tail(self) -> bytes:
        """Last 64 KiB the command wrote to stderr."""
        ...

    async def close(self) -> None:
        """Close; never raises. The remote command may go on (it sees EOF)."""
        ...


class Transport(Protocol):
    """One way to one node."""

    async def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        deadline_s: float,
        max_output: int = DEFAULT_MAX_OUTPUT,
        is_read_only: bool = False,
    ) -> CommandResult:
        """Run a command in the node to its end, draining both streams.

        Raises:
            OutcomeUnknownError: link lost or deadline passed after the command may have started
                (DeadlineError instead when `is_read_only`).
            ConnectError, AuthError, HostKeyError: it certainly did not run.
            NotRunningError, MissingError, LockedError: the container is the obstacle.
        """
        ...

    async def open_channel(self, argv: Sequence[str], *, deadline_s: float) -> Channel:
        """Start a command and keep its streams open."""
        ...

    async def put(
        self,
        source: Path | bytes,
        target: str,
        *,
        mode: int = 0o644,
        progress: Progress | None = None,
        deadline_s: float,
    ) -> str:
        """Copy to `target` in the node: temporary name, SHA-256 compared in the node, fsync, rename.

        Returns the hex digest. The final name is untouched unless all bytes are there.
        """
        ...

    async def get(self, source: str, *, max_bytes: int, deadline_s: float) -> bytes:
        """Read a file from the node; more than `max_bytes` is a CommandFailedError, reason FileTooLarge."""
        ...

    async def probe(self, *, deadline_s: float) -> NodeProbe:
        """Say whether the node can be reached, and what is known of its container. Never raises."""
        ...

    async def close(self) -> None:
        """Release connections; never raises."""
        ...
