"""`dflashctl`: assembles the commands and turns every failure into a message and an exit code.

The commands live in `supervisor.commands`; they talk to the daemon through `supervisor.client` only. This
module imports nothing slow: the web framework, the database and paramiko are loaded by `serve` alone.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from supervisor.commands import access, demo, events, logs, nodes, plans, recovery, runs, serving, top
from supervisor.commands.output import UsageFaultError, strip_escapes
from supervisor.commands.serving import COMPLETE_VARIABLE
from supervisor.commands.session import DEFAULT_URL, Session
from supervisor.commands.waiting import UNREACHABLE_REASONS, OperationFailedError
from supervisor.domain.errors import ConfigError, ConflictError, NotFoundError, SupervisorError

DONE, FAILED, USAGE, NOT_FOUND, CONFLICT, UNREACHABLE, TIMED_OUT, NOT_AUTHORISED = range(8)
INTERRUPTED = 130

EXIT_BY_STATUS: Mapping[int, int] = {
    400: USAGE,
    401: NOT_AUTHORISED,
    403: NOT_AUTHORISED,
    404: NOT_FOUND,
    409: CONFLICT,
    412: CONFLICT,
    413: USAGE,
    415: USAGE,
    422: USAGE,
    428: CONFLICT,
    502: UNREACHABLE,
    504: UNREACHABLE,
}
EXIT_BY_CLASS: Mapping[type[SupervisorError], int] = {
    UsageFaultError: USAGE,
    ConfigError: USAGE,
    NotFoundError: NOT_FOUND,
    ConflictError: CONFLICT,
}
"""For errors that arise here and not in an answer of the daemon."""

CONFLICT_REASONS = frozenset({"AlreadyRunning", "Conflict", "Superseded", "Held"})

HELP = """Run DFlash trainings on GPU nodes: deploy, start, watch, stop and restart them.

Examples:

  dflashctl run slammed.toml          store the run and start it

  dflashctl logs slammed -f           follow its log, across restarts
"""

app = typer.Typer(
    name="dflashctl",
    help=HELP,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        serving.version()
        raise typer.Exit(0)


@app.callback()
def _root(
    ctx: typer.Context,
    url: Annotated[
        str, typer.Option(envvar="DFLASHCTL_URL", metavar="URL", help="Where the daemon listens.")
    ] = DEFAULT_URL,
    token_file: Annotated[
        Path | None,
        typer.Option(
            envvar="DFLASHCTL_TOKEN_FILE", help="File with the API token; default: admin.token of the daemon."
        ),
    ] = None,
    is_debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of a failure.")] = False,
    _is_version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and end."),
    ] = False,
) -> None:
    sources = {
        name: source.name.lower()
        for name in ("url", "token_file")
        if (source := ctx.get_parameter_source(name)) is not None
    }
    ctx.obj = Session(url=url, token_file=token_file, is_debug=is_debug, sources=sources)


for group in (serving, demo, nodes, runs, recovery, logs, events, top, plans, access):
    group.register(app)


def exit_code_of(error: SupervisorError) -> int:
    """The documented exit code of a failure."""
    if isinstance(error, OperationFailedError):
        if error.reason in UNREACHABLE_REASONS:
            return UNREACHABLE
        is_conflict = error.operation["status"] == "superseded" or error.reason in CONFLICT_REASONS
        return CONFLICT if is_conflict else FAILED
    for kind, code in EXIT_BY_CLASS.items():
        if isinstance(error, kind):
            return code
    by_reason = {
        "WaitTimeout": TIMED_OUT,
        "DaemonUnreachable": UNREACHABLE,
        "NodeUnreachable": UNREACHABLE,
    }
    if error.reason in by_reason:
        return by_reason[error.reason]
    return EXIT_BY_STATUS.get(getattr(error, "status", 0), FAILED)


def render_error(error: SupervisorError) -> str:
    """What failed, why, what follows by itself, and what to do: a line each."""
    lines = [f"error: {error.message}"]
    place = ":".join(str(error.data[key]) for key in ("file", "line") if error.data.get(key) is not None)
    if place and place not in error.message:
        lines.append(f"  at: {place}")
    aside = _instance(error) or _end_reason(error)
    lines.append(f"  why: {error.reason}" + (f" ({aside})" if aside else ""))
    if error.data.get("follows"):
        lines.append(f"  next: {error.data['follows']}")
    if error.hint:
        lines.append(f"  do: {error.hint}")
    return strip_escapes("\n".join(lines))


def _instance(error: SupervisorError) -> str | None:
    instance = getattr(error, "instance", None)
    return str(instance) if instance and getattr(error, "status", 0) >= 500 else None


def _end_reason(error: SupervisorError) -> str | None:
    """How the attempt's end is called where its cause has a name of its own."""
    found = error.data.get("attempt_reason")
    return str(found) if found and found != error.reason else None


def main(args: list[str] | None = None) -> None:
    """Entry point of the console script; always ends by SystemExit with a documented code."""
    if COMPLETE_VARIABLE in os.environ:
        from typer._completion_classes import completion_init

        completion_init()
    try:
        app(args=args, prog_name="dflashctl")
    except SupervisorError as error:
        if "--debug" in (sys.argv[1:] if args is None else args):
            traceback.print_exc()
        typer.echo(render_error(error), err=True)
        sys.exit(exit_code_of(error))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        # The reader of a pipe (head, less) has left; that is no failure of ours.
        sys.stderr.close()
        sys.exit(DONE)
