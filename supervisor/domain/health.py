"""The four layers of health as pure judgements: liveness, readiness, progress, quality.

Used by the reconciler's observation. Each judgement is true, false or unknown with a reason; unknown never
acts. What must be remembered between looks is a frozen memory that the caller stores as JSON. Times are
seconds on one clock of the caller's choice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from supervisor.domain.metrics import non_finite_names
from supervisor.domain.policy import HealthPolicy, Probe, ProgressProbe, QualityProbe

READY_PHASES = frozenset({"training", "evaluating", "checkpointing", "draining", "done"})
"""Phases of a trainer that has begun to train."""

WARM_UP_STEPS = 5
"""The first steps compile and fill queues: their times teach nothing."""

PHASE_FLOORS_S: Mapping[str, float] = {"evaluating": 1800.0, "checkpointing": 900.0, "draining": 900.0}
"""Least limit of phases in which no step is expected; they cannot trip the limit of training."""

WINDOW = 20
"""Throughput samples that the running mean looks back on."""

READY_TIMEOUT = "ReadyTimeout"

_WATCHED_FIRST = ("train.loss", "train.grad_norm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One layer's answer. `ok` is None when it cannot be known."""

    ok: bool | None
    reason: str
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressMemory:
    """What has been learnt about an attempt's steps."""

    step: int | None = None
    at_s: float | None = None
    """When the step counter was last seen to move."""
    moves: int = 0
    longest_s: float = 0.0
    """Longest time between two moves after the warm-up, outside of phases without steps."""
    had_pause: bool = False
    """Whether a phase without steps lay between: such an interval teaches nothing."""

    def to_json(self) -> dict[str, Any]:
        """As stored with the attempt."""
        return {name: getattr(self, name) for name in ("step", "at_s", "moves", "longest_s", "had_pause")}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ProgressMemory:
        """Read what `to_json` wrote; an empty dict is a fresh memory."""
        return cls(**data)


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityMemory:
    """Newest throughput samples and how many of the last ones were low."""

    throughput: tuple[float, ...] = ()
    low_in_a_row: int = 0

    def to_json(self) -> dict[str, Any]:
        """As stored with the attempt."""
        return {"throughput": list(self.throughput), "low_in_a_row": self.low_in_a_row}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> QualityMemory:
        """Read what `to_json` wrote; an empty dict is a fresh memory."""
        return cls(
            throughput=tuple(data.get("throughput", ())), low_in_a_row=int(data.get("low_in_a_row", 0))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeMemory:
    """What one probe answers, and how many looks in a row have said otherwise."""

    ok: bool | None = None
    towards: bool | None = None
    looks: int = 0
    counted_s: float = 0.0
    """When the last of them was counted; several looks within one period are one."""


def settle(
    memory: ProbeMemory, probe: Probe, verdict: Verdict, *, now_s: float
) -> tuple[ProbeMemory, Verdict]:
    """Let an answer turn only after as many looks in a row as the probe asks for.

    Args:
        memory: from the look before.
        probe: its thresholds and period.
        verdict: of this look; one that knows nothing is passed on and counts for nothing.
        now_s: on the clock of the memory.
    """
    if verdict.ok is None:
        return memory, verdict
    if verdict.ok is memory.ok:
        return ProbeMemory(ok=memory.ok), verdict
    if verdict.ok is not memory.towards:
        memory = ProbeMemory(ok=memory.ok, towards=verdict.ok)
    if memory.looks == 0 or now_s - memory.counted_s >= probe.period_s:
        memory = replace(memory, looks=memory.looks + 1, counted_s=now_s)
    threshold = probe.success_threshold if verdict.ok else probe.failure_threshold
    if memory.looks >= threshold:
        return ProbeMemory(ok=verdict.ok), verdict
    message = f"{verdict.message}; {memory.looks} of {threshold} looks in a row".removeprefix("; ")
    return memory, Verdict(ok=memory.ok, reason=verdict.reason, message=message)


def settle_readiness(
    memory: ProbeMemory, probe: Probe, verdict: Verdict, *, now_s: float
) -> tuple[ProbeMemory, Verdict]:
    """As `settle`, where not being ready in time is no failure and only breaks a row of good looks."""
    if verdict.ok is False and verdict.reason != READY_TIMEOUT:
        return ProbeMemory(), verdict
    return settle(memory, probe, verdict, now_s=now_s)


def judge_liveness(*, alive: bool | None, shim_alive: bool | None) -> Verdict:
    """Does the identified process exist?"""
    if alive is None:
        return Verdict(ok=None, reason="NotAsked", message="the node has not answered")
    if alive:
        lost = "" if shim_alive else "; its shim is gone, so its exit code cannot be learnt"
        return Verdict(
            ok=True, reason="IdentityVerified", message=f"boot, pid and start time are equal{lost}"
        )
    return Verdict(ok=False, reason="NotThere", message="no process has the recorded identity")


def judge_readiness(
    policy: HealthPolicy,
    *,
    phase: str | None,
    step: int | None,
    has_ready_line: bool | None,
    has_output: bool | None,
    is_program: bool,
    running_s: float | None,
) -> Verdict:
    """Has training begun?

    Args:
        policy: the run's health policy.
        phase: of the newest status record; None without one.
        step: of it, or found by `progress_regex`.
        has_ready_line: whether `ready_regex` matched; None when the log could not be read.
        has_output: whether anything was written to the log.
        is_program: an argv of the user's.
        running_s: since the exec was verified.
    """
    if phase in READY_PHASES:
        return Verdict(ok=True, reason="PhaseReached", message=f"phase is {phase}")
    if step is not None and step > 0:
        return Verdict(ok=True, reason="FirstStep", message=f"step {step} was reached")
    if policy.ready_regex and has_ready_line:
        return Verdict(ok=True, reason="ReadyLine", message="the log matched ready_regex")
    if is_program and not policy.ready_regex and phase is None and has_output:
        return Verdict(ok=True, reason="FirstOutput", message="no ready_regex is set; it has written output")
    if phase is None and has_ready_line is None and has_output is None:
        return Verdict(ok=None, reason="NotAsked", message="the node has not answered")
    if running_s is not None and running_s > policy.ready_timeout_s:
        return Verdict(
            ok=False,
            reason=READY_TIMEOUT,
            message=f"not ready {running_s:.0f} s after its start, the limit is {policy.ready_timeout_s:g} s",
        )
    return Verdict(ok=False, reason="NotYet", message=f"phase is {phase or 'not known'}")


def remember_step(
    memory: ProgressMemory, *, step: int | None, phase: str | None, now_s: float
) -> ProgressMemory:
    """Learn from one look at the step counter; a look without a step teaches nothing."""
    if phase in PHASE_FLOORS_S:
        memory = replace(memory, had_pause=True)
    if step is None or step == memory.step:
        return memory
    fresh = replace(memory, step=step, at_s=now_s, had_pause=phase in PHASE_FLOORS_S)
    if memory.step is None or memory.at_s is None or step < memory.step:
        return fresh
    moves = memory.moves + (step - memory.step)
    interval_s = max(0.0, now_s - memory.at_s)
    teaches = memory.moves >= WARM_UP_STEPS and not memory.had_pause
    return replace(
        fresh, moves=moves, longest_s=max(memory.longest_s, interval_s) if teaches else memory.longest_s
    )


def progress_limit_s(memory: ProgressMemory, probe: ProgressProbe, *, phase: str | None) -> float:
    """How long the step counter may stand still in this phase."""
    learnt = max(probe.floor_s, probe.factor * memory.longest_s)
    return max(learnt, PHASE_FLOORS_S.get(phase or "", 0.0))


def judge_progress(
    memory: ProgressMemory,
    probe: ProgressProbe,
    *,
    phase: str | None,
    phase_age_s: float | None,
    now_s: float,
) -> Verdict:
    """Is the step counter moving?

    Args:
        memory: from `remember_step`, this look included.
        probe: the run's progress probe.
        phase: newest one.
        phase_age_s: how long it has lasted; a phase that has just begun is judged by its own age.
        now_s: on the clock of the memory.
    """
    if phase is not None and phase not in READY_PHASES:
        return Verdict(ok=None, reason="NotTraining", message=f"phase is {phase}: no steps are expected yet")
    if memory.at_s is None:
        return Verdict(ok=None, reason="NoStep", message="no step counter has been seen")
    if memory.moves < WARM_UP_STEPS:
        return Verdict(
            ok=None, reason="WarmingUp", message=f"{memory.moves} of {WARM_UP_STEPS} warm-up steps"
        )
    still_s = now_s - memory.at_s
    if phase_age_s is not None:
        still_s = min(still_s, phase_age_s)
    limit_s = progress_limit_s(memory, probe, phase=phase)
    if still_s > limit_s:
        return Verdict(
            ok=False,
            reason="Stalled",
            message=f"step {memory.step} for {still_s:.0f} s, the limit is {limit_s:.0f} s",
        )
    return Verdict(ok=True, reason="Moving", message=f"step {memory.step}, limit {limit_s:.0f} s")


def find_non_finite(record: Mapping[str, Any]) -> list[str]:
    """Names of training values that are NaN or infinite in a metrics line, the loss first.

    Also reads the marks that the trainer or the store leave where they had to write null: `nonfinite` and
    `non_finite`.
    """
    names = set(non_finite_names(record))
    for key in ("nonfinite", "non_finite"):
        marked = record.get(key)
        if isinstance(marked, Sequence) and not isinstance(marked, str):
            names.update(str(name) for name in marked)
    training = [name for name in names if name.split(".")[0] in ("train", "loss", "grad_norm")]
    return sorted(training, key=lambda name: (name not in _WATCHED_FIRST, name))


def remember_throughput(memory: QualityMemory, probe: QualityProbe, tok_s: float | None) -> QualityMemory:
    """Learn from one metrics line; low samples do not drag the mean down to themselves."""
    if tok_s is None or not math.isfinite(tok_s):
        return memory
    mean = _mean(memory.throughput)
    if len(memory.throughput) >= WARM_UP_STEPS and tok_s < mean * (1 - probe.throughput_drop):
        return replace(memory, low_in_a_row=memory.low_in_a_row + 1)
    return QualityMemory(throughput=(*memory.throughput, tok_s)[-WINDOW:], low_in_a_row=0)


def judge_quality(memory: QualityMemory, probe: QualityProbe, *, non_finite: Sequence[str]) -> Verdict:
    """Is the result sane? A NaN counts at once, a drop of throughput after several samples."""
    if non_finite:
        return Verdict(ok=False, reason="NonFinite", message=f"{non_finite[0]} is not finite")
    if memory.low_in_a_row >= probe.failure_threshold:
        return Verdict(
            ok=False,
            reason="ThroughputDrop",
            message=f"{memory.low_in_a_row} samples in a row more than {probe.throughput_drop:.0%} "
            f"below {_mean(memory.throughput):.0f} tokens/s",
        )
    if not memory.throughput:
        return Verdict(ok=None, reason="NoMetrics", message="no metrics line has arrived")
    return Verdict(ok=True, reason="Finite", message=f"{_mean(memory.throughput):.0f} tokens/s")


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0
