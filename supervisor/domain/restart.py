"""The restart policy: rules and defaults, backoff with jitter, and the ledger that bounds every path.

Pure and clock-free. `decide` calls `judge_end` once for each ended attempt; the ledger it returns is stored
with the run, so that counters survive the daemon.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Literal

from supervisor.domain.policy import RestartPolicy, RestartRule, RuleAction
from supervisor.domain.run import AttemptState, Reason

JITTER = 0.2
DAY = timedelta(days=1)
MAX_LINES = 200
MAX_LINE = 2000

Verdict = Literal["restart", "succeeded", "stopped", "fail", "hold"]

DEFAULTS: Mapping[Reason, RuleAction] = {
    Reason.CONTAINER_RESTARTED: "restart_uncounted",
    Reason.CONTAINER_STOPPED: "restart_uncounted",
    Reason.HOST_REBOOTED: "restart_uncounted",
    Reason.DRIFT_RESTART: "restart_uncounted",
    Reason.RESTART_REQUESTED: "restart_uncounted",
    Reason.STOPPED_EXTERNALLY: "restart_uncounted",
    Reason.LOG_EXISTS: "restart_uncounted",
    Reason.PREFLIGHT_FAILED: "fail",
    Reason.EXEC_FAILED: "fail",
    Reason.LAUNCH_REJECTED: "fail",
    Reason.CANNOT_BOOT: "fail",
    Reason.OUT_OF_MEMORY: "fail",
    Reason.DECLARED_LOST: "hold",
    Reason.NON_FINITE: "hold",
    Reason.QUALITY_HOLD: "hold",
    Reason.DISK_LOW: "hold",
}
"""Tried after the run's own rules; every reason that is absent restarts, counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedAttempt:
    """The end of an attempt, as far as the policy looks at it."""

    id: str
    state: AttemptState
    reason: Reason
    ended_at: datetime
    exit_code: int | None = None
    exit_signal: int | None = None
    phase: str | None = None
    last_lines: tuple[str, ...] = ()
    has_new_checkpoint: bool | None = None
    cause_fingerprint: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Counters of a run since its last explicit start; all times are when attempts ended."""

    streak: int = 0
    """Counted failures since the last healthy reset."""
    counted: tuple[datetime, ...] = ()
    uncounted: tuple[datetime, ...] = ()
    restarts: int = 0
    """Counted restarts in this start's life."""
    no_progress: int = 0
    cause: str | None = None
    cause_streak: int = 0
    evaluated: str | None = None
    """Attempt whose end was judged last."""
    verdict: Verdict | None = None
    trigger: str | None = None
    """Why the next attempt will exist, while one is scheduled."""

    def to_json(self) -> dict[str, Any]:
        """As stored with the run."""
        return {
            "streak": self.streak,
            "counted": [at.isoformat() for at in self.counted],
            "uncounted": [at.isoformat() for at in self.uncounted],
            "restarts": self.restarts,
            "no_progress": self.no_progress,
            "cause": self.cause,
            "cause_streak": self.cause_streak,
            "evaluated": self.evaluated,
            "verdict": self.verdict,
            "trigger": self.trigger,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Ledger:
        """Read what `to_json` wrote; an empty dict is a fresh ledger."""
        known = dict(data)
        for name in ("counted", "uncounted"):
            known[name] = tuple(datetime.fromisoformat(text) for text in known.get(name, ()))
        return cls(**known)

    def remaining(self, policy: RestartPolicy, now: datetime) -> dict[str, int]:
        """What is left before each limit holds the run."""
        window = _within(self.counted, now, timedelta(seconds=policy.interval_s))
        return {
            "restarts": max(0, policy.max_restarts - self.restarts),
            "burst": max(0, policy.burst - len(window)),
            "no_progress": max(0, policy.no_progress - self.no_progress),
            "uncounted": max(0, policy.uncounted_per_day - len(_within(self.uncounted, now, DAY))),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class EndJudgement:
    """What follows from an end."""

    verdict: Verdict
    ledger: Ledger
    reason: Reason
    message: str
    start_at: datetime | None = None
    is_counted: bool = False


def judge_end(
    ended: EndedAttempt, policy: RestartPolicy, ledger: Ledger, *, now: datetime, seed: int
) -> EndJudgement:
    """Apply rules, defaults and limits to the end of an attempt that nobody asked to stop.

    Args:
        ended: the attempt.
        policy: of the run's spec.
        ledger: before this end.
        now: decision time.
        seed: for the jitter; the same seed gives the same delay.
    """
    ledger = replace(ledger, evaluated=ended.id, trigger=None)
    if ended.state is AttemptState.SUCCEEDED and policy.policy != "always":
        return _end("succeeded", ledger, ended.reason, "finished")
    action, origin = choose_action(ended, policy)
    if action == "fail":
        return _end("fail", ledger, ended.reason, f"{origin} says that a restart cannot help")
    if action == "hold":
        reason = ended.reason if ended.reason in DEFAULTS else Reason.HELD_BY_RULE
        return _end("hold", ledger, reason, f"{origin} says hold")
    if policy.policy == "never":
        return _end("fail", ledger, ended.reason, "the restart policy is never")
    is_counted = action == "restart"
    ledger = _count(ended, ledger, policy, is_counted=is_counted)
    limit = _exceeded_limit(ended, ledger, policy, is_counted=is_counted)
    if limit is not None:
        return _end("hold", ledger, limit[0], limit[1])
    delay_s = backoff_s(policy, ledger.streak, seed=seed) if is_counted else 0.0
    start_at = max(now, ended.ended_at + timedelta(seconds=delay_s))
    if is_counted:
        ledger = replace(ledger, restarts=ledger.restarts + 1)
    return EndJudgement(
        verdict="restart",
        ledger=replace(ledger, verdict="restart"),
        reason=ended.reason,
        message=f"{origin} says {action.replace('_', ' ')}, in {delay_s:.0f} s",
        start_at=start_at,
        is_counted=is_counted,
    )


def choose_action(ended: EndedAttempt, policy: RestartPolicy) -> tuple[RuleAction, str]:
    """First rule that matches, else the default for the reason; also says which it was."""
    for position, rule in enumerate(policy.rules):
        if rule_matches(rule, ended):
            return rule.action, f"rule {position + 1}"
    if ended.state is AttemptState.SUCCEEDED:
        return "restart", "policy always"
    return DEFAULTS.get(ended.reason, "restart"), f"the default for {ended.reason.value}"


def rule_matches(rule: RestartRule, ended: EndedAttempt) -> bool:
    """Whether every matcher that the rule gives fits."""
    if rule.reason is not None and rule.reason != ended.reason.value:
        return False
    if rule.exit_codes is not None and ended.exit_code not in rule.exit_codes:
        return False
    if rule.signal is not None and rule.signal != ended.exit_signal:
        return False
    if rule.phase is not None and rule.phase != ended.phase:
        return False
    if rule.log_pattern is not None:
        pattern = re.compile(rule.log_pattern)
        return any(pattern.search(line[:MAX_LINE]) for line in ended.last_lines[-MAX_LINES:])
    return True


def backoff_s(policy: RestartPolicy, failures: int, *, seed: int) -> float:
    """Delay before the next start: capped exponential, spread by at most a fifth to either side."""
    digest = hashlib.sha256(f"{seed}/{failures}".encode()).digest()
    unit = int.from_bytes(digest[:8], "big") / 2**64
    return policy.nominal_delay_s(failures) * (1 + JITTER * (2 * unit - 1))


def forget_failures(ledger: Ledger) -> Ledger:
    """The healthy reset: the backoff starts over; the sliding windows and the lifetime budget stay."""
    return replace(ledger, streak=0, no_progress=0, cause=None, cause_streak=0)


def count_uncounted(ledger: Ledger, attempt_id: str, at: datetime) -> Ledger:
    """Enter a restart that was triggered, not failed, into the ledger of uncounted ones."""
    kept = (*_within(ledger.uncounted, at, DAY), at)
    return replace(ledger, uncounted=kept, evaluated=attempt_id, verdict="restart")


def is_over_ceiling(ledger: Ledger, policy: RestartPolicy, at: datetime) -> bool:
    """Whether one more uncounted restart would be too many for a day."""
    return len(_within(ledger.uncounted, at, DAY)) >= policy.uncounted_per_day


def classify_exit(
    code: int | None,
    signal: int | None,
    *,
    oom: bool | None,
    success_codes: Sequence[int],
    is_program: bool,
) -> tuple[AttemptState, Reason]:
    """State and reason of an attempt that ended although nobody asked it to.

    The exit codes of the bundled trainer mean nothing for other programs.
    """
    if code is not None and code in success_codes:
        return AttemptState.SUCCEEDED, Reason.COMPLETED
    if oom:
        return AttemptState.FAILED, Reason.OOM_KILLED
    if signal is not None:
        return AttemptState.FAILED, Reason.KILLED_BY_SIGNAL
    if is_program or code is None:
        return AttemptState.FAILED, Reason.EXITED_NON_ZERO
    return AttemptState.FAILED, _TRAINER_CODES.get(code, Reason.EXITED_NON_ZERO)


_TRAINER_CODES: Mapping[int, Reason] = {
    2: Reason.CANNOT_BOOT,
    3: Reason.CANNOT_BOOT,
    4: Reason.CANNOT_BOOT,
    5: Reason.NON_FINITE,
    6: Reason.OUT_OF_MEMORY,
    7: Reason.PIPELINE_FAILED,
    8: Reason.CANNOT_BOOT,
    9: Reason.STOPPED_EXTERNALLY,
}

LAUNCH_REASONS: Mapping[str, Reason] = {
    "LogExists": Reason.LOG_EXISTS,
    "LockHeld": Reason.LOCK_HELD,
    "ExecFailed": Reason.EXEC_FAILED,
    "NoSpace": Reason.NO_SPACE,
    "Tombstone": Reason.TOMBSTONE,
    "ShimDied": Reason.SHIM_LOST,
}
"""The shim's words for a failed launch; any other one is LaunchRejected."""

_FRAME = re.compile(r'^\s*File "([^"]+)", line \d+, in (\S+)')
_RAISED = re.compile(
    r"^((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Warning|Stalled|Died))\b"
)


def failure_fingerprint(last_lines: Sequence[str], phase: str | None) -> str | None:
    """Exception type, innermost frame of the project and phase; None when no traceback is among the lines."""
    raised: str | None = None
    frame = ""
    for line in last_lines:
        place = _FRAME.match(line[:MAX_LINE])
        if place and ("/site-packages/" not in place.group(1) and "/lib/python" not in place.group(1)):
            frame = f"{place.group(1).rsplit('/', 1)[-1]}:{place.group(2)}"
        found = _RAISED.match(line[:MAX_LINE])
        if found:
            raised = found.group(1)
    return None if raised is None else f"{raised} in {frame or 'unknown'} while {phase or 'unknown'}"


def _end(verdict: Verdict, ledger: Ledger, reason: Reason, message: str) -> EndJudgement:
    return EndJudgement(
        verdict=verdict, ledger=replace(ledger, verdict=verdict), reason=reason, message=message
    )


def _count(ended: EndedAttempt, ledger: Ledger, policy: RestartPolicy, *, is_counted: bool) -> Ledger:
    at = ended.ended_at
    if not is_counted:
        return replace(ledger, uncounted=(*_within(ledger.uncounted, at, DAY), at))
    window = _within(ledger.counted, at, timedelta(seconds=policy.interval_s))
    ledger = replace(ledger, streak=ledger.streak + 1, counted=(*window, at))
    if ended.has_new_checkpoint:
        return replace(ledger, no_progress=0, cause=ended.cause_fingerprint, cause_streak=1)
    is_same = ended.cause_fingerprint is not None and ended.cause_fingerprint == ledger.cause
    return replace(
        ledger,
        no_progress=ledger.no_progress + (ended.has_new_checkpoint is False),
        cause=ended.cause_fingerprint,
        cause_streak=ledger.cause_streak + 1 if is_same else 1,
    )


def _exceeded_limit(
    ended: EndedAttempt, ledger: Ledger, policy: RestartPolicy, *, is_counted: bool
) -> tuple[Reason, str] | None:
    if not is_counted:
        if len(ledger.uncounted) > policy.uncounted_per_day:
            return Reason.UNCOUNTED_CEILING, f"{len(ledger.uncounted)} uncounted restarts within a day"
        return None
    if len(ledger.counted) > policy.burst:
        return Reason.CRASH_LOOP, f"{len(ledger.counted)} failures within {policy.interval_s:g} s"
    if ledger.restarts >= policy.max_restarts:
        return Reason.BUDGET_EXHAUSTED, f"all {policy.max_restarts} restarts are used up"
    has_cause = ended.cause_fingerprint is not None and not ended.has_new_checkpoint
    if has_cause and ledger.cause_streak >= policy.no_progress:
        return Reason.REPEATED_CAUSE, f"{ledger.cause_streak} times in a row: {ended.cause_fingerprint}"
    if ledger.no_progress >= policy.no_progress:
        return Reason.NO_PROGRESS, f"{ledger.no_progress} attempts in a row ended without a newer checkpoint"
    return None


def _within(times: Sequence[datetime], now: datetime, span: timedelta) -> tuple[datetime, ...]:
    return tuple(at for at in times if now - at < span)
