"""Which environment variables a run may set, how secrets are named, and how values are kept out of texts.

Used by `spec.py`, the secrets service and everything that writes an event or an error. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

ENV_NAME = re.compile(r"[A-Z_][A-Z0-9_]*")
MAX_ENV_VALUE = 131_000
DENIED_NAMES = frozenset({"PATH", "BASH_ENV", "ENV", "IFS"})
DENIED_PREFIXES = ("LD_", "PYTHON")
OWN_NAMES = frozenset({"DFLASH_RUN_DIR", "DFLASH_RUN_TOKEN"})
"""Set by the shim for every attempt."""

REDACTED = "[redacted]"
MIN_REDACTED_LENGTH = 4
"""Shorter values would blank unrelated text and protect nothing."""

_SECRET_KEY = re.compile(
    r"(?i)(secret|token|password|passwd|api_?key|authorization|cookie|credential|private_?key)"
)
_NOT_SECRET_KEYS = frozenset(
    {"secrets", "tokens", "tok_s", "token_id", "token_budget", "mask_token_id", "lease_token"}
)


def check_env_name(name: object) -> str:
    """Return the name if a run may set it.

    Raises:
        ValueError: shape, deny-list, or one of our own.
    """
    if not isinstance(name, str) or not ENV_NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no environment name: it must match {ENV_NAME.pattern}")
    if name in DENIED_NAMES or name.startswith(DENIED_PREFIXES):
        raise ValueError(f"{name} may not be set: it would change which code runs")
    if name in OWN_NAMES:
        raise ValueError(f"{name} is set by the supervisor itself")
    return name


def check_env_value(value: object) -> str:
    """Return the value as text; numbers are allowed, booleans and tables are not.

    Raises:
        ValueError: NUL, too long, or a type that has no one spelling.
    """
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError("must be a text or a number, write it in quotes")
    text = value if isinstance(value, str) else str(value)
    if "\0" in text:
        raise ValueError("must not contain NUL")
    if len(text.encode()) > MAX_ENV_VALUE:
        raise ValueError(f"is longer than {MAX_ENV_VALUE} bytes")
    return text


def check_secret_name(name: str) -> str:
    """Return the name if it may name a secret: it becomes an environment variable.

    Raises:
        ValueError: as for `check_env_name`.
    """
    return check_env_name(name)


def redact(value: Any, *, secrets: Iterable[str] = ()) -> Any:
    """Copy JSON-like data with secrets blanked: by key name at any depth, and by value in every text."""
    hidden = sorted({text for text in secrets if len(text) >= MIN_REDACTED_LENGTH}, key=len, reverse=True)
    return _redact(value, hidden)


def _redact(value: Any, hidden: Sequence[str]) -> Any:
    if isinstance(value, Mapping):
        return {key: _redact_item(str(key), item, hidden) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_redact(item, hidden) for item in value]
    if isinstance(value, str):
        for text in hidden:
            value = value.replace(text, REDACTED)
    return value


def _redact_item(key: str, item: Any, hidden: Sequence[str]) -> Any:
    if isinstance(item, str) and key.lower() not in _NOT_SECRET_KEYS and _SECRET_KEY.search(key):
        return REDACTED
    return _redact(item, hidden)
