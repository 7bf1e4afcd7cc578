"""The pure core of the reconciler: what to do next about one run, and why.

`decide` reads intent, evidence and history and answers with actions; it has no I/O, no clock and no chance in
it, so the same input always gives the same answer and each stored decision can be replayed. Order of the
questions: has it ended, must it stop, may it be replaced, is it healthy; and without a live attempt: may
another one begin. A failure to ask is never evidence: unknown leads to waiting or to asking again.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from supervisor.domain.actions import (
    Advance,
    Decision,
    Hold,
    Launch,
    PlanAttempt,
    Preflight,
    ResolveLaunch,
    Stop,
    one,
    wait,
)
from supervisor.domain.ends import find_end, finish
from supervisor.domain.facts import (
    AttemptFacts,
    Desired,
    DriftFacts,
    GpuMemory,
    History,
    Observed,
    ShimAnswer,
    StopCause,
    Trigger,
)
from supervisor.domain.restart import is_over_ceiling
from supervisor.domain.run import AttemptState, DesiredState, Reason, RunPhase
from supervisor.domain.spec import RunSpec
from supervisor.domain.succession import judge_newest, passed_gate


def decide(
    desired: Desired, observed: Observed, history: History, policy: RunSpec, now: datetime, seed: int
) -> Decision:
    """Choose the next actions for one run.

    Args:
        desired: what an actor asked for.
        observed: newest evidence about the newest attempt.
        history: attempts, ledger and hold.
        policy: the run's spec; while an attempt lives, the one that it pinned.
        now: decision time, from a clock that does not jump.
        seed: for the jitter of the backoff.
    """
    live = history.live
    if live is None:
        return _without_attempt(desired, observed, history, policy, now, seed)
    end = find_end(desired, live, observed, policy)
    if end is not None:
        return one(end, end.reason.value, end.message or end.reason.message)
    if live.state in (AttemptState.PLANNED, AttemptState.PREFLIGHT, AttemptState.LAUNCHING):
        return _before_start(desired, live, observed)
    if live.state is AttemptState.QUARANTINED:
        return wait("Quarantined", "a process that cannot be killed is left; it needs a person")
    if live.state is AttemptState.STOPPING:
        return _while_stopping(desired, live, observed, policy, now)
    return _while_running(desired, live, observed, history, policy, now)


def derive_phase(desired: Desired, history: History) -> RunPhase:
    """The run's phase, from what is wanted and its newest attempt."""
    live = history.live
    if live is not None:
        if live.state is AttemptState.QUARANTINED:
            return RunPhase.HELD
        if live.state is AttemptState.STOPPING:
            return RunPhase.STOPPING
        return RunPhase.RUNNING if live.state is AttemptState.READY else RunPhase.STARTING
    newest = history.newest
    is_current = newest is not None and newest.intent >= desired.intent
    if desired.state is DesiredState.STOPPED:
        if newest is not None and newest.state is AttemptState.SUCCEEDED:
            return RunPhase.SUCCEEDED
        return RunPhase.STOPPED if newest or desired.intent else RunPhase.PENDING
    if history.hold is not None and history.hold.intent >= desired.intent:
        return RunPhase.HELD
    if newest is None or not is_current:
        return RunPhase.STARTING
    if newest.state is AttemptState.SUCCEEDED and history.ledger.verdict != "restart":
        return RunPhase.SUCCEEDED
    if history.ledger.evaluated != newest.id:
        return RunPhase.BACKOFF
    ends = {"succeeded": RunPhase.SUCCEEDED, "fail": RunPhase.FAILED, "hold": RunPhase.HELD}
    return ends.get(history.ledger.verdict or "", RunPhase.BACKOFF)


