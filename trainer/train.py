"""One training run from start to end: phases, stop, checkpoints.

Called by `trainer.__main__`. Reads top to bottom: `Trainer.train` goes through the phases, the workers do the
work, the main thread only watches. What the phases build comes from `trainer.assembly`. Must not hold
training logic: that is the workers'.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from trainer.assembly import (
    Lines,
    Parts,
    build_drafter_workers,
    build_evaluation,
    build_target_workers,
    load_parts,
    open_lines,
    plan_steps,
    run_identity,
)
from trainer.checkpoint import imported
from trainer.checkpoint.lineage import StartPoint, choose_start, resume_record
from trainer.checkpoint.saver import RunFacts, Saver
from trainer.checkpoint.state import TrainState, compare, read_record, read_state
from trainer.checkpoint.store import CheckpointStore
from trainer.config import TrainConfig
from trainer.data.sampler import Feeder
from trainer.drafter.worker import DrafterWorker, StepHooks
from trainer.errors import EXIT_FINISHED, EXIT_STOPPED, PipelineError
from trainer.eval.online import OnlineEvaluation, report_evaluation
from trainer.flags import Resolved, has_wandb_key
from trainer.lifecycle.exits import describe
from trainer.lifecycle.heartbeat import StatusFile
from trainer.lifecycle.runfolder import (
    OutputHold,
    describe_code,
    hold_run_folder,
    write_json,
    write_run_record,
)
from trainer.lifecycle.signals import SignalCounter, StoppedEarlyError
from trainer.lifecycle.stalls import NativeDump, StartWatch, log_stacks
from trainer.lifecycle.stopping import StopWatch
from trainer.machines import Machines
from trainer.pipeline.devices import check_devices
from trainer.pipeline.records import connect_sources
from trainer.pipeline.workers import Board, WorkerGroup
from trainer.planning.check import check_memory
from trainer.target.identity import export_identity
from trainer.target.kernels import find_kernels
from trainer.target.worker import TargetWorker
from trainer.telemetry import capabilities
from trainer.telemetry.metrics import IntervalReport, empty_train
from trainer.telemetry.reporter import Reporter
from trainer.telemetry.setup import Telemetry

_LOG = logging.getLogger(__name__)

MONITOR_S = 0.2
JOIN_AFTER_FAILURE_S = 30.0
SAVE_AFTER_FAILURE_S = 120.0
"""A checkpoint that is being written when the run fails gets so long to come to its end."""


class Trainer:
    """Runs one configuration to its end or to a stop."""

    def __init__(self, resolved: Resolved) -> None:
        self.config: TrainConfig = resolved.config
        self._resolved = resolved
        self._code = describe_code()
        self._signals = SignalCounter()
        self._status = StatusFile(resolved.run_dir)
        self._stopping = StopWatch(
            resolved.run_dir, self._status, self._signals, needed_s=self._needed_to_stop_s
        )
        self._board = Board(stall_s=self.config.queue.stall_s, on_stall=log_stacks)
        self._start_watch = StartWatch(
            self.config.queue.start_stall_s,
            say=self._status.set_message,
            look_for_stop=lambda: self._stopping.look() and self._signals.count == 0,
        )
        self._output_dir = Path(self.config.paths.output_dir)
        self._evaluation: OnlineEvaluation | None = None
        self._imported: dict[str, Any] | None = None
        self._worker: DrafterWorker | None = None
        self._saver: Saver | None = None
        self._hold: OutputHold | None = None
        self._is_finished = False
        self._has_run_out = False
        self._wandb_id = ""
        self._machines = Machines(resolved.world)

    def train(self) -> int:
        """Go through all phases; returns the exit code of a finished or stopped run.

        Raises:
            TrainerError: anything that ends the run before its end; its class decides the exit code.
        """
        check_devices(self.config)
        run_dir = self._resolved.run_dir
        with self._machines.hold_output(self._output_dir) as self._hold, hold_run_folder(run_dir):
            self._signals.install()
            try:
                write_run_record(self._resolved, self._code)
                self._open_status()
                self._join_machines()
                self._go_through_phases()
                self._machines.part(is_abandoned=self._stopping.is_abandoned)
            except StoppedEarlyError:
                self._leave_early()
            except Exception as error:
                if self._worker is None and self._machines.take_over_stop(self._stopping, ask=True):
                    self._leave_early()
                    return EXIT_STOPPED
                self._machines.fail(describe(error))
                self._status.set_message(describe(error))
                raise
            finally:
                self._signals.restore()
        # a stop that comes while the last checkpoint is saved finds a finished run
        if self._is_finished and not self._stopping.is_abandoned:
            self._status.set_phase("done", "finished")
            return EXIT_FINISHED
        self._status.set_phase("done", "stopped on request")
        return EXIT_STOPPED

    def _go_through_phases(self) -> None:
        start = self._choose_start()
        self._reporter = self._open_telemetry()
        try:
            self._store = CheckpointStore(self._output_dir / start.lineage)
            if self._machines.is_first:
                self._store.prepare()
            with self._start_watch.watching(), self._signals.interrupting():
                self._parts = parts = self._load(start)
            if parts.plan.first_step >= parts.plan.total_steps:
                _LOG.info("nothing left to do: step %d of %d", parts.plan.first_step, parts.plan.total_steps)
                self._save_last(parts.plan.first_step)
                self._is_finished = True
            else:
                self._run_pipeline(parts)
                self._require_end(parts.plan.total_steps)
        finally:
            if self._saver is not None:
                self._saver.close(timeout_s=SAVE_AFTER_FAILURE_S, give_up=self._is_abandoned)
            if not self._stopping.is_abandoned:
                self._reporter.close()

    # -- init ---------------------------------------------------------------------------------------------

    def _open_status(self) -> None:
        self._status.write()
        if self._resolved.is_own_run_dir:
            self._stopping.clear_stale()

    def _follow_imported(self) -> None:
        """Where the lineage began with an imported drafter, its shape is the run's."""
        record = self._imported
        if record is None:
            return
        self.config = imported.follow(self.config, record, given=self._resolved.sources)
        write_run_record(dataclasses.replace(self._resolved, config=self.config), self._code)
        _LOG.info("the drafter's shape comes from the imported %s", record["from"])

    def _open_telemetry(self) -> Reporter:
        """Report what is off and why, refuse what must not be off, then start the telemetry thread."""
        for note in self._resolved.notes:
            _LOG.warning("%s", note)
        config = self._machines.own_settings(self.config)
        telemetry = Telemetry(config, has_cuda=torch.cuda.is_available(), has_wandb_key=has_wandb_key())
        telemetry.found += find_kernels(self.config)
        records = capabilities.report(telemetry.found)
        write_json(self._resolved.run_dir / "startup.json", {"v": 1, "capabilities": records})
        capabilities.require(telemetry.found)
        for entry in telemetry.found:
            if entry.level != "off" and not entry.is_on:
                self._status.set_degraded(entry.name, entry.reason)
        reporter = telemetry.open_reporter(
            self._resolved.run_dir,
            wandb_id=self._wandb_id,
            tick=self._status.write,
            on_trouble=self._status.set_degraded,
        )
        reporter.start()
        return reporter

    def _choose_start(self) -> StartPoint:
        """Decide where to begin; on several machines rank 0 decides, for it alone has the checkpoints."""
        start = (
            choose_start(self._output_dir, self.config.checkpoint.resume) if self._machines.is_first else None
        )
        if start is not None:
            self._wandb_id = self._choose_wandb_id(start)
            self._imported = imported.find_imported(start.state_dir)
        shared = self._machines.share(
            {"lineage": start.lineage, "imported": self._imported} if start else None
        )
        self._imported = shared["imported"]
        start = start or StartPoint(lineage=shared["lineage"], state_dir=None, skipped=())
        self._follow_imported()
        return start

    def _choose_wandb_id(self, start: StartPoint) -> str:
        stored = "" if start.state_dir is None else read_record(start.state_dir).get("wandb_id", "")
        return stored or uuid.uuid4().hex[:12]

    def _join_machines(self) -> None:
        if self._machines.count > 1:
            self._status.set_phase("loading", f"waiting for {self._machines.count - 1} other machines")
        with self._start_watch.watching(), self._signals.interrupting():
            self._start_watch.enter("waiting for the other machines")
            self._machines.join(self.config, self._board)

    def _leave_early(self) -> None:
        self._stopping.look()
        self._machines.leave_early()
        _LOG.info("stopped before the first step; nothing to save")

    # -- loading ------------------------------------------------------------------------------------------

    def _load(self, start: StartPoint) -> Parts:
        """Read data and models, build the drafter, and take a stored state over."""
        check_memory(self.config)
        record = self._imported
        parts = load_parts(
            self.config,
            enter=self._enter_loading,
            ranks=self._machines.count,
            imported=None if record is None else imported.fields_of(record),
        )
        self._identity = run_identity(self.config, parts, self._code, ranks=self._machines.count)
        if record is not None:
            self._identity |= {imported.KEY: record}
        self._machines.require_same(self.config, self._identity, parts)
        self._resume(parts, start)
        self._status.progress(parts.plan.first_step, parts.plan.total_steps)
        if self._machines.is_first:
            self._saver = self._open_saver(parts, start)
            self._evaluation = build_evaluation(self.config, parts, self._board)
        return parts

    def _enter_loading(self, what: str) -> None:
        self._leave_if_stopped()
        self._start_watch.enter(f"loading {what}")
        self._status.set_phase("loading", what)

    def _resume(self, parts: Parts, start: StartPoint) -> None:
        """Take a stored state over, if there is one, after comparing what it belongs to with this run."""
        state = None if start.state_dir is None else read_state(start.state_dir)
        state = self._machines.share_state(state)
        if state is None:
            return
        if start.state_dir is not None:
            # refuses by name, before the packs of another plan are looked at
            compare(imported.as_if_of_this_run(state.meta, self._identity), self._identity)
        parts.consumed.load(state.tensors)
        parts.plan = plan_steps(
            self.config,
            parts.plan,
            ranks=self._machines.count,
            step=state.step,
            packs_done=parts.consumed.count(),
            tokens=state.tokens,
        )
        self._identity["plan"]["total_steps"] = parts.plan.total_steps
        if start.state_dir is not None:
            self._record_resume(state, start, start.state_dir)
        for replica in parts.replicas:
            replica.optimizer.load_state_tensors(state.tensors)
        _LOG.info(
            "resumed from %s: step %d, %d packs consumed%s",
            start.state_dir or "rank 0",
            state.step,
            parts.consumed.count(),
            f"; skipped {len(start.skipped)} damaged" if start.skipped else "",
        )

    def _record_resume(self, state: TrainState, start: StartPoint, state_dir: Path) -> None:
        stored = imported.as_if_of_this_run(state.meta, self._identity)
        differences = compare(stored, self._identity)
        for line in differences:
            _LOG.warning("resumed with a difference: %s", line)
        write_json(
            self._resolved.run_dir / "resume.json",
            resume_record(start, state.step, differences, is_ordered=self.config.queue.ordered),
        )
        self._status.checkpoint_saved(state.step, state_dir, start.saved_at())

    def _open_saver(self, parts: Parts, start: StartPoint) -> Saver:
        config = self.config.checkpoint
        is_named = config.resume not in ("latest", "scratch") and start.continues_lineage
        drafter = parts.drafter.config
        return Saver(
            self._store,
            config=config,
            facts=RunFacts(
                identity=self._identity | {"wandb_id": self._wandb_id},
                drafter_fields={f.name: getattr(drafter, f.name) for f in dataclasses.fields(drafter)},
                export_meta={"mask_token_reason": parts.target.info.mask_token_reason}
                | export_identity(self._identity["target"]),
            ),
            source=parts.optimizer,
            consumed=parts.consumed,
            status=self._status,
            board=self._board,
            protect=frozenset({parts.plan.first_step} if is_named else ()),
            saved_step=parts.plan.first_step if start.continues_lineage else -1,
            hold=self._hold,
        )

    # -- pipeline -----------------------------------------------------------------------------------------

    def _run_pipeline(self, parts: Parts) -> None:
        """Build queues and workers, warm up, start the threads, and watch them to their end."""
        config, board = self.config, self._board
        board.beat("start")
        lines = open_lines(config, parts, board)
        feeder = Feeder(
            parts.sampler,
            lines.feed,
            # as it is now: what the machines consume later must not change how they deal the rest
            is_consumed=copy.deepcopy(parts.consumed).has,
            open_epoch=lines.hidden_states.open_epoch,
            board=board,
            rank=self._machines.rank,
            ranks=self._machines.count,
        )
        targets = build_target_workers(config, parts, lines, board)
        drafters = build_drafter_workers(
            config,
            parts,
            lines,
            board,
            targets=targets,
            hooks=self._hooks(parts, lines),
            nodes=self._machines.nodes,
        )
        self._worker = drafters[0]
        self._connect_sources(lines, targets, drafters, parts)
        with self._start_watch.watching(), self._signals.interrupting():
            self._warm_up(targets, drafters)
        group = WorkerGroup(board)
        group.add("feeder", feeder.run)
        for worker in targets:
            group.add(worker.name, worker.run)
        for drafter in drafters:
            group.add(drafter.name, drafter.run)
        self._leave_if_stopped()
        self._status.set_phase("filling", f"until {config.queue.hs_min_ready} packs wait")
        group.start()
        self._watch(group)

    def _hooks(self, parts: Parts, lines: Lines) -> StepHooks:
        return StepHooks(
            consumed=parts.consumed.add,
            report=self._submit,
            first_pack=lambda: self._status.set_phase("training"),
            after_step=self._after_step,
            at_end=functools.partial(self._at_end, close=lines.hidden_states.close),
        )

    def _warm_up(self, targets: Sequence[TargetWorker], drafters: Sequence[DrafterWorker]) -> None:
        """On CUDA, run the largest pack of each bucket once, largest first, while memory is free.

        Every worker does it here, in the main thread and on the default stream that it will use itself.
        """
        parts = self._parts
        if {parts.target.device.type, parts.drafter.device.type} == {"cpu"}:
            return
        for item in parts.sampler.largest_per_bucket():
            self._leave_if_stopped()
            self._start_watch.enter(f"compiling for bucket {item.bucket}")
            started_s = time.monotonic()
            _LOG.info("warming up bucket %d, %d samples", item.bucket, len(item.sample_ids))
            self._status.set_phase("compiling", f"bucket {item.bucket}, {len(item.sample_ids)} samples")
            with self._board.quiet("warm-up"):
                pack, *_ = [worker.compute(item) for worker in targets]
                for drafter in drafters:
                    drafter.warm_up(pack)
            _LOG.info("warmed up bucket %d in %.1f s", item.bucket, time.monotonic() - started_s)

    def _watch(self, group: WorkerGroup) -> None:
        """Wait for the workers; look at stop requests and at signs of life meanwhile."""
        native = NativeDump(self.config.queue.stall_s)
        try:
            self._watch_workers(group, native)
        finally:
            native.cancel()
        group.raise_first()

    def _watch_workers(self, group: WorkerGroup, native: NativeDump) -> None:
        native.rearm()
        while not group.join(timeout_s=MONITOR_S):
            native.rearm()
            if self._stopping.look() or self._machines.take_over_stop(self._stopping):
                self._begin_stop()
            if self._stopping.is_abandoned:
                return
            try:
                self._board.check()
            except PipelineError as error:
                # where a worker failed, its own error is on the board already: the first one wins
                self._board.fail("monitor", error)
                group.join(timeout_s=JOIN_AFTER_FAILURE_S)
                return

    def _begin_stop(self) -> None:
        self._machines.announce_stop(self._stopping.request)
        self._board.stop.set()
        self._status.drain("stop requested")

    def _connect_sources(
        self,
        lines: Lines,
        targets: Sequence[TargetWorker],
        drafters: Sequence[DrafterWorker],
        parts: Parts,
    ) -> None:
        """Tell the reporter where the parts of a line come from, and what is known before the first step."""
        connect_sources(
            self._reporter.sources,
            feed_depth=lambda: len(lines.feed),
            snapshot=lines.hidden_states.snapshot,
            edges=parts.sampler.edges,
            token_budget=self.config.data.token_budget,
            targets=targets,
            drafters=drafters,
            devices=list(dict.fromkeys((*self.config.devices.targets(), *self.config.devices.drafters()))),
            tokens=lambda: drafters[0].tokens,
            checkpoint=lambda: self._saver.take_record() if self._saver else {},
        )
        self._reporter.prime(
            IntervalReport(
                step=parts.plan.first_step,
                tokens=parts.plan.tokens,
                train=empty_train(parts.plan.total_steps),
            )
        )

    # -- between steps (called on the drafter's thread) ---------------------------------------------------

    def _after_step(self, step: int) -> None:
        config = self.config
        self._status.progress(step)
        is_last = step >= self._parts.plan.total_steps or self._board.stop.is_set()
        if self._saver and config.checkpoint.every and step % config.checkpoint.every == 0 and not is_last:
            self._saver.save(step, self._tokens())
        if self._evaluation is not None and self._evaluation.is_due(step) and not self._board.stop.is_set():
            self._evaluate(self._evaluation, step)

    def _evaluate(self, evaluation: OnlineEvaluation, step: int) -> None:
        limit_s = self.config.queue.stall_s
        with (
            self._status.during("evaluating"),
            # workers wait meanwhile: the limit counts from one group of prompts to the next
            self._board.quiet("evaluation", limit_s=limit_s, key="queue.stall_s"),
        ):
            record = evaluation.measure(self._parts.drafter, step)
        if record is None:
            _LOG.info("evaluation at step %d given up for a stop", step)
            return
        self._score("held_out_eal", step, record.get("held_out_eal"))
        self._score("acceptance_length", step, record.get("acceptance_length"))
        report_evaluation(record, self._status)
        self._reporter.submit(
            IntervalReport(
                step=step,
                tokens=self._tokens(),
                train={},
                evaluation=record,
            )
        )

    def _at_end(self, step: int, *, close: Any) -> None:
        """Release the producers, then save unless told not to."""
        close()
        was_stopping = self._board.stop.is_set()
        self._board.stop.set()
        if step < self._parts.plan.total_steps:
            self._machines.take_over_stop(self._stopping, ask=True)
        stop = self._stopping.request
        if stop is not None and not stop.save:
            _LOG.info("stopped at step %d without saving, as asked", step)
            return
        self._save_last(step)
        self._is_finished = step >= self._parts.plan.total_steps
        self._has_run_out = not (self._is_finished or was_stopping or stop)

    def _require_end(self, total_steps: int) -> None:
        """Refuse to pass off as a stop, or as an end, that the packs ran out before the plan was done."""
        if self._has_run_out:
            step = self._parts.plan.first_step if self._worker is None else self._worker.step
            raise PipelineError(
                f"the packs ran out at step {step} of {total_steps} without a stop request: the plan counted "
                "more than the feeder dealt; start again, it resumes from the checkpoint of this step"
            )

    def _save_last(self, step: int) -> None:
        if self._saver is not None:
            self._saver.save(step, self._tokens(), is_last=True)

    def _score(self, metric: str, step: int, value: float | None) -> None:
        """Tell the saver how good the drafter was at a step; it keeps the best checkpoints."""
        if self._saver is not None:
            self._saver.scores.observe(metric, step, value)

    def _submit(self, report: IntervalReport) -> None:
        self._score("eal", report.step, report.train.get("eal"))
        self._reporter.submit(report)

    def _tokens(self) -> int:
        return self._parts.plan.tokens if self._worker is None else self._worker.tokens

    # -- stop (main thread) -------------------------------------------------------------------------------

    def _leave_if_stopped(self) -> None:
        self._machines.take_over_stop(self._stopping)
        if self._stopping.look() or self._stopping.request is not None:
            raise StoppedEarlyError

    def _needed_to_stop_s(self) -> float:
        step_s = self._worker.step_seconds if self._worker else 0.0
        return step_s + (2.0 * self._saver.needed_s() if self._saver else 0.0)

    def _is_abandoned(self) -> bool:
        self._stopping.look()
        return self._stopping.is_abandoned
