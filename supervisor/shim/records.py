"""The JSON files of one attempt: where they lie, how they are written whole, how they are read back.

Used by the starter, the per-attempt shim and the agent; the supervisor reads the same records through the
agent. Every record is written as temporary name, fsync, rename, fsync of the folder, so a reader sees the
old or the new one and never a part. Must not decide anything, and must never be given a secret.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import sys
import time
from typing import Any

RECORD_VERSION = 1
MAX_RECORD_BYTES = 4 << 20
MAX_INT = (1 << 63) - 1

PHASES = ("launching", "running", "stopping", "exited", "launch_failed", "abandoned")
LIVE_PHASES = ("launching", "running", "stopping")

STOP_DEFAULTS = {
    "signal": "SIGTERM",
    "grace_s": 120.0,
    "extend_max_s": 900.0,
    "term_s": 30.0,
    "kill_s": 10.0,
    "verify_s": 60.0,
}


class RefusedError(Exception):
    """A refusal with a stable reason; becomes the `error` object of a reply."""

    def __init__(self, reason: str, message: str, errno: int | None = None, **data: Any) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.errno = errno
        self.data = data

    def to_json(self) -> dict[str, Any]:
        """The wire form: reason, message, errno, data."""
        return {"reason": self.reason, "message": self.message, "errno": self.errno, "data": self.data}


def dumps(value: Any) -> str:
    """One line of valid JSON: ASCII only, no NaN or infinity."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def note(text: str) -> None:
    """Leave a line on stderr (an attempt's shim.log); never fails, for that file's disk may be full too."""
    with contextlib.suppress(OSError):
        os.write(2, (text.rstrip("\n") + "\n").encode("utf-8", "replace"))


def note_exception() -> None:
    """Leave the present traceback on stderr, without the traceback module, which is slow to load."""
    with contextlib.suppress(OSError):
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()


def fsync_folder(path: str) -> None:
    """Make renames and creations in `path` durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_json(path: str, value: Any) -> None:
    """Replace `path` by `value` in one step; readers see the old or the new content, nothing between."""
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, ".%s.%s.tmp" % (name, os.urandom(8).hex()))
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "w", encoding="ascii") as file:
            file.write(dumps(value))
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    fsync_folder(folder)


def open_regular(path: str) -> int:
    """Open a file that somebody else writes: a pipe would hang its reader, a device would never end."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", path)
    return fd


def read_json(path: str) -> dict[str, Any] | None:
    """The object in `path`, or None where there is none, or it is not one (foreign writers may fail)."""
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            data = file.read(MAX_RECORD_BYTES + 1)
    except OSError:
        return None
    if len(data) > MAX_RECORD_BYTES:
        return None
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def null_nonfinite(value: Any, path: str, found: list[str]) -> Any:
    """Copy `value` with NaN, infinities and what no 64 bits hold as None; their paths go to `found`."""
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        found.append(path)
        return None
    if isinstance(value, int) and abs(value) > MAX_INT:
        found.append(path)
        return None
    if isinstance(value, dict):
        prefix = path + "." if path else ""
        return {str(key): null_nonfinite(item, prefix + str(key), found) for key, item in value.items()}
    if isinstance(value, list):
        return [null_nonfinite(item, "%s[%d]" % (path, i), found) for i, item in enumerate(value)]
    return value


class AttemptFiles:
    """Paths and records of one attempt under `<root>/attempts/<attempt_id>/`."""

    def __init__(self, root: str, attempt_id: str, folder: str | None = None) -> None:
        self.root = root
        self.attempt_id = attempt_id
        self.folder = folder or os.path.join(root, "attempts", attempt_id)

    def path(self, *names: str) -> str:
        """A path inside the attempt's folder."""
        return os.path.join(self.folder, *names)

    def exists(self) -> bool:
        """Whether the attempt's folder is there."""
        return os.path.isdir(self.folder)

    def state(self) -> dict[str, Any] | None:
        """`state.json`, the shim's record of the launch and the stop; None also when it is not one."""
        state = read_json(self.path("state.json"))
        return state if state is not None and state.get("phase") in PHASES else None

    def write_state(self, state: dict[str, Any]) -> None:
        """Replace `state.json`."""
        write_json(self.path("state.json"), state)

    def exit(self) -> dict[str, Any] | None:
        """`exit.json`, written once when nothing of the attempt is left (or is quarantined)."""
        return read_json(self.path("exit.json"))

    def status(self) -> dict[str, Any] | None:
        """`status.json`, the trainer's own record; non-finite numbers become None."""
        value = read_json(self.path("status.json"))
        try:
            return None if value is None else null_nonfinite(value, "", [])
        except RecursionError:
            return None

    def redirect_stderr(self) -> None:
        """Let this process write its own trouble to the attempt's shim.log."""
        fd = os.open(self.path("shim.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        os.dup2(fd, 2)
        os.close(fd)

    def is_acknowledged(self) -> bool:
        """Whether the supervisor has said that it ingested the exit record."""
        return os.path.exists(self.path("acked.json"))

    def event(self, reason: str, message: str, /, **data: Any) -> None:
        """Append one line to `events.ndjson`, durably; on a full disk it is only noted in shim.log."""
        line = dumps({"v": 1, "t": time.time(), "reason": reason, "message": message, "data": data}) + "\n"
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        try:
            fd = os.open(self.path("events.ndjson"), flags, 0o600)
            try:
                os.write(fd, line.encode("ascii"))
                os.fsync(fd)
            finally:
                os.close(fd)
        except OSError as error:
            note("event lost: %s: %s" % (reason, error))


def check_id(value: Any, field: str) -> str:
    """An id that is safe as one path component, or a BadRequest."""
    text = value if isinstance(value, str) else ""
    allowed = all(c.isascii() and (c.isalnum() or c in "._-:") for c in text)
    if not text or len(text) > 200 or not allowed or text.startswith("."):
        raise RefusedError("BadRequest", "%s: not a usable id: %r" % (field, value), field=field)
    return text


def list_attempts(root: str) -> list[AttemptFiles]:
    """All attempt folders under `root`, by name."""
    try:
        names = sorted(os.listdir(os.path.join(root, "attempts")))
    except OSError:
        return []
    found = [AttemptFiles(root, name) for name in names if not name.startswith(".")]
    return [files for files in found if files.exists()]
