"""The pure core of the reconciler: what to do next about one run, and why.

`decide` reads intent, evidence and history and answers with actions; it has no I/O, no clock and no chance in
it, so the same input always gives the same answer and each stored decision can be replayed. Order of the
questions: has it ended, must it stop, may it be replaced, is it healthy; and without a live attempt: may
another one begin. A failure to ask is never evidence: unknown leads to waiting or to asking again.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from supervisor.domain.actions import (
    Action,
    Advance,
    Decision,
    EndRun,
    FinishAttempt,
    Hold,
    Launch,
    Nothing,
    PassGate,
    PlanAttempt,
    Preflight,
    ResolveLaunch,
    Revert,
    ScheduleRestart,
    Stop,
)
from supervisor.domain.facts import (
    AttemptFacts,
    Desired,
    History,
    Observed,
    ShimAnswer,
    StopCause,
    Trigger,
)
from supervisor.domain.restart import (
    LAUNCH_REASONS,
    EndedAttempt,
    EndJudgement,
    Ledger,
    classify_exit,
    count_uncounted,
    forget_failures,
    is_over_ceiling,
    judge_end,
)
from supervisor.domain.run import AttemptState, DesiredState, Reason, RunPhase
from supervisor.domain.spec import RunSpec

_STOPPED_STATES: dict[StopCause, tuple[AttemptState, Reason]] = {
    StopCause.STOP: (AttemptState.STOPPED, Reason.STOP_REQUESTED),
    StopCause.RESTART: (AttemptState.STOPPED, Reason.RESTART_REQUESTED),
    StopCause.DRIFT: (AttemptState.STOPPED, Reason.DRIFT_RESTART),
    StopCause.READY_TIMEOUT: (AttemptState.FAILED, Reason.READY_TIMEOUT),
    StopCause.PROGRESS: (AttemptState.FAILED, Reason.PROGRESS_TIMEOUT),
    StopCause.QUALITY: (AttemptState.FAILED, Reason.QUALITY_HOLD),
    StopCause.DISK: (AttemptState.STOPPED, Reason.DISK_LOW),
}
"""What the end of a stop means, by why it was begun."""

_ASKED = (StopCause.STOP, StopCause.RESTART, StopCause.DRIFT)

_TRIGGERED = {Reason.RESTART_REQUESTED: Trigger.OPERATOR, Reason.DRIFT_RESTART: Trigger.DRIFT}

_GATE_EXEMPT = frozenset(
    {
        Reason.CONTAINER_RESTARTED,
        Reason.CONTAINER_STOPPED,
        Reason.HOST_REBOOTED,
        Reason.DECLARED_LOST,
        Reason.STOPPED_EXTERNALLY,
        Reason.LOG_EXISTS,
        Reason.LOCK_HELD,
        Reason.DISK_LOW,
    }
)
"""Ends that say nothing about the release or the environment."""


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
    end = _find_end(desired, live, observed, policy)
    if end is not None:
        return _one(end, end.reason.value, end.message or end.reason.message)
    if live.state in (AttemptState.PLANNED, AttemptState.PREFLIGHT, AttemptState.LAUNCHING):
        return _before_start(desired, live, observed)
    if live.state is AttemptState.QUARANTINED:
        return _wait("Quarantined", "a process that cannot be killed is left; it needs a person")
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


def _find_end(
    desired: Desired, live: AttemptFacts, observed: Observed, policy: RunSpec
) -> FinishAttempt | None:
    """The end of the live attempt, if there is evidence for one."""
    if observed.launch_error is not None and live.state is AttemptState.LAUNCHING:
        reason = LAUNCH_REASONS.get(observed.launch_error.reason, Reason.LAUNCH_REJECTED)
        if reason is Reason.TOMBSTONE:
            return _finish(live, AttemptState.STOPPED, Reason.TOMBSTONE)
        return _finish(live, AttemptState.LAUNCH_FAILED, reason, observed.launch_error.message)
    if observed.shim_phase == "abandoned" and live.state is AttemptState.LAUNCHING:
        return _finish(live, AttemptState.STOPPED, Reason.TOMBSTONE)
    if live.state in (AttemptState.PLANNED, AttemptState.PREFLIGHT):
        return None
    if observed.exit is not None and not observed.exit.is_quarantined:
        return _finish_by_exit(live, observed, policy)
    if observed.gone is not None:
        return _finish_without_exit(live, observed.gone)
    if desired.declare_lost == live.id:
        return _finish(live, AttemptState.LOST, Reason.DECLARED_LOST)
    is_absent = observed.alive is False and observed.shim_alive is False and observed.at > live.last_action_at
    if is_absent and live.state is not AttemptState.LAUNCHING:
        return _finish_without_exit(live, Reason.SHIM_LOST)
    return None


def _finish_by_exit(live: AttemptFacts, observed: Observed, policy: RunSpec) -> FinishAttempt | None:
    ended = observed.exit
    assert ended is not None
    if live.state is AttemptState.LAUNCHING:
        return None
    is_success = ended.code is not None and ended.code in policy.restart.success_exit_codes
    if _is_stopping(live):
        cause = live.stop.cause if live.stop is not None else StopCause.STOP
        state, reason = _STOPPED_STATES[cause]
        may_succeed = cause in _ASKED and live.state is AttemptState.STOPPING and not live.is_program
        if is_success and may_succeed:
            return _finish(
                live, AttemptState.SUCCEEDED, Reason.COMPLETED, "finished while it was being stopped"
            )
        return _finish(live, state, reason)
    state, reason = classify_exit(
        ended.code,
        ended.signal,
        oom=ended.oom,
        success_codes=policy.restart.success_exit_codes,
        is_program=live.is_program,
    )
    shown = f"signal {ended.signal}" if ended.signal is not None else f"exit code {ended.code}"
    return _finish(live, state, reason, f"{reason.message} ({shown})")


def _is_stopping(live: AttemptFacts) -> bool:
    return live.state in (AttemptState.STOPPING, AttemptState.QUARANTINED)


def _finish_without_exit(live: AttemptFacts, reason: Reason) -> FinishAttempt:
    """Certainly gone, exit status unknowable: what we asked to stop has stopped, anything else is lost."""
    if live.stop is not None and _is_stopping(live):
        state, cause = _STOPPED_STATES[live.stop.cause]
        return _finish(live, state, cause, f"{cause.message}; its absence was verified ({reason.value})")
    return _finish(live, AttemptState.LOST, reason)


def _before_start(desired: Desired, live: AttemptFacts, observed: Observed) -> Decision:
    is_unwanted = desired.state is DesiredState.STOPPED or live.intent < desired.intent
    if live.state is not AttemptState.LAUNCHING:
        if is_unwanted:
            end = _finish(
                live, AttemptState.STOPPED, _unwanted_reason(desired), "ended before it was launched"
            )
            return _one(end, "StoppedBeforeLaunch", end.message)
        if live.state is AttemptState.PLANNED:
            return _one(Preflight(attempt_id=live.id), "Preflight", "checks must pass before the launch")
        return _after_preflight(live, observed)
    if observed.shim_answer is ShimAnswer.KNOWN and observed.shim_phase in ("running", "stopping", "exited"):
        step = Advance(attempt_id=live.id, state=AttemptState.STARTED)
        return _one(step, "ExecVerified", "the shim knows the process; its identity is recorded")
    if is_unwanted:
        abandon = ResolveLaunch(attempt_id=live.id, tombstone=True)
        return _one(abandon, "AbandonLaunch", "a stop was asked for while the launch was under way")
    has_proof = observed.shim_answer is ShimAnswer.NO_SUCH_ATTEMPT and observed.at > live.last_action_at
    if has_proof:
        again = Advance(attempt_id=live.id, state=AttemptState.PLANNED)
        return _one(again, "LaunchNeverArrived", "the shim proved that it has no such attempt; same id again")
    if observed.reachable is False:
        return _wait("Unreachable", "whether the launch arrived is not known, and the node cannot be asked")
    if observed.shim_phase == "launching":
        return _wait("Launching", "the shim is about to execute the program")
    ask = ResolveLaunch(attempt_id=live.id)
    return _one(ask, "LaunchUnknown", "whether the launch arrived is not known: the shim must be asked first")


def _after_preflight(live: AttemptFacts, observed: Observed) -> Decision:
    if observed.preflight is None:
        return _one(Preflight(attempt_id=live.id), "Preflight", "checks have not been answered yet")
    if observed.preflight.is_ok:
        return _one(Launch(attempt_id=live.id), "Launch", "all required checks passed")
    end = _finish(live, AttemptState.LAUNCH_FAILED, Reason.PREFLIGHT_FAILED, observed.preflight.message)
    return _one(end, "PreflightFailed", observed.preflight.message)


def _while_stopping(
    desired: Desired, live: AttemptFacts, observed: Observed, policy: RunSpec, now: datetime
) -> Decision:
    stop = live.stop
    assert stop is not None
    is_quarantined = observed.exit is not None and observed.exit.is_quarantined
    deadline = stop.requested_at + timedelta(seconds=policy.stop.longest_s)
    if is_quarantined or (observed.alive is True and now > deadline and observed.at > deadline):
        step = Advance(attempt_id=live.id, state=AttemptState.QUARANTINED, reason=Reason.STILL_ALIVE)
        return _one(step, "StillAlive", Reason.STILL_ALIVE.message)
    if observed.shim_stop_id == stop.id:
        return _wait("Stopping", "the shim carries out the stop with its own deadlines")
    again = Stop(
        attempt_id=live.id, stop_id=stop.id, cause=stop.cause, reason=desired.stop_reason, save=stop.save
    )
    return _one(again, "StopNotConfirmed", "the shim has not confirmed the stop: sent again with the same id")


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
        return _wait("StaleObservation", "the evidence is older than the last action")
    if live.state is AttemptState.STARTED:
        if observed.is_ready:
            step = Advance(attempt_id=live.id, state=AttemptState.READY)
            return _one(step, "Ready", "training has begun")
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
    return _passed_gate(live, observed, history, policy, now) or _wait("InSync", "what is wanted is running")


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
            return _wait("WaitForCheckpoint", "the restart was asked for at the next checkpoint")
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
        bool(observed.is_quality_bad) and health.quality.action != "log_only"
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
        return _wait("DriftDebounce", f"{drift.kind} drift is new; more changes may follow")
    last = history.last_drift_restart_at
    if last is not None and now - last < timedelta(seconds=policy.drift.min_interval_s):
        return _wait("DriftInterval", "the last drift restart is too recent")
    if is_over_ceiling(history.ledger, policy.restart, now):
        return _wait("DriftCeiling", "too many uncounted restarts today for another one")
    if observed.phase == "checkpointing":
        return _wait("DriftCheckpointing", "never during a checkpoint")
    if action == "at_next_checkpoint":
        has_saved = observed.checkpoint_at is not None and observed.checkpoint_at > drift.first_seen_at
        if not has_saved:
            return _wait("DriftWaitsForCheckpoint", f"{drift.kind} drift restarts at the next checkpoint")
    if action == "when_cheap" and not drift.is_cheap_now:
        return _wait("DriftWaitsUntilCheap", f"{drift.kind} drift restarts when it costs little")
    reason = drift.message or f"{drift.kind} drift"
    return _begin_stop(
        live, StopCause.DRIFT, reason, save=True, tag=f"drift-{drift.first_seen_at.isoformat()}"
    )


def _passed_gate(
    live: AttemptFacts, observed: Observed, history: History, policy: RunSpec, now: datetime
) -> Decision | None:
    if live.state is not AttemptState.READY or live.ready_at is None:
        return None
    is_long_enough = now - live.ready_at >= timedelta(seconds=policy.restart.healthy_s)
    is_sane = not observed.is_non_finite and not observed.is_quality_bad and not observed.is_progress_late
    has_work = history.good_deployment_id != live.deployment_id or history.ledger != forget_failures(
        history.ledger
    )
    if not (is_long_enough and is_sane and live.progress_checks > 0 and has_work):
        return None
    step = PassGate(
        attempt_id=live.id, deployment_id=live.deployment_id, ledger=forget_failures(history.ledger)
    )
    return _one(step, "Healthy", f"healthy for {policy.restart.healthy_s:g} s: its failures are forgotten")


def _without_attempt(
    desired: Desired, observed: Observed, history: History, policy: RunSpec, now: datetime, seed: int
) -> Decision:
    if desired.state is DesiredState.STOPPED:
        return _wait("Stopped", "nobody wants it to run")
    if history.hold is not None and history.hold.intent >= desired.intent:
        return _wait("Held", history.hold.message)
    newest = history.newest
    if newest is None:
        return _plan(desired, Trigger.START, "first attempt")
    if (
        newest.reason is Reason.DECLARED_LOST
        and observed.reachable is not True
        and not desired.may_start_unseen
    ):
        return _wait("HostNotSeen", "declared lost: a second copy waits until the node has been seen again")
    gate = _gpu_gate(newest, observed, history, policy, now)
    if newest.intent < desired.intent:
        trigger = (
            Trigger.OPERATOR if newest.stop and newest.stop.cause is StopCause.RESTART else Trigger.START
        )
        return gate or _plan(desired, trigger, "an operator asked for a start")
    if history.ledger.evaluated != newest.id:
        return _judge(newest, history, policy, now, seed)
    if history.ledger.verdict != "restart" or history.next_start_at is None:
        return _wait("Ended", "no further attempt follows from the newest one")
    if now < history.next_start_at:
        return _wait("Backoff", f"the next attempt begins at {history.next_start_at.isoformat()}")
    if observed.reachable is False:
        return _wait("Unreachable", "the node cannot be reached: nothing is restarted meanwhile")
    return gate or _plan(desired, Trigger(history.ledger.trigger or Trigger.FAILURE), "its delay is over")


def _judge(newest: AttemptFacts, history: History, policy: RunSpec, now: datetime, seed: int) -> Decision:
    ended_at = newest.ended_at or now
    reason = newest.reason or Reason.EXITED_NON_ZERO
    trigger = _TRIGGERED.get(reason)
    if newest.state is AttemptState.STOPPED and trigger is not None:
        ledger = count_uncounted(history.ledger, newest.id, ended_at)
        return _one(
            ScheduleRestart(
                attempt_id=newest.id,
                at=max(now, ended_at),
                is_counted=False,
                trigger=trigger,
                reason=reason.value,
                ledger=_with_trigger(ledger, trigger),
            ),
            reason.value,
            "the restart that was asked for follows at once",
        )
    judgement = judge_end(
        _ended(newest, reason, ended_at), policy.restart, history.ledger, now=now, seed=seed
    )
    return _revert(newest, reason, judgement, history, policy, now) or _follow(newest, judgement)


def _follow(newest: AttemptFacts, judgement: EndJudgement) -> Decision:
    if judgement.verdict == "restart" and judgement.start_at is not None:
        is_host = judgement.reason in (Reason.CONTAINER_RESTARTED, Reason.HOST_REBOOTED)
        trigger = Trigger.HOST if is_host else Trigger.FAILURE
        action: Action = ScheduleRestart(
            attempt_id=newest.id,
            at=judgement.start_at,
            is_counted=judgement.is_counted,
            trigger=trigger,
            reason=judgement.reason.value,
            ledger=_with_trigger(judgement.ledger, trigger),
        )
    elif judgement.verdict == "hold":
        action = Hold(
            attempt_id=newest.id, reason=judgement.reason, message=judgement.message, ledger=judgement.ledger
        )
    else:
        action = EndRun(
            attempt_id=newest.id,
            is_success=judgement.verdict == "succeeded",
            reason=judgement.reason,
            ledger=judgement.ledger,
        )
    return _one(action, judgement.reason.value, judgement.message)


def _revert(
    newest: AttemptFacts,
    reason: Reason,
    judgement: EndJudgement,
    history: History,
    policy: RunSpec,
    now: datetime,
) -> Decision | None:
    """A new pair that fails before it proved itself: once back to the last good one, then hold."""
    is_failure = newest.state in (AttemptState.FAILED, AttemptState.LAUNCH_FAILED, AttemptState.LOST)
    if not is_failure or not _may_revert(reason, policy):
        return None
    if newest.trigger is Trigger.REVERT:
        message = f"the last good pair failed as well: {reason.message}"
        ledger = replace(judgement.ledger, verdict="hold")
        hold = Hold(attempt_id=newest.id, reason=Reason.GATE_FAILED, message=message, ledger=ledger)
        return _one(hold, Reason.GATE_FAILED.value, message)
    good = find_good_deployment(history)
    if (
        good is None
        or newest.deployment_id is None
        or newest.deployment_id in (good, history.good_deployment_id)
    ):
        return None
    ledger = _with_trigger(count_uncounted(history.ledger, newest.id, newest.ended_at or now), Trigger.REVERT)
    back = Revert(attempt_id=newest.id, bad_deployment_id=newest.deployment_id, good_deployment_id=good)
    again = ScheduleRestart(
        attempt_id=newest.id,
        at=now,
        is_counted=False,
        trigger=Trigger.REVERT,
        reason=reason.value,
        ledger=ledger,
    )
    return Decision(
        actions=(back, again),
        reason="Reverted",
        explanation=f"the new release and environment failed before they proved good ({reason.message}); "
        "once back to the last good pair",
    )


def _may_revert(reason: Reason, policy: RunSpec) -> bool:
    if reason is Reason.QUALITY_HOLD:
        return "rollback" in (policy.health.quality.nan, policy.health.quality.action)
    return policy.drift.auto_revert and reason not in _GATE_EXEMPT


def find_good_deployment(history: History) -> str | None:
    """The pair to go back to: the proven one, else the newest earlier one with which training began."""
    newest = history.newest
    if newest is None:
        return None
    if history.good_deployment_id is not None and history.good_deployment_id != newest.deployment_id:
        return history.good_deployment_id
    for attempt in history.attempts:
        if attempt.deployment_id == newest.deployment_id and attempt.ready_at is not None:
            return None
    for attempt in history.attempts[1:]:
        if attempt.ready_at is not None and attempt.deployment_id not in (None, newest.deployment_id):
            return attempt.deployment_id
    return None


def _gpu_gate(
    newest: AttemptFacts, observed: Observed, history: History, policy: RunSpec, now: datetime
) -> Decision | None:
    """Wait until the GPUs of the ended attempt are measured to be free; kill nothing."""
    if not newest.has_gpus or newest.is_gpu_clean or observed.gpu_clean is not False:
        return None
    waited_s = (now - (newest.ended_at or now)).total_seconds()
    if waited_s <= policy.stop.gpu_wait_s:
        return _wait("GpuBusy", "waiting until GPU memory is released")
    message = f"{Reason.GPU_NOT_RELEASED.message}: still in use after {waited_s:.0f} s"
    hold = Hold(attempt_id=newest.id, reason=Reason.GPU_NOT_RELEASED, message=message, ledger=history.ledger)
    return _one(hold, Reason.GPU_NOT_RELEASED.value, message)


def _plan(desired: Desired, trigger: Trigger, why: str) -> Decision:
    resume = desired.resume
    if desired.restart is not None and desired.restart.resume and desired.restart.intent == desired.intent:
        resume = desired.restart.resume if trigger in (Trigger.START, Trigger.OPERATOR) else "latest"
    elif trigger not in (Trigger.START, Trigger.OPERATOR):
        resume = "latest"
    step = PlanAttempt(trigger=trigger, intent=desired.intent, resume=resume)
    return _one(step, "Start", why)


def _begin_stop(live: AttemptFacts, cause: StopCause, reason: str, *, save: bool, tag: str) -> Decision:
    stop = Stop(
        attempt_id=live.id, stop_id=f"{live.id}-{cause.value}-{tag}", cause=cause, reason=reason, save=save
    )
    return _one(stop, f"Stop{cause.value.title().replace('_', '')}", reason)


def _with_trigger(ledger: Ledger, trigger: Trigger) -> Ledger:
    return replace(ledger, trigger=trigger.value)


def _unwanted_reason(desired: Desired) -> Reason:
    return Reason.STOP_REQUESTED if desired.state is DesiredState.STOPPED else Reason.RESTART_REQUESTED


def _ended(newest: AttemptFacts, reason: Reason, ended_at: datetime) -> EndedAttempt:
    return EndedAttempt(
        id=newest.id,
        state=newest.state,
        reason=reason,
        ended_at=ended_at,
        exit_code=newest.exit_code,
        exit_signal=newest.exit_signal,
        phase=newest.phase,
        last_lines=newest.last_lines,
        has_new_checkpoint=newest.has_new_checkpoint,
        cause_fingerprint=newest.cause_fingerprint,
    )


def _finish(live: AttemptFacts, state: AttemptState, reason: Reason, message: str = "") -> FinishAttempt:
    return FinishAttempt(attempt_id=live.id, state=state, reason=reason, message=message or reason.message)


def _one(action: Action, reason: str, explanation: str) -> Decision:
    return Decision(actions=(action,), reason=reason, explanation=explanation)


def _wait(reason: str, explanation: str) -> Decision:
    return Decision(actions=(Nothing(reason=reason),), reason=reason, explanation=explanation)
