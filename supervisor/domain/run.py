"""What a run and an attempt can be: the closed sets of states, phases, reasons and conditions.

Owns the literal transition table, the groups LIVE and TERMINAL, and the reasons with what they mean. The
check of one change is in `transitions.py`, the choice of the next change in `decide.py`. Pure data: no I/O,
no clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Any


class AttemptState(StrEnum):
    """One process lifetime of a run. `unreachable` is deliberately absent: it is a condition."""

    PLANNED = "planned"
    PREFLIGHT = "preflight"
    LAUNCHING = "launching"
    STARTED = "started"
    READY = "ready"
    STOPPING = "stopping"
    SUCCEEDED = "succeeded"
    STOPPED = "stopped"
    FAILED = "failed"
    LAUNCH_FAILED = "launch_failed"
    LOST = "lost"
    QUARANTINED = "quarantined"


_S = AttemptState

TRANSITIONS: Mapping[AttemptState, frozenset[AttemptState]] = MappingProxyType(
    {
        _S.PLANNED: frozenset({_S.PREFLIGHT, _S.STOPPED}),
        _S.PREFLIGHT: frozenset({_S.LAUNCHING, _S.LAUNCH_FAILED, _S.STOPPED}),
        _S.LAUNCHING: frozenset({_S.STARTED, _S.LAUNCH_FAILED, _S.LOST, _S.PLANNED, _S.STOPPED}),
        _S.STARTED: frozenset({_S.READY, _S.STOPPING, _S.SUCCEEDED, _S.FAILED, _S.LOST}),
        _S.READY: frozenset({_S.STOPPING, _S.SUCCEEDED, _S.FAILED, _S.LOST}),
        _S.STOPPING: frozenset({_S.STOPPED, _S.SUCCEEDED, _S.FAILED, _S.LOST, _S.QUARANTINED}),
        _S.QUARANTINED: frozenset({_S.STOPPED, _S.FAILED, _S.LOST}),
        _S.SUCCEEDED: frozenset(),
        _S.STOPPED: frozenset(),
        _S.FAILED: frozenset(),
        _S.LAUNCH_FAILED: frozenset(),
        _S.LOST: frozenset(),
    }
)
"""Every change an attempt may make; anything else is an InvalidTransitionError."""

TERMINAL: frozenset[AttemptState] = frozenset(
    {_S.SUCCEEDED, _S.STOPPED, _S.FAILED, _S.LAUNCH_FAILED, _S.LOST}
)
"""Rows in these states never change again (a lost one may gain its exit record once)."""

LIVE: frozenset[AttemptState] = frozenset(AttemptState) - TERMINAL
"""An attempt that holds its run: no second one may exist beside it."""

RUNNING: frozenset[AttemptState] = frozenset({_S.STARTED, _S.READY, _S.STOPPING, _S.QUARANTINED})
"""States in which a process with a known identity exists, as far as we know."""


class DesiredState(StrEnum):
    """What an actor asked for."""

    RUNNING = "running"
    STOPPED = "stopped"


class RunPhase(StrEnum):
    """Derived from desired and the newest attempt, see `decide.derive_phase`; never stored by hand."""

    PENDING = "pending"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    BACKOFF = "backoff"
    HELD = "held"
    STOPPED = "stopped"
    SUCCEEDED = "succeeded"
    FAILED = "failed"


class ConditionType(StrEnum):
    """Everything orthogonal to the state; each is true, false or unknown, with a reason and a since."""

    REACHABLE = "Reachable"
    ALIVE = "Alive"
    READY = "Ready"
    PROGRESSING = "Progressing"
    QUALITY_OK = "QualityOK"
    TELEMETRY_OK = "TelemetryOK"
    CAPABILITIES_OK = "CapabilitiesOK"
    ENVIRONMENT_IN_SYNC = "EnvironmentInSync"
    RELEASE_CURRENT = "ReleaseCurrent"
    GPU_CLEAN = "GpuClean"
    DISK_OK = "DiskOK"
    SHIM_PRESENT = "ShimPresent"


class ConditionStatus(StrEnum):
    """`unknown` is not `false`."""

    TRUE = "true"
    FALSE = "false"
    UNKNOWN = "unknown"


class Reason(StrEnum):
    """Why an attempt ended or a run is held. `retryable` is its own nature; policy rules come first."""

    COMPLETED = "Completed"
    STOP_REQUESTED = "StopRequested"
    RESTART_REQUESTED = "RestartRequested"
    DRIFT_RESTART = "DriftRestart"
    CANNOT_BOOT = "CannotBoot"
    NON_FINITE = "NonFinite"
    OUT_OF_MEMORY = "OutOfMemory"
    PIPELINE_FAILED = "PipelineFailed"
    STOPPED_EXTERNALLY = "StoppedExternally"
    EXITED_NON_ZERO = "ExitedNonZero"
    KILLED_BY_SIGNAL = "KilledBySignal"
    OOM_KILLED = "OomKilled"
    READY_TIMEOUT = "ReadyTimeout"
    PROGRESS_TIMEOUT = "ProgressTimeout"
    PREFLIGHT_FAILED = "PreflightFailed"
    EXEC_FAILED = "ExecFailed"
    LOG_EXISTS = "LogExists"
    LOCK_HELD = "LockHeld"
    NO_SPACE = "NoSpace"
    LAUNCH_REJECTED = "LaunchRejected"
    TOMBSTONE = "Tombstone"
    CONTAINER_RESTARTED = "ContainerRestarted"
    CONTAINER_STOPPED = "ContainerStopped"
    HOST_REBOOTED = "HostRebooted"
    SHIM_LOST = "ShimLost"
    DECLARED_LOST = "DeclaredLost"
    STILL_ALIVE = "StillAlive"
    CRASH_LOOP = "CrashLoop"
    BUDGET_EXHAUSTED = "BudgetExhausted"
    UNCOUNTED_CEILING = "UncountedCeiling"
    NO_PROGRESS = "NoProgress"
    REPEATED_CAUSE = "RepeatedCause"
    GPU_NOT_RELEASED = "GpuNotReleased"
    QUARANTINED = "Quarantined"
    QUALITY_HOLD = "QualityHold"
    GATE_FAILED = "GateFailed"
    HELD_BY_RULE = "HeldByRule"
    DISK_LOW = "DiskLow"

    @property
    def retryable(self) -> bool:
        """Whether starting again can help without anybody changing something."""
        return self in _RETRYABLE

    @property
    def message(self) -> str:
        """What it means, for people; the event adds the figures."""
        return _MESSAGES[self]


_RETRYABLE = frozenset(
    {
        Reason.PIPELINE_FAILED,
        Reason.STOPPED_EXTERNALLY,
        Reason.EXITED_NON_ZERO,
        Reason.KILLED_BY_SIGNAL,
        Reason.OOM_KILLED,
        Reason.READY_TIMEOUT,
        Reason.PROGRESS_TIMEOUT,
        Reason.LOCK_HELD,
        Reason.NO_SPACE,
        Reason.LOG_EXISTS,
        Reason.CONTAINER_RESTARTED,
        Reason.CONTAINER_STOPPED,
        Reason.HOST_REBOOTED,
        Reason.SHIM_LOST,
        Reason.RESTART_REQUESTED,
        Reason.DRIFT_RESTART,
    }
)

_MESSAGES: Mapping[Reason, str] = MappingProxyType(
    {
        Reason.COMPLETED: "finished by itself with a success exit code",
        Reason.STOP_REQUESTED: "ended after the stop that was asked for",
        Reason.RESTART_REQUESTED: "ended for the restart that was asked for",
        Reason.DRIFT_RESTART: "ended to take up a newer release or environment",
        Reason.CANNOT_BOOT: "configuration, data, checkpoint or a dependency stops it from starting",
        Reason.NON_FINITE: "gave up after too many non-finite losses or gradients",
        Reason.OUT_OF_MEMORY: "ran out of GPU memory; the same settings will do so again",
        Reason.PIPELINE_FAILED: "a worker died or stalled",
        Reason.STOPPED_EXTERNALLY: "was told to stop by something other than this supervisor",
        Reason.EXITED_NON_ZERO: "exited with a failure code",
        Reason.KILLED_BY_SIGNAL: "was ended by a signal that this supervisor did not send",
        Reason.OOM_KILLED: "was ended by the kernel for lack of memory",
        Reason.READY_TIMEOUT: "did not begin training within its ready timeout",
        Reason.PROGRESS_TIMEOUT: "made no progress for longer than its limit",
        Reason.PREFLIGHT_FAILED: "a required check before launch failed",
        Reason.EXEC_FAILED: "the program could not be executed",
        Reason.LOG_EXISTS: "a file already lies where the log should go",
        Reason.LOCK_HELD: "another live trainer holds the run's or a GPU's lock",
        Reason.NO_SPACE: "too little free disk space on the node",
        Reason.LAUNCH_REJECTED: "the shim refused the launch request",
        Reason.TOMBSTONE: "the launch was abandoned before the process existed",
        Reason.CONTAINER_RESTARTED: "the container was restarted; its processes are gone",
        Reason.CONTAINER_STOPPED: "the host says the container is stopped",
        Reason.HOST_REBOOTED: "the host was rebooted; its processes are gone",
        Reason.SHIM_LOST: "the process is gone and so is the shim that would know its exit code",
        Reason.DECLARED_LOST: "an operator declared it lost",
        Reason.STILL_ALIVE: "still there after SIGKILL, probably in uninterruptible sleep",
        Reason.CRASH_LOOP: "failed too often within the policy's interval",
        Reason.BUDGET_EXHAUSTED: "used up its restarts",
        Reason.UNCOUNTED_CEILING: "restarted too often within a day without counted failures",
        Reason.NO_PROGRESS: "ended repeatedly without a newer checkpoint",
        Reason.REPEATED_CAUSE: "failed repeatedly for the same cause without a newer checkpoint",
        Reason.GPU_NOT_RELEASED: "GPU memory was not released after the end of the process",
        Reason.QUARANTINED: "a process that cannot be killed holds its GPUs",
        Reason.QUALITY_HOLD: "quality probe failed and its action is hold",
        Reason.GATE_FAILED: "neither the new release and environment nor the last good pair became healthy",
        Reason.HELD_BY_RULE: "a restart rule or default says hold",
        Reason.DISK_LOW: "stopped at a checkpoint because disk space ran low",
    }
)


def condition(
    kind: ConditionType,
    status: ConditionStatus | bool | None,
    *,
    reason: str,
    message: str = "",
    since: str,
) -> dict[str, Any]:
    """Build one condition as it is stored and shown; None means unknown."""
    if not isinstance(status, ConditionStatus):
        status = {True: ConditionStatus.TRUE, False: ConditionStatus.FALSE, None: ConditionStatus.UNKNOWN}[
            status
        ]
    return {"type": kind.value, "status": status.value, "reason": reason, "message": message, "since": since}


def merge_condition(conditions: list[dict[str, Any]], new: dict[str, Any]) -> list[dict[str, Any]]:
    """Replace the condition of the same type; `since` is kept while the status stays the same."""
    merged = []
    is_placed = False
    for old in conditions:
        if old["type"] != new["type"]:
            merged.append(old)
            continue
        merged.append({**new, "since": old["since"]} if old["status"] == new["status"] else new)
        is_placed = True
    return merged if is_placed else [*merged, new]
