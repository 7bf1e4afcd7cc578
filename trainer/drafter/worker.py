"""The drafter worker: one thread per drafter device, from hidden states to optimizer steps.

Started by `trainer.train` through `pipeline.workers`. Owns the step loop and the record of consumed
packs' callbacks; what happens between steps (checkpoint, evaluation) is handed in. Several
workers make one step together (`optim.replicas`); the first of them leads: it alone reports and calls the
hooks. The steady step never reads a device value on the host. Must not know the target.

Dimension suffixes: as in `drafter.loss`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trainer.config import TrainConfig
from trainer.drafter.acceptance import BlockCounts
from trainer.drafter.anchors import block_labels, select_anchors
from trainer.drafter.compiled import CompileGate
from trainer.drafter.interval import IntervalLog, StepTotals
from trainer.drafter.loss import FrozenEnds, StepSums, coarse_length, microbatch_sums
from trainer.drafter.model import Drafter
from trainer.drafter.noise import noise_sigma, pack_seed
from trainer.drafter.objective import Objective
from trainer.optim.adamw import MasterAdamW
from trainer.optim.replicas import ReplicaGroup, StepResult, StepShare
from trainer.optim.schedule import learning_rate
from trainer.pipeline.devices import on_device
from trainer.pipeline.messages import FeaturePack
from trainer.pipeline.timers import DeferredScalars, WorkerStats
from trainer.pipeline.transfer import Receiver
from trainer.pipeline.workers import Board
from trainer.telemetry.metrics import IntervalReport

CHECKSUM_EVERY = 100
"""Optimizer steps between two comparisons of the replicas' parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Where the run stands in its plan and how long it is.

    `schedule_shift` is added to the step where learning rate and noise are concerned: a run that goes on with
    another number of drafters has other steps, and its schedule goes on where the packs stand.
    """

    first_step: int
    total_steps: int
    total_packs: int
    packs_per_epoch: int
    tokens: int
    first_packs: int = 0
    schedule_shift: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepHooks:
    """What the worker tells `trainer.train`.

    `consumed` gets each pack of a completed step; `first_pack` says that training begins; `after_step`
    runs between steps and may take long (save, evaluate); `at_end` runs once after the last step of a
    clean end or a stop.
    """

    consumed: Callable[[int, int], None]
    report: Callable[[IntervalReport], None]
    first_pack: Callable[[], None]
    after_step: Callable[[int], None]
    at_end: Callable[[int], None]


class DrafterWorker:
    """Trains one replica of the drafter.

    Args:
        group: of all replicas.
        replica: this one's number in it; 0 leads.
        gate: kept while other workers of this process compile too; None where nothing is compiled.
        cpu_threads: asked before each step for the torch threads of this worker; None leaves them alone.
    """

    def __init__(
        self,
        *,
        name: str,
        drafter: Drafter,
        ends: FrozenEnds,
        optimizer: MasterAdamW,
        receiver: Receiver,
        board: Board,
        group: ReplicaGroup,
        replica: int,
        config: TrainConfig,
        plan: StepPlan,
        attention: str,
        hooks: StepHooks,
        gate: CompileGate | None = None,
        cpu_threads: Callable[[], int] | None = None,
    ) -> None:
        self.name = name
        self.step = plan.first_step
        self.tokens = plan.tokens
        self.stats = WorkerStats(name)
        self.timers = receiver.timers
        self._drafter = drafter
        self._ends = ends
        self._optimizer = optimizer
        self._receiver = receiver
        self._board = board
        self._group = group
        self._replica = replica
        self._config = config
        self._plan = plan
        self._attention = attention
        self._objective = Objective.from_config(config.loss)
        self._hooks = hooks
        self._gate = gate
        self._cpu_threads = cpu_threads
        self._packs_done = plan.first_packs
        self._counts = self._no_counts()
        """right predictions of the present step"""
        self._checksum: DeferredScalars | None = None
        self._log = IntervalLog(config, optimizer, device=drafter.device, report=hooks.report)
        self._used: Mapping[str, float] = {}
        """rate and noise of the latest completed step"""
        self._has_begun = False
        self.step_seconds = 0.0
        """duration of the latest optimizer step, waiting included"""

    def run(self) -> None:
        """Step until the plan is done, the packs run out, or a stop is asked for."""
        if self._drafter.device.type == "cuda":
            torch.cuda.set_device(self._drafter.device)
        every = self._config.checkpoint.every
        self._prove_equal()
        while self.step < self._plan.total_steps and self._goes_on():
            started_s = time.monotonic()
            if not self.train_step():
                break
            self.step_seconds = time.monotonic() - started_s
            if every and self.step % every == 0:
                self._prove_equal()
            if self._is_lead:
                self._hooks.after_step(self.step)
        self._prove_equal()
        if self._is_lead:
            if not self._log.is_empty and self.step > self._plan.first_step:
                self._start_report(epoch=self._config.optim.epochs - 1)
            self._log.finish()
            self._hooks.at_end(self.step)

    def warm_up(self, pack: FeaturePack) -> None:
        """Run one micro-batch and throw its gradients away: kernels get compiled, the allocator grows."""
        with on_device(self._drafter.device):
            self._accumulate(pack)
            self._optimizer.discard()
            if self._drafter.device.type == "cuda":
                torch.cuda.synchronize()  # host sync: errors must show here, not later
        self.timers.clear()

    def train_step(self) -> bool:
        """Do one optimizer step; False when there were no packs for it (end of data, or stop)."""
        config = self._config.optim
        if self._cpu_threads is not None:
            torch.set_num_threads(self._cpu_threads())
        # fetch and accumulate: gradients of the loss numerators, summed over the micro-batches
        used: list[FeaturePack] = []
        sums = StepTotals()
        while len(used) < config.grad_accum:
            with self.timers.wait("wait_hidden_states"):
                pack = self._receiver.next(stop_empties=not used)
            if pack is None:
                break
            if not self._has_begun:
                self._has_begun = True
                self._hooks.first_pack()
            with self.stats.working():
                sums += self._microbatch(pack)
            used.append(pack)

        # meet the other replicas: a step that a stop cut short is dropped, the last of the plan may be short
        result = self._group.close_step(self._replica, self._share(used, sums))
        if not result.is_applied:
            self._optimizer.discard()
            self._counts = self._no_counts()
            return False

        # sum over the replicas; one that had no pack brings zeros
        with self.timers.stage("all_reduce"):
            self._group.sum_tensors(
                self._replica, [*self._optimizer.pending_sums(), *_tensors_of(self._counts)]
            )
        self._add_to_log(result)

        # divide by the weight of the whole step, check, clip, update: all on the device
        lr = self._lr()
        with self.stats.working(), self.timers.stage("optimizer"):
            self._optimizer.step(lr)
        self._used = {"lr": lr, "noise_sigma": self._sigma()}
        self.step += 1
        self._start_checksum_if_due()

        # log every N steps: values start their way to the host now and are read once they have arrived
        self._board.beat(self.name)
        if self._is_lead:
            for epoch, pack_id in result.packs:
                self._hooks.consumed(epoch, pack_id)
            self._log.finish_if_arrived()
            if self.step % self._config.telemetry.log_every == 0:
                self._start_report(epoch=result.packs[-1][0])
        return True

    @property
    def _is_lead(self) -> bool:
        return self._replica == 0

    def _goes_on(self) -> bool:
        return self._group.agree_to_go_on(self._replica, wants_stop=self._board.stop.is_set())

    def _share(self, used: Sequence[FeaturePack], sums: StepTotals) -> StepShare:
        return StepShare(
            packs=tuple((pack.epoch, pack.pack_id) for pack in used),
            counts=tuple(sums),
            is_short=len(used) < self._config.optim.grad_accum,
            wants_stop=self._board.stop.is_set(),
            checksum=self._take_checksum(),
        )

    def _microbatch(self, pack: FeaturePack) -> StepTotals:
        sums = self._accumulate(pack)
        self._receiver.done(pack)
        self._counts = self._counts + sums.counts
        length = int(pack.tokens.input_ids_T.numel())
        self.stats.add(length)
        self._board.beat(self.name)
        return StepTotals(
            tokens=length,
            rows=sums.rows,
            blocks=sums.blocks,
            supervised=int(pack.tokens.loss_mask_T.sum()),  # on the CPU: no sync
        )

    def _accumulate(self, pack: FeaturePack) -> StepSums:
        if self._gate is None:
            return self._pass_through(pack)
        # the device is one of the compiler's guards, and lengths are padded as in `loss`
        length = coarse_length(max(pack.tokens.input_ids_T.numel(), self._config.loss.flex_min_tokens))
        with self._gate.visit((self._drafter.device, length)):
            return self._pass_through(pack)

    def _pass_through(self, pack: FeaturePack) -> StepSums:
        """Run forward and backward of one micro-batch."""
        loss, seed = self._config.loss, self._config.optim.seed
        block_size = self._config.drafter.block_size
        draw = pack_seed(run_seed=seed, epoch=pack.epoch, pack_id=pack.pack_id, stream="anchors")
        anchors = select_anchors(
            pack.tokens, loss.max_anchors, block_size=block_size, rng=np.random.default_rng(draw)
        )
        labels = block_labels(pack.tokens, anchors, block_size=block_size, gamma=loss.decay_gamma)
        sums = microbatch_sums(
            self._drafter,
            self._ends,
            pack,
            anchors,
            labels,
            noise_sigma=self._sigma(),
            noise_seed=pack_seed(run_seed=seed, epoch=pack.epoch, pack_id=pack.pack_id, stream="noise"),
            head_chunk_rows=loss.head_chunk_rows,
            attention=self._attention,
            flex_min_tokens=loss.flex_min_tokens,
            objective=self._objective,
            stage=self.timers.stage,
        )
        with self.timers.stage("backward"):
            self._optimizer.accumulate(sums.numerator, sums.denominator)
        return sums

    def _add_to_log(self, result: StepResult) -> None:
        if self._is_lead:
            self._log.add(result, self._counts)
        self._counts = self._no_counts()
        self.tokens += StepTotals(*result.counts).tokens
        self._packs_done += len(result.packs)

    def _prove_equal(self) -> None:
        if not self._group.is_alone:
            # host sync: before the first step and at checkpoints, where the parameters are read anyway
            self._group.compare(self._replica, int(self._optimizer.checksum().item()))

    def _start_checksum_if_due(self) -> None:
        if not self._group.is_alone and self.step % CHECKSUM_EVERY == 0:
            self._checksum = DeferredScalars({"checksum": self._optimizer.checksum()})

    def _take_checksum(self) -> int | None:
        """Return what the former step started; the device has passed it before this step's own work."""
        pending, self._checksum = self._checksum, None
        return None if pending is None else int(pending.read()["checksum"])

    def _start_report(self, *, epoch: int) -> None:
        known = {
            "epoch": round(self._packs_done / self._plan.packs_per_epoch, 4),
            "plan_epoch": epoch,
            "total_steps": self._plan.total_steps,
        }
        self._log.start(step=self.step, tokens=self.tokens, train=known | dict(self._used))

    def _no_counts(self) -> BlockCounts:
        return BlockCounts.zeros(self._config.drafter.block_size, self._drafter.device)

    def _lr(self) -> float:
        config = self._config.optim
        shift = self._plan.schedule_shift
        return learning_rate(
            self.step + shift,
            total_steps=self._plan.total_steps + shift,
            peak=config.lr,
            warmup_ratio=config.warmup_ratio,
            shape=config.schedule,
            decay_ratio=config.decay_ratio,
        )

    def _sigma(self) -> float:
        loss, shift = self._config.loss, self._plan.schedule_shift
        return noise_sigma(
            self.step + shift,
            self._plan.total_steps + shift,
            start=loss.noise_start,
            end=loss.noise_end,
        )


def _tensors_of(counts: BlockCounts) -> list[Tensor]:
    return [counts.correct_K, counts.supervised_K, counts.prefix_correct_K, counts.complete_blocks]
