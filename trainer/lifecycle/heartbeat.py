"""The status record: `status.json`, by which others tell a working trainer from a hung one.

Owns the record and its file. `trainer.train` sets phase, progress, checkpoint and stop answers; the telemetry
thread calls `write` every few seconds. The file is replaced whole, by rename. A full disk or a lost folder is
logged once and never ends training.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args

_LOG = logging.getLogger(__name__)

Phase = Literal[
    "init",
    "loading",
    "compiling",
    "filling",
    "training",
    "evaluating",
    "checkpointing",
    "draining",
    "done",
]
PHASES: tuple[str, ...] = get_args(Phase)
STATUS_VERSION = 1


def write_first_status(run_dir: Path) -> None:
    """Show a sign of life (phase `init`) before the slow imports; a folder that fails is reported later."""
    with contextlib.suppress(OSError):
        run_dir.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(
                descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB
            )  # the record of another trainer stays as it is
            StatusFile(run_dir).write()
        finally:
            os.close(descriptor)


class StatusFile:
    """Thread-safe status record that is written at each phase change and on `write`."""

    def __init__(self, run_dir: Path, *, wall: Callable[[], float] = time.time) -> None:
        self.path = run_dir / "status.json"
        self._wall = wall
        self._lock = threading.RLock()
        self._has_complained = False
        self._nested = 0
        self._draining = ""
        self._record: dict[str, Any] = {
            "v": STATUS_VERSION,
            "pid": os.getpid(),
            "phase": "init",
            "phase_since": wall(),
            "written_at": wall(),
            "step": 0,
            "total_steps": None,
            "last_progress_at": None,
            "last_checkpoint": None,
            "message": "",
            "stop": None,
            "degraded": {},
        }

    @property
    def phase(self) -> str:
        """The present phase."""
        return str(self._record["phase"])

    def set_phase(self, phase: Phase, message: str = "") -> None:
        """Enter a phase (entering the present one again only changes the message) and write the file."""
        with self._lock:
            if self._record["phase"] != phase:
                self._record["phase"] = phase
                self._record["phase_since"] = self._wall()
            self._record["message"] = message
        self.write()

    @contextlib.contextmanager
    def during(self, phase: Phase, message: str = "") -> Iterator[None]:
        """Be in a phase for a while, then return to the one before (to draining once that has begun)."""
        with self._lock:
            before = self._record["phase"], self._record["message"]
            self._nested += 1
        self.set_phase(phase, message)
        try:
            yield
        finally:
            with self._lock:
                self._nested -= 1
                after = ("draining", self._draining) if self._draining else before
            self.set_phase(*after)

    def drain(self, message: str) -> None:
        """Enter `draining`; a save or evaluation that is going on keeps its phase until it ends."""
        with self._lock:
            self._draining = message
            if self._nested:
                return
        self.set_phase("draining", message)

    def progress(self, step: int, total_steps: int | None = None) -> None:
        """Record that work went on; the file follows at the next write."""
        with self._lock:
            self._record["step"] = step
            self._record["last_progress_at"] = self._wall()
            if total_steps is not None:
                self._record["total_steps"] = total_steps

    def set_message(self, message: str) -> None:
        """Change the message only, and write the file."""
        with self._lock:
            self._record["message"] = message
        self.write()

    def set_degraded(self, capability: str, reason: str) -> None:
        """Record that something wanted is off or impaired, and write the file."""
        with self._lock:
            self._record["degraded"] = {**self._record["degraded"], capability: reason}
        self.write()

    def clear_degraded(self, capability: str) -> None:
        """Record that something works again, and write the file if that is news."""
        with self._lock:
            if capability not in self._record["degraded"]:
                return
            left = {name: why for name, why in self._record["degraded"].items() if name != capability}
            self._record["degraded"] = left
        self.write()

    def checkpoint_saved(
        self, step: int, path: Path, saved_at: float | None = None, *, duration_s: float | None = None
    ) -> None:
        """Record the newest checkpoint (`saved_at` None: just now) and write the file."""
        with self._lock:
            saved_at = self._wall() if saved_at is None else saved_at
            record: dict[str, Any] = {"step": step, "path": str(path), "saved_at": saved_at}
            if duration_s is not None:
                record["duration_s"] = round(duration_s, 3)
            self._record["last_checkpoint"] = record
        self.write()

    def answer_stop(self, request_id: str | None, *, extend_s: float, why: str) -> None:
        """Acknowledge a stop request and write the file."""
        with self._lock:
            seen_at = self._wall()
            self._record["stop"] = {"id": request_id, "seen_at": seen_at, "extend_s": extend_s, "why": why}
        self.write()

    def write(self) -> None:
        """Replace the file by the present record."""
        with self._lock:
            self._record["written_at"] = self._wall()
            text = json.dumps(self._record, allow_nan=False)
            temporary = self.path.with_suffix(f".tmp-{os.getpid()}")
            try:
                temporary.write_text(text + "\n", encoding="utf-8")
                temporary.replace(self.path)
                self._has_complained = False
            except OSError as error:
                if not self._has_complained:
                    _LOG.error("status cannot be written: %s (%s); training goes on", self.path, error)
                self._has_complained = True
