"""Where things lie in a node, and how a run's log path is made from its pattern.

Pure string work: the only place that spells the folders below a node's root. Used by the reconciler, the
services (plans) and `spec.py` (pattern check). It must not touch a file.
"""

from __future__ import annotations

import hashlib
import posixpath
import re
import string
from collections.abc import Callable
from dataclasses import dataclass

from supervisor.domain.errors import ConfigError, ConflictError

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
LOG_FIELDS = ("log_dir", "root", "name", "attempt", "node")
MAX_SKIPPED = 10_000


@dataclass(frozen=True, slots=True)
class Layout:
    """Paths below one node's root."""

    root: str

    def shim(self, digest: str) -> str:
        """The zipapp of that digest."""
        return f"{self.root}/shim/{digest}/dflash-shim.pyz"

    def uv(self, digest: str) -> str:
        """The installer of that digest."""
        return f"{self.root}/tools/uv-{digest}/uv"

    def release(self, digest: str) -> str:
        """Folder of a release."""
        return f"{self.root}/releases/{digest}"

    def environment(self, digest: str) -> str:
        """Folder of a built environment."""
        return f"{self.root}/envs/{digest}"

    def python(self, digest: str) -> str:
        """Interpreter of a built environment."""
        return f"{self.environment(digest)}/bin/python"

    def attempt(self, attempt_id: str) -> str:
        """Folder of an attempt."""
        return f"{self.root}/attempts/{attempt_id}"

    @property
    def current(self) -> str:
        """Link to the newest release, for people."""
        return f"{self.root}/current"

    @property
    def locks(self) -> str:
        """Folder of the run and GPU locks."""
        return f"{self.root}/locks"

    @property
    def temporary(self) -> str:
        """Folder for things under way."""
        return posixpath.join(self.root, "tmp")

    @property
    def logs(self) -> str:
        """Log folder when the node names none."""
        return f"{self.root}/logs"


def is_name(text: str) -> bool:
    """Whether a text may name a node or a run."""
    return NAME.fullmatch(text) is not None


def attempt_id(run_id: str, number: int) -> str:
    """The id that follows from run and number, so that a repeated request cannot launch twice."""
    return f"a{hashlib.sha256(f'{run_id}/{number}'.encode()).hexdigest()[:19]}"


def check_log_pattern(pattern: str) -> str:
    """Return the pattern if it can only give distinct, absolute paths.

    Raises:
        ValueError: unknown placeholder, no `{attempt}`, relative, or a `..` in it.
    """
    try:
        fields = [field for _, field, _, _ in string.Formatter().parse(pattern) if field is not None]
        if any(spec or conversion for _, _, spec, conversion in string.Formatter().parse(pattern)):
            raise ValueError("placeholders take no format")
    except ValueError as error:
        raise ValueError(f"not a log pattern: {error}") from error
    for field in fields:
        if field not in LOG_FIELDS:
            raise ValueError(f"unknown placeholder {{{field}}}, known are {', '.join(LOG_FIELDS)}")
    if "attempt" not in fields:
        raise ValueError("needs {attempt}: every attempt has a log of its own")
    if not (pattern.startswith(("/", "{log_dir}/", "{root}/"))) or "\0" in pattern or "\n" in pattern:
        raise ValueError("must be an absolute path or begin with {log_dir}/ or {root}/")
    if ".." in pattern.split("/"):
        raise ValueError("must not contain ..")
    return pattern


def render_log_path(pattern: str, *, log_dir: str, root: str, name: str, node: str, attempt: int) -> str:
    """Fill a checked pattern for one attempt number.

    Raises:
        ConfigError: the result is no absolute path.
    """
    path = pattern.format(log_dir=log_dir, root=root, name=name, node=node, attempt=attempt)
    if not path.startswith("/") or posixpath.normpath(path) != path:
        raise ConfigError(
            f"log pattern gives no plain absolute path: {path}", field="log.pattern", value=pattern
        )
    return path


def first_free_number(
    first: int, exists: Callable[[int], bool], *, limit: int = MAX_SKIPPED
) -> tuple[int, list[int]]:
    """Find the next attempt number whose log does not exist yet, and those that were skipped.

    Raises:
        ConflictError: `limit` numbers in a row are taken.
    """
    skipped: list[int] = []
    for number in range(first, first + limit):
        if not exists(number):
            return number, skipped
        skipped.append(number)
    raise ConflictError(
        f"the logs of {limit} attempt numbers from {first} on exist already",
        reason="LogExists",
        hint="choose another [log] pattern or move the old logs away",
        first=first,
    )
