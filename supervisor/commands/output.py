"""How results are printed: tables for people, tab-separated text for pipes, JSON or YAML for programs.

stdout carries data only; hints, progress and questions go to stderr through `say`. Remote text loses its
terminal escapes here, so that a log line or a node's name cannot drive the reader's terminal.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any

import typer

from supervisor.domain.errors import SupervisorError

Json = Mapping[str, Any]
Column = tuple[str, Callable[[Json], Any]]
"""Header and how to get the cell from a row."""

MISSING = "–"
_ESCAPES = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-_])|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
)
_FRACTION = re.compile(r"\A(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)\.\d+(Z|[+-]\d\d:\d\d)\Z")


class Format(StrEnum):
    """Values of `-o`."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


OutputOption = Annotated[
    Format, typer.Option("-o", "--output", help="How to print the result.", show_default=True)
]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]


class DeclinedError(SupervisorError):
    """The question was answered with no; nothing was done."""

    reason = "Declined"


class UsageFaultError(SupervisorError):
    """The command line cannot work as it stands; exit code 2."""

    reason = "Usage"


def say(text: str) -> None:
    """One line for the person, on stderr."""
    typer.echo(text, err=True)


def emit(data: Any, fmt: Format, *, table: Callable[[], object]) -> None:
    """Print `data` as one document, or call `table` for the human form."""
    if fmt is Format.JSON:
        typer.echo(json.dumps(data, indent=2, ensure_ascii=False))
    elif fmt is Format.YAML:
        import yaml

        typer.echo(yaml.safe_dump(data, sort_keys=False, allow_unicode=True), nl=False)
    else:
        table()


def emit_line(data: Any) -> None:
    """One NDJSON line of a stream, flushed at once."""
    typer.echo(json.dumps(data, ensure_ascii=False, separators=(",", ":")))
    sys.stdout.flush()


def print_table(rows: Sequence[Json], columns: Sequence[Column], *, empty: str) -> None:
    """A table on a terminal, tab-separated lines elsewhere; `empty` says the next command, on stderr."""
    if not rows:
        say(empty)
        return
    cells = [[clean(get(row)) for _, get in columns] for row in rows]
    headers = [header for header, _ in columns]
    if not sys.stdout.isatty():
        for line in [headers, *cells]:
            typer.echo("\t".join(cell.replace("\t", " ").replace("\n", " ") for cell in line))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(*headers, box=box.SIMPLE_HEAD, pad_edge=False)
    for line in cells:
        table.add_row(*line)
    Console(highlight=False, markup=False).print(table)


def clear_screen() -> None:
    """Begin a new picture at the top of the terminal."""
    typer.echo("\x1b[2J\x1b[H", nl=False)


def print_pairs(pairs: Iterable[tuple[str, Any]]) -> None:
    """Aligned `key  value` lines; the values are untruncated."""
    shown = [(key, clean(value)) for key, value in pairs]
    width = max((len(key) for key, _ in shown), default=0)
    for key, value in shown:
        typer.echo(f"{key.ljust(width)}  {value}")


def clean(value: Any) -> str:
    """A cell's text without terminal escapes and control characters, times to the second; None is missing."""
    if value is None or value == "":
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    return second(strip_escapes(str(value)))


@contextmanager
def until_interrupted() -> Iterator[None]:
    """Whatever is watched or followed: Ctrl-C is its ordinary end, exit code 0."""
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


def strip_escapes(text: str) -> str:
    """Remove escape sequences and control characters but tab and newline."""
    return _ESCAPES.sub("", text)


def is_interactive() -> bool:
    """Whether a person can see progress: stderr is a terminal and this is no CI job."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb" and not os.environ.get("CI")


def confirm(question: str, *, is_yes: bool, flag: str = "--yes") -> None:
    """Ask before a destructive act; the default is no.

    Raises:
        DeclinedError: the person said no (exit 1).
        UsageFaultError: there is nobody to ask and the flag is missing (exit 2).
    """
    if is_yes:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageFaultError(
            f"confirmation needed: {question}", hint=f"add {flag} to do it without a question"
        )
    if not typer.confirm(question, default=False, err=True):
        raise DeclinedError("nothing was done")


def age(timestamp: str | None, *, now: datetime | None = None) -> str:
    """How long ago an RFC 3339 time was, as `2h 15m`."""
    if not timestamp:
        return MISSING
    then = datetime.fromisoformat(timestamp)
    return duration(((now or datetime.now(UTC)) - then).total_seconds())


def second(timestamp: str) -> str:
    """An RFC 3339 time without its fraction of a second; other text as it is."""
    return _FRACTION.sub(r"\1\2", timestamp)


def duration(seconds: float | None) -> str:
    """`45s`, `12m 5s`, `2h 15m`, `3d 4h`."""
    if seconds is None:
        return MISSING
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60}s"
    if whole < 86400:
        return f"{whole // 3600}h {whole % 3600 // 60}m"
    return f"{whole // 86400}d {whole % 86400 // 3600}h"


def gib(count: float | None) -> str:
    """Bytes as GiB with one digit."""
    return MISSING if count is None else f"{count / (1 << 30):.1f} GiB"


def number(value: float | None, digits: int = 2) -> str:
    """A plain number, or missing."""
    return MISSING if value is None else f"{value:,.{digits}f}"