def _before_start(desired: Desired, live: AttemptFacts, observed: Observed) -> Decision:
    is_unwanted = desired.state is DesiredState.STOPPED or live.intent < desired.intent
    if live.state is not AttemptState.LAUNCHING:
        if is_unwanted:
            end = finish(
                live, AttemptState.STOPPED, _unwanted_reason(desired), "ended before it was launched"
            )
            return one(end, "StoppedBeforeLaunch", end.message)
        if live.state is AttemptState.PLANNED:
            return one(Preflight(attempt_id=live.id), "Preflight", "checks must pass before the launch")
        return _after_preflight(live, observed)
    if observed.shim_answer is ShimAnswer.KNOWN and observed.shim_phase in ("running", "stopping", "exited"):
        step = Advance(attempt_id=live.id, state=AttemptState.STARTED)
        return one(step, "ExecVerified", "the shim knows the process; its identity is recorded")
    if is_unwanted:
        abandon = ResolveLaunch(attempt_id=live.id, tombstone=True)
        return one(abandon, "AbandonLaunch", "a stop was asked for while the launch was under way")
    has_proof = observed.shim_answer is ShimAnswer.NO_SUCH_ATTEMPT and observed.at > live.last_action_at
    if has_proof:
        again = Advance(attempt_id=live.id, state=AttemptState.PLANNED)
        return one(again, "LaunchNeverArrived", "the shim proved that it has no such attempt; same id again")
    if observed.reachable is False:
        return wait("Unreachable", "whether the launch arrived is not known, and the node cannot be asked")
    is_fresh = observed.at > live.last_action_at
    if observed.shim_phase == "launching" and is_fresh and observed.alive is observed.shim_alive is False:
        settle = ResolveLaunch(attempt_id=live.id, tombstone=True)
        return one(settle, "LaunchDied", "the shim died before the exec: the attempt is closed in the node")
    if observed.shim_phase == "launching":
        return wait("Launching", "the shim is about to execute the program")
    ask = ResolveLaunch(attempt_id=live.id)
    return one(ask, "LaunchUnknown", "whether the launch arrived is not known: the shim must be asked first")


def _after_preflight(live: AttemptFacts, observed: Observed) -> Decision:
    if observed.preflight is None:
        return one(Preflight(attempt_id=live.id), "Preflight", "checks have not been answered yet")
    if observed.preflight.is_ok:
        return one(Launch(attempt_id=live.id), "Launch", "all required checks passed")
    end = finish(live, AttemptState.LAUNCH_FAILED, Reason.PREFLIGHT_FAILED, observed.preflight.message)
    return one(end, "PreflightFailed", observed.preflight.message)


def _while_stopping(
    desired: Desired, live: AttemptFacts, observed: Observed, policy: RunSpec, now: datetime
) -> Decision:
    stop = live.stop
    assert stop is not None
    is_quarantined = observed.exit is not None and observed.exit.is_quarantined
    deadline = stop.requested_at + timedelta(seconds=policy.stop.longest_s)
    if is_quarantined or (observed.alive is True and now > deadline and observed.at > deadline):
        step = Advance(attempt_id=live.id, state=AttemptState.QUARANTINED, reason=Reason.STILL_ALIVE)
        return one(step, "StillAlive", Reason.STILL_ALIVE.message)
    if observed.shim_stop_id == stop.id:
        return wait("Stopping", "the shim carries out the stop with its own deadlines")
    again = Stop(
        attempt_id=live.id, stop_id=stop.id, cause=stop.cause, reason=desired.stop_reason, save=stop.save
    )
    return one(again, "StopNotConfirmed", "the shim has not confirmed the stop: sent again with the same id")


def _while_running(
    desired: Desired,
    live: AttemptFacts,
    observed: Observed,
    history: History,
    policy: RunSpec,
    now: datetime,
) -> Decision:
    asked = _asked_stop(desired, live, observed)
    if asked is not None:
        return asked
    if observed.at < live.last_action_at:
        return wait("StaleObservation", "the evidence is older than the last action")
    if live.state is AttemptState.STARTED:
        if observed.is_ready:
            step = Advance(attempt_id=live.id, state=AttemptState.READY)
            return one(step, "Ready", "training has begun")
        begun = live.started_at or live.last_action_at
        limit_s = policy.health.ready_timeout_s
        if observed.is_ready is False and now - begun > timedelta(seconds=limit_s):
            return _begin_stop(
                live, StopCause.READY_TIMEOUT, f"not ready after {limit_s:g} s", save=False, tag="ready"
            )
    unhealthy = _unhealthy_stop(live, observed, policy)
    if unhealthy is not None:
        return unhealthy
    drifted = _drift_stop(live, observed, history, policy, now)
    if drifted is not None:
        return drifted
    return passed_gate(live, observed, history, policy, now) or wait("InSync", "what is wanted is running")


