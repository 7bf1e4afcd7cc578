"""Words for shells: the one place that quotes, masks and frames what is run on a node.

A command travels as an argv list and meets a shell at most twice on its way: the login shell of the SSH
host and the `/bin/sh` that prints our markers. Each of them gets its text from here. Text that is not plain
ASCII, or too long for one word of a command line, travels as data on stdin instead (the host's locale or
`MAX_ARG_STRLEN` would spoil it). Called by the transports; must not run anything itself.
"""

from __future__ import annotations

import re
import secrets
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from supervisor.domain.errors import RequestError

SAFE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
BASE_ENV: Mapping[str, str] = {"PATH": SAFE_PATH, "LANG": "C.UTF-8", "LC_ALL": "C.UTF-8"}
"""What every command in a node finds in its environment, whatever the login environment says."""

MAX_INLINE_BYTES = 96 << 10
"""Longest text put on a command line; Linux refuses a single word of 128 KiB."""

_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_SECRET_NAME = re.compile(r"(?i)(token|secret|passw|api_?key|credential|authorization)")
_MASK = "***"
_LONGEST_SHOWN = 200


def check_argv(argv: Sequence[str]) -> tuple[str, ...]:
    """Return `argv` as a tuple, or refuse what no kernel or shell could run unchanged.

    Raises:
        RequestError: empty, a NUL byte in a word, or a first word that a shell would take for an option.
    """
    words = tuple(argv)
    if not words or not words[0] or words[0].startswith("-"):
        raise RequestError(
            f"cannot run {list(words[:1])}: the first word must name a program", reason="BadArgv"
        )
    for position, word in enumerate(words):
        if "\0" in word:
            raise RequestError(f"word {position} of the command holds a NUL byte", reason="BadArgv")
    return words


def with_environment(
    argv: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: str | None = None, clear: bool = False
) -> tuple[str, ...]:
    """Prefix `argv` with `env`, so that it runs in `cwd` and with `env` set (and nothing else when `clear`).

    Values show in the node's process list: secrets go on stdin, never through here.
    """
    if not env and cwd is None and not clear:
        return tuple(argv)
    words = ["/usr/bin/env"]
    if clear:
        words.append("-i")
    if cwd is not None:
        words += ["-C", cwd]
    for name, value in (env or {}).items():
        if not _ENV_NAME.match(name):
            raise RequestError(f"{name!r} is not a name for an environment variable", reason="BadEnvName")
        words.append(f"{name}={value}")
    return (*words, *argv)


def render(argv: Sequence[str], *, secret_values: Iterable[str] = ()) -> str:
    """Render a command for people: quoted, secrets masked, very long words shortened. Never for a shell."""
    hidden = [value for value in secret_values if value]
    return " ".join(shlex.quote(_masked(word, hidden)) for word in argv)


def _masked(word: str, hidden: Sequence[str]) -> str:
    name, separator, _ = word.partition("=")
    if separator and _SECRET_NAME.search(name):
        return f"{name}={_MASK}"
    for value in hidden:
        word = word.replace(value, _MASK)
    if len(word) > _LONGEST_SHOWN:
        return f"{word[:_LONGEST_SHOWN]}...({len(word)} characters)"
    return word


@dataclass(frozen=True, slots=True)
class Frame:
    """Random markers that tell a command's own output and status from everything around them.

    The script puts them together when it runs, so that a listing of its text (`ps`, `set -x`) holds none.
    """

    token: str = field(default_factory=lambda: secrets.token_hex(12))

    @property
    def begin(self) -> bytes:
        """Printed on both streams immediately before the command starts."""
        return f"{self._head}:begin>>".encode()

    @property
    def end(self) -> bytes:
        """Printed on both streams after the command, followed by its status and `>>`."""
        return f"{self._head}:end=".encode()

    def script(self, argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> str:
        """POSIX shell text that runs `argv` between the markers and reports its own status.

        `exec` in a subshell keeps words such as `if`, `exit` or `A=b` from being taken as shell syntax.
        """
        report = f"printf '%s:%s=%s>>' '{self._head}' end \"$s\""
        return f"{_exports(env)}{self._announce()}; (exec {shlex.join(argv)}); s=$?; {report}; {report} >&2"

    def channel_script(self, argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> str:
        """Like `script` for a long-lived command, which replaces the shell; only its start is marked."""
        return f"{_exports(env)}{self._announce()}; exec {shlex.join(argv)}"

    def _announce(self) -> str:
        # stdout last: whoever sees it there may close the channel at once, and nothing is left to be written.
        report = f"printf '%s:%s>>' '{self._head}' begin"
        return f"{report} >&2; {report}"

    @property
    def _head(self) -> str:
        return f"<<dflash:{self.token}"


def _exports(env: Mapping[str, str] | None) -> str:
    if not env:
        return ""
    assignments = " ".join(f"{name}={shlex.quote(value)}" for name, value in env.items())
    return f"export {assignments}; "


@dataclass(frozen=True, slots=True)
class HostCommand:
    """What goes to the SSH host: one text for its login shell, and bytes that precede the command's stdin."""

    text: str
    preamble: bytes


def host_command(prefix: Sequence[str], script: str) -> HostCommand:
    """Build the text that makes the host run `prefix` + `/bin/sh -c script`.

    `prefix` leads to the place (`pct exec 200 --`), and is empty for the host itself.
    """
    text = shlex.join((*prefix, "/bin/sh", "-c", script))
    if text.isascii() and len(text) <= MAX_INLINE_BYTES:
        return HostCommand(text, b"")
    data = script.encode("utf-8", "surrogateescape")
    loader = f'eval "$(head -c {len(data)})"'
    return HostCommand(shlex.join((*prefix, "/bin/sh", "-c", loader)), data)
