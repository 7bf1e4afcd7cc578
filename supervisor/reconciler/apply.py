"""Writes what came of an action: guarded by the run's lease, state and event in one transaction.

Called by the loop inside `Store.write` only; every function takes the session first and changes rows of that
session. The transition table is checked by `store.attempts`; nothing here talks to a node or reads a clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlmodel import Session, col, select

from supervisor.domain.actions import (
    EndRun,
    FinishAttempt,
    Hold,
    PassGate,
    Revert,
    ScheduleRestart,
    Stop,
)
from supervisor.domain.facts import StopCause
from supervisor.domain.reports import clean_status
from supervisor.domain.restart import failure_fingerprint
from supervisor.domain.run import (
    AttemptState,
    ConditionStatus,
    ConditionType,
    condition,
    merge_condition,
)
from supervisor.store.attempts import apply_transition, bump
from supervisor.store.events import now_of, record_event
from supervisor.store.tables import Attempt, Deployment, Event, Node, Run

ACTOR = "supervisor"
POLICY = "policy"
MAX_KEPT_LINES = 200

_QUIET = frozenset({ConditionType.ALIVE, ConditionType.READY, ConditionType.GPU_CLEAN})
"""They change for ordinary reasons; the attempt's own events, or a hold, tell of what matters."""

Json = dict[str, Any]


def tell(
    session: Session,
    run: Run,
    reason: str,
    message: str,
    *,
    data: Mapping[str, Any] | None = None,
    attempt: Attempt | None = None,
    level: str = "info",
    actor: str = ACTOR,
) -> None:
    """Record an event about a run."""
    record_event(
        session,
        actor=actor,
        subject=f"run/{run.name}",
        reason=reason,
        message=message,
        data=data,
        level=level,
        run_id=run.id,
        node_id=run.node_id,
        attempt_id=attempt.id if attempt is not None else None,
    )


def set_condition(
    session: Session,
    row: Run | Node,
    kind: ConditionType,
    status: bool | None,
    *,
    reason: str,
    message: str = "",
) -> bool:
    """Set one condition. True when it changed.

    An event is written when it becomes false, when it is false for a reason not told since then, and when it
    becomes true after having been false. Not knowing is shown and is no event: what only comes and goes, a
    link or one of two reasons, must not fill the history.
    """
    old = next((item for item in row.conditions if item["type"] == kind.value), None)
    new = condition(kind, status, reason=reason, message=message, since=now_of(session).isoformat())
    if old is not None and all(old[key] == new[key] for key in ("status", "reason", "message")):
        return False
    row.conditions = merge_condition(row.conditions, new)
    bump(session, row)
    was = old["status"] if old is not None else None
    is_worse = status is False and (was != "false" or _is_new_reason(session, row, kind, old or {}, reason))
    is_better = status is True and was == "false"
    if not (is_worse or is_better) or kind in _QUIET:
        return True
    is_run = isinstance(row, Run)
    record_event(
        session,
        actor=ACTOR,
        subject=f"{'run' if is_run else 'node'}/{row.name}",
        reason=f"{kind.value}{new['status'].title()}",
        message=f"{kind.value} became {new['status']}: {reason}{': ' + message if message else ''}",
        data={"old": was, "new": new["status"], "reason": reason},
        level="warning" if new["status"] == ConditionStatus.FALSE.value else "info",
        run_id=row.id if is_run else None,
        node_id=row.node_id if isinstance(row, Run) else row.id,
    )
    return True


def _is_new_reason(
    session: Session, row: Run | Node, kind: ConditionType, old: Mapping[str, Any], reason: str
) -> bool:
    """Whether a condition that stays false has not been told of with this reason since it became false."""
    if old.get("reason") == reason:
        return False
    subject = f"{'run' if isinstance(row, Run) else 'node'}/{row.name}"
    told = select(Event.data).where(
        Event.subject == subject,
        Event.reason == f"{kind.value}False",
        col(Event.at) >= datetime.fromisoformat(old["since"]),
    )
    return all(data.get("reason") != reason for data in session.exec(told))


def record_identity(attempt: Attempt, state: Mapping[str, Any]) -> None:
    """Copy what the shim wrote about process, shim and launch onto the row."""
    attempt.shim_state = dict(state)
    attempt.identity = state.get("identity")
    attempt.shim_identity = state.get("shim")


def apply_started(session: Session, attempt: Attempt, state: Mapping[str, Any]) -> None:
    """The exec was verified: keep the identity with the change."""
    record_identity(attempt, state)
    identity = attempt.identity or {}
    apply_transition(
        session,
        attempt,
        AttemptState.STARTED,
        message=f"process {identity.get('pid')} was verified",
        data={"identity": identity, "log_path": attempt.log_path},
    )


def apply_stop(session: Session, run: Run, attempt: Attempt, action: Stop) -> Json:
    """Commit a stop before its first signal; repeating it changes nothing."""
    if attempt.stop is not None and attempt.stop["id"] == action.stop_id:
        return attempt.stop
    actor = run.desired_actor if action.cause in (StopCause.STOP, StopCause.RESTART) else POLICY
    attempt.stop = {
        "id": action.stop_id,
        "reason": action.reason,
        "actor": actor or ACTOR,
        "requested_at": now_of(session).isoformat(),
        "save": action.save,
        "cause": action.cause.value,
        "step": "asked",
    }
    if action.cause is StopCause.DRIFT:
        run.drift = {**(run.drift or {}), "last_restart_at": now_of(session).isoformat()}
        bump(session, run)
    apply_transition(
        session,
        attempt,
        AttemptState.STOPPING,
        message=action.reason,
        actor=actor or ACTOR,
        data={"cause": action.cause.value, "save": action.save, "stop_id": action.stop_id},
    )
    return attempt.stop


