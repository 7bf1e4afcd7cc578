"""Ends the recorded requests about runs: each reaches exactly one of done, failed, superseded.

Called by the loop in the transaction of a pass, so an operation's end and the state that ends it are one.
What a request asked for is judged from rows alone; a daemon that was killed in between judges again.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from sqlmodel import Session, col, select

from supervisor.domain.actions import Decision
from supervisor.domain.outlook import failures_left, next_try, no_next_try
from supervisor.domain.restart import Ledger
from supervisor.domain.run import LIVE, AttemptState, DesiredState, Reason
from supervisor.reconciler.reachability import Reachability
from supervisor.store.events import now_of
from supervisor.store.facts import spec_of
from supervisor.store.operations import finish_operation, report_progress
from supervisor.store.queries import list_open_operations, newest_attempt
from supervisor.store.tables import Attempt, Operation, Run

SETTLE_S = 1.0
"""A process must outlive its first output by this much before its start counts as done."""

RUN_KINDS = ("start", "stop", "restart", "rollback", "declare_lost")
_STARTING = ("start", "restart", "rollback")
_UP = frozenset({AttemptState.STARTED, AttemptState.READY})
_STARTED_PHASES = frozenset({"loading", "compiling", "filling", "training", "evaluating", "checkpointing"})

Error = dict[str, Any]


def end_operations(
    session: Session, run: Run, decision: Decision, reach: Reachability | None
) -> list[Operation]:
    """End what can be ended; returns those that did."""
    ended = []
    attempt = newest_attempt(session, run.id)
    for operation in list_open_operations(session, kinds=RUN_KINDS, run_id=run.id):
        verdict = _judge(session, operation, run, attempt, decision, reach)
        if verdict is None:
            _note_running(session, operation, attempt, decision, reach)
            continue
        status, error = verdict
        finish_operation(
            session,
            operation,
            status=status,
            error=error,
            result=_result(attempt),
            attempt_id=attempt.id if attempt is not None else None,
        )
        ended.append(operation)
    return ended


def _result(attempt: Attempt | None) -> dict[str, Any] | None:
    if attempt is None:
        return None
    return {"attempt": attempt.number, "state": attempt.state, "log_path": attempt.log_path}


def _note_running(
    session: Session,
    operation: Operation,
    attempt: Attempt | None,
    decision: Decision,
    reach: Reachability | None,
) -> None:
    step = attempt.state if attempt is not None else "waiting"
    message = decision.explanation
    if reach is not None and reach.is_reachable is not True and reach.failures:
        message = f"the node does not answer: {reach.message}"
    progress = {"step": step, "message": message, "done": None, "total": None}
    if operation.progress != progress:
        report_progress(session, operation, step=step, message=message)


def _judge(
    session: Session,
    operation: Operation,
    run: Run,
    attempt: Attempt | None,
    decision: Decision,
    reach: Reachability | None,
) -> tuple[str, Error | None] | None:
    """Status and error of the operation's end, or None while it goes on."""
    intent = operation.intent or 0
    if operation.kind in _STARTING:
        if intent < run.intent:
            return ("superseded", _superseded(run))
        return _judge_start(session, run, attempt, decision, reach, intent)
    if operation.kind == "stop":
        return _judge_stop(run, attempt, reach, intent)
    return _judge_lost(operation, attempt, session)


def _superseded(run: Run) -> Error:
    return {
        "reason": "Superseded",
        "message": f"a newer request took its place: the run is wanted {run.desired}",
        "hint": "look at the newest operation of the run",
        "data": {"desired": run.desired},
    }


def _judge_start(
    session: Session,
    run: Run,
    attempt: Attempt | None,
    decision: Decision,
    reach: Reachability | None,
    intent: int,
) -> tuple[str, Error | None] | None:
    if attempt is None or attempt.intent < intent:
        if run.hold is not None and decision.reason in ("Held", "GpuNotReleased"):
            return (
                "failed",
                _error(run.hold["reason"], run.hold["message"], "remove the cause, then start again"),
            )
        return _unreachable(reach, _START_STAYS)
    state = AttemptState(attempt.state)
    if state in _UP and attempt.first_output_at is not None:
        return ("done", None) if _has_settled(session, attempt) else None
    if state is AttemptState.SUCCEEDED:
        return ("done", None)
    if state in LIVE:
        is_unsent = state in (AttemptState.PLANNED, AttemptState.PREFLIGHT)
        return _unreachable(reach, _START_STAYS) if is_unsent else None
    if _is_undecided(run, attempt):
        return None
    return ("failed", describe_end(attempt, follows=what_follows(session, run, attempt, decision)))


def _is_undecided(run: Run, attempt: Attempt) -> bool:
    """Whether the policy has yet to judge this end: the very next pass does, and then it can be told."""
    is_judged = run.ledger.get("evaluated") == attempt.id or run.hold is not None
    # a loss that was declared may wait for its node, for as long as that takes
    is_wanted = run.desired == DesiredState.RUNNING and attempt.reason != Reason.DECLARED_LOST
    return is_wanted and not is_judged