def _asked_stop(desired: Desired, live: AttemptFacts, observed: Observed) -> Decision | None:
    """A stop or restart that an actor asked for; it wins over everything that policy could want."""
    if desired.state is DesiredState.STOPPED:
        reason = desired.stop_reason or "stop requested"
        return _begin_stop(live, StopCause.STOP, reason, save=desired.stop_save, tag=str(desired.intent))
    if live.intent >= desired.intent:
        return None
    request = desired.restart
    if request is not None and request.when == "next_checkpoint":
        has_saved = observed.checkpoint_at is not None and observed.checkpoint_at > request.requested_at
        if not has_saved or observed.phase == "checkpointing":
            return wait("WaitForCheckpoint", "the restart was asked for at the next checkpoint")
    reason = request.reason if request is not None else "restart requested"
    save = request.save if request is not None else True
    return _begin_stop(live, StopCause.RESTART, reason, save=save, tag=str(desired.intent))


def _unhealthy_stop(live: AttemptFacts, observed: Observed, policy: RunSpec) -> Decision | None:
    health = policy.health
    if observed.is_progress_late and health.progress.action == "restart":
        return _begin_stop(
            live, StopCause.PROGRESS, "no progress within its limit", save=False, tag="progress"
        )
    is_enforced = (observed.is_non_finite and health.quality.nan != "log_only") or (
        bool(observed.is_quality_bad) and not observed.is_non_finite and health.quality.action != "log_only"
    )
    if is_enforced:
        what = "a non-finite value was reported" if observed.is_non_finite else "throughput dropped"
        return _begin_stop(live, StopCause.QUALITY, what, save=False, tag="quality")
    if observed.is_disk_low and policy.log.action == "stop_at_checkpoint":
        return _begin_stop(live, StopCause.DISK, "disk space ran low", save=True, tag="disk")
    return None


def _drift_stop(
    live: AttemptFacts, observed: Observed, history: History, policy: RunSpec, now: datetime
) -> Decision | None:
    drift = observed.drift
    if drift is None or drift.kind not in ("critical", "capability", "release", "minor"):
        return None
    action: str = getattr(policy.drift, drift.kind)
    if action == "notify":
        return None
    if now - drift.first_seen_at < timedelta(seconds=policy.drift.debounce_s):
        return wait("DriftDebounce", f"{drift.kind} drift is new; more changes may follow")
    last = history.last_drift_restart_at
    if last is not None and now - last < timedelta(seconds=policy.drift.min_interval_s):
        return wait("DriftInterval", "the last drift restart is too recent")
    if is_over_ceiling(history.ledger, policy.restart, now):
        return wait("DriftCeiling", "too many uncounted restarts today for another one")
    if observed.phase == "checkpointing":
        return wait("DriftCheckpointing", "never during a checkpoint")
    if action == "at_next_checkpoint":
        waiting = _drift_checkpoint_wait(observed, drift, policy)
        if waiting is not None:
            return waiting
    if action == "when_cheap" and not drift.is_cheap_now:
        return wait("DriftWaitsUntilCheap", f"{drift.kind} drift restarts when it costs little")
    reason = drift.message or f"{drift.kind} drift"
    return _begin_stop(
        live, StopCause.DRIFT, reason, save=True, tag=f"drift-{drift.first_seen_at.isoformat()}"
    )


def _drift_checkpoint_wait(observed: Observed, drift: DriftFacts, policy: RunSpec) -> Decision | None:
    """Say what the restart waits for, until a checkpoint came after the drift."""
    if observed.checkpoint_at is not None and observed.checkpoint_at > drift.first_seen_at:
        return None
    if policy.command.is_program and observed.checkpoint_at is None:
        # a program of the user's may never write one: the wait must say how it can end
        return wait(
            "DriftNoCheckpoints",
            f"{drift.kind} drift restarts at the next checkpoint, and this program has reported none yet: "
            "restart it by hand, or set this class of [drift] to now",
        )
    return wait("DriftWaitsForCheckpoint", f"{drift.kind} drift restarts at the next checkpoint")


