"""One daemon per state folder, held by a file lock that ends with the process.

Taken by the composition root before the store is opened. The text in the file is for people; the lock itself
is the kernel's, so a file left behind by a killed daemon blocks nobody.
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from supervisor.domain.errors import ConflictError

LOCK_NAME = "daemon.lock"
MAX_LOCK_BYTES = 4096


class StateLock:
    """The right to run on a state folder."""

    def __init__(self, state_dir: Path) -> None:
        self._path = state_dir / LOCK_NAME
        self._descriptor: int | None = None

    def acquire(self, **facts: Any) -> None:
        """Take the lock or say who holds it.

        Args:
            facts: JSON-ready words about this daemon (`started_at`, `url` ...); the pid is added.

        Raises:
            ConflictError: another daemon runs here; data holds its facts.
        """
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = _read_facts(descriptor)
            os.close(descriptor)
            words = {"started_at": "started at"}
            named = ", ".join(f"{words.get(key, key)} {value}" for key, value in holder.items()) or "unknown"
            url = holder.get("url")
            use = f"use that one: export DFLASHCTL_URL={shlex.quote(str(url))}" if url else "use that one"
            raise ConflictError(
                f"another daemon runs on {self._path.parent}: {named}",
                reason="StateFolderInUse",
                hint=f"{use}; or end it first, or choose another --state-dir",
                holder=holder,
            ) from error
        self._descriptor = descriptor
        self.note(**facts)

    def note(self, **facts: Any) -> None:
        """Replace what is said about this daemon; nothing happens while the lock is not held."""
        if self._descriptor is None:
            return
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, json.dumps({"pid": os.getpid(), **facts}).encode(), 0)

    def release(self) -> None:
        """Give the lock back; harmless when it is not held."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def _read_facts(descriptor: int) -> dict[str, Any]:
    try:
        facts = json.loads(os.pread(descriptor, MAX_LOCK_BYTES, 0))
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}
