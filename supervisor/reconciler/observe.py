"""Looks at one run's newest attempt and its node, and turns the answers into evidence for `decide`.

Called by the loop once a pass. Asks the agent by attempt id, adds what the sampler received, and says for
each thing whether it is known. A question that was not answered leaves None: nothing follows from silence.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import structlog

from supervisor.clock import Clock
from supervisor.domain import health
from supervisor.domain.errors import ContainerError, ShimError, TransportError
from supervisor.domain.facts import (
    DriftFacts,
    ExitFacts,
    GpuMemory,
    LaunchError,
    Observed,
    PreflightResult,
    ShimAnswer,
)
from supervisor.domain.metrics import read_metric
from supervisor.domain.policy import Probe, QualityProbe
from supervisor.domain.reports import clean_status
from supervisor.domain.run import AttemptState, Reason
from supervisor.domain.spec import RunSpec
from supervisor.reconciler.connections import NodeConnection
from supervisor.reconciler.logscan import LogScan
from supervisor.reconciler.sampler import AttemptView, GpuView, Sampler
from supervisor.store.tables import Attempt

log = structlog.get_logger(__name__)

DISK_PERIOD_S = 30.0
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

    attempt_id: str = ""
    ended_seen_s: float | None = None
    """When this daemon first saw that the attempt has ended, on the monotonic clock."""
    scan: LogScan = field(default_factory=LogScan)
    progress: health.ProgressMemory = field(default_factory=health.ProgressMemory)
    quality: health.QualityMemory = field(default_factory=health.QualityMemory)
    metrics_t: float = 0.0
    """Time of the newest metrics line that was looked at."""
    non_finite: list[str] = field(default_factory=list)
    probes: dict[str, health.ProbeMemory] = field(default_factory=dict)
    """What each probe answers and how often in a row it was contradicted, by the probe's name."""
    disk_at_s: float | None = None
    is_disk_low: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthView:
    """The judgements of one pass, for decision and conditions alike."""

    alive: health.Verdict
    ready: health.Verdict
    progress: health.Verdict
    quality: health.Verdict


NOT_KNOWN = health.Verdict(ok=None, reason="NotKnown")


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

    @property
    def is_folder_gone(self) -> bool:
        """Whether the attempt's folder was removed: only its processes can still be asked about."""
        return bool(self.reply.get("is_folder_gone"))


