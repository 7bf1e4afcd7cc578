"""The other machines of a run, as `trainer.train` sees them; a run on one machine has none.

Built by `trainer.train`. Owns what rank 0 does for all (decide where to begin, read the state, keep the
output folder and W&B) and what every rank must tell the others (a stop, a failure, the end). Must not step
or sum anything: that is `pipeline.nodes` and `optim.replicas`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.assembly import Parts
from trainer.checkpoint.state import TrainState
from trainer.config import MOST_SECONDS, TrainConfig
from trainer.flags import World, set_collective_defaults
from trainer.lifecycle.runfolder import OutputHold, hold_output
from trainer.lifecycle.signals import StopRequest
from trainer.lifecycle.stopping import StopWatch
from trainer.pipeline.nodes import Nodes
from trainer.pipeline.workers import WAIT_S, Board

_LOG = logging.getLogger(__name__)


class Machines:
    """This rank among the others; every method does the right thing on a machine that is alone."""

    def __init__(self, world: World) -> None:
        self.rank, self.count = world.rank, world.size
        self.nodes: Nodes | None = None
        """the link, once they have met"""
        self._world = world

    @property
    def is_first(self) -> bool:
        """True on rank 0, which alone writes checkpoints, evaluates and reports to W&B."""
        return self.rank == 0

    def hold_output(self, output_dir: Path) -> contextlib.AbstractContextManager[OutputHold | None]:
        """Keep other trainers out of the output folder; on ranks that do not write there, do nothing."""
        return hold_output(output_dir) if self.is_first else contextlib.nullcontext()

    def join(self, config: TrainConfig, board: Board) -> None:
        """Meet the others; may take as long as the slowest of them.

        The main thread only waits: torch meets in one long call, in which no signal handler would run.

        Raises:
            PipelineError: they did not come.
        """
        if self.count == 1:
            return
        set_collective_defaults()
        _LOG.info(
            "rank %d waits for the other %d at %s", self.rank, self.count - 1, self._world.meeting_point
        )
        meeting = _Meeting(
            self._world,
            board,
            uses_cuda=config.devices.drafters()[0] != "cpu",
            limit_s=exchange_limit_s(config),
        )
        meeting.start()
        while meeting.is_alive():
            meeting.join(WAIT_S)
        self.nodes = meeting.result()

    def own_settings(self, config: TrainConfig) -> TrainConfig:
        """Return the settings of this rank's telemetry: one run of W&B for all machines, rank 0's."""
        if self.is_first:
            return config
        return dataclasses.replace(
            config, wandb=dataclasses.replace(config.wandb, mode="disabled", project="")
        )

    def share(self, record: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return what rank 0 brings (plain JSON values); the others' records are ignored."""
        if self.nodes is None:
            return dict(record or {})
        return self.nodes.share(record if self.is_first else None)

    def share_state(self, state: TrainState | None) -> TrainState | None:
        """Return rank 0's state to all: the others may not even see the output folder."""
        if self.nodes is None:
            return state
        head = self.share({} if state is None else {"step": state.step, "tokens": state.tokens})
        if not head:
            return None
        tensors = self.nodes.share_tensors(None if state is None else state.tensors)
        return state or TrainState(step=head["step"], tokens=head["tokens"], meta={}, tensors=tensors)

    def require_same(self, config: TrainConfig, identity: Mapping[str, Any], parts: Parts) -> None:
        """Refuse to train together with a machine whose data, target or settings differ.

        Raises:
            ConfigError: names what differs, on the rank where it does.
        """
        if self.nodes is None:
            return
        self.nodes.require_same(
            {
                "config_hash": identity["config_hash"],
                "data.sha256": identity["data"]["sha256"],
                "target": json.dumps(identity["target"], sort_keys=True),
                "drafters": len(parts.replicas),
                "drafter dtype": parts.drafter.dtype,
                "checkpoint.every": config.checkpoint.every,
                "torch": identity["versions"]["torch"],
            }
        )

    # -- stop and end -------------------------------------------------------------------------------------

    def announce_stop(self, request: StopRequest | None) -> None:
        """Tell the others; before the workers see the stop, so that whoever votes for it has told why."""
        if self.nodes is not None and request is not None:
            self.nodes.announce_stop(save=request.save)

    def take_over_stop(self, stopping: StopWatch, *, ask: bool = False) -> bool:
        """Stop here too when another machine was asked to; True when that is news.

        Args:
            stopping: of this machine.
            ask: ask the meeting point itself instead of what the pulse saw last.
        """
        if self.nodes is None or stopping.request is not None:
            return False
        note = self.nodes.look_for_stop() if ask else self.nodes.find_stop()
        if note is None:
            return False
        reason = f"rank {note.rank} stops"
        stopping.join(StopRequest(id=None, reason=reason, deadline_s=None, save=note.save))
        return True

    def part(self, *, is_abandoned: bool) -> None:
        """Part from the others after the last step."""
        if self.nodes is None:
            return
        if is_abandoned:
            self.nodes.fail("stopped by a second signal")
        else:
            self.nodes.close()

    def leave_early(self) -> None:
        """Part from the others before the first step; they leave too."""
        if self.nodes is not None:
            self.nodes.announce_stop(save=False)
            self.nodes.close()

    def fail(self, reason: str) -> None:
        """Tell the others why this rank ends; they end too."""
        if self.nodes is not None:
            self.nodes.fail(reason)


class _Meeting(threading.Thread):
    """Builds the link to the others; left behind when the run is stopped meanwhile."""

    def __init__(self, world: World, board: Board, *, uses_cuda: bool, limit_s: float) -> None:
        super().__init__(name="meeting", daemon=True)
        self._build = functools.partial(Nodes, world, board, uses_cuda=uses_cuda, limit_s=limit_s)
        self._nodes: Nodes | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._nodes = self._build()
        except BaseException as error:  # noqa: BLE001 (the main thread raises it, see `result`)
            self._error = error

    def result(self) -> Nodes:
        """Return the link, or raise what kept it from being made."""
        if self._error is not None:
            raise self._error
        assert self._nodes is not None
        return self._nodes


def exchange_limit_s(config: TrainConfig) -> float:
    """Return how long a machine waits for the others in one exchange before the run counts as stalled.

    Another machine may be in its longest quiet phase: one part of a start (`queue.start_stall_s`), a save
    (`checkpoint.stall_s`), or an evaluation, with `queue.stall_s` for each prompt and for the held-out pass.
    After it there is `queue.stall_s`, as for any other sign of life.
    """
    stall_s, wanted = config.queue.stall_s, config.eval
    parts = (wanted.max_prompts if wanted.prompts else 0) + bool(wanted.held_out_data)
    evaluation_s = parts * stall_s if wanted.every or wanted.held_out_every else 0.0
    longest_s = max(config.queue.start_stall_s, config.checkpoint.stall_s, evaluation_s)
    return stall_s + min(longest_s, MOST_SECONDS)
