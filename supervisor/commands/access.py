"""`secret` and `token`: values that must not be seen twice, and who may do what."""

from __future__ import annotations

import contextlib
import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from supervisor.commands.output import (
    Column,
    Format,
    OutputOption,
    UsageFaultError,
    YesOption,
    age,
    confirm,
    emit,
    print_table,
    say,
)
from supervisor.commands.session import connect

MAX_SECRET_BYTES = 65_536

secret_app = typer.Typer(
    help="Values that runs need and nobody may read back.\n\nExamples:\n\n"
    "  dflashctl secret set WANDB_API_KEY < key.txt\n\n  dflashctl secret ls",
    no_args_is_help=True,
)
token_app = typer.Typer(
    help="API tokens with a scope.\n\nExamples:\n\n"
    "  dflashctl token create ci --scope read\n\n  dflashctl token ls",
    no_args_is_help=True,
)


class Scope(StrEnum):
    """What a token may do; each includes the one before."""

    READ = "read"
    OPERATE = "operate"
    ADMIN = "admin"


SECRET_COLUMNS: list[Column] = [
    ("NAME", lambda item: item["name"]),
    ("KIND", lambda item: item.get("reference") or item["kind"]),
    ("CHANGED", lambda item: age(item.get("updated_at"))),
]
TOKEN_COLUMNS: list[Column] = [
    ("ID", lambda item: item["id"]),
    ("NAME", lambda item: item["name"]),
    ("SCOPE", lambda item: item["scope"]),
    ("CREATED", lambda item: age(item.get("created_at"))),
    ("EXPIRES", lambda item: item.get("expires_at")),
    ("LAST USED", lambda item: age(item.get("last_used_at"))),
    ("REVOKED", lambda item: item.get("revoked_at")),
]


def register(root: typer.Typer) -> None:
    """Add both groups to the program."""
    root.add_typer(secret_app, name="secret")
    root.add_typer(token_app, name="token")


@secret_app.command("set")
def secret_set(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(help="Name of the environment variable.")],
    file: Annotated[
        Path | None, typer.Option("--file", help="Read the value from here instead of stdin.")
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(
            metavar="env:NAME|file:PATH", help="Keep no value: the daemon reads it there when a run starts."
        ),
    ] = None,
) -> None:
    """Store a secret's value, read from stdin or a file; one newline at the end is dropped."""
    if reference is not None and file is not None:
        raise UsageFaultError("--file and --reference exclude each other", hint="give one of them")
    body = {"reference": reference} if reference is not None else {"value": _read_value(file)}
    connect(ctx).put(f"/v1/secrets/{quote(name, safe='')}", body)
    say(f"secret {name} stored")


@secret_app.command("ls")
def secret_ls(ctx: typer.Context, output: OutputOption = Format.TABLE) -> None:
    """List names; values are never shown."""
    secrets = connect(ctx).list_all("/v1/secrets")
    empty = "no secrets; store one: dflashctl secret set NAME"
    emit(secrets, output, table=lambda: print_table(secrets, SECRET_COLUMNS, empty=empty))


@secret_app.command("rm")
def secret_rm(ctx: typer.Context, name: str, is_yes: YesOption = False) -> None:
    """Delete a secret; runs that name it will not start."""
    confirm(f"Delete secret {name}?", is_yes=is_yes)
    connect(ctx).delete(f"/v1/secrets/{quote(name, safe='')}", is_versioned=False)
    say(f"secret {name} deleted")


@token_app.command("create")
def token_create(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(help="What it is for.")],
    scope: Annotated[Scope, typer.Option(help="What it may do.")] = Scope.READ,
    days: Annotated[int | None, typer.Option("--expires-days", min=1, help="Days until it expires.")] = None,
    file: Annotated[
        Path | None, typer.Option("--file", help="Write the token here (0600), not to stdout.")
    ] = None,
    output: OutputOption = Format.TABLE,
) -> None:
    """Create a token; its value is shown this once."""
    body: dict[str, Any] = {"name": name, "scope": scope.value}
    if days is not None:
        body["expires_days"] = days
    descriptor = _reserve(file) if file is not None else None
    try:
        created = connect(ctx).post("/v1/tokens", body)
        if descriptor is not None:
            os.write(descriptor, (created.pop("token") + "\n").encode())
            say(f"token {created['id']} written to {file}")
            if output is Format.TABLE:
                return
    except BaseException:
        if file is not None:
            with contextlib.suppress(OSError):
                file.unlink()
        raise
    finally:
        if descriptor is not None:
            os.close(descriptor)
    emit(created, output, table=lambda: typer.echo(created["token"]))


@token_app.command("ls")
def token_ls(ctx: typer.Context, output: OutputOption = Format.TABLE) -> None:
    """List tokens; values are never shown again."""
    tokens = connect(ctx).list_all("/v1/tokens")
    emit(tokens, output, table=lambda: print_table(tokens, TOKEN_COLUMNS, empty="no tokens"))


@token_app.command("revoke")
def token_revoke(
    ctx: typer.Context,
    token_id: Annotated[str, typer.Argument(metavar="ID", help="From `dflashctl token ls`.")],
    is_yes: YesOption = False,
) -> None:
    """Make a token invalid at once, with the browser sessions opened by it."""
    confirm(f"Revoke token {token_id}?", is_yes=is_yes)
    connect(ctx).delete(f"/v1/tokens/{quote(token_id, safe='')}", is_versioned=False)
    say(f"token {token_id} revoked")


def _read_value(file: Path | None) -> str:
    if file is None and sys.stdin.isatty():
        value = typer.prompt("value", hide_input=True, err=True)
    else:
        try:
            raw = file.read_bytes() if file is not None else sys.stdin.buffer.read(MAX_SECRET_BYTES + 1)
            value = raw.decode("utf-8")
        except OSError as error:
            raise UsageFaultError(f"the value cannot be read: {file}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise UsageFaultError(
                "the value is not UTF-8 text", hint="encode it, for example with base64"
            ) from error
    value = value.removesuffix("\n").removesuffix("\r")
    if not value or "\0" in value or len(value.encode()) > MAX_SECRET_BYTES:
        raise UsageFaultError(f"a secret has 1 to {MAX_SECRET_BYTES} bytes without NUL")
    return str(value)


def _reserve(file: Path) -> int:
    """Create the file before the token exists, so that no token is made that cannot be kept."""
    try:
        return os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise UsageFaultError(f"the token file cannot be created: {file}: {error.strerror}") from error
