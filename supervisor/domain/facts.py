"""What `decide` is given: intent, evidence and history, as frozen values.

Built from rows by `store.facts` and from the node's answers by the reconciler's observation. None always
means "not known", never "no". No I/O, no clock: every age and time comes from the caller.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Literal

from supervisor.domain.restart import Ledger
from supervisor.domain.run import LIVE, AttemptState, DesiredState, Reason


class StopCause(StrEnum):
    """Why a stop was begun; decides what the end of the attempt means."""

    STOP = "stop"
    RESTART = "restart"
    DRIFT = "drift"
    READY_TIMEOUT = "ready_timeout"
    PROGRESS = "progress"
    QUALITY = "quality"
    DISK = "disk"


class GpuMemory(StrEnum):
    """What the node's samples say of the memory on the GPUs of an attempt that has ended."""

    FREE = "free"
    IN_USE = "in use"
    AWAITED = "awaited"
    """Samples come, but none was taken since the end: nothing is known yet, and soon will be."""
    UNKNOWN = "unknown"
    """Nobody can measure it."""


class Trigger(StrEnum):
    """Why an attempt exists."""

    START = "start"
    OPERATOR = "operator"
    DRIFT = "drift"
    FAILURE = "failure"
    REVERT = "revert"
    HOST = "host"


class ShimAnswer(StrEnum):
    """What the shim said when it was asked for the attempt."""

    NONE = "none"
    """Not asked, or no answer: nothing follows from it."""
    KNOWN = "known"
    NO_SUCH_ATTEMPT = "no_such_attempt"


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartRequest:
    """An operator's wish to replace the live attempt."""

    intent: int
    when: Literal["now", "next_checkpoint"] = "now"
    save: bool = True
    resume: str | None = None
    reason: str = ""
    requested_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Desired:
    """What should be true."""

    state: DesiredState
    intent: int
    generation: int
    stop_save: bool = True
    stop_reason: str = ""
    restart: RestartRequest | None = None
    declare_lost: str | None = None
    """Id of the attempt that an operator declared lost."""
    may_start_unseen: bool = False
    """An operator forced a start although a lost attempt's node has not been seen again."""
    deployment_id: str | None = None
    """Pair that the next attempt would use."""
    resume: str = "latest"


@dataclass(frozen=True, slots=True, kw_only=True)
class StopFacts:
    """A stop that has been begun."""

    id: str
    cause: StopCause
    requested_at: datetime
    save: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptFacts:
    """One attempt as the store knows it."""

    id: str
    number: int
    state: AttemptState
    intent: int
    trigger: Trigger = Trigger.START
    reason: Reason | None = None
    launch_error_reason: str | None = None
    launch_errno: int | None = None
    deployment_id: str | None = None
    generation: int = 1
    last_action_at: datetime
    """When we last did something to it; older evidence triggers nothing."""
    started_at: datetime | None = None
    ready_at: datetime | None = None
    stopping_at: datetime | None = None
    ended_at: datetime | None = None
    stop: StopFacts | None = None
    exit_code: int | None = None
    exit_signal: int | None = None
    last_lines: tuple[str, ...] = ()
    phase: str | None = None
    has_new_checkpoint: bool | None = None
    """None when it cannot be known, as for a program that reports nothing."""
    progress_checks: int = 0
    cause_fingerprint: str | None = None
    has_gpus: bool = False
    is_gpu_clean: bool = False
    is_program: bool = False

    @property
    def is_live(self) -> bool:
        """Whether it has not ended."""
        return self.state in LIVE


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldFacts:
    """Policy refuses to start; only a new intent lifts it."""

    reason: Reason
    message: str
    intent: int


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What has happened so far; attempts newest first."""

    attempts: tuple[AttemptFacts, ...] = ()
    ledger: Ledger = field(default_factory=Ledger)
    hold: HoldFacts | None = None
    next_start_at: datetime | None = None
    good_deployment_id: str | None = None
    last_drift_restart_at: datetime | None = None

    @property
    def newest(self) -> AttemptFacts | None:
        """The attempt with the highest number."""
        return self.attempts[0] if self.attempts else None

    @property
    def live(self) -> AttemptFacts | None:
        """The attempt that has not ended."""
        return next((attempt for attempt in self.attempts if attempt.is_live), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitFacts:
    """The exit record as the shim wrote it."""

    code: int | None
    signal: int | None = None
    oom: bool | None = None
    is_quarantined: bool = False
    last_lines: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchError:
    """Why a process never came to be."""

    reason: str
    message: str
    errno: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightResult:
    """Outcome of the checks before a launch."""

    is_ok: bool
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftFacts:
    """The newest classified difference between what runs and what a new start would use."""

    kind: str
    """critical | capability | release | minor."""
    first_seen_at: datetime
    message: str = ""
    is_cheap_now: bool | None = None
    """Whether a restart now costs little; None when it cannot be told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Evidence about the newest attempt and its node, taken at `at`."""

    at: datetime
    reachable: bool | None = None
    shim_answer: ShimAnswer = ShimAnswer.NONE
    shim_phase: str | None = None
    """launching | running | stopping | exited | launch_failed | abandoned."""
    shim_stop_id: str | None = None
    alive: bool | None = None
    """Identity checked in the node; None when nobody could look."""
    shim_alive: bool | None = None
    exit: ExitFacts | None = None
    launch_error: LaunchError | None = None
    gone: Reason | None = None
    """Evidence that the processes cannot exist any more: restarted or stopped container, rebooted host."""
    preflight: PreflightResult | None = None
    gpu_memory: GpuMemory = GpuMemory.UNKNOWN
    is_ready: bool | None = None
    is_progress_late: bool | None = None
    is_non_finite: bool = False
    is_quality_bad: bool | None = None
    is_disk_low: bool | None = None
    phase: str | None = None
    checkpoint_at: datetime | None = None
    drift: DriftFacts | None = None
