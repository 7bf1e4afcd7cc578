"""Looks at one run's newest attempt and its node, and turns the answers into evidence for `decide`.

Called by the loop once a pass. Asks the agent by attempt id, adds what the sampler received, and says for
each thing whether it is known. A question that was not answered leaves None: nothing follows from silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import structlog

from supervisor.clock import Clock
from supervisor.domain.errors import ContainerError, ShimError, TransportError
from supervisor.domain.facts import (
    DriftFacts,
    ExitFacts,
    LaunchError,
    Observed,
    PreflightResult,
    ShimAnswer,
)
from supervisor.domain.metrics import read_metric
from supervisor.domain.run import AttemptState, Reason
from supervisor.domain.spec import RunSpec
from supervisor.reconciler.connections import NodeConnection
from supervisor.reconciler.logscan import LogScan
from supervisor.reconciler.sampler import AttemptView, GpuView, Sampler
from supervisor.store.tables import Attempt

log = structlog.get_logger(__name__)

STATUS_DEADLINE_S = 10.0
_READY_PHASES = frozenset({"training", "evaluating", "checkpointing", "draining", "done"})
_ASKED_STATES = frozenset(
    {
        AttemptState.LAUNCHING,
        AttemptState.STARTED,
        AttemptState.READY,
        AttemptState.STOPPING,
        AttemptState.QUARANTINED,
    }
)


@dataclass(slots=True)
class AttemptMemory:
    """What the loop remembers of an attempt between passes; rebuilt after a restart of the daemon."""

    scan: LogScan = field(default_factory=LogScan)
    step: int | None = None
    step_s: float | None = None


@dataclass(slots=True, kw_only=True)
class Look:
    """The agent's answer about one attempt, or why there is none."""

    answer: ShimAnswer = ShimAnswer.NONE
    reply: dict[str, Any] = field(default_factory=dict)
    error: str = ""

    @property
    def state(self) -> dict[str, Any]:
        """`state.json`, {} when unknown."""
        return self.reply.get("state") or {}

    @property
    def exit(self) -> dict[str, Any] | None:
        """`exit.json`."""
        return self.reply.get("exit")


async def look_at(connection: NodeConnection | None, attempt: Attempt) -> Look:
    """Ask the agent for an attempt that should have a folder in the node."""
    if connection is None or AttemptState(attempt.state) not in _ASKED_STATES:
        return Look()
    try:
        reply = await connection.request("status", attempt_id=attempt.id, deadline_s=STATUS_DEADLINE_S)
    except ShimError as error:
        if error.reason == "NoSuchAttempt":
            return Look(answer=ShimAnswer.NO_SUCH_ATTEMPT)
        return Look(error=error.message)
    except (TransportError, ContainerError) as error:
        return Look(error=error.message)
    return Look(answer=ShimAnswer.KNOWN, reply=reply)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """Where the evidence about one run comes from, during one pass."""

    connection: NodeConnection | None
    attempt: Attempt | None
    spec: RunSpec
    sampler: Sampler
    memory: AttemptMemory
    clock: Clock
    drift: DriftFacts | None = None
    is_disk_low: bool | None = None


async def observe(scene: Scene) -> tuple[Observed, Look]:
    """Gather the evidence about the newest attempt."""
    attempt, connection = scene.attempt, scene.connection
    at = scene.clock.now()
    reachable = connection.reach.is_reachable if connection is not None else None
    if attempt is None:
        return Observed(at=at, reachable=reachable), Look()
    look = await look_at(connection, attempt)
    if look.answer is ShimAnswer.KNOWN:
        await _scan_log(scene, attempt)
    view = scene.sampler.attempt(attempt.id)
    status = _newest_status(attempt, look, view)
    observed = Observed(
        at=at,
        reachable=reachable,
        shim_answer=look.answer,
        shim_phase=look.state.get("phase"),
        shim_stop_id=(look.state.get("stop") or {}).get("id"),
        alive=look.reply.get("alive"),
        shim_alive=look.reply.get("shim_alive"),
        exit=exit_facts(look.exit),
        launch_error=_launch_error(attempt, look),
        gone=find_gone(connection, attempt, look),
        preflight=_preflight(attempt),
        gpu_clean=_gpu_clean(scene, attempt),
        is_ready=_is_ready(scene, attempt, status, look),
        is_progress_late=None,
        is_non_finite=_is_non_finite(view),
        is_disk_low=scene.is_disk_low,
        phase=status.get("phase"),
        checkpoint_at=checkpoint_time(status),
        drift=scene.drift,
    )
    return observed, look


async def _scan_log(scene: Scene, attempt: Attempt) -> None:
    health = scene.spec.health
    if not (health.ready_regex or health.progress_regex) or scene.connection is None:
        return
    try:
        await scene.memory.scan.advance(scene.connection, attempt.id, health, scene.clock.monotonic())
    except (TransportError, ContainerError, ShimError) as error:
        log.info("log could not be searched", attempt=attempt.id, reason=error.reason)


