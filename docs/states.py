"""Renders docs/reference/states.md from the closed sets of `supervisor.domain.run`.

Called by `docs.generate` and by the test that compares page and code. The diagram comes from the transition
table, messages and retry from the reasons; only what a name cannot say stands here.
"""

from __future__ import annotations

from collections.abc import Mapping

from supervisor.domain.restart import DEFAULTS
from supervisor.domain.run import (
    TERMINAL,
    TRANSITIONS,
    AttemptState,
    ConditionType,
    Reason,
    RunPhase,
)
from supervisor.domain.transitions import render_diagram

STATES: Mapping[AttemptState, tuple[str, str]] = {
    AttemptState.PLANNED: ("written down, nothing done yet", "a decision to start"),
    AttemptState.PREFLIGHT: ("checks before the launch", "the checks have begun"),
    AttemptState.LAUNCHING: ("the start request may have reached the node", "committed before it is sent"),
    AttemptState.STARTED: ("the process exists, its identity is recorded", "the shim's answer or record"),
    AttemptState.READY: ("training has begun", "phase, first step, or the ready line"),
    AttemptState.STOPPING: ("a stop is on its way, with its deadlines", "committed before the first signal"),
    AttemptState.SUCCEEDED: ("ended by itself with a success code", "exit record"),
    AttemptState.STOPPED: ("ended because it was asked to", "exit record, or absence verified in the node"),
    AttemptState.FAILED: ("ended otherwise", "exit record"),
    AttemptState.LAUNCH_FAILED: (
        "never came to be; the cause is kept",
        "a failed check, or the shim's refusal",
    ),
    AttemptState.LOST: (
        "certainly gone, exit code unknowable",
        "another boot, a stopped container, process and shim absent",
    ),
    AttemptState.QUARANTINED: (
        "outlived SIGKILL; keeps its GPUs",
        "still there when its absence should be verified",
    ),
}
"""Meaning, and the evidence that leads into the state."""

PHASES: Mapping[RunPhase, str] = {
    RunPhase.PENDING: "stored, never started",
    RunPhase.STARTING: "wanted; its attempt is not ready yet",
    RunPhase.RUNNING: "wanted, and its attempt is ready",
    RunPhase.STOPPING: "its attempt is being stopped",
    RunPhase.BACKOFF: "the next attempt waits for its delay, or the last end has not been judged yet",
    RunPhase.HELD: "policy refuses to start another attempt; the reason says why, a start lifts it",
    RunPhase.STOPPED: "not wanted, nothing live",
    RunPhase.SUCCEEDED: "finished",
    RunPhase.FAILED: "ended, and a restart cannot help",
}

CONDITIONS: Mapping[ConditionType, str] = {
    ConditionType.REACHABLE: "the node answers; false needs three failures over a minute, or the host's "
    "own word",
    ConditionType.ALIVE: "a process with the recorded identity exists",
    ConditionType.READY: "training has begun",
    ConditionType.PROGRESSING: "the step counter moves within its limit",
    ConditionType.QUALITY_OK: "values are finite and throughput has not dropped",
    ConditionType.TELEMETRY_OK: "GPU samples arrive; else the reason, such as `MissingDependency`",
    ConditionType.CAPABILITIES_OK: "everything that the run file declares was found by the checks "
    "before launch",
    ConditionType.ENVIRONMENT_IN_SYNC: "the packages of the running attempt are those of the next start",
    ConditionType.RELEASE_CURRENT: "the trainer's source of the running attempt is that of the next start",
    ConditionType.GPU_CLEAN: "the ended attempt's GPU memory was measured to be released",
    ConditionType.DISK_OK: "log below `warn_bytes`, free space above `min_free_bytes`",
    ConditionType.SHIM_PRESENT: "the attempt's shim lives; false: the trainer goes on, its exit code "
    "will not be known",
}

_HEAD = """# States, phases, conditions, reasons

Written by `make docs` from `supervisor/domain/run.py`; a test compares the two. What decides between them
is in [concepts/supervision](../concepts/supervision.md).

## Attempt states

A state changes only along these lines, together with its event, in one transaction. A final state never
changes again; one that is `lost` may gain its exit record once.
"""


