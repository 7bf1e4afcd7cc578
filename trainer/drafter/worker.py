"""The drafter worker: one thread per drafter device, from hidden states to optimizer steps.

Started by `trainer.train` through `pipeline.workers`. Owns the step loop, the interval metrics and the record
of consumed packs' callbacks; what happens between steps (checkpoint, evaluation) is handed in. The steady
step never reads a device value on the host. Must not know the target.

Dimension suffixes: as in `drafter.loss`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.config import TrainConfig
from trainer.drafter.acceptance import BlockCounts, DeferredCounts
from trainer.drafter.anchors import block_labels, select_anchors
from trainer.drafter.loss import FrozenEnds, StepSums, microbatch_sums
from trainer.drafter.model import Drafter
from trainer.drafter.noise import noise_sigma, pack_seed
from trainer.drafter.objective import Objective
from trainer.errors import NonFiniteError
from trainer.optim.adamw import MasterAdamW
from trainer.optim.schedule import learning_rate
from trainer.pipeline.messages import FeaturePack
from trainer.pipeline.timers import DeferredScalars, WorkerStats
from trainer.pipeline.transfer import Receiver
from trainer.pipeline.workers import Board
from trainer.telemetry.metrics import IntervalReport

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Where the run stands in its plan and how long it is."""

    first_step: int
    total_steps: int
    total_packs: int
    packs_per_epoch: int
    tokens: int


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


@dataclass(slots=True, kw_only=True)
class _Interval:
    """Sums since the last report; the tensors stay on the device."""

    numerator: Tensor
    denominator: Tensor
    counts: BlockCounts
    rows: int = 0
    blocks: int = 0
    packs: int = 0
    tokens: int = 0
    supervised: int = 0
    started_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pending:
    """A report whose device values are still on their way."""

    step: int
    tokens: int
    scalars: DeferredScalars
    counts: DeferredCounts
    train: Mapping[str, Any]
    batch: Mapping[str, Any]


