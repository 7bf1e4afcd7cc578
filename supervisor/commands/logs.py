"""`logs`: the bytes of an attempt's log, followed by byte offset and across restarts.

A broken connection is resumed at the next byte, so no line comes twice; when an attempt ends and the run goes
on, the next attempt's log follows after a one-line marker on stderr.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from supervisor.commands.ends import SETTLED_PHASES, describe_end, reason_of, what_follows
from supervisor.commands.naming import RunArgument, find_object, path_of
from supervisor.commands.output import UsageFaultError, say, strip_escapes, until_interrupted
from supervisor.commands.session import connect
from supervisor.domain.errors import NotFoundError

if TYPE_CHECKING:
    from supervisor.client import Client

POLL_S = 0.5
TAIL_PIECE_BYTES = 262_144
SETTLE_POLLS = 20
"""How often the run is asked what follows the end of an attempt, until that is decided."""

Write = Callable[[bytes], None]


def register(root: typer.Typer) -> None:
    """Add the command to the program."""
    root.command("logs")(logs)


def logs(
    ctx: typer.Context,
    run: RunArgument,
    is_following: Annotated[
        bool,
        typer.Option("-f", "--follow", help="Go on as it grows, across restarts; Ctrl-C ends it (exit 0)."),
    ] = False,
    attempt: Annotated[int | None, typer.Option(min=1, help="Attempt number; default: the newest.")] = None,
    tail: Annotated[int | None, typer.Option(min=0, metavar="LINES", help="Only the last lines.")] = None,
    grep: Annotated[str | None, typer.Option(metavar="REGEX", help="Only lines that match.")] = None,
) -> None:
    """Print the log of a run's newest attempt.

    Examples:
      dflashctl logs slammed --tail 25

      dflashctl logs slammed -f
    """
    write = _writer(grep)
    client = connect(ctx)
    found = find_object(client, "runs", run)
    number = attempt or (found.get("attempt") or {}).get("number")
    if number is None:
        if not is_following:
            raise NotFoundError(
                f"run {found['name']} has no attempt yet", hint=f"start it: dflashctl start {found['name']}"
            )
        with until_interrupted():
            number = _next_attempt(client, found["name"], 0)
    if number is None:
        return
    name = found["name"]
    _require_attempt(client, name, number)
    try:
        with until_interrupted():
            if is_following:
                offset = _offset_to_follow(client, name, number, tail)
                _follow(client, name, number, offset, is_pinned=attempt is not None, write=write)
            else:
                _print_whole(client, name, number, tail, write)
    finally:
        write(b"")


def _require_attempt(client: Client, name: str, number: int) -> None:
    from supervisor.client import ApiError

    try:
        client.get(path_of("runs", name, "attempts", str(number)))
    except ApiError as error:
        if error.status != 404:
            raise
        attempts = client.list_all(path_of("runs", name, "attempts"), maximum=200)
        numbers = sorted(attempt["number"] for attempt in attempts)
        known = f"it has {', '.join(map(str, numbers[-10:]))}" if numbers else "it has none yet"
        raise NotFoundError(
            f"run {name} has no attempt {number}: {known}", hint=f"see: dflashctl show {name}"
        ) from error


def _offset_to_follow(client: Client, name: str, number: int, tail: int | None) -> int:
    from supervisor.client import ApiError

    if tail is None:
        return 0
    try:
        return _tail_offset(client, name, number, tail)
    except ApiError as error:
        if error.reason != "NoLog":
            raise
        return 0  # not launched yet: all that comes is new


def _print_whole(client: Client, name: str, number: int, tail: int | None, write: Write) -> None:
    from supervisor.client import ApiError

    try:
        offset = 0 if tail is None else _tail_offset(client, name, number, tail)
        is_written = _print_once(client, name, number, offset, write)
    except ApiError as error:
        if error.reason != "NoLog":
            raise
        raise NotFoundError(
            _why_no_log(client, name, number), reason="NoLog", hint=f"see: dflashctl explain {name}"
        ) from error
    if not is_written:
        say(_why_no_log(client, name, number))


def _why_no_log(client: Client, name: str, number: int) -> str:
    """An empty screen would leave open whether the log is empty or was not found."""
    attempt = client.get(path_of("runs", name, "attempts", str(number)))
    launch = attempt.get("launch_error") or {}
    cause = launch.get("message") or attempt.get("message") or attempt.get("reason")
    because = f": {strip_escapes(cause)}" if cause and not attempt["is_live"] else ""
    return f"attempt {number} of {name} has no log ({attempt['state']}){because}"


def _print_once(client: Client, name: str, number: int, offset: int, write: Write) -> bool:
    """Write the log from `offset` on; False when it is empty."""
    while True:
        piece = client.log(name, number, offset=offset)
        write(piece.data)
        offset = piece.offset + len(piece.data)
        if not piece.data or offset >= piece.size:
            return piece.size > 0


def _follow(client: Client, name: str, number: int, offset: int, *, is_pinned: bool, write: Write) -> None:
    current: int | None = number
    while current is not None:
        if _follow_attempt(client, name, current, offset, write):
            write(b"")
            say(f"--- {name} {_end_of(client, name, current)}")
        if is_pinned:
            return
        current = _next_attempt(client, name, current)
        offset = 0
        if current is not None:
            attempt = client.get(path_of("runs", name, "attempts", str(current)))
            say(f"--- {name} attempt {current}: {strip_escapes(attempt.get('log_path') or '')}")


def _end_of(client: Client, name: str, number: int) -> str:
    """How the attempt ended, and what the supervisor does next by itself."""
    for _ in range(SETTLE_POLLS):
        attempt = client.get(path_of("runs", name, "attempts", str(number)))
        run = client.get(path_of("runs", name))
        is_newest = (run.get("attempt") or {}).get("number") == number
        follows = what_follows(run) if is_newest else f"attempt {number + 1} follows"
        if follows is not None and not attempt["is_live"]:
            return f"{describe_end(attempt)}; {follows}"
        time.sleep(POLL_S)
    return f"{describe_end(attempt)}; what follows is not decided yet: dflashctl explain {name}"


def _follow_attempt(client: Client, name: str, number: int, offset: int, write: Write) -> bool:
    """One attempt's log to its end; one that is not launched yet is waited for. False: it never was."""
    from supervisor.client import ApiError

    while True:
        try:
            for piece in client.follow_log(name, number, offset=offset):
                write(piece.data)
            return True
        except ApiError as error:
            if error.reason != "NoLog":
                raise
        attempt = client.get(path_of("runs", name, "attempts", str(number)))
        if not attempt["is_live"]:
            say(f"--- {name} attempt {number} was never launched: {reason_of(attempt) or attempt['state']}")
            return False
        time.sleep(POLL_S)


