"""`serve`, `doctor`, `version` and `completion`: the daemon itself and the program around it."""

from __future__ import annotations

import shlex
import sys
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from supervisor.commands.output import Format, OutputOption, emit, is_interactive, say
from supervisor.commands.session import DEFAULT_URL, session_of
from supervisor.domain.errors import SupervisorError

if TYPE_CHECKING:
    from fastapi import FastAPI

DISTRIBUTION = "dflash-supervisor"
COMPLETE_VARIABLE = "_DFLASHCTL_COMPLETE"
STATE_DIR_HELP = (
    "State folder of the daemon; default ~/.local/state/dflash-supervisor, "
    "as root /var/lib/dflash-supervisor."
)
LOG_LEVEL_HELP = "How much goes to stderr; default: warnings on a terminal, info elsewhere."


class Shell(StrEnum):
    """Shells with completion."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


class LogLevel(StrEnum):
    """Levels of the daemon's log."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class DoctorFoundError(SupervisorError):
    """At least one check failed; the report has been printed."""

    reason = "DoctorFound"


def register(root: typer.Typer) -> None:
    """Add the commands to the program."""
    for function in (serve, doctor, completion, version):
        root.command(function.__name__)(function)


def serve(
    state_dir: Annotated[Path | None, typer.Option(help=STATE_DIR_HELP)] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on; default 127.0.0.1.")] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Default 8420; 0 takes a free one.")
    ] = None,
    is_behind_proxy: Annotated[
        bool, typer.Option("--behind-proxy", help="A proxy on this address ends TLS in front of the daemon.")
    ] = False,
    tls_cert: Annotated[Path | None, typer.Option(metavar="FILE", help="Certificate chain, PEM.")] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="FILE", help="Private key, PEM.")] = None,
    log_level: Annotated[LogLevel | None, typer.Option(help=LOG_LEVEL_HELP)] = None,
) -> None:
    """Run the daemon; prints one line with its URL and the file of the admin token.

    Examples:
      dflashctl serve

      dflashctl serve --state-dir ./state --port 0
    """
    import asyncio

    from supervisor.api.server import Binding, serve_app
    from supervisor.app import create_app
    from supervisor.settings import load_settings

    settings = load_settings(
        state_dir=state_dir,
        host=host,
        port=port,
        behind_proxy=True if is_behind_proxy else None,
        tls_cert=tls_cert,
        tls_key=tls_key,
        log_level=None if log_level is None else log_level.value,
    )
    app = create_app(settings)

    async def announce(url: str) -> None:
        app.state.supervisor.note_address(url)
        code = await _login_code(app)
        typer.echo(f"listening on {url}/#code={code}  admin token: {settings.admin_token_file}")
        sys.stdout.flush()
        for hint in _hints(url, settings.admin_token_file):
            say(hint)

    asyncio.run(serve_app(app, Binding.of(settings), announce))


def _hints(url: str, token_file: Path) -> list[str]:
    """What a person needs beside the one line: the link's life, and how other shells find this daemon."""
    from supervisor.settings import default_state_dir

    hints = ["the link logs a browser in, once, within 15 minutes"] if is_interactive() else []
    if url != DEFAULT_URL:
        hints.append(f"export DFLASHCTL_URL={shlex.quote(url)}")
    if token_file.parent != default_state_dir():
        hints.append(f"export DFLASHCTL_TOKEN_FILE={shlex.quote(str(token_file))}")
    return hints


async def _login_code(app: FastAPI) -> str:
    from supervisor.services import auth

    return str(await app.state.supervisor.store.write(auth.create_login_code))


def doctor(ctx: typer.Context, output: OutputOption = Format.TABLE) -> None:
    """Check this installation and the way to the daemon; one line for each check.

    Examples:
      dflashctl doctor

      dflashctl doctor -o json
    """
    from supervisor.commands.diagnosis import diagnose

    report = diagnose(session_of(ctx))
    emit(report, output, table=lambda: _print_findings(report))
    failed = [finding["name"] for finding in report if finding["status"] == "fail"]
    if failed:
        raise DoctorFoundError(
            f"checks failed: {', '.join(failed)}", hint="the remedies are in the report above"
        )


def _print_findings(report: list[dict[str, Any]]) -> None:
    for finding in report:
        typer.echo(f"{finding['status']:4}  {finding['name']:12}  {finding['value']}")
        if finding["remedy"]:
            typer.echo(f"      {'':12}  → {finding['remedy']}")


def completion(shell: Annotated[Shell, typer.Argument(help="Which shell.")]) -> None:
    """Print the completion script of a shell.

    Examples:
      dflashctl completion bash > ~/.local/share/bash-completion/completions/dflashctl

      dflashctl completion fish > ~/.config/fish/completions/dflashctl.fish
    """
    from typer._completion_shared import get_completion_script

    typer.echo(
        get_completion_script(prog_name="dflashctl", complete_var=COMPLETE_VARIABLE, shell=shell.value)
    )


def version(output: OutputOption = Format.TABLE) -> None:
    """Print the version.

    Examples:
      dflashctl version

      dflashctl version -o json
    """
    try:
        number = metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        say(f"{DISTRIBUTION} is not installed as a package; the version is unknown")
        number = "unknown"
    emit({"version": number}, output, table=lambda: typer.echo(number))