class DrafterWorker:
    """Trains one replica of the drafter.

    Args:
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
        config: TrainConfig,
        plan: StepPlan,
        attention: str,
        hooks: StepHooks,
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
        self._config = config
        self._plan = plan
        self._attention = attention
        self._objective = Objective.from_config(config.loss)
        self._hooks = hooks
        self._cpu_threads = cpu_threads
        self._packs_done = plan.total_packs
        self._interval = self._new_interval()
        self._pending: _Pending | None = None
        self._used: Mapping[str, float] = {}
        """rate and noise of the latest completed step"""
        self._recent_packs: list[str] = []
        # host sync: once, before the first step
        self._skipped_seen = optimizer.skipped.item()
        self._tokens_per_s_ema: float | None = None
        self._has_begun = False
        self.step_seconds = 0.0
        """duration of the latest optimizer step, waiting included"""

    def run(self) -> None:
        """Step until the plan is done, the packs run out, or a stop is asked for."""
        if self._drafter.device.type == "cuda":
            torch.cuda.set_device(self._drafter.device)
        while self.step < self._plan.total_steps and not self._board.stop.is_set():
            started_s = time.monotonic()
            if not self.train_step():
                break
            self.step_seconds = time.monotonic() - started_s
            self._hooks.after_step(self.step)
        self._flush_report()
        self._hooks.at_end(self.step)

    def warm_up(self, pack: FeaturePack) -> None:
        """Run one micro-batch and throw its gradients away: kernels get compiled, the allocator grows."""
        self._accumulate(pack)
        self._optimizer.discard()
        if self._drafter.device.type == "cuda":
            torch.cuda.synchronize(self._drafter.device)  # host sync: errors must show here, not later
        self.timers.clear()

    def train_step(self) -> bool:
        """Do one optimizer step; False when there were no packs for it (end of data, or stop)."""
        config = self._config.optim
        if self._cpu_threads is not None:
            torch.set_num_threads(self._cpu_threads())
        # fetch and accumulate: gradients of the loss numerators, summed over the micro-batches
        used: list[FeaturePack] = []
        while len(used) < config.grad_accum:
            with self.timers.wait("wait_hidden_states"):
                pack = self._receiver.next(stop_empties=not used)
            if pack is None:
                break
            if not self._has_begun:
                self._has_begun = True
                self._hooks.first_pack()
            with self.stats.working():
                self._microbatch(pack)
            used.append(pack)
        # the last step of the plan may be short; one that a stop cut short is dropped and repeated later
        if not used or (len(used) < config.grad_accum and self._board.stop.is_set()):
            self._optimizer.discard()
            return False

        # divide by the weight of the whole step, check, clip, update: all on the device
        lr = self._lr()
        with self.stats.working(), self.timers.stage("optimizer"):
            self._optimizer.step(lr)
        self._used = {"lr": lr, "noise_sigma": self._sigma()}
        self.step += 1
        for pack in used:
            self._hooks.consumed(pack.epoch, pack.pack_id)

        # log every N steps: values start their way to the host now and are read once they have arrived
        self._board.beat(self.name)
        self._report_if_arrived()
        if self.step % self._config.telemetry.log_every == 0:
            self._start_report(epoch=used[-1].epoch)
        return True

    def _microbatch(self, pack: FeaturePack) -> None:
        sums = self._accumulate(pack)
        self._receiver.done(pack)
        self._count(pack, sums)

    def _accumulate(self, pack: FeaturePack) -> StepSums:
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
            objective=self._objective,
            stage=self.timers.stage,
        )
        with self.timers.stage("backward"):
            self._optimizer.accumulate(sums.numerator, sums.denominator)
        return sums

    def _count(self, pack: FeaturePack, sums: StepSums) -> None:
        length = int(pack.tokens.input_ids_T.numel())
        self.tokens += length
        self.stats.add(length)
        self._board.beat(self.name)
        interval = self._interval
        interval.numerator += sums.numerator.detach()
        interval.denominator += sums.denominator
        interval.counts = interval.counts + sums.counts
        interval.rows += sums.rows
        interval.blocks += sums.blocks
        interval.packs += 1
        interval.tokens += length
        interval.supervised += int(pack.tokens.loss_mask_T.sum())  # on the CPU: no sync
        self._recent_packs.append(f"{pack.epoch}:{pack.pack_id}")
        del self._recent_packs[:-64]

    def _lr(self) -> float:
        config = self._config.optim
        return learning_rate(
            self.step,
            total_steps=self._plan.total_steps,
            peak=config.lr,
            warmup_ratio=config.warmup_ratio,
            shape=config.schedule,
            decay_ratio=config.decay_ratio,
        )

    def _sigma(self) -> float:
        loss = self._config.loss
        return noise_sigma(self.step, self._plan.total_steps, start=loss.noise_start, end=loss.noise_end)

    def _new_interval(self) -> _Interval:
        device = self._drafter.device
        return _Interval(
            numerator=torch.zeros((), device=device),
            denominator=torch.zeros((), device=device),
            counts=BlockCounts.zeros(self._config.drafter.block_size, device),
            started_s=time.monotonic(),
        )

    def _start_report(self, *, epoch: int) -> None:
        if self._pending is not None:
            self._finish_report(self._pending)
        interval = self._interval
        rate = interval.tokens / max(time.monotonic() - interval.started_s, 1e-9)
        before = self._tokens_per_s_ema
        self._tokens_per_s_ema = rate if before is None else 0.8 * before + 0.2 * rate
        packs_done = min(self.step * self._config.optim.grad_accum, self._plan.total_packs)
        self._pending = _Pending(
            step=self.step,
            tokens=self.tokens,
            scalars=DeferredScalars(
                {
                    "numerator": interval.numerator,
                    "denominator": interval.denominator,
                    "skipped": self._optimizer.skipped,
                    "in_a_row": self._optimizer.in_a_row,
                    "longest_row": self._optimizer.longest_row,
                }
            ),
            counts=DeferredCounts(interval.counts),
            train={
                "epoch": round(packs_done / self._plan.packs_per_epoch, 4),
                "plan_epoch": epoch,
                "total_steps": self._plan.total_steps,
                **self._used,
                "tok_s": rate,
                "tok_s_ema": self._tokens_per_s_ema,
            },
            batch={
                "packs": interval.packs,
                "valid_tokens": interval.tokens,
                "supervised_tokens": interval.supervised,
                "supervised_rows": interval.rows,
                "blocks": interval.blocks,
                "anchor_fill_ratio": interval.blocks / max(1, interval.packs * self._config.loss.max_anchors),
            },
        )
        self._interval = self._new_interval()
        self._report_if_arrived()

    def _report_if_arrived(self) -> None:
        pending = self._pending
        if pending is not None and pending.scalars.is_ready() and pending.counts.is_ready():
            self._finish_report(pending)

    def _flush_report(self) -> None:
        """Report what the last interval holds; only after the last step."""
        if self._interval.packs and self.step > self._plan.first_step:
            self._start_report(epoch=self._config.optim.epochs - 1)
        if self._pending is not None:
            self._finish_report(self._pending)

    def _finish_report(self, pending: _Pending) -> None:
        self._pending = None
        values, reading = pending.scalars.read(), pending.counts.read()
        weight = values["denominator"]
        train = {
            "loss": values["numerator"] / weight if weight else None,
            "eal": reading.expected_acceptance_length,
            "skipped": int(values["skipped"]),
            "accuracy": {str(k): value for k, value in enumerate(reading.accuracy, start=1)},
            **pending.train,
        }
        self._hooks.report(
            IntervalReport(step=pending.step, tokens=pending.tokens, train=train, batch=pending.batch)
        )
        self._check_skipped(pending.step, values)

    def _check_skipped(self, step: int, values: Mapping[str, float]) -> None:
        limit = self._config.optim.max_nonfinite_steps
        if values["skipped"] > self._skipped_seen:
            _LOG.warning(
                "%d non-finite steps skipped up to step %d; seed %d, recent packs (epoch:pack): %s",
                int(values["skipped"] - self._skipped_seen),
                step,
                self._config.optim.seed,
                " ".join(self._recent_packs),
            )
            self._skipped_seen = values["skipped"]
        if values["longest_row"] >= limit:
            raise NonFiniteError(
                f"{int(values['longest_row'])} steps in a row had a non-finite loss or gradient "
                f"(limit {limit}, optim.max_nonfinite_steps) by step {step}; parameters were left alone, "
                "the last checkpoint is good: lower --lr or look at the packs named above"
            )
