"""The telemetry thread: turns interval reports into metrics lines and progress lines, and ticks the status.

Built and started by `trainer.train` before the model loads, closed last. Workers only hand over plain numbers
by `submit`, which never waits. Must not import torch; an error here is logged and never reaches a worker.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trainer.telemetry.metrics import IntervalReport, build_line
from trainer.telemetry.sink import Sink

_LOG = logging.getLogger(__name__)

POLL_S = 0.25


def _no_mapping() -> Mapping[str, Any]:
    return {}


def _no_records() -> Sequence[Mapping[str, Any]]:
    return []


@dataclass(slots=True, kw_only=True)
class Sources:
    """Where the parts of a line come from; each is replaced by `trainer.train` once it exists."""

    queue: Callable[[], Mapping[str, Any]] = _no_mapping
    profile: Callable[[], Mapping[str, Any]] = _no_mapping
    workers: Callable[[], Sequence[Mapping[str, Any]]] = _no_records
    gpu: Callable[[], Sequence[Mapping[str, Any]]] = _no_records
    cuda: Callable[[], Sequence[Mapping[str, Any]]] = _no_records
    batch: Callable[[], Mapping[str, Any]] = _no_mapping
    tokens: Callable[[], int] = field(default=lambda: 0)
    reasons: dict[str, Callable[[], str]] = field(default_factory=dict)
    """by group: why it has no entries at all"""


class Reporter:
    """Runs the thread `telemetry`.

    Args:
        profile_interval_s: a line is also written when so much time passed since the last one.
        tick: called every `tick_interval_s` (writes the status file).
        monotonic: the clock that lines and ticks go by.
    """

    def __init__(
        self,
        sinks: Sequence[Sink],
        sources: Sources,
        *,
        profile_interval_s: float,
        tick: Callable[[], None],
        tick_interval_s: float,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._monotonic = monotonic
        self._sinks = list(sinks)
        self.sources = sources
        self._profile_interval_s = profile_interval_s
        self._tick = tick
        self._tick_interval_s = tick_interval_s
        self._reports: queue.Queue[IntervalReport | None] = queue.Queue(maxsize=1024)
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)
        self._last: IntervalReport | None = None
        self._last_line_s = monotonic()
        self._last_tick_s = float("-inf")
        self._clock_tokens = 0
        self._clock_s = monotonic()
        self.dropped = 0
        self.failed = 0

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def prime(self, report: IntervalReport) -> None:
        """Set what lines by the clock say before the first interval ends (filling, warming up).

        Tokens of before a resume count from here: they are not this process's throughput.
        """
        self._last = report
        self._clock_tokens, self._clock_s = report.tokens, self._monotonic()

    def submit(self, report: IntervalReport) -> None:
        """Hand a report over; dropped and counted when the thread is far behind."""
        try:
            self._reports.put_nowait(report)
        except queue.Full:
            self.dropped += 1

    def close(self) -> None:
        """Write what is waiting, then finish the sinks."""
        if self._thread.is_alive():
            self._reports.put(None)
            self._thread.join(10.0)
        for sink in self._sinks:
            sink.close()

    def turn(self, *, wait_s: float) -> bool:
        """Write what was submitted, or the line that is due by the clock; False after `close`.

        Args:
            wait_s: longest wait for a report.
        """
        try:
            report = self._reports.get(timeout=wait_s)
            if report is None:
                return False
            if report.evaluation is not None and self._last is not None:
                report = replace(report, train={**self._last.train, **report.train})
            self._emit(report, is_progress=report.evaluation is None)
        except queue.Empty:
            self._guarded_line_by_clock()
        except Exception:  # noqa: BLE001 - the thread boundary: telemetry must not end training
            self._count_lost_line()
        self._tick_if_due()
        return True

    def _run(self) -> None:
        while self.turn(wait_s=POLL_S):
            pass

    def _guarded_line_by_clock(self) -> None:
        try:
            self._emit_by_clock()
        except Exception:  # noqa: BLE001 - as in `turn`
            self._count_lost_line()

    def _count_lost_line(self) -> None:
        """Log the error that is being handled and count its line; the next line says how many were lost."""
        self.failed += 1
        _LOG.exception("a metrics line was lost")

    def _own_record(self) -> Mapping[str, Any]:
        lost = {sink.counter: sink.lost for sink in self._sinks}
        own = {"reports_dropped": self.dropped, "lines_failed": self.failed}
        return own | {"jsonl_lost": None, "wandb_dropped": None} | lost

    def _tick_if_due(self) -> None:
        now_s = self._monotonic()
        if now_s - self._last_tick_s >= self._tick_interval_s:
            self._last_tick_s = now_s
            self._tick()

    def _emit_by_clock(self) -> None:
        """Write a line although no interval ended: throughput by the clock, the rest as last known."""
        now_s = self._monotonic()
        if now_s - self._last_line_s < self._profile_interval_s or self._last is None:
            return
        tokens = self.sources.tokens()
        rate = (tokens - self._clock_tokens) / max(now_s - self._clock_s, 1e-9)
        self._clock_tokens, self._clock_s = tokens, now_s
        last = self._last
        self._emit(
            IntervalReport(
                step=last.step, tokens=tokens, train={**last.train, "tok_s": rate}, batch=last.batch
            ),
            is_progress=False,
        )

    def _emit(self, report: IntervalReport, *, is_progress: bool) -> None:
        self._last, self._last_line_s = report, self._monotonic()
        line = build_line(
            t=time.time(),
            report=report,
            queue=self.sources.queue(),
            profile=self.sources.profile(),
            workers=self.sources.workers(),
            gpu=self.sources.gpu(),
            cuda=self.sources.cuda(),
            batch=self.sources.batch(),
            reasons={group: reason() for group, reason in self.sources.reasons.items()},
            telemetry=self._own_record(),
        )
        if is_progress:
            _LOG.info("%s", progress_text(line))
        for sink in self._sinks:
            sink.write(line)


def progress_text(line: Mapping[str, Any]) -> str:
    """Return the readable form of a metrics line."""
    train, hs = line["train"], line["queue"]
    depths = ",".join(str(bucket["depth"]) for bucket in hs.get("buckets", ()))
    return (
        f"step {line['step']}/{train.get('total_steps', '?')} epoch {_number(train.get('epoch'), '.2f')} "
        f"loss {_number(train.get('loss'), '.4f')} eal {_number(train.get('eal'), '.3f')} "
        f"tok/s {_number(train.get('tok_s'), '.0f')} lr {_number(train.get('lr'), '.2e')} "
        f"skipped {_number(train.get('skipped'), '.0f')} q_hs={hs.get('hs', '-')} q_hsb=[{depths}]"
    )


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
