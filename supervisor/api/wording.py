"""Faults of a request in plain words: which field, and what is allowed there.

`api.errors` asks here for the text of each fault that the schema found. The value itself is never repeated:
it may be a secret. Whoever typed it (the CLI) knows it and can add it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from supervisor.api import schemas


def _pattern_of(kind: Any) -> str:
    return str(next(item.pattern for item in kind.__metadata__ if getattr(item, "pattern", None)))


ALLOWED: Mapping[str, str] = {
    _pattern_of(schemas.Name): (
        "must be 1 to 64 lower case letters, digits, dots, dashes or underscores, "
        "beginning with a letter or digit"
    ),
    _pattern_of(schemas.Text): "must be text without NUL characters",
    _pattern_of(schemas.NodePath): "must be an absolute path: it begins with / and is one line",
    _pattern_of(schemas.LocalPath): "must be one line without NUL characters",
    _pattern_of(schemas.HostName): "must be a host name or an address",
    _pattern_of(schemas.UserName): "must be a user name: letters, digits, dots, dashes, underscores",
    _pattern_of(schemas.Fingerprint): "must be a fingerprint as ssh-keygen -l shows it: SHA256:…",
}
"""What a pattern of the schema lets in."""

PLAIN: Mapping[str, str] = {
    "missing": "is missing",
    "extra_forbidden": "is no field of this request",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "string_too_short": "must not be shorter than {min_length} characters",
    "string_too_long": "must not be longer than {max_length} characters",
    "literal_error": "must be one of {expected}",
}


def field_of(fault: Mapping[str, Any]) -> str:
    """`body.root` as people call it: `root`."""
    parts = [str(part) for part in fault["loc"]]
    return ".".join(parts[1:] if len(parts) > 1 and parts[0] in ("body", "query", "path") else parts)


def words_of(fault: Mapping[str, Any]) -> str:
    """What is allowed where the fault is, as the rest of a sentence that begins with the field."""
    context = fault.get("ctx") or {}
    if fault["type"] == "string_pattern_mismatch" and context.get("pattern") in ALLOWED:
        return ALLOWED[context["pattern"]]
    if fault["type"] == "string_too_short" and context.get("min_length") == 1:
        return "must not be empty"
    if fault["type"] in PLAIN:
        return PLAIN[fault["type"]].format_map(context)
    message = str(fault["msg"])
    return message[:1].lower() + message[1:]