def record_status(attempt: Attempt, status: Mapping[str, Any]) -> None:
    """Copy the trainer's own record onto a live row."""
    attempt.last_status = dict(status)
    if isinstance(status.get("step"), int):
        attempt.last_step = status["step"]
    if isinstance(status.get("last_checkpoint"), dict):
        attempt.last_checkpoint = status["last_checkpoint"]


def apply_finish(
    session: Session,
    attempt: Attempt,
    action: FinishAttempt,
    *,
    exit_record: Mapping[str, Any] | None,
    reply: Mapping[str, Any],
) -> None:
    """Enter a final state with its evidence; the columns are set first, for final rows are immutable."""
    if reply.get("status"):
        record_status(attempt, clean_status(reply["status"]))
        attempt.last_status_at = now_of(session)
    if isinstance(reply.get("log_size"), int):
        attempt.log_size = reply["log_size"]
    if exit_record is not None:
        attempt.exit_record = dict(exit_record)
        attempt.exit_code = exit_record.get("code")
        attempt.exit_signal = exit_record.get("signal")
    lines = list((exit_record or {}).get("last_lines") or [])[-MAX_KEPT_LINES:]
    phase = (attempt.last_status or {}).get("phase")
    attempt.cause_fingerprint = failure_fingerprint(lines, phase)
    if attempt.stop is not None:
        attempt.stop = {**attempt.stop, "step": "done"}
    apply_transition(
        session,
        attempt,
        action.state,
        reason=action.reason,
        message=action.message,
        data={
            "exit_code": attempt.exit_code,
            "signal": attempt.exit_signal,
            "last_lines": lines[-20:],
            "launch_error": attempt.launch_error,
        },
    )


def apply_schedule(session: Session, run: Run, attempt: Attempt, action: ScheduleRestart) -> None:
    """Remember when the next attempt may begin and what the end of this one cost."""
    run.next_start_at = action.at
    run.ledger = action.ledger.to_json()
    attempt.is_counted = action.is_counted
    bump(session, run)
    bump(session, attempt)
    delay_s = max(0.0, (action.at - now_of(session)).total_seconds())
    tell(
        session,
        run,
        "RestartScheduled",
        f"the next attempt begins in {delay_s:.0f} s ({action.reason})",
        data={"at": action.at.isoformat(), "counted": action.is_counted, "trigger": action.trigger.value},
        attempt=attempt,
        actor=POLICY,
    )


def apply_hold(session: Session, run: Run, attempt: Attempt | None, action: Hold) -> None:
    """Refuse further starts until an operator asks again."""
    run.hold = {
        "reason": action.reason.value,
        "message": action.message,
        "since": now_of(session).isoformat(),
        "intent": run.intent,
    }
    run.ledger = action.ledger.to_json()
    run.next_start_at = None
    if attempt is not None and attempt.is_counted is None:
        attempt.is_counted = False
        bump(session, attempt)
    bump(session, run)
    tell(
        session,
        run,
        "RunHeld",
        f"{action.reason.message}: {action.message}",
        data={"reason": action.reason.value},
        attempt=attempt,
        level="warning",
        actor=POLICY,
    )


def apply_end(session: Session, run: Run, attempt: Attempt | None, action: EndRun) -> None:
    """No further attempt follows."""
    run.ledger = action.ledger.to_json()
    run.next_start_at = None
    if attempt is not None:
        attempt.is_counted = False
        bump(session, attempt)
    bump(session, run)
    tell(
        session,
        run,
        "RunSucceeded" if action.is_success else "RunFailed",
        action.reason.message,
        data={"reason": action.reason.value},
        attempt=attempt,
        level="info" if action.is_success else "error",
        actor=POLICY,
    )


def apply_revert(session: Session, run: Run, attempt: Attempt, action: Revert) -> None:
    """Mark the new pair bad and pin the run to the last good one."""
    bad = session.get(Deployment, action.bad_deployment_id)
    if bad is not None:
        bad.is_good = False
        session.add(bad)
    run.pinned_deployment_id = action.good_deployment_id
    run.pinned_against_id = action.bad_deployment_id
    bump(session, run)
    tell(
        session,
        run,
        "Reverted",
        "the new release and environment failed; the last good pair is used again, once",
        data={"bad": action.bad_deployment_id, "good": action.good_deployment_id},
        attempt=attempt,
        level="warning",
        actor=POLICY,
    )


def apply_gate(session: Session, run: Run, attempt: Attempt, action: PassGate) -> None:
    """The pair has proved good; earlier failures are forgotten."""
    run.ledger = action.ledger.to_json()
    is_new = action.deployment_id is not None and run.good_deployment_id != action.deployment_id
    if action.deployment_id is not None:
        run.good_deployment_id = action.deployment_id
        deployment = session.get(Deployment, action.deployment_id)
        if deployment is not None:
            deployment.is_good = True
            session.add(deployment)
    bump(session, run)
    if is_new:
        tell(
            session,
            run,
            "GatePassed",
            "the release and environment proved good",
            data={"deployment": action.deployment_id},
            attempt=attempt,
        )


def tell_skipped(session: Session, run: Run, skipped: Sequence[int], paths: Sequence[str]) -> None:
    """Say which attempt numbers were passed over because a log lies there already."""
    if not skipped:
        return
    shown = ", ".join(str(number) for number in skipped[:20])
    tell(
        session,
        run,
        "AttemptNumberSkipped",
        f"a log exists already for attempt {shown}: existing logs are never written to",
        data={"numbers": list(skipped[:200]), "paths": list(paths[:20])},
        level="warning",
    )