def _next_attempt(client: Client, name: str, number: int) -> int | None:
    """Number of the attempt after `number` once it exists; None when the run has settled without one."""
    while True:
        run: dict[str, Any] = client.get(path_of("runs", name))
        newest = (run.get("attempt") or {}).get("number") or 0
        if newest > number:
            return number + 1 if number else int(newest)
        if run["phase"] in SETTLED_PHASES:
            return None
        time.sleep(POLL_S)


def _tail_offset(client: Client, name: str, number: int, lines: int) -> int:
    """Byte offset at which the last `lines` lines begin, found by reading backwards."""
    size = client.log(name, number, offset=0, limit=0).size
    end, wanted = size, lines
    is_first = True
    while end > 0:
        start = max(0, end - TAIL_PIECE_BYTES)
        data = client.log(name, number, offset=start, limit=end - start).data
        # A newline at the very end closes the last line, it does not begin another.
        stop = len(data) - 1 if is_first and data.endswith(b"\n") else len(data)
        if wanted == 0:
            return size
        for position in _newlines_backwards(data, stop):
            wanted -= 1
            if wanted == 0:
                return start + position + 1
        is_first, end = False, start
    return 0 if lines else size


def _newlines_backwards(data: bytes, stop: int) -> Iterator[int]:
    position = data.rfind(b"\n", 0, stop)
    while position >= 0:
        yield position
        position = data.rfind(b"\n", 0, position)


def _writer(grep: str | None) -> Write:
    """Raw bytes into a pipe; escapes stripped on a terminal; whole matching lines with `--grep`."""
    if grep is None and not sys.stdout.isatty():
        return _write_raw
    try:
        pattern = re.compile(grep) if grep is not None else None
    except re.error as error:
        raise UsageFaultError(
            f"not a regular expression: {grep!r}: {error}", hint="quote it for the shell"
        ) from error
    return _LineWriter(pattern)


def _write_raw(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


class _LineWriter:
    """Collects lines; an empty write ends the last one."""

    def __init__(self, pattern: re.Pattern[str] | None) -> None:
        self._pattern = pattern
        self._rest = b""

    def __call__(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if not data and self._rest:
            lines, self._rest = [self._rest], b""
        for line in lines:
            text = line.decode("utf-8", "replace")
            if self._pattern is None or self._pattern.search(text):
                sys.stdout.write(strip_escapes(text.rstrip("\r").rpartition("\r")[2]) + "\n")
        sys.stdout.flush()
