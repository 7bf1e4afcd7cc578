"""Guarded children of the agent: the NVML reader, and the look at an environment's package listing.

NVML can hang in the driver, so it is read by a child process of the run's own interpreter, under a deadline;
a child that fails or falls silent becomes a reason in the sample and is restarted slowly. The trainer is
never touched and its absence of telemetry is never hidden.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from typing import Any, Callable

Send = Callable[[dict[str, Any]], None]

RESTART_S = 30.0
FIRST_SAMPLE_S = 30.0
SITE_INTERVAL_S = 30.0


def script_argv(python: str, *arguments: str) -> list[str]:
    """Argv that runs a command of this very shim under `python`, from the zipapp or the source tree."""
    here = os.path.dirname(os.path.abspath(__file__))
    archive = os.path.dirname(here)
    if os.path.isfile(archive):
        return [python, archive, *arguments]
    return [python, os.path.join(here, "_run.py"), *arguments]


def child_argv(python: str, command: str, *arguments: str) -> list[str]:
    """Argv of a child mode, which ends by itself when this process is gone."""
    return script_argv(python, command, str(os.getpid()), *arguments)


def unavailable(reason: str, message: str) -> dict[str, Any]:
    """A sample that says why there is none."""
    return {"t": time.time(), "gpus": [], "reason": reason, "message": message}


class GpuSampler:
    """Runs the NVML child while configured and forwards its samples as `gpu` events."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._wanted: tuple[str, float] | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._changed = threading.Event()
        self._thread: threading.Thread | None = None

    def configure(self, wanted: dict[str, Any] | None) -> None:
        """Sample with this interpreter and interval from now on, or stop with None."""
        interval_s = (wanted or {}).get("interval_s")
        is_number = isinstance(interval_s, (int, float)) and interval_s > 0
        seconds = max(0.1, min(3600.0, float(interval_s))) if is_number and interval_s else 1.0
        target = None if wanted is None else (wanted.get("python") or sys.executable, seconds)
        with self._lock:
            if target == self._wanted:
                return
            self._wanted = target
            self._changed.set()
            self._kill()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="gpu", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """End the child; called when the agent leaves."""
        self._kill()

    def _kill(self) -> None:
        child = self._child
        if child is not None:
            with contextlib.suppress(OSError):
                child.kill()

    def _run(self) -> None:
        while True:
            self._changed.clear()
            wanted = self._wanted
            if wanted is not None:
                self._sample(*wanted)
            self._changed.wait(RESTART_S if wanted is not None else None)

    def _sample(self, python: str, interval_s: float) -> None:
        try:
            child = subprocess.Popen(
                child_argv(python, "nvml", str(interval_s)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        except OSError as error:
            message = "cannot run %s: %s" % (python, error.strerror)
            self._emit(unavailable("InterpreterMissing", message))
            return
        self._child = child
        try:
            last = self._forward(child, interval_s)
        finally:
            self._child = None
            child.kill()
            child.wait()
            for stream in (child.stdin, child.stdout):
                if stream is not None:
                    stream.close()
        if last is not None and not self._changed.is_set():
            self._emit(last)

    def _forward(self, child: subprocess.Popen[bytes], interval_s: float) -> dict[str, Any] | None:
        """Pass samples on until the child ends; returns the sample that explains an end without reason."""
        assert child.stdout is not None
        fd = child.stdout.fileno()
        limit_s = FIRST_SAMPLE_S
        buffer = b""
        has_reason = False
        while not self._changed.is_set():
            if not select.select([fd], [], [], limit_s)[0]:
                return unavailable("Timeout", "NVML gave no sample within %.0f s" % limit_s)
            piece = os.read(fd, 65536)
            if not piece:
                code = child.wait()
                message = "the NVML reader ended with status %d" % code
                return None if has_reason else unavailable("ReaderFailed", message)
            *lines, buffer = (buffer + piece).split(b"\n")
            for line in lines:
                with contextlib.suppress(ValueError):
                    sample = json.loads(line)
                    has_reason = sample.get("reason") is not None
                    self._emit(sample)
            limit_s = max(10.0, 5 * interval_s)
        return None

    def _emit(self, sample: dict[str, Any]) -> None:
        self._send({"ev": "gpu", "sample": sample})


class SiteWatcher:
    """Sends an `env` event when the listing of an interpreter's site-packages changes."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._python: str | None = None
        self._interval_s = SITE_INTERVAL_S
        self._changed = threading.Event()
        self._thread: threading.Thread | None = None

    def configure(self, python: str | None, interval_s: Any) -> None:
        """Look at this interpreter's packages from now on; None stops."""
        is_number = isinstance(interval_s, (int, float)) and interval_s > 0
        with self._lock:
            self._interval_s = max(0.1, float(interval_s)) if is_number else SITE_INTERVAL_S
            if python == self._python:
                return
            self._python = python
            self._changed.set()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="sites", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        python: str | None = None
        folders: list[str] | None = None
        digest: str | None = None
        while True:
            self._changed.clear()
            if self._python != python:
                python, folders, digest = self._python, None, None
            if python is not None:
                folders = folders or site_folders(python)
                current = listing_digest(folders) if folders else None
                if current is not None and current != digest:
                    digest = current
                    self._send({"ev": "env", "python": python, "listing_digest": digest})
            self._changed.wait(self._interval_s if python is not None else None)


def site_folders(python: str) -> list[str] | None:
    """The package folders of an interpreter, asked of itself; None when it cannot say."""
    try:
        done = subprocess.run(
            child_argv(python, "sites"),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=30,
            check=True,
        )
        folders = json.loads(done.stdout)["folders"]
    except (OSError, subprocess.SubprocessError, ValueError, KeyError):
        return None
    return [str(folder) for folder in folders]


def listing_digest(folders: list[str]) -> str:
    """Digest over names, sizes and times of what is installed there; cheap, so it may be asked often."""
    entries = []
    for folder in folders:
        with contextlib.suppress(OSError), os.scandir(folder) as found:
            for entry in found:
                if entry.name != "__pycache__":
                    stat = entry.stat(follow_symlinks=False)
                    entries.append("%s/%s %d" % (folder, entry.name, stat.st_mtime_ns))
    return hashlib.sha256("\n".join(sorted(entries)).encode("utf-8", "surrogateescape")).hexdigest()
