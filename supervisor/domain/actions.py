"""What `decide` may answer. Each action is a frozen value that names its attempt and says why.

Carried out by the reconciler's `act` and `apply`; every one is safe to repeat. Nothing here acts.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any, TypeAlias

from supervisor.domain.facts import StopCause, Trigger
from supervisor.domain.restart import Ledger
from supervisor.domain.run import AttemptState, Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Nothing:
    """Wait; `reason` says for what."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanAttempt:
    """Create the next attempt's row as `planned`; no side effect yet."""

    trigger: Trigger
    intent: int
    resume: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Preflight:
    """Run the checks before launch; `planned` becomes `preflight`."""

    attempt_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Commit `launching`, then send the start request."""

    attempt_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolveLaunch:
    """Ask the shim for the attempt; with `tombstone`, first make a late start impossible."""

    attempt_id: str
    tombstone: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Advance:
    """Change to a state that is not final: planned, started, ready, quarantined."""

    attempt_id: str
    state: AttemptState
    reason: Reason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Commit `stopping` (unless it is already), then ask the shim; idempotent by `stop_id`."""

    attempt_id: str
    stop_id: str
    cause: StopCause
    reason: str
    save: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishAttempt:
    """Change to a final state, on evidence."""

    attempt_id: str
    state: AttemptState
    reason: Reason
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleRestart:
    """Remember when the next attempt may begin, and what the end of this one cost."""

    attempt_id: str
    at: datetime
    is_counted: bool
    trigger: Trigger
    reason: str
    ledger: Ledger


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """Refuse further starts until an operator asks again."""

    attempt_id: str | None
    reason: Reason
    message: str
    ledger: Ledger


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRun:
    """No further attempt: it succeeded, or its failure is not one that a restart cures."""

    attempt_id: str
    is_success: bool
    reason: Reason
    ledger: Ledger


@dataclass(frozen=True, slots=True, kw_only=True)
class Revert:
    """Mark the new pair bad and pin the run to the last good one; comes with a ScheduleRestart."""

    attempt_id: str
    bad_deployment_id: str
    good_deployment_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PassGate:
    """The attempt has been healthy long enough: its pair is good, its failures are forgotten."""

    attempt_id: str
    deployment_id: str | None
    ledger: Ledger


Action: TypeAlias = (
    Nothing
    | PlanAttempt
    | Preflight
    | Launch
    | ResolveLaunch
    | Advance
    | Stop
    | FinishAttempt
    | ScheduleRestart
    | Hold
    | EndRun
    | Revert
    | PassGate
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Actions in order, a stable reason word and one sentence of explanation."""

    actions: tuple[Action, ...]
    reason: str
    explanation: str

    def to_json(self) -> dict[str, Any]:
        """For the run's `last_decision` and `/explain`."""
        return {
            "reason": self.reason,
            "explanation": self.explanation,
            "actions": [_action_json(action) for action in self.actions],
        }


def one(action: Action, reason: str, explanation: str) -> Decision:
    """A decision for a single action."""
    return Decision(actions=(action,), reason=reason, explanation=explanation)


def wait(reason: str, explanation: str) -> Decision:
    """A decision for nothing now."""
    return one(Nothing(reason=reason), reason, explanation)


def _action_json(action: Action) -> dict[str, Any]:
    rendered: dict[str, Any] = {"action": type(action).__name__}
    for item in fields(action):
        value = getattr(action, item.name)
        if isinstance(value, Ledger):
            value = value.to_json()
        elif isinstance(value, datetime):
            value = value.isoformat()
        rendered[item.name] = value
    return rendered
