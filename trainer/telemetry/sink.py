"""Where metrics lines go: `metrics.ndjson`, and W&B in a thread of its own.

Called by the reporter's thread, never by a worker. A sink that fails says so once, counts what it lost, and
goes on: watching never slows or ends training. Must not import torch.
"""

from __future__ import annotations

import errno
import importlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from trainer.telemetry.metrics import flatten, render_line

_LOG = logging.getLogger(__name__)

OFFLINE_TRIES = 2
"""Starts without the service after a failed one with it; the last one is under another id."""
OFFLINE_START_S = 60.0
"""A start without the service waits for nobody but this machine, which may be busy loading models."""


class Sink(Protocol):
    """Takes finished lines."""

    counter: str
    """name of its field in the `telemetry` part of a line"""
    lost: int
    """lines that it could not take"""

    def write(self, line: Mapping[str, Any]) -> None:
        """Take one line; never raises and never waits long."""

    def close(self) -> None:
        """Finish in bounded time."""


class JsonlSink:
    """Appends to `metrics.ndjson`; above `max_bytes` the file moves to `metrics.ndjson.1` (one kept)."""

    counter = "jsonl_lost"

    def __init__(self, run_dir: Path, *, max_bytes: int) -> None:
        self.path = run_dir / "metrics.ndjson"
        self._max_bytes = max_bytes
        self.lost = 0

    def write(self, line: Mapping[str, Any]) -> None:
        """Append one line with a single write, so that a reader never sees half of it."""
        data = (render_line(line) + "\n").encode()
        try:
            if self.path.exists() and self.path.stat().st_size + len(data) > self._max_bytes:
                self.path.replace(self.path.with_name("metrics.ndjson.1"))
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                _append_whole(handle, data)
            finally:
                os.close(handle)
        except OSError as error:
            self.lost += 1
            if self.lost == 1:
                _LOG.error("metrics cannot be written: %s (%s); training goes on", self.path, error)

    def close(self) -> None:
        """Nothing is held open between lines."""


def _append_whole(handle: int, data: bytes) -> None:
    """Append a line, or nothing of it: a disk that fills takes a part without an error."""
    size = os.fstat(handle).st_size
    if size and os.pread(handle, 1, size - 1) != b"\n":  # torn by a crash of the machine
        data = b"\n" + data
    if os.write(handle, data) < len(data):
        os.ftruncate(handle, size)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class WandbSink:
    """Hands lines to W&B from its own thread; the buffer is bounded and drops the oldest line.

    Args:
        mode: `online` or `offline`; online falls back to offline when the service does not answer in time.
        run_id: fixed id, so that a resumed run continues the same W&B run.
        retry_s: pause between attempts to start offline.
        on_trouble: told when W&B is not in the mode that was asked for, or loses lines.
    """

    counter = "wandb_dropped"

    def __init__(
        self,
        *,
        run_dir: Path,
        mode: str,
        project: str,
        run_id: str,
        config: Mapping[str, Any],
        init_timeout_s: float,
        finish_timeout_s: float,
        on_trouble: Callable[[str], None],
        retry_s: float = 1.0,
    ) -> None:
        self._retry_s = retry_s
        self._on_trouble = on_trouble
        self._settings = (run_dir, mode, project, run_id, dict(config), init_timeout_s)
        self._finish_timeout_s = finish_timeout_s
        self._lines: queue.Queue[Mapping[str, Any] | None] = queue.Queue(maxsize=256)
        self.lost = 0
        self.state = f"starting {mode}"
        self._thread = threading.Thread(target=self._work, name="wandb", daemon=True)
        self._thread.start()

    def write(self, line: Mapping[str, Any]) -> None:
        """Queue one line."""
        self._put(line)

    def close(self) -> None:
        """Finish, waiting at most the configured time."""
        self._put(None)
        self._thread.join(self._finish_timeout_s)
        if self._thread.is_alive() and self.state.startswith("starting"):
            _LOG.warning(
                "W&B had not started when the run ended (%.0f s granted): it holds nothing of this run, "
                "metrics.ndjson has every line",
                self._finish_timeout_s,
            )
        elif self._thread.is_alive():
            _LOG.warning(
                "W&B did not finish in %.0f s; what it has written by now stays in %s, `wandb sync` uploads "
                "it, metrics.ndjson has every line",
                self._finish_timeout_s,
                self._settings[0] / "wandb",
            )
        elif self.lost:
            _LOG.warning("W&B lacks %d lines of this run (metrics.ndjson has them all)", self.lost)

    def _put(self, line: Mapping[str, Any] | None) -> None:
        while True:
            try:
                self._lines.put_nowait(line)
            except queue.Full:
                self._drop_oldest()
            else:
                return

    def _drop_oldest(self) -> None:
        try:
            self._lines.get_nowait()
        except queue.Empty:
            return
        self.lost += 1
        if self.lost == 1:
            _LOG.warning("W&B is too slow, metrics lines for it are dropped (metrics.ndjson has them all)")
            self._on_trouble("too slow, lines are dropped")

    def _work(self) -> None:
        try:
            run = self._start()
            self._forward(run)
        except Exception as error:  # noqa: BLE001 - the thread boundary: W&B must never end training
            self.state = f"failed: {type(error).__name__}: {error}"
            _LOG.error("W&B is off from here on: %s", self.state)
            self._on_trouble(self.state)
            self._discard_rest()

    def _start(self) -> Any:
        run_dir, mode, project, run_id, config, init_timeout_s = self._settings
        wandb = importlib.import_module("wandb")
        arguments: dict[str, Any] = {
            "project": project,
            "id": run_id,
            "resume": "allow",
            "dir": str(run_dir),
            "config": config,
        }
        fixed = {"x_disable_stats": True, "console": "off", "init_timeout": init_timeout_s}
        offline = fixed | {"init_timeout": max(init_timeout_s, OFFLINE_START_S)}
        try:
            settings = wandb.Settings(**(fixed if mode == "online" else offline))
            run = wandb.init(mode=mode, settings=settings, **arguments)
            self.state = mode
        except Exception as error:
            if mode != "online":
                raise
            _LOG.warning(
                "W&B ONLINE FAILED (%s: %s): going on OFFLINE in %s; upload later with `wandb sync`",
                type(error).__name__,
                " ".join(str(error).split())[:200],
                run_dir,
            )
            run = self._start_offline(wandb, wandb.Settings(**offline), arguments)
            self.state = "offline (online failed)"
            self._on_trouble(self.state)
        return run

    def _start_offline(self, wandb: Any, settings: Any, arguments: dict[str, Any]) -> Any:
        """Start again without the service; the failed start may hold the run's id for a while."""
        for left in reversed(range(OFFLINE_TRIES)):
            wandb.teardown()
            if not left:
                # rather a run under a second id than none: `wandb sync --id` brings the two together
                second = f"{arguments['id']}-offline"
                _LOG.warning("W&B still holds run %s: offline as %s", arguments["id"], second)
                arguments = arguments | {"id": second}
            try:
                return wandb.init(mode="offline", settings=settings, **arguments)
            except Exception as error:
                if not left:
                    raise
                _LOG.info("W&B does not go offline yet, trying again: %s", error)
                time.sleep(self._retry_s)
        raise AssertionError("the last try returns or raises")

    def _forward(self, run: Any) -> None:
        while (line := self._lines.get()) is not None:
            run.log(flatten(line), step=int(line["step"]))
        run.finish()

    def _discard_rest(self) -> None:
        while self._lines.get() is not None:
            self.lost += 1