def _newest_status(attempt: Attempt, look: Look, view: AttemptView | None) -> Mapping[str, Any]:
    """The trainer's own record: as just read, else as last received, else as stored."""
    return look.reply.get("status") or (view.status if view else None) or attempt.last_status or {}


def exit_facts(record: Mapping[str, Any] | None) -> ExitFacts | None:
    """The exit record for `decide`."""
    if record is None:
        return None
    return ExitFacts(
        code=record.get("code"),
        signal=record.get("signal"),
        oom=record.get("oom"),
        is_quarantined=bool(record.get("quarantined")),
        last_lines=tuple(str(line) for line in record.get("last_lines") or ()),
    )


def _launch_error(attempt: Attempt, look: Look) -> LaunchError | None:
    """Of the start request's answer (stored), or of the shim's own record when the answer was lost."""
    error = attempt.launch_error
    if error is None and look.state.get("phase") == "launch_failed":
        error = look.state.get("launch_error") or {"reason": "LaunchRejected", "message": "launch failed"}
    if error is None:
        return None
    return LaunchError(reason=error["reason"], message=error["message"], errno=error.get("errno"))


def find_gone(connection: NodeConnection | None, attempt: Attempt, look: Look) -> Reason | None:
    """Evidence that the attempt's processes cannot exist: stopped container, other boot, other init."""
    if connection is None or attempt.identity is None:
        return None
    if connection.reach.container_status == "stopped":
        return Reason.CONTAINER_STOPPED
    if look.answer is ShimAnswer.NONE or look.exit is not None:
        return None
    hello = connection.hello or {}
    identity = attempt.identity
    if hello.get("boot_id") and hello["boot_id"] != identity.get("boot_id"):
        return Reason.HOST_REBOOTED
    if hello.get("init_ticks") is not None and hello["init_ticks"] != identity.get("init_ticks"):
        return Reason.CONTAINER_RESTARTED
    return None


def _preflight(attempt: Attempt) -> PreflightResult | None:
    if attempt.preflight is None:
        return None
    failed = [item for item in attempt.preflight if item["status"] == "fail"]
    message = "; ".join(
        item["message"] + (f" ({item['remedy']})" if item.get("remedy") else "") for item in failed
    )
    return PreflightResult(is_ok=not failed, message=message)


def _gpu_clean(scene: Scene, attempt: Attempt) -> bool | None:
    """Whether the ended attempt's GPUs are measured to be free; None where nobody can measure."""
    if not attempt.gpus or attempt.ended_at is None or scene.connection is None:
        return None
    view = scene.sampler.gpus(scene.connection.address.id)
    return gpus_released(attempt, view, scene.spec.stop.gpu_free_bytes, scene.clock.monotonic())


def gpus_released(attempt: Attempt, view: GpuView | None, free_bytes: int, monotonic_s: float) -> bool | None:
    """Compare the newest sample, taken after the end, with the limit."""
    if view is None or view.is_stale(monotonic_s) or view.sample.get("reason"):
        return None
    ended = attempt.ended_at
    if ended is not None and float(view.sample.get("t") or 0) < ended.timestamp():
        return None
    used = {gpu.get("uuid"): gpu.get("mem_used_bytes") for gpu in view.sample.get("gpus") or ()}
    mine = [used.get(gpu["uuid"]) for gpu in attempt.gpus]
    known = [value for value in mine if value is not None]
    return all(value <= free_bytes for value in known) if len(known) == len(mine) else None


def _is_ready(scene: Scene, attempt: Attempt, status: Mapping[str, Any], look: Look) -> bool | None:
    if AttemptState(attempt.state) is not AttemptState.STARTED:
        return None
    if look.answer is not ShimAnswer.KNOWN:
        return None
    if status.get("phase") in _READY_PHASES:
        return True
    if scene.spec.health.ready_regex:
        return scene.memory.scan.is_ready
    if scene.spec.command.is_program:
        return bool(look.reply.get("log_size"))  # no pattern was given: its first output has to do
    return False


def _is_non_finite(view: AttemptView | None) -> bool:
    """Whether the newest metrics line reports a NaN or an infinity for the loss or a gradient norm."""
    if view is None or not view.metrics:
        return False
    names = view.metrics[-1].get("nonfinite") or []
    return any(str(name).split(".")[-1] in ("loss", "grad_norm") for name in names)


def checkpoint_time(status: Mapping[str, Any]) -> datetime | None:
    """When the newest checkpoint was saved, by the trainer's own word."""
    saved = read_metric(status, "last_checkpoint.saved_at")
    if isinstance(saved, int | float):
        return datetime.fromtimestamp(saved, UTC)
    if isinstance(saved, str):
        try:
            parsed = datetime.fromisoformat(saved)
        except ValueError:
            return None
        return parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)
    return None