def _without_attempt(
    desired: Desired, observed: Observed, history: History, policy: RunSpec, now: datetime, seed: int
) -> Decision:
    if desired.state is DesiredState.STOPPED:
        return wait("Stopped", "nobody wants it to run")
    if history.hold is not None and history.hold.intent >= desired.intent:
        return wait("Held", history.hold.message)
    newest = history.newest
    if newest is None:
        return _plan(desired, Trigger.START, "first attempt")
    if (
        newest.reason is Reason.DECLARED_LOST
        and observed.reachable is not True
        and not desired.may_start_unseen
    ):
        return wait("HostNotSeen", "declared lost: a second copy waits until the node has been seen again")
    gate = _gpu_gate(newest, observed, history, policy, now)
    if newest.intent < desired.intent:
        trigger = (
            Trigger.OPERATOR if newest.stop and newest.stop.cause is StopCause.RESTART else Trigger.START
        )
        return gate or _plan(desired, trigger, "an operator asked for a start")
    if history.ledger.evaluated != newest.id:
        return judge_newest(newest, history, policy, now, seed)
    if history.ledger.verdict != "restart" or history.next_start_at is None:
        return wait("Ended", "no further attempt follows from the newest one")
    if now < history.next_start_at:
        return wait(
            "Backoff", f"the next attempt begins at {history.next_start_at.isoformat(timespec='seconds')}"
        )
    if observed.reachable is False:
        return wait("Unreachable", "the node cannot be reached: nothing is restarted meanwhile")
    return gate or _plan(desired, Trigger(history.ledger.trigger or Trigger.FAILURE), "its delay is over")


def _gpu_gate(
    newest: AttemptFacts, observed: Observed, history: History, policy: RunSpec, now: datetime
) -> Decision | None:
    """Wait until the GPUs of the ended attempt are measured to be free; kill nothing."""
    is_open = observed.gpu_memory in (GpuMemory.FREE, GpuMemory.UNKNOWN)
    if not newest.has_gpus or newest.is_gpu_clean or is_open:
        return None
    if observed.gpu_memory is GpuMemory.AWAITED:
        return wait("GpuBusy", "waiting for a GPU sample from after the end")
    waited_s = (now - (newest.ended_at or now)).total_seconds()
    if waited_s <= policy.stop.gpu_wait_s:
        return wait("GpuBusy", "waiting until GPU memory is released")
    message = f"{Reason.GPU_NOT_RELEASED.message}: still in use after {waited_s:.0f} s"
    hold = Hold(attempt_id=newest.id, reason=Reason.GPU_NOT_RELEASED, message=message, ledger=history.ledger)
    return one(hold, Reason.GPU_NOT_RELEASED.value, message)


def _plan(desired: Desired, trigger: Trigger, why: str) -> Decision:
    resume = desired.resume
    if desired.restart is not None and desired.restart.resume and desired.restart.intent == desired.intent:
        resume = desired.restart.resume if trigger in (Trigger.START, Trigger.OPERATOR) else "latest"
    elif trigger not in (Trigger.START, Trigger.OPERATOR):
        resume = "latest"
    step = PlanAttempt(trigger=trigger, intent=desired.intent, resume=resume)
    return one(step, "Start", why)


def _begin_stop(live: AttemptFacts, cause: StopCause, reason: str, *, save: bool, tag: str) -> Decision:
    stop = Stop(
        attempt_id=live.id, stop_id=f"{live.id}-{cause.value}-{tag}", cause=cause, reason=reason, save=save
    )
    return one(stop, f"Stop{cause.value.title().replace('_', '')}", reason)


def _unwanted_reason(desired: Desired) -> Reason:
    return Reason.STOP_REQUESTED if desired.state is DesiredState.STOPPED else Reason.RESTART_REQUESTED
