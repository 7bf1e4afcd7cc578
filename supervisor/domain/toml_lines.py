"""Where in a TOML text each key stands, so that an error can name its line.

The standard parser gives no positions. This one only finds keys and tables; `tomllib` has already accepted
the text, so it may assume that the syntax is right. Used by `spec.py` alone.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence

_KEY = re.compile(
    r"""^\s*((?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*'))*)\s*="""
)
_HEADER = re.compile(r"^\s*\[\[?\s*(.+?)\s*\]\]?\s*(?:#.*)?$")
_STRINGS = re.compile(
    r'"""(?:[^\\]|\\.)*?"""|\'\'\'.*?\'\'\'|"(?:[^"\\\n]|\\.)*"|\'[^\'\n]*\'|#[^\n]*', re.DOTALL
)

Path = tuple[str | int, ...]


def locate_keys(text: str) -> Mapping[Path, int]:
    """Map each key path to the first line (from 1) that names it; array tables count from 0."""
    found: dict[Path, int] = {}
    array_sizes: dict[Path, int] = {}
    table: Path = ()
    depth = 0
    plain = _blank_strings(text)
    for number, (line, bare) in enumerate(zip(text.split("\n"), plain.split("\n"), strict=True), start=1):
        if depth == 0 and bare.lstrip().startswith("["):
            table = _header_path(line, array_sizes)
            found.setdefault(table, number)
        elif depth == 0:
            key = _KEY.match(line)
            if key and "=" in bare:
                path = table + _split_key(key.group(1))
                for length in range(len(table) + 1, len(path) + 1):
                    found.setdefault(path[:length], number)
                depth = _depth_change(bare)
        else:
            depth = max(0, depth + _depth_change(bare))
    return found


def line_of(found: Mapping[Path, int], path: Sequence[str | int]) -> int | None:
    """Line of the longest known prefix of a path; None when nothing of it is in the text."""
    for length in range(len(path), 0, -1):
        line = found.get(tuple(path[:length]))
        if line is not None:
            return line
    return None


def _blank_strings(text: str) -> str:
    """Replace string contents and comments by spaces, keeping every line break."""
    return _STRINGS.sub(lambda match: re.sub(r"[^\n]", " ", match.group(0)), text)


def _depth_change(bare: str) -> int:
    return sum(bare.count(sign) for sign in "[{") - sum(bare.count(sign) for sign in "]}")


def _split_key(key: str) -> tuple[str, ...]:
    parsed = tomllib.loads(f"{key} = 0")
    parts = []
    while True:
        (name, value), *_ = parsed.items()
        parts.append(name)
        if not isinstance(value, dict):
            return tuple(parts)
        parsed = value


def _header_path(line: str, array_sizes: dict[Path, int]) -> Path:
    match = _HEADER.match(line)
    names = _split_key(match.group(1)) if match else ()
    path: Path = ()
    for name in names[:-1]:
        path = (*path, name)
        if path in array_sizes:
            path = (*path, array_sizes[path] - 1)
    path = (*path, *names[-1:])
    if not line.lstrip().startswith("[["):
        return path
    array_sizes[path] = array_sizes.get(path, 0) + 1
    return (*path, array_sizes[path] - 1)
