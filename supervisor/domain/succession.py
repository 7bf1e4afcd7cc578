"""What follows an ended attempt: a restart, a hold, the way back to the last good pair, or nothing.

A part of `decide`, with the gate that a new pair of release and environment must pass. Pure: no I/O, no
clock.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from supervisor.domain.actions import (
    Action,
    Decision,
    EndRun,
    Hold,
    PassGate,
    Revert,
    ScheduleRestart,
    one,
)
from supervisor.domain.facts import AttemptFacts, History, Observed, Trigger
from supervisor.domain.restart import (
    EndedAttempt,
    EndJudgement,
    Ledger,
    count_uncounted,
    forget_failures,
    judge_end,
)
from supervisor.domain.run import AttemptState, Reason
from supervisor.domain.spec import RunSpec

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


def judge_newest(
    newest: AttemptFacts, history: History, policy: RunSpec, now: datetime, seed: int
) -> Decision:
    """Judge an ended attempt, once: restart, hold, revert or end of the run."""
    ended_at = newest.ended_at or now
    reason = newest.reason or Reason.EXITED_NON_ZERO
    trigger = _TRIGGERED.get(reason)
    if newest.state is AttemptState.STOPPED and trigger is not None:
        ledger = count_uncounted(history.ledger, newest.id, ended_at)
        return one(
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


def passed_gate(
    live: AttemptFacts, observed: Observed, history: History, policy: RunSpec, now: datetime
) -> Decision | None:
    """The live attempt has been healthy long enough for its pair to count as good; None before."""
    if live.state is not AttemptState.READY or live.ready_at is None:
        return None
    is_long_enough = now - live.ready_at >= timedelta(seconds=policy.restart.healthy_s)
    is_sane = not observed.is_non_finite and not observed.is_quality_bad and not observed.is_progress_late
    has_work = history.good_deployment_id != live.deployment_id or history.ledger != forget_failures(
        history.ledger
    )
    if not (is_long_enough and is_sane and _has_progressed(live, policy) and has_work):
        return None
    step = PassGate(
        attempt_id=live.id, deployment_id=live.deployment_id, ledger=forget_failures(history.ledger)
    )
    return one(step, "Healthy", f"healthy for {policy.restart.healthy_s:g} s: its failures are forgotten")


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
    return one(action, judgement.reason.value, judgement.message)


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
    if not is_failure or not _may_revert(reason, policy) or _stood_the_gate(newest, policy, now):
        return None
    if newest.trigger is Trigger.REVERT:
        message = f"the last good pair failed as well: {reason.message}"
        ledger = replace(judgement.ledger, verdict="hold")
        hold = Hold(attempt_id=newest.id, reason=Reason.GATE_FAILED, message=message, ledger=ledger)
        return one(hold, Reason.GATE_FAILED.value, message)
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


def _has_progressed(attempt: AttemptFacts, policy: RunSpec) -> bool:
    """Whether a progress check passed; a program that reports no progress cannot be asked for one."""
    is_silent = attempt.is_program and attempt.phase is None and not policy.health.progress_regex
    return attempt.progress_checks > 0 or is_silent


def _stood_the_gate(newest: AttemptFacts, policy: RunSpec, now: datetime) -> bool:
    """Whether it was healthy long enough for its failure to say nothing about the pair."""
    if newest.ready_at is None:
        return False
    lasted_s = ((newest.ended_at or now) - newest.ready_at).total_seconds()
    return lasted_s >= policy.restart.healthy_s and _has_progressed(newest, policy)


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


def _with_trigger(ledger: Ledger, trigger: Trigger) -> Ledger:
    return replace(ledger, trigger=trigger.value)


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
