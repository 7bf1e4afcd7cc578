"""Follows the files of attempts and turns changes into event frames.

Owned by the agent, one thread. Looks at each watched attempt a few times a second, costs the trainer nothing
(it only reads), bounds what it sends per look, and also tells living shims that somebody is in contact.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from typing import Any, Callable

from . import control, logfile
from .records import (
    LIVE_PHASES,
    AttemptFiles,
    RefusedError,
    list_attempts,
    note_exception,
    null_nonfinite,
    open_regular,
)

INTERVAL_S = 0.25
CONTACT_S = 15.0
MAX_RECORDS = 500
MAX_LINE = 1 << 20
READ_BYTES = 1 << 20
MAX_PIECES = 16

Send = Callable[[dict[str, Any]], None]


class FileWatcher:
    """Watches a set of attempts; `set_targets` replaces the set."""

    def __init__(self, root: str, send: Send) -> None:
        self._root = root
        self._send = send
        self._lock = threading.Lock()
        self._targets: list[_Target] = []
        self._last_contact = float("-inf")
        threading.Thread(target=self._run, name="watch", daemon=True).start()

    def set_targets(self, attempt_ids: list[str], with_log: bool, offsets: dict[str, Any]) -> None:
        """Watch exactly these attempts from now on; attempts already watched go on where they are.

        One that is let go is looked at once more: what it wrote last may have come since the last look.
        """
        with self._lock:
            known = {target.files.attempt_id: target for target in self._targets}
            targets = []
            for attempt_id in dict.fromkeys(attempt_ids):
                target = known.pop(attempt_id, None)
                if target is None or attempt_id in offsets:
                    offset = offsets.get(attempt_id, 0)
                    target = _Target(AttemptFiles(self._root, attempt_id), offset, self._send)
                target.with_log = with_log
                targets.append(target)
            for target in known.values():
                _guarded(target.look)
                target.metrics.close()
            self._targets = targets

    def _run(self) -> None:
        while True:
            with self._lock:
                for target in self._targets:
                    _guarded(target.look)
            _guarded(self._keep_contact)
            time.sleep(INTERVAL_S)

    def _keep_contact(self) -> None:
        if time.monotonic() - self._last_contact < CONTACT_S:
            return
        self._last_contact = time.monotonic()
        for files in list_attempts(self._root):
            if (files.state() or {}).get("phase") in LIVE_PHASES:
                with contextlib.suppress(RefusedError):
                    control.ask(files.folder, {"op": "ping"}, timeout_s=2.0)


def _guarded(look: Callable[[], None]) -> None:
    try:
        look()
    except Exception:  # noqa: BLE001 - thread boundary: one bad file must not end the telemetry of the others
        note_exception()


class _Target:
    """One watched attempt and what was last sent of it."""

    def __init__(self, files: AttemptFiles, offset: Any, send: Send) -> None:
        self.files = files
        self.with_log = False
        self.metrics = LineFollower(files.path("metrics.ndjson"), offset if isinstance(offset, int) else 0)
        self._send = send
        self._stamps: dict[str, Any] = {}
        self._log_size: int | None = None
        self._last_state: dict[str, Any] | None = None

    def look(self) -> None:
        """Send what changed since the last look; the exit comes after everything that preceded it."""
        has_ended = self._changed("exit.json")
        if self._changed("state.json"):
            self._send_state()
        if self._changed("status.json"):
            self._send_event("status", "status", self.files.status())
        for record, offset, nonfinite in self.metrics.read():
            frame = {"ev": "metrics", "attempt_id": self.files.attempt_id, "record": record, "offset": offset}
            if nonfinite:
                frame["nonfinite"] = nonfinite
            self._send(frame)
        if self.with_log:
            self._look_at_log()
        if has_ended:
            self._send_event("exit", "exit", self.files.exit())

    def _changed(self, name: str) -> bool:
        try:
            stat = os.stat(self.files.path(name))
        except OSError:
            return False
        stamp = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
        is_new = self._stamps.get(name) != stamp
        self._stamps[name] = stamp
        return is_new

    def _send_state(self) -> None:
        state = self.files.state()
        # The heartbeat rewrites the file every few seconds; only a change of substance is news.
        bare = None if state is None else {k: v for k, v in state.items() if k != "heartbeat_at"}
        if bare != self._last_state:
            self._last_state = bare
            self._send_event("state", "state", state)

    def _look_at_log(self) -> None:
        size = logfile.size((self._last_state or {}).get("log_path"))
        if size is not None and size != self._log_size:
            self._log_size = size
            self._send({"ev": "log", "attempt_id": self.files.attempt_id, "size": size})

    def _send_event(self, event: str, field: str, value: dict[str, Any] | None) -> None:
        if value is not None:
            self._send({"ev": event, "attempt_id": self.files.attempt_id, field: value})


class LineFollower:
    """Reads whole JSON lines as they are appended, across rotation by rename."""

    def __init__(self, path: str, offset: int = 0) -> None:
        self._path = path
        self._offset = offset
        self._fd: int | None = None
        self._partial = b""
        self._is_skipping = False

    def read(self) -> list[tuple[Any, int, list[str]]]:
        """New records, each with the offset behind it and the paths of its non-finite numbers (now None)."""
        if self._fd is None and not self._open(self._offset):
            return []
        found: list[tuple[Any, int, list[str]]] = []
        for _ in range(MAX_PIECES):
            if len(found) >= MAX_RECORDS:
                break
            piece = os.pread(self._fd or 0, READ_BYTES, self._offset + len(self._partial))
            if not piece:
                if not self._is_rotated() or not self._open(0):
                    break
                continue
            self._partial += piece
            self._split(found)
        return found

    def close(self) -> None:
        """Let go of the file."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _open(self, offset: int) -> bool:
        try:
            fd = open_regular(self._path)
        except OSError:
            return False
        self.close()
        self._fd = fd
        # An offset from before a rotation may lie behind the end of the present file.
        self._offset = offset if offset <= os.fstat(fd).st_size else 0
        self._partial = b""
        return True

    def _is_rotated(self) -> bool:
        try:
            return os.stat(self._path).st_ino != os.fstat(self._fd or 0).st_ino
        except OSError:
            return False

    def _split(self, found: list[tuple[Any, int, list[str]]]) -> None:
        lines = self._partial.split(b"\n")
        self._partial = lines.pop()
        for line in lines:
            self._offset += len(line) + 1
            if self._is_skipping:
                self._is_skipping = False
                continue
            with contextlib.suppress(ValueError, RecursionError):
                nonfinite: list[str] = []
                record = null_nonfinite(json.loads(line), "", nonfinite)
                if isinstance(record, dict):
                    found.append((record, self._offset, nonfinite))
        if len(self._partial) > MAX_LINE:
            self._offset += len(self._partial)
            self._partial = b""
            self._is_skipping = True