async def look_at(connection: NodeConnection | None, attempt: Attempt, *, deadline_s: float) -> Look:
    """Ask the agent for an attempt that should have a folder in the node."""
    if connection is None or AttemptState(attempt.state) not in _ASKED_STATES:
        return Look()
    try:
        reply = await connection.request(
            "status",
            attempt_id=attempt.id,
            identity=attempt.identity,
            shim=attempt.shim_identity,
            deadline_s=deadline_s,
        )
    except ShimError as error:
        if error.reason == "NoSuchAttempt":
            return Look(answer=ShimAnswer.NO_SUCH_ATTEMPT)
        return Look(error=error.message)
    except (TransportError, ContainerError) as error:
        return Look(error=error.message)
    if reply.get("status") is not None:
        reply = {**reply, "status": clean_status(reply["status"])}
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Everything that one pass knows."""

    observed: Observed
    look: Look
    health: HealthView


async def observe(scene: Scene) -> Evidence:
    """Gather the evidence about the newest attempt."""
    attempt, connection = scene.attempt, scene.connection
    at = scene.clock.now()
    reachable = connection.reach.is_reachable if connection is not None else None
    if attempt is None:
        nothing = HealthView(alive=NOT_KNOWN, ready=NOT_KNOWN, progress=NOT_KNOWN, quality=NOT_KNOWN)
        return Evidence(observed=Observed(at=at, reachable=reachable), look=Look(), health=nothing)
    look = await look_at(connection, attempt, deadline_s=scene.spec.health.liveness.timeout_s)
    if look.answer is ShimAnswer.KNOWN:
        await _scan_log(scene, attempt)
        await _look_at_disk(scene, attempt, look)
    view = scene.sampler.attempt(attempt.id)
    status = _newest_status(attempt, look, view)
    judged = judge_health(scene, attempt, status, look, view)
    observed = Observed(
        at=at,
        reachable=reachable,
        shim_answer=look.answer,
        shim_phase=look.state.get("phase"),
        shim_stop_id=(look.state.get("stop") or {}).get("id"),
        alive=judged.alive.ok,
        shim_alive=look.reply.get("shim_alive"),
        exit=exit_facts(look.exit),
        launch_error=_launch_error(attempt, look),
        gone=find_gone(connection, attempt, look),
        preflight=_preflight(attempt),
        gpu_memory=_gpu_memory(scene, attempt),
        is_ready=judged.ready.ok,
        is_progress_late=None if judged.progress.ok is None else not judged.progress.ok,
        is_non_finite=judged.quality.reason == "NonFinite",
        is_quality_bad=None if judged.quality.ok is None else not judged.quality.ok,
        is_disk_low=scene.memory.is_disk_low,
        phase=status.get("phase"),
        checkpoint_at=checkpoint_time(status),
        drift=scene.drift,
    )
    return Evidence(observed=observed, look=look, health=judged)


async def _look_at_disk(scene: Scene, attempt: Attempt, look: Look) -> None:
    """Size of the log and free space beside it, against the run's limits; once in a while."""
    memory, now_s = scene.memory, scene.clock.monotonic()
    if scene.connection is None or (
        memory.disk_at_s is not None and now_s - memory.disk_at_s < DISK_PERIOD_S
    ):
        return
    folder = posixpath.dirname(attempt.log_path)
    try:
        reply = await scene.connection.request("paths", paths=[folder])
    except (TransportError, ContainerError, ShimError) as error:
        log.info("disk could not be looked at", attempt=attempt.id, reason=error.reason)
        return
    memory.disk_at_s = now_s
    free, size = reply["paths"][folder]["disk"].get("free"), look.reply.get("log_size")
    if free is None or size is None:
        memory.is_disk_low = None
        return
    limits = scene.spec.log
    memory.is_disk_low = size > limits.warn_bytes or free < limits.min_free_bytes


async def _scan_log(scene: Scene, attempt: Attempt) -> None:
    policy = scene.spec.health
    if not (policy.ready_regex or policy.progress_regex) or scene.connection is None:
        return
    try:
        await scene.memory.scan.advance(scene.connection, attempt.id, policy, scene.clock.monotonic())
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


def _gpu_memory(scene: Scene, attempt: Attempt) -> GpuMemory:
    """What is known of the memory on the ended attempt's GPUs."""
    if not attempt.gpus or attempt.ended_at is None or scene.connection is None:
        return GpuMemory.UNKNOWN
    view, now_s = scene.sampler.gpus(scene.connection.address.id), scene.clock.monotonic()
    if scene.memory.ended_seen_s is None:
        scene.memory.ended_seen_s = now_s
    return judge_gpu_memory(
        attempt, view, scene.spec.stop.gpu_free_bytes, since_s=scene.memory.ended_seen_s, now_s=now_s
    )


def judge_gpu_memory(
    attempt: Attempt, view: GpuView | None, free_bytes: int, *, since_s: float, now_s: float
) -> GpuMemory:
    """Compare the newest sample with the limit.

    A sample from before the end proves nothing, neither that the memory is free nor that it is in use.
    """
    if view is None or view.is_stale(now_s) or view.sample.get("reason"):
        return GpuMemory.UNKNOWN
    if view.received_s <= since_s:
        return GpuMemory.AWAITED
    used = {gpu.get("uuid"): gpu.get("mem_used_bytes") for gpu in view.sample.get("gpus") or ()}
    mine = [used.get(gpu["uuid"]) for gpu in attempt.gpus]
    known = [value for value in mine if value is not None]
    if any(value > free_bytes for value in known):
        return GpuMemory.IN_USE
    return GpuMemory.FREE if len(known) == len(mine) else GpuMemory.UNKNOWN


