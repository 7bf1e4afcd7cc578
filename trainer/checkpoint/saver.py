"""Saves a run: a copy between two steps, then hashing, writing and pruning on a thread of its own.

Built by `trainer.train`; `save` is called between optimizer steps. Training waits only for the copy to host
memory. At most one checkpoint is being written: one that is due before the former is done waits for it, so
that the steps saved are always those that were asked for and host memory holds one copy. A save that fails
is reported and the run goes on with its earlier checkpoints; only the last save of a run must succeed.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from trainer.checkpoint.export import write_export
from trainer.checkpoint.scores import ScoreBook
from trainer.checkpoint.snapshot import HostSnapshot
from trainer.checkpoint.state import ConsumedPacks, TrainState, write_state
from trainer.checkpoint.store import CheckpointStore, verify
from trainer.config import CheckpointConfig
from trainer.errors import CheckpointError
from trainer.lifecycle.heartbeat import StatusFile
from trainer.lifecycle.runfolder import OutputHold
from trainer.pipeline.workers import WAIT_S, Board

_LOG = logging.getLogger(__name__)

MASTER_PREFIX = "master."


class StateSource(Protocol):
    """What holds weights and optimizer state (`optim.adamw.MasterAdamW`)."""

    def state_sources(self) -> Mapping[str, Tensor]:
        """Tensors by name, where they live; the weights are `master.<parameter>`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What every checkpoint of a run says of it.

    `identity` is what a resume compares, `drafter_fields` the drafter's config, `export_meta` text for the
    exported weights.
    """

    identity: Mapping[str, Any]
    drafter_fields: Mapping[str, Any]
    export_meta: Mapping[str, object]


class Saver:
    """Takes snapshots and has them written.

    Args:
        protect: a step that is never pruned, because a resume points to it.
        saved_step: the step that is on disk already (of the state that was resumed).
        hold: on the output folder, looked at before each save.
    """

    def __init__(
        self,
        store: CheckpointStore,
        *,
        config: CheckpointConfig,
        facts: RunFacts,
        source: StateSource,
        consumed: ConsumedPacks,
        status: StatusFile,
        board: Board,
        protect: frozenset[int] = frozenset(),
        saved_step: int = -1,
        hold: OutputHold | None = None,
    ) -> None:
        self.scores = ScoreBook(store.lineage_dir)
        self._store = store
        self._config = config
        self._facts = facts
        self._source = source
        self._consumed = consumed
        self._status = status
        self._board = board
        self._protect = protect
        self._saved_step = saved_step
        self._hold = hold
        self._snapshot = HostSnapshot()
        self._thread: threading.Thread | None = None
        self._error: CheckpointError | None = None
        self._copy_s = 0.0
        self._write_s = 0.0
        self._failures = 0

    def save(self, step: int, tokens: int, *, is_last: bool = False) -> None:
        """Save a completed step; called between steps, on the thread that makes them.

        Args:
            step: completed optimizer steps.
            tokens: tokens trained on so far.
            is_last: nothing comes after it: wait until it is on disk.

        Raises:
            CheckpointError: the last save failed.
            StalledError: the disk did not answer within `checkpoint.stall_s`.
        """
        with (
            self._status.during("checkpointing", f"step {step}"),
            self._board.quiet("checkpoint", limit_s=self._config.stall_s, key="checkpoint.stall_s"),
        ):
            self._wait()
            if step != self._saved_step:
                self._begin(self._take(step, tokens))
            if is_last:
                self._wait()
        if is_last and self._error is not None:
            raise self._error

    def needed_s(self) -> float:
        """Estimate how long a save takes that is asked for now, the one on its way included."""
        one_s = self._copy_s + self._write_s
        return 2.0 * one_s if self._is_writing() else one_s

    def close(self, *, timeout_s: float, give_up: Callable[[], bool]) -> None:
        """Let the save on its way come to its end, unless `give_up` says so or the time is over."""
        deadline_s = time.monotonic() + timeout_s
        while self._is_writing() and time.monotonic() < deadline_s and not give_up():
            assert self._thread is not None
            self._thread.join(WAIT_S)
        if self._is_writing():
            _LOG.warning("a checkpoint was still being written at the end; it is given up")

    def take_record(self) -> dict[str, float]:
        """Return durations of the latest save in ms and the number of failed ones, for the metrics."""
        return {
            "copy_ms": round(self._copy_s * 1e3, 3),
            "write_ms": round(self._write_s * 1e3, 3),
            "failed": float(self._failures),
        }

    # -- on the thread between steps ----------------------------------------------------------------------

    def _take(self, step: int, tokens: int) -> TrainState:
        started_s = time.monotonic()
        tensors = self._snapshot.take(self._source.state_sources()) | self._consumed.tensors()
        self._copy_s = time.monotonic() - started_s
        meta = {**self._facts.identity, "noise_step": step}
        return TrainState(step=step, tokens=tokens, meta=meta, tensors=tensors)

    def _begin(self, state: TrainState) -> None:
        self._error = None
        self._thread = threading.Thread(target=self._write, args=(state,), name="checkpoint", daemon=True)
        self._thread.start()

    def _is_writing(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _wait(self) -> None:
        while self._is_writing():
            assert self._thread is not None
            self._thread.join(WAIT_S)
            if self._is_writing():
                self._board.check()

    # -- on the thread that writes ------------------------------------------------------------------------

    def _write(self, state: TrainState) -> None:
        started_s = time.monotonic()
        try:
            path = self._publish(state)
        except Exception as error:  # noqa: BLE001 - the thread boundary: reported, the run goes on
            self._report_failure(state.step, error)
            return
        self._saved_step = state.step
        self._write_s = time.monotonic() - started_s
        seconds = self._copy_s + self._write_s
        self._status.clear_degraded("checkpoint")
        self._status.checkpoint_saved(state.step, path, duration_s=seconds)
        _LOG.info("checkpoint of step %d saved in %.1f s: %s", state.step, seconds, path)

    def _publish(self, state: TrainState) -> Path:
        """Write export and state, look at what is on disk, and only then remove older ones."""
        verified: int | None = None
        self._renew_hold()
        try:
            self._store.save("export", state.step, functools.partial(self._fill_export, state))
            self._renew_hold()
            path = self._store.save("state", state.step, functools.partial(write_state, state))
            verify(path)
            verified = state.step
        finally:
            # also after a failure: exports whose state found no room must not fill the disk further
            self._prune(verified)
        return path

    def _renew_hold(self) -> None:
        if self._hold is not None:
            self._hold.renew()

    def _fill_export(self, state: TrainState, path: Path) -> None:
        weights = {
            name.removeprefix(MASTER_PREFIX): tensor
            for name, tensor in state.tensors.items()
            if name.startswith(MASTER_PREFIX)
        }
        write_export(self._facts.drafter_fields, weights, self._facts.export_meta, path)

    def _prune(self, verified: int | None) -> None:
        if verified is not None:
            self.scores.add_checkpoint(verified)
        best = self.scores.best(self._config.keep_best, self._store.steps("state"))
        self._store.prune(self._config.keep, protect={*self._protect, *best}, verified=verified)
        if verified is not None:
            self.scores.forget(self._store.steps("state"))

    def _report_failure(self, step: int, error: Exception) -> None:
        self._failures += 1
        if isinstance(error, CheckpointError):
            self._error = error
        else:
            self._error = CheckpointError(
                f"checkpoint of step {step} failed: {type(error).__name__}: {' '.join(str(error).split())}"
            )
            self._error.__cause__ = error
            _LOG.error("the thread that writes checkpoints failed", exc_info=error)
        # a full disk must not end a run whose earlier checkpoints are good
        _LOG.error("checkpoint of step %d failed, training goes on: %s", step, self._error)
        self._status.set_degraded("checkpoint", f"checkpoint of step {step} failed: {self._error}")
