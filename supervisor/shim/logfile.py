"""Reading an attempt's log: byte ranges, last lines, size, always with bounded memory.

Used by the agent and by the shim for the exit record. The trainer writes the file; nobody here ever opens
it for writing. Offsets are stable because the log is never cut or renamed.
"""

from __future__ import annotations

import base64
import os
from typing import Any

from .records import RefusedError

MAX_READ = 262_144
MAX_LINES = 200
MAX_LINE_CHARS = 2000
MAX_TAIL_CHARS = 65_536


def size(path: str | None) -> int | None:
    """Bytes in the log, None where it cannot be read."""
    try:
        return os.stat(path).st_size if path else None
    except OSError:
        return None


def read_range(path: str | None, offset: int, limit: int) -> dict[str, Any]:
    """Bytes from `offset`, at most `limit`, base64 coded; the bytes are the file's, untouched."""
    is_number = all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in (offset, limit))
    if not is_number:
        raise RefusedError("BadRequest", "offset and limit must be integers >= 0")
    with _open(path) as file:
        total = os.fstat(file.fileno()).st_size
        data = os.pread(file.fileno(), min(limit, MAX_READ), offset)
    return {"offset": offset, "data_b64": base64.b64encode(data).decode("ascii"), "size": total}


def last_lines(path: str | None, count: int = MAX_LINES) -> list[str]:
    """The last lines as text: at most `count`, each and all bounded however long the real ones are."""
    with _open(path) as file:
        total = os.fstat(file.fileno()).st_size
        start = max(0, total - MAX_READ)
        data = os.pread(file.fileno(), MAX_READ, start)
    text = data.decode("utf-8", "replace").replace("\r\n", "\n").replace("\r", "\n")
    lines = text.split("\n")
    if lines and lines[-1] == "":
        lines.pop()
    if start > 0 and len(lines) > 1:
        lines.pop(0)
    kept: list[str] = []
    room = MAX_TAIL_CHARS
    for line in reversed(lines[-max(0, min(count, MAX_LINES)) :] if count > 0 else []):
        if len(line) > MAX_LINE_CHARS:
            line = line[:MAX_LINE_CHARS] + " [... %d characters]" % len(line)
        room -= len(line)
        if room < 0:
            break
        kept.append(line)
    return kept[::-1]


def _open(path: str | None) -> Any:
    if not path:
        raise RefusedError("NoLog", "the attempt has no log")
    try:
        return open(path, "rb")
    except OSError as error:
        raise RefusedError("NoLog", "log %s: %s" % (path, error.strerror), error.errno, path=path) from error
