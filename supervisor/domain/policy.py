"""The policy tables of a run file as frozen models: restart, drift, health, stop, log, capabilities.

Used by `spec.RunSpec` and read by the pure deciders. Ranges live here and nowhere else. No I/O, no clock.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from supervisor.domain.layout import check_log_pattern

MAX_SECONDS = 366 * 86_400
MAX_REGEX = 512

Seconds = Annotated[float, Field(strict=True, ge=0, le=MAX_SECONDS)]
PositiveSeconds = Annotated[float, Field(strict=True, gt=0, le=MAX_SECONDS)]
Count = Annotated[int, Field(strict=True, ge=0, le=1_000_000)]
PositiveCount = Annotated[int, Field(strict=True, ge=1, le=1_000_000)]
Bytes = Annotated[int, Field(strict=True, ge=0, le=1 << 60)]
Flag = Annotated[bool, Field(strict=True)]
ExitCode = Annotated[int, Field(strict=True, ge=0, le=255)]

_NESTED_REPEAT = re.compile(r"\((?:[^()\\]|\\.)*[+*](?:[^()\\]|\\.)*\)\??[+*{]")


def check_regex(pattern: str) -> str:
    """Accept a pattern that compiles and cannot take exponential time on a hostile log line."""
    if len(pattern) > MAX_REGEX:
        raise ValueError(f"pattern is longer than {MAX_REGEX} characters")
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from error
    if _NESTED_REPEAT.search(pattern):
        raise ValueError("a repetition inside a repeated group can take for ever, rewrite it without nesting")
    return pattern


class Table(BaseModel):
    """Base of every table: frozen, no unknown key, no infinity."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, validate_by_name=True, validate_by_alias=True
    )


RuleAction = Literal["restart", "restart_uncounted", "fail", "hold"]
DriftAction = Literal["notify", "at_next_checkpoint", "when_cheap", "now"]
Need = Literal["required", "wanted", "off"]


class RestartRule(Table):
    """One rule, tried in order before the defaults; all matchers that are given must match."""

    reason: str | None = None
    exit_codes: tuple[ExitCode, ...] | None = None
    signal: Annotated[int, Field(strict=True, ge=1, le=64)] | None = None
    log_pattern: str | None = None
    phase: str | None = None
    action: RuleAction

    @field_validator("log_pattern")
    @classmethod
    def _log_pattern(cls, value: str | None) -> str | None:
        return value if value is None else check_regex(value)

    @model_validator(mode="after")
    def _has_matcher(self) -> Self:
        matchers = (self.reason, self.exit_codes, self.signal, self.log_pattern, self.phase)
        if all(matcher is None for matcher in matchers):
            raise ValueError("needs at least one of reason, exit_codes, signal, log_pattern, phase")
        return self


class RestartPolicy(Table):
    """When an ended attempt is followed by another one."""

    policy: Literal["never", "on-failure", "always"] = "on-failure"
    rules: tuple[RestartRule, ...] = ()
    success_exit_codes: Annotated[tuple[ExitCode, ...], Field(min_length=1)] = (0,)
    base_s: PositiveSeconds = 10
    factor: Annotated[float, Field(strict=True, ge=1, le=100)] = 2
    cap_s: PositiveSeconds = 300
    healthy_s: Seconds = 600
    burst: PositiveCount = 5
    interval_s: PositiveSeconds = 3600
    max_restarts: Count = 20
    no_progress: PositiveCount = 3
    uncounted_per_day: PositiveCount = 10

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.cap_s < self.base_s:
            raise ValueError(f"cap_s {self.cap_s:g} is below base_s {self.base_s:g}")
        shortest = self.seconds_to_burst()
        if self.policy != "never" and shortest >= self.interval_s:
            raise ValueError(
                f"burst {self.burst} cannot be reached: the delays before it add up to {shortest:g} s, "
                f"not below interval_s {self.interval_s:g}; lower burst or cap_s, or raise interval_s"
            )
        return self

    def nominal_delay_s(self, failures: int) -> float:
        """Delay before the next start after so many counted failures, without jitter."""
        if failures < 1:
            return 0.0
        delay = self.base_s
        for _ in range(failures - 1):
            delay *= self.factor
            if delay >= self.cap_s:
                return self.cap_s
        return min(self.cap_s, delay)

    def seconds_to_burst(self) -> float:
        """Least time in which a run that dies at once exceeds the burst."""
        total = 0.0
        for failures in range(1, self.burst + 1):
            total += self.nominal_delay_s(failures)
            if total >= self.interval_s:
                break
        return total