def render_states_page() -> str:
    """Return docs/reference/states.md."""
    lines = [_HEAD, f"```mermaid\n{render_diagram()}```", ""]
    lines += ["| state | meaning | entered on | may become |", "|---|---|---|---|"]
    for state in AttemptState:
        meaning, evidence = STATES[state]
        after = ", ".join(f"`{name.value}`" for name in sorted(TRANSITIONS[state]))
        lines.append(
            f"| `{state.value}` | {meaning} | {evidence} | {after if state not in TERMINAL else 'final'} |"
        )
    lines += [
        "",
        "## Run phases",
        "",
        "Derived from what is wanted and from the newest attempt; never stored by hand.",
        "",
    ]
    lines += ["| phase | meaning |", "|---|---|"]
    lines += [f"| `{phase.value}` | {PHASES[phase]} |" for phase in RunPhase]
    lines += [
        "",
        "## Conditions",
        "",
        "Each is `true`, `false` or `unknown`, with a reason, a message and the time since when. "
        "Unknown is not false.",
        "",
    ]
    lines += ["| condition | true means |", "|---|---|"]
    lines += [f"| `{kind.value}` | {CONDITIONS[kind]} |" for kind in ConditionType]
    lines += ["", "## Reasons", "", *_reasons()]
    lines += ["", "## Reasons of the checks before a launch", "", *_check_reasons()]
    return "\n".join(lines) + "\n"


def _reasons() -> list[str]:
    lines = [
        "Why an attempt ended or a run is held. *Retryable*: starting again can help although nobody changed",
        "anything. *Default*: what `[restart]` does without a rule of the run's own.",
        "",
        "| reason | meaning | retryable | default |",
        "|---|---|---|---|",
    ]
    for reason in Reason:
        retryable = "yes" if reason.retryable else "no"
        lines.append(f"| `{reason.value}` | {reason.message} | {retryable} | {_default_of(reason)} |")
    return lines


CHECK_REASONS: Mapping[str, str] = {
    "NotDeployed": "no release and environment has been deployed to the node",
    "ReleaseMissing": "the deployed release is gone from the node",
    "EnvironmentMissing": "the deployed environment is gone from the node",
    "InterpreterMissing": "the Python interpreter is not there, or cannot be executed",
    "ProgramMissing": "the first word of `[command] argv` is no executable file on the node",
    "PathMissing": "a path that the run names does not exist on the node",
    "NotWritable": "a folder cannot be written to",
    "NoSpace": "too little free disk space",
    "GpuNotFound": "the run asks for a GPU that the node does not have",
    "SecretMissing": "a secret that the run names is not set",
    "MissingDependency": "a required capability's package is not in the environment",
    "ImportFailed": "a required capability's package is there but cannot be imported",
    "LibraryNotFound": "the driver's libraries are not in the node",
    "DriverMismatch": "the driver's libraries in the node are not of its host's version",
    "NoCuda": "torch was built without CUDA, or sees no GPU",
    "CapabilityUnknown": "a capability was not probed in this environment",
    "OtherSource": "what is deployed was built from another source than the run file names (a warning)",
    "OtherLock": "what is deployed was built from another lock than the run file names (a warning)",
    "LockNotFound": "the lock that the run file names cannot be read, so it was not compared (a warning)",
}
"""What a check calls its cause: the reasons that a person meets behind `PreflightFailed`."""


def _check_reasons() -> list[str]:
    lines = [
        "An attempt that a check kept from its launch has the reason `PreflightFailed`. The check has a name",
        "for the cause, which stands before it wherever the end is shown:",
        "`ProgramMissing (PreflightFailed)`.",
        "Rules of `[restart]` look at the reason, not at the cause.",
        "",
        "| cause | meaning |",
        "|---|---|",
    ]
    return lines + [f"| `{name}` | {meaning} |" for name, meaning in CHECK_REASONS.items()]


_NOT_JUDGED: Mapping[Reason, str] = {
    Reason.COMPLETED: "end",
    Reason.STOP_REQUESTED: "end",
    Reason.TOMBSTONE: "end",
    Reason.STILL_ALIVE: "wait for a person",
    Reason.QUARANTINED: "wait for a person",
    **dict.fromkeys(
        (
            Reason.CRASH_LOOP,
            Reason.BUDGET_EXHAUSTED,
            Reason.UNCOUNTED_CEILING,
            Reason.NO_PROGRESS,
            Reason.REPEATED_CAUSE,
            Reason.GPU_NOT_RELEASED,
            Reason.GATE_FAILED,
            Reason.HELD_BY_RULE,
        ),
        "is a hold",
    ),
}
"""Reasons that no rule looks at: ends that were asked for, and holds."""


def _default_of(reason: Reason) -> str:
    if reason in _NOT_JUDGED:
        return _NOT_JUDGED[reason]
    return DEFAULTS.get(reason, "restart").replace("_", ", ")
