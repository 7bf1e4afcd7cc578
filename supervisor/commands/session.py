"""Where the daemon is and which token to show it: flag, then environment, then default.

Owns the options that stand before the command name and the one `Client` of an invocation. Tokens come from
files only, never from an argument.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from supervisor.domain.errors import ConfigError

if TYPE_CHECKING:
    from supervisor.client import Client

DEFAULT_URL = "http://127.0.0.1:8420"


@dataclass
class Session:
    """Options of this invocation, kept in `ctx.obj`."""

    url: str = DEFAULT_URL
    token_file: Path | None = None
    is_debug: bool = False
    sources: dict[str, str] = field(default_factory=dict)
    """Option name to where its value came from, for `doctor`."""

    def connect(self) -> Client:
        """Open the client; the token is read now."""
        from supervisor.client import Client

        return Client(self.url, self.read_token())

    def read_token(self) -> str:
        """The token's text.

        Raises:
            ConfigError: the file is missing or cannot be read, with what to do.
        """
        path = self.token_file or default_token_file()
        try:
            token = path.read_text(encoding="utf-8").strip()
        except FileNotFoundError as error:
            raise ConfigError(
                f"no token file: {path}",
                hint="start the daemon once (dflashctl serve makes it), or name another with "
                "--token-file or DFLASHCTL_TOKEN_FILE",
            ) from error
        except OSError as error:
            raise ConfigError(
                f"the token file cannot be read: {path}: {error.strerror}",
                hint="run as the daemon's user, or ask for a token file of your own: dflashctl token create",
            ) from error
        if not token:
            raise ConfigError(f"the token file is empty: {path}", hint="write the token into it")
        return token


def default_state_dir() -> Path:
    """The daemon's default state folder, so that the CLI finds the admin token beside it.

    The same rule as in `supervisor.settings`, which is too slow to import for every command.
    """
    named = os.environ.get("SUPERVISOR_STATE_DIR")
    if named:
        return Path(named)
    if os.geteuid() == 0:
        return Path("/var/lib/dflash-supervisor")
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "dflash-supervisor"


def default_token_file() -> Path:
    """Where `serve` writes the admin token."""
    return default_state_dir() / "admin.token"


def session_of(ctx: typer.Context) -> Session:
    """The invocation's session."""
    found = ctx.find_object(Session)
    assert found is not None, "the root callback sets it"
    return found


def connect(ctx: typer.Context) -> Client:
    """The client for this invocation, closed when the command ends."""
    client = session_of(ctx).connect()
    ctx.call_on_close(client.close)
    return client