def judge_health(
    scene: Scene, attempt: Attempt, status: Mapping[str, Any], look: Look, view: AttemptView | None
) -> HealthView:
    """Readiness, progress and quality, after the memory has learnt from this look."""
    is_known = look.answer is ShimAnswer.KNOWN
    state, memory, policy = AttemptState(attempt.state), scene.memory, scene.spec.health
    phase, step = status.get("phase"), _step_of(status, memory)
    now_s = scene.clock.monotonic()
    seen = health.judge_liveness(alive=look.reply.get("alive"), shim_alive=look.reply.get("shim_alive"))
    alive = _settled(memory, "liveness", policy.liveness, seen, now_s)
    ready = NOT_KNOWN
    if is_known and state is AttemptState.STARTED:
        ready = health.judge_readiness(
            policy,
            phase=phase,
            step=_step_since_start(step, memory),
            has_ready_line=memory.scan.is_ready if policy.ready_regex else False,
            has_output=bool(look.reply.get("log_size")),
            is_program=scene.spec.command.is_program,
            running_s=_age_s(attempt.started_at, scene.clock),
        )
        memory.probes["readiness"], ready = health.settle_readiness(
            memory.probes.get("readiness", health.ProbeMemory()), policy.readiness, ready, now_s=now_s
        )
    if state is not AttemptState.READY:
        return HealthView(alive=alive, ready=ready, progress=NOT_KNOWN, quality=NOT_KNOWN)
    _learn(memory, view, step, phase, now_s, policy.quality)
    progress = NOT_KNOWN
    if is_known:
        progress = health.judge_progress(
            memory.progress,
            policy.progress,
            phase=phase,
            phase_age_s=_phase_age_s(status, scene.clock),
            now_s=now_s,
        )
        progress = _settled(memory, "progress", policy.progress, progress, now_s)
    quality = health.judge_quality(memory.quality, policy.quality, non_finite=memory.non_finite)
    # Its failures were counted in samples already, and a NaN counts at once.
    counted = policy.quality.model_copy(update={"failure_threshold": 1})
    quality = _settled(memory, "quality", counted, quality, now_s)
    return HealthView(alive=alive, ready=ready, progress=progress, quality=quality)


def _settled(
    memory: AttemptMemory, name: str, probe: Probe, verdict: health.Verdict, now_s: float
) -> health.Verdict:
    known = memory.probes.get(name, health.ProbeMemory())
    memory.probes[name], settled = health.settle(known, probe, verdict, now_s=now_s)
    return settled


def _learn(
    memory: AttemptMemory,
    view: AttemptView | None,
    step: int | None,
    phase: str | None,
    now_s: float,
    probe: QualityProbe,
) -> None:
    memory.progress = health.remember_step(memory.progress, step=step, phase=phase, now_s=now_s)
    for record in view.metrics if view is not None else ():
        if record["t"] <= memory.metrics_t:
            continue
        memory.metrics_t = record["t"]
        memory.non_finite = health.find_non_finite(record)
        speed = read_metric(record, "train.tok_s")
        memory.quality = health.remember_throughput(
            memory.quality, probe, float(speed) if isinstance(speed, int | float) else None
        )


def _step_of(status: Mapping[str, Any], memory: AttemptMemory) -> int | None:
    step = status.get("step")
    return step if isinstance(step, int) and not isinstance(step, bool) else memory.scan.step


def _step_since_start(step: int | None, memory: AttemptMemory) -> int | None:
    """A resumed trainer begins at a high step: only one that moved proves that training has begun."""
    if memory.progress.step is None and step is not None:
        memory.progress = health.ProgressMemory(step=step)
        return None
    return step if step is not None and step != memory.progress.step else None


def _age_s(since: datetime | None, clock: Clock) -> float | None:
    return (clock.now() - since).total_seconds() if since is not None else None


def _phase_age_s(status: Mapping[str, Any], clock: Clock) -> float | None:
    since = status.get("phase_since")
    return clock.now().timestamp() - since if isinstance(since, int | float) else None


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
