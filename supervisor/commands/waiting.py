"""Waiting for operations: phases on stderr, an end with the right exit code, Ctrl-C that only detaches.

Every acting command goes through `finish_operation`. It decides nothing about the run; it reports what the
operation's record says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from supervisor.commands.output import Format, emit, is_interactive, say, strip_escapes
from supervisor.domain.errors import SupervisorError

if TYPE_CHECKING:
    from supervisor.client import Client

Json = dict[str, Any]

NoWaitOption = Annotated[bool, typer.Option("--no-wait", help="Return at once; print the operation's id.")]
TimeoutOption = Annotated[
    float | None,
    typer.Option("--timeout", min=0.1, metavar="SECONDS", help="Give up waiting after this long."),
]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Print the plan with its costs; change nothing.")
]

ENDED = frozenset({"done", "failed", "superseded"})

UNREACHABLE_REASONS = frozenset(
    {
        "OutcomeUnknown",
        "TransportFailed",
        "ConnectFailed",
        "ConnectRefused",
        "ConnectTimeout",
        "DnsFailed",
        "DeadlineExceeded",
        "HostUnreachable",
        "LinkLost",
        "ChannelClosed",
        "ChannelsBusy",
        "NotConnected",
        "AgentGone",
        "ShimSilent",
        "Unreachable",
        "NodeUnreachable",
        "ContainerStopped",
        "ContainerMissing",
        "ContainerLocked",
        "GuestLockBusy",
        "PctMissing",
        "PctFailed",
        "PctNotAllowed",
        "HostKeyChanged",
        "HostKeyUnknown",
        "BadHostKey",
        "AuthFailed",
        "AgentUnavailable",
        "IdentityMissing",
        "IdentityUnreadable",
        "IdentityEncrypted",
    }
)
"""Reasons of a failed operation that mean: the node could not be asked, or we do not know."""


class OperationFailedError(SupervisorError):
    """The operation ended without its effect; carries the reason from its record."""

    def __init__(self, operation: Json) -> None:
        error = operation.get("error") or {}
        super().__init__(
            f"{operation['kind']} failed: {error.get('message') or operation['status']}",
            reason=error.get("reason") or "Failed",
            hint=error.get("hint"),
            **(error.get("data") or {}),
        )
        self.operation = operation


def finish_operation(
    client: Client, operation: Json, *, fmt: Format, is_waiting: bool, timeout_s: float | None, subject: str
) -> Json:
    """Print the operation's id, wait for its end unless told not to, and print the result.

    Raises:
        OperationFailedError: it ended as failed or was superseded by a later request.
        WaitTimeoutError: the wait is over, the operation goes on.
    """
    if is_waiting:
        operation = wait_for_success(client, operation, timeout_s=timeout_s)
    print_operation(operation, fmt, subject=subject)
    return operation


def print_operation(operation: Json, fmt: Format, *, subject: str) -> None:
    """Its result when it is done, else its id."""
    if operation["status"] not in ENDED:
        say(f"operation {operation['id']}")
    emit(operation, fmt, table=lambda: _print_done(operation, subject))


def wait_for_success(client: Client, operation: Json, *, timeout_s: float | None) -> Json:
    """Say the operation's id and wait for its good end; raises as `finish_operation` does."""
    say(f"operation {operation['id']}")
    operation = wait(client, operation, timeout_s=timeout_s)
    if operation["status"] in ("failed", "superseded"):
        raise OperationFailedError(operation)
    return operation


def wait(client: Client, operation: Json, *, timeout_s: float | None) -> Json:
    """Wait and show each new phase once; on Ctrl-C leave the operation alone and exit 0."""
    reporter = _Reporter()
    try:
        return client.wait_operation(operation["id"], timeout_s=timeout_s, on_progress=reporter)
    except KeyboardInterrupt:
        say(f"\ndetached; {operation['kind']} goes on as {operation['id']}")
        raise typer.Exit(0) from None


class _Reporter:
    """Says each step of an operation once; a count of bytes or items updates in place on a terminal."""

    def __init__(self) -> None:
        self._seen: str | None = None
        self._is_interactive = is_interactive()
        self._is_line_open = False

    def __call__(self, operation: Json) -> None:
        if operation["status"] in ENDED:
            # Its record still holds the last step; the result says how it ended.
            self._end_line()
            return
        progress = operation.get("progress") or {}
        step = progress.get("step") or operation["status"]
        text = strip_escapes(f"{step}: {progress['message']}" if progress.get("message") else str(step))
        total = progress.get("total")
        if self._is_interactive and total:
            share = 100 * (progress.get("done") or 0) / total
            typer.echo(f"\r\x1b[2K  {text} {share:.0f} %", err=True, nl=False)
            self._seen, self._is_line_open = None, True
        elif text != self._seen:
            self._end_line()
            say(f"  {text}")
            self._seen = text

    def _end_line(self) -> None:
        if self._is_line_open:
            say("")
            self._is_line_open = False


def _print_done(operation: Json, subject: str) -> None:
    if operation["status"] != "done":
        typer.echo(operation["id"])
        return
    result = operation.get("result") or {}
    message = result.get("message")
    typer.echo(strip_escapes(f"{subject}: {message}" if message else f"{subject}: {operation['kind']} done"))