class DriftPolicy(Table):
    """What happens when the newest release or environment differs from the running one."""

    release: DriftAction = "notify"
    capability: DriftAction = "at_next_checkpoint"
    critical: DriftAction = "notify"
    minor: DriftAction = "notify"
    debounce_s: Seconds = 60
    min_interval_s: Seconds = 21_600
    auto_revert: Flag = True


class Probe(Table):
    """How often a probe looks, and how many answers in a row change its verdict."""

    period_s: PositiveSeconds = 5
    timeout_s: PositiveSeconds = 5
    failure_threshold: PositiveCount = 3
    success_threshold: PositiveCount = 1

    @property
    def worst_case_s(self) -> float:
        """Longest time between a failure and its report."""
        return self.period_s * self.failure_threshold + self.timeout_s


class LivenessProbe(Probe):
    """Does the identified process exist? Its absence is evidence, so one look is enough."""

    timeout_s: PositiveSeconds = 10
    failure_threshold: PositiveCount = 1


class ReadinessProbe(Probe):
    """Has training begun? Until `ready_timeout_s` not being ready is no failure."""

    timeout_s: PositiveSeconds = 10
    failure_threshold: PositiveCount = 1


class ProgressProbe(Probe):
    """The step counter: a limit learnt from the run itself, never below `floor_s`."""

    factor: Annotated[float, Field(strict=True, gt=1, le=1000)] = 5
    floor_s: PositiveSeconds = 60
    failure_threshold: PositiveCount = 1
    action: Literal["log_only", "restart"] = "log_only"


class QualityProbe(Probe):
    """Is the result sane: a reported NaN is immediate, a throughput drop needs several samples."""

    nan: Literal["log_only", "hold", "rollback"] = "log_only"
    throughput_drop: Annotated[float, Field(strict=True, gt=0, lt=1)] = 0.3
    action: Literal["log_only", "hold", "rollback"] = "log_only"


class HealthPolicy(Table):
    """The four layers: liveness, readiness, progress, quality."""

    ready_timeout_s: PositiveSeconds = 1800
    ready_regex: str = ""
    progress_regex: str = ""
    liveness: LivenessProbe = LivenessProbe()
    readiness: ReadinessProbe = ReadinessProbe()
    progress: ProgressProbe = ProgressProbe()
    quality: QualityProbe = QualityProbe()

    @property
    def period_s(self) -> float:
        """How often at least to look: all four probes are judged by the same look."""
        return min(probe.period_s for probe in (self.liveness, self.readiness, self.progress, self.quality))

    def detects_within_s(self) -> dict[str, float]:
        """Longest time until each layer reports a failure, while the node answers."""
        return {
            "liveness": self.liveness.worst_case_s,
            "readiness": self.ready_timeout_s + self.readiness.worst_case_s,
            "progress": self.progress.floor_s + self.progress.worst_case_s,
            "quality": self.quality.worst_case_s,
        }

    @field_validator("ready_regex", "progress_regex")
    @classmethod
    def _regex(cls, value: str) -> str:
        return check_regex(value)


class StopPolicy(Table):
    """The ladder of a stop and the gate after it."""

    signal: Literal["SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"] = "SIGTERM"
    grace_s: Seconds = 120
    extend_max_s: Seconds = 900
    term_s: Seconds = 30
    kill_s: Seconds = 10
    verify_s: PositiveSeconds = 60
    gpu_wait_s: Seconds = 50
    gpu_free_bytes: Bytes = 536_870_912
    orphan_after_s: Seconds = 0

    @property
    def longest_s(self) -> float:
        """Time until a stop must have ended or become a quarantine."""
        return max(self.grace_s, self.extend_max_s) + self.term_s + self.kill_s + self.verify_s


class LogPolicy(Table):
    """Where the log goes and when its size becomes a condition."""

    pattern: str = "{log_dir}/train_{name}{attempt}.log"
    warn_bytes: Bytes = 10_000_000_000
    min_free_bytes: Bytes = 5_000_000_000
    action: Literal["notify", "stop_at_checkpoint"] = "notify"

    @field_validator("pattern")
    @classmethod
    def _pattern(cls, value: str) -> str:
        return check_log_pattern(value)


class Capabilities(Table):
    """Optional parts: `required` refuses a launch without them, `wanted` shows their absence."""

    nvml: Need = "wanted"
    wandb: Need = "wanted"
    flash_linear_attention: Need = "wanted"
    kernels: Need = "wanted"
    gpu_direct: Need = "off"
