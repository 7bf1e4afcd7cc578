"""What a drafter worker knows of the steps since the last report, and its way to the telemetry thread.

Owned by the leading drafter worker. Sums stay on the device; a report starts their copy to the host and is
finished once they have arrived, usually a step later, so that no step waits. Also watches the counter of
skipped steps and ends the run when there are too many in a row.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.config import TrainConfig
from trainer.drafter.acceptance import BlockCounts, DeferredCounts
from trainer.errors import NonFiniteError
from trainer.optim.adamw import MasterAdamW
from trainer.optim.replicas import PackId, StepResult
from trainer.pipeline.timers import DeferredScalars
from trainer.telemetry.metrics import IntervalReport

_LOG = logging.getLogger(__name__)

MAX_NAMED_PACKS = 512
"""Packs named in the warning about skipped steps, newest last."""


class StepTotals(NamedTuple):
    """Whole numbers of one step that are known on the host."""

    tokens: int = 0
    rows: int = 0
    blocks: int = 0
    supervised: int = 0

    def __add__(self, other: tuple[int, ...]) -> StepTotals:  # type: ignore[override]
        return StepTotals(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


@dataclass(slots=True, kw_only=True)
class _Interval:
    """Sums over all replicas since the last report."""

    numerator: Tensor
    denominator: Tensor
    counts: BlockCounts
    totals: StepTotals = field(default_factory=StepTotals)
    packs: list[PackId] = field(default_factory=list)
    started_s: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pending:
    """A report whose device values are still on their way."""

    step: int
    tokens: int
    packs: Sequence[PackId]
    scalars: DeferredScalars
    counts: DeferredCounts
    train: Mapping[str, Any]
    batch: Mapping[str, Any]


class IntervalLog:
    """Sums steps up and reports them.

    Args:
        config: of the run.
        optimizer: whose counters of skipped steps are reported.
        device: where the sums live.
        report: gets each finished report.
    """

    def __init__(
        self,
        config: TrainConfig,
        optimizer: MasterAdamW,
        *,
        device: torch.device,
        report: Callable[[IntervalReport], None],
    ) -> None:
        self._config = config
        self._optimizer = optimizer
        self._device = device
        self._report = report
        self._interval = self._new_interval()
        self._pending: _Pending | None = None
        self._tokens_per_s_ema: float | None = None
        # host sync: once, before the first step
        self._skipped_seen = optimizer.skipped.item()

    @property
    def is_empty(self) -> bool:
        """True when no step came since the last report."""
        return not self._interval.packs

    def add(self, result: StepResult, counts: BlockCounts) -> None:
        """Add a step of all replicas, before the optimizer forgets its sums."""
        interval = self._interval
        numerator, denominator = self._optimizer.loss_sums
        interval.numerator += numerator
        interval.denominator += denominator
        interval.counts = interval.counts + counts
        interval.totals += StepTotals(*result.counts)
        interval.packs += result.packs

    def start(self, *, step: int, tokens: int, train: Mapping[str, Any]) -> None:
        """Begin a report; `train` is what the worker knows on the host."""
        if self._pending is not None:
            self._finish(self._pending)
        interval = self._interval
        self._pending = _Pending(
            step=step,
            tokens=tokens,
            packs=interval.packs,
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
            train={**train, **self._rates(interval)},
            batch=self._batch(interval),
        )
        self._interval = self._new_interval()
        self.finish_if_arrived()

    def finish_if_arrived(self) -> None:
        """Hand the begun report over when that needs no waiting."""
        pending = self._pending
        if pending is not None and pending.scalars.is_ready() and pending.counts.is_ready():
            self._finish(pending)

    def finish(self) -> None:
        """Hand the begun report over, waiting for it; only after the last step."""
        if self._pending is not None:
            self._finish(self._pending)

    def _new_interval(self) -> _Interval:
        return _Interval(
            numerator=torch.zeros((), device=self._device),
            denominator=torch.zeros((), device=self._device),
            counts=BlockCounts.zeros(self._config.drafter.block_size, self._device),
        )

    def _rates(self, interval: _Interval) -> dict[str, float]:
        rate = interval.totals.tokens / max(time.monotonic() - interval.started_s, 1e-9)
        before = self._tokens_per_s_ema
        self._tokens_per_s_ema = rate if before is None else 0.8 * before + 0.2 * rate
        return {"tok_s": rate, "tok_s_ema": self._tokens_per_s_ema}

    def _batch(self, interval: _Interval) -> dict[str, Any]:
        totals, packs = interval.totals, len(interval.packs)
        return {
            "packs": packs,
            "valid_tokens": totals.tokens,
            "supervised_tokens": totals.supervised,
            "supervised_rows": totals.rows,
            "blocks": totals.blocks,
            "anchor_fill_ratio": totals.blocks / max(1, packs * self._config.loss.max_anchors),
        }

    def _finish(self, pending: _Pending) -> None:
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
        self._report(
            IntervalReport(step=pending.step, tokens=pending.tokens, train=train, batch=pending.batch)
        )
        self._check_skipped(pending, values)

    def _check_skipped(self, pending: _Pending, values: Mapping[str, float]) -> None:
        optim = self._config.optim
        if values["skipped"] > self._skipped_seen:
            _LOG.warning(
                "%d non-finite steps skipped up to step %d; seed %d, packs since the last report "
                "(epoch:pack): %s",
                int(values["skipped"] - self._skipped_seen),
                pending.step,
                optim.seed,
                " ".join(f"{epoch}:{pack}" for epoch, pack in pending.packs[-MAX_NAMED_PACKS:]),
            )
            self._skipped_seen = values["skipped"]
        if values["longest_row"] >= optim.max_nonfinite_steps:
            raise NonFiniteError(
                f"{int(values['longest_row'])} steps in a row had a non-finite loss or gradient "
                f"(limit {optim.max_nonfinite_steps}, optim.max_nonfinite_steps) by step {pending.step}; "
                "parameters were left alone, the last checkpoint is good: lower --lr or look at the packs "
                "named above"
            )