def what_follows(session: Session, run: Run, attempt: Attempt, decision: Decision) -> str:
    """The next try and when, or that there is none and why."""
    ledger = Ledger.from_json(run.ledger)
    if run.hold is not None:
        return no_next_try("hold", str(run.hold["message"]))
    if ledger.verdict != "restart" or run.next_start_at is None:
        return no_next_try(ledger.verdict, decision.explanation)
    now = now_of(session)
    return next_try(
        run.next_attempt_number,
        starts_in_s=(run.next_start_at - now).total_seconds(),
        failures_left=failures_left(ledger, spec_of(run).restart, now) if attempt.is_counted else None,
    )


def _has_settled(session: Session, attempt: Attempt) -> bool:
    phase = (attempt.last_status or {}).get("phase")
    if attempt.state == AttemptState.READY or phase in _STARTED_PHASES:
        return True
    begun = attempt.first_output_at or attempt.started_at
    return begun is not None and now_of(session) - begun >= timedelta(seconds=SETTLE_S)


_START_STAYS = "the run stays wanted and starts when the node is back, `stop` withdraws it"
_STOP_STAYS = "the run stays unwanted and is stopped when the node is back"


def _unreachable(reach: Reachability | None, what_stays: str) -> tuple[str, Error] | None:
    """A request for a node that is out of reach fails as a request; the wish itself stays."""
    if reach is None or not reach.is_out_of_reach:
        return None
    hint = "; ".join(part for part in (reach.remedy, what_stays) if part)
    return ("failed", _error(reach.reason, f"the node cannot be reached: {reach.message}", hint))


def _judge_stop(
    run: Run, attempt: Attempt | None, reach: Reachability | None, intent: int
) -> tuple[str, Error | None] | None:
    if run.desired == DesiredState.RUNNING and intent < run.intent:
        return ("superseded", _superseded(run))
    if attempt is None or AttemptState(attempt.state) not in LIVE:
        return ("done", None)
    if attempt.state == AttemptState.QUARANTINED:
        return (
            "failed",
            _error(
                "Quarantined",
                f"attempt {attempt.number} is still there after SIGKILL",
                "look at the process on the node; its GPUs stay reserved",
            ),
        )
    if reach is not None and reach.container_status is not None:
        return None  # a container that is stopped or gone took the attempt with it: that is found next
    return _unreachable(reach, _STOP_STAYS)


def _judge_lost(
    operation: Operation, attempt: Attempt | None, session: Session
) -> tuple[str, Error | None] | None:
    named = session.get(Attempt, operation.attempt_id) if operation.attempt_id else attempt
    if named is None or AttemptState(named.state) not in LIVE:
        return ("done", None)
    return None


def _error(reason: str, message: str, hint: str, **data: Any) -> Error:
    return {"reason": reason, "message": message, "hint": hint, "data": data}


def describe_end(attempt: Attempt, *, follows: str) -> Error:
    """Why an attempt did not stay up: cause, errno, exit code, signal, its last words, and what follows."""
    lines = (attempt.exit_record or {}).get("last_lines") or []
    launch = attempt.launch_error or {}
    reason = launch.get("reason") or attempt.reason or attempt.state
    message = launch.get("message") or attempt.message or f"attempt {attempt.number} is {attempt.state}"
    if lines:
        message = f"{message}: {str(lines[-1])[:500]}"
    failed = [item for item in attempt.preflight or [] if item["status"] == "fail"]
    hint = (
        failed[0].get("remedy")
        if failed
        else f"`dflashctl logs {attempt.spec.get('name', 'RUN')} --attempt {attempt.number}` shows its log"
    )
    if failed and attempt.state == AttemptState.LAUNCH_FAILED:
        # not the attempt's own text, which has every remedy in it
        reason, message = failed[0]["reason"], "; ".join(_found(item) for item in failed)
    return _error(
        str(reason),
        f"attempt {attempt.number} {attempt.state}: {message}",
        str(hint),
        exit_code=attempt.exit_code,
        signal=attempt.exit_signal,
        errno=launch.get("errno"),
        last_lines=[str(line) for line in lines[-20:]],
        findings=failed,
        log_path=attempt.log_path,
        attempt_reason=attempt.reason,
        follows=follows,
    )


def _found(finding: dict[str, Any]) -> str:
    return f"{finding['name']}: {finding.get('message') or finding.get('value')}"


def pending_node_operations(session: Session) -> list[Operation]:
    """Checks and deploys that have not reached an end, oldest first; after a crash they are run again."""
    query = select(Operation).where(
        col(Operation.status).in_(("pending", "running")), col(Operation.kind).in_(("check", "deploy"))
    )
    return list(session.exec(query.order_by(col(Operation.created_at))).all())
