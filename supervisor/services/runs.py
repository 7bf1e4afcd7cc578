"""Runs: stored, started, stopped, restarted, rolled back, declared lost, removed.

Called by the routes; each function is one short transaction's work that writes intent and its event, never
talks to a node and never waits. The reconciler makes the intent true and ends the operation.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sqlmodel import Session, col, select

from supervisor.domain.decide import derive_phase
from supervisor.domain.errors import ConflictError, RequestError
from supervisor.domain.restart import Ledger
from supervisor.domain.run import AttemptState, DesiredState, RunPhase
from supervisor.domain.spec import RunSpec, render_spec, spec_digest
from supervisor.services.nodes import require_version
from supervisor.services.operations import create_done, create_operation
from supervisor.services.plans import (
    earlier_refusal,
    loss_refusal,
    plan_declare_lost,
    plan_restart,
    plan_rollback,
    plan_start,
    plan_stop,
    wait_refusal,
)
from supervisor.store.attempts import bump
from supervisor.store.events import now_of, record_event
from supervisor.store.facts import desired_of, history_of
from supervisor.store.operations import new_id, supersede_operations
from supervisor.store.queries import (
    find_earlier_deployment,
    find_run,
    get_attempt,
    get_node,
    get_run,
    list_all_runs,
    list_open_operations,
    list_run_attempts,
    live_attempt,
)
from supervisor.store.tables import Attempt, Operation, Run

__all__ = [
    "delete_run",
    "find_run",
    "get_attempt",
    "get_run",
    "list_attempts",
    "list_runs",
    "plan_declare_lost",
    "plan_restart",
    "plan_rollback",
    "plan_start",
    "plan_stop",
    "put_run",
    "request_declare_lost",
    "request_restart",
    "request_rollback",
    "request_start",
    "request_stop",
]

INTENT_KINDS = ("start", "stop", "restart", "rollback", "declare_lost")
WHEN = ("now", "next_checkpoint")
MAX_ATTEMPTS = 200
_OVER = (RunPhase.SUCCEEDED, RunPhase.FAILED)
"""Phases that no further attempt follows, although the run is still wanted."""


def put_run(session: Session, spec: RunSpec, *, actor: str, request_id: str | None = None) -> Run:
    """Store a spec under its name: a new run, or the next generation of the one that exists.

    An unchanged spec changes nothing. A live attempt keeps the spec that it pinned; the difference is drift.

    Raises:
        NotFoundError: no such node.
        ConflictError: a live run would move to another node.
    """
    node = get_node(session, spec.node)
    run = find_run(session, spec.name)
    digest = spec_digest(spec)
    if run is None:
        now = now_of(session)
        run = Run(
            id=new_id("r"),
            name=spec.name,
            node_id=node.id,
            spec=render_spec(spec),
            spec_digest=digest,
            desired_at=now,
            created_at=now,
            updated_at=now,
        )
        session.add(run)
        session.flush()
        _tell(session, run, actor, "RunCreated", "created", {"generation": 1}, request_id)
        return run
    if run.spec_digest == digest and run.node_id == node.id:
        return run
    if run.node_id != node.id and live_attempt(session, run.id) is not None:
        raise ConflictError(
            f"run {run.name} is live and cannot move to node {node.name}",
            reason="RunLive",
            hint="stop it first, or store it under another name",
        )
    run.spec = render_spec(spec)
    run.spec_digest = digest
    run.node_id = node.id
    run.generation += 1
    bump(session, run)
    _tell(
        session,
        run,
        actor,
        "RunChanged",
        f"generation {run.generation} stored",
        {"generation": run.generation},
        request_id,
    )
    return run


def list_runs(session: Session, *, node_id: str | None = None) -> list[Run]:
    """All runs by name, or those of one node."""
    return [run for run in list_all_runs(session) if node_id is None or run.node_id == node_id]


def delete_run(
    session: Session,
    run: Run,
    *,
    actor: str,
    expected_version: int | None = None,
    request_id: str | None = None,
) -> None:
    """Forget a run with its attempts and metrics. Logs and checkpoints on the node and events stay.

    Raises:
        ConflictError: it is live, wanted, or StaleVersion.
    """
    require_version(run, expected_version)
    live = live_attempt(session, run.id)
    phase = derive_phase(desired_of(session, run), history_of(session, run))
    if live is not None or (run.desired == DesiredState.RUNNING and phase not in _OVER):
        waits = "held" if phase is RunPhase.HELD else "waiting for its next attempt"
        state = live.state if live else waits
        raise ConflictError(
            f"run {run.name} is {state}",
            reason="RunLive",
            hint=f"stop it first: dflashctl stop {run.name}",
            state=state,
        )
    message = "removed; logs and checkpoints on the node were left"
    _tell(session, run, actor, "RunRemoved", message, {"generation": run.generation}, request_id)
    session.delete(run)


def list_attempts(session: Session, run: Run, *, before: int | None = None, limit: int = 50) -> list[Attempt]:
    """Attempts, newest first; `before` continues below a number.

    Raises:
        RequestError: limit out of range.
    """
    if not 1 <= limit <= MAX_ATTEMPTS:
        raise RequestError(f"limit must be from 1 to {MAX_ATTEMPTS}: {limit}", reason="BadLimit")
    if before is None:
        return list_run_attempts(session, run.id, limit=limit)
    query = select(Attempt).where(Attempt.run_id == run.id, col(Attempt.number) < before)
    return list(session.exec(query.order_by(col(Attempt.number).desc()).limit(limit)).all())


def request_start(
    session: Session,
    run: Run,
    *,
    actor: str,
    resume: str | None = None,
    force: bool = False,
    request_id: str | None = None,
) -> Operation:
    """Ask for the run to be running; lifts a hold, ends a backoff and gives it fresh restart counters.

    Args:
        session: open write transaction.
        run: which.
        actor: who asks.
        resume: latest, scratch or a checkpoint; the spec's choice when absent.
        force: start a second copy after declare-lost although the node was not seen again.
        request_id: of the HTTP request.

    Raises:
        ConflictError: AlreadyRunning, or Quarantined.
        RequestError: bad `resume`.
    """
    live = live_attempt(session, run.id)
    _refuse_quarantine(run, live)
    is_pending = live is None and run.desired == DesiredState.RUNNING and _awaits_first(session, run)
    if run.desired == DesiredState.RUNNING and (live is not None or is_pending):
        state = live.state if live else "starting"
        raise ConflictError(
            f"run {run.name} is {state} already",
            reason="AlreadyRunning",
            hint=f"see it with `dflashctl show {run.name}`, replace it with `dflashctl restart {run.name}`",
            state=state,
            attempt=live.number if live else None,
        )
    _check_resume(resume)
    _want(session, run, DesiredState.RUNNING, actor=actor, reason="start requested")
    run.restart_request = _restart_request(session, run, when="now", save=True, resume=resume, reason="start")
    if force and run.declare_lost:
        run.declare_lost = {**run.declare_lost, "force": True}
    return _record(session, run, "start", actor, {"resume": resume, "force": force}, request_id)


def request_stop(
    session: Session,
    run: Run,
    *,
    actor: str,
    reason: str = "",
    save: bool = True,
    request_id: str | None = None,
) -> Operation:
    """Ask for the run to be stopped; wins over every restart rule. Stopping a stopped run is done at once.

    Args:
        session: open write transaction.
        run: which.
        actor: who asks.
        reason: told to the trainer and kept in the history.
        save: whether the trainer should write a checkpoint first.
        request_id: of the HTTP request.
    """
    reason = reason or "stop requested"
    live = live_attempt(session, run.id)
    if run.desired == DesiredState.STOPPED:
        open_stops = list_open_operations(session, kinds=("stop",), run_id=run.id)
        if open_stops and live is not None:
            return open_stops[0]
        if live is None:
            return create_done(
                session,
                kind="stop",
                actor=actor,
                run=run,
                params={"reason": reason},
                result={"state": "stopped", "message": "it was stopped already"},
                request_id=request_id,
            )
    _want(session, run, DesiredState.STOPPED, actor=actor, reason=reason)
    run.stop_request = {"save": save, "reason": reason}
    params = {"reason": reason, "save": save}
    if live is not None:
        return _record(session, run, "stop", actor, params, request_id)
    supersede_operations(session, kinds=INTENT_KINDS, by="stop", run_id=run.id)
    _tell(
        session, run, actor, "StopRequested", f"no further attempt will start: {reason}", params, request_id
    )
    result = {"state": "stopped", "message": "no attempt was live"}
    return create_done(
        session, kind="stop", actor=actor, run=run, params=params, result=result, request_id=request_id
    )


def request_restart(
    session: Session,
    run: Run,
    *,
    actor: str,
    when: str = "now",
    save: bool = True,
    resume: str | None = None,
    reason: str = "",
    request_id: str | None = None,
    kind: str = "restart",
) -> Operation:
    """Ask for the live attempt to be replaced by a new one; without a live attempt, for a start.

    Args:
        session: open write transaction.
        run: which.
        actor: who asks.
        when: now, or next_checkpoint.
        save: whether the old attempt should write a checkpoint first.
        resume: latest, scratch or a checkpoint; the spec's choice when absent.
        reason: told to the trainer and kept in the history.
        request_id: of the HTTP request.
        kind: of the operation.

    Raises:
        RequestError: bad `when` or `resume`.
        ConflictError: Quarantined, or NoCheckpoints to wait for.
    """
    if when not in WHEN:
        raise RequestError(
            f"when must be one of {', '.join(WHEN)}: {when!r}", reason="BadField", field="when"
        )
    reason = reason or "restart requested"
    _check_resume(resume)
    live = live_attempt(session, run.id)
    _refuse_quarantine(run, live)
    refusal = wait_refusal(run, live) if when == "next_checkpoint" else None
    if refusal is not None:
        raise ConflictError(**refusal)
    _want(session, run, DesiredState.RUNNING, actor=actor, reason=reason)
    run.restart_request = _restart_request(session, run, when=when, save=save, resume=resume, reason=reason)
    params = {"when": when, "save": save, "resume": resume, "reason": reason}
    return _record(session, run, kind, actor, params, request_id)


def request_rollback(
    session: Session, run: Run, *, actor: str, when: str = "now", request_id: str | None = None
) -> Operation:
    """Pin the run to the pair it used before the present one and restart it on that.

    Raises:
        ConflictError: NoEarlierDeployment.
    """
    earlier = find_earlier_deployment(session, run)
    if earlier is None:
        raise ConflictError(**earlier_refusal(run))
    run.pinned_deployment_id = earlier.id
    run.pinned_against_id = None
    return request_restart(
        session, run, actor=actor, when=when, reason="rolled back", request_id=request_id, kind="rollback"
    )


def request_declare_lost(
    session: Session,
    run: Run,
    *,
    actor: str,
    reason: str,
    force: bool = False,
    request_id: str | None = None,
) -> Operation:
    """Declare the live attempt lost, on an operator's word, because its node cannot be asked.

    The run is then held; a start waits until the node has been seen again, unless forced.

    Args:
        session: open write transaction.
        run: which.
        actor: who asks.
        reason: kept in the history.
        force: also for a quarantined attempt, whose process is known to be there; a start does not wait then.
        request_id: of the HTTP request.

    Raises:
        ConflictError: no live attempt, or the process is known to be alive.
    """
    live = live_attempt(session, run.id)
    refusal = loss_refusal(run, live, force=force)
    if refusal is not None:
        raise ConflictError(**refusal)
    assert live is not None
    run.declare_lost = {"attempt_id": live.id, "actor": actor, "reason": reason, "force": force}
    bump(session, run)
    params = {"attempt": live.number, "reason": reason, "force": force}
    return _record(session, run, "declare_lost", actor, params, request_id, supersedes=())


def _want(session: Session, run: Run, state: DesiredState, *, actor: str, reason: str) -> None:
    run.desired = state.value
    run.desired_reason = reason
    run.desired_actor = actor
    run.desired_at = now_of(session)
    run.intent += 1
    run.stop_request = None
    run.restart_request = None
    run.next_start_at = None
    if state is DesiredState.RUNNING:
        run.hold = None
        run.ledger = replace(Ledger(), uncounted=Ledger.from_json(run.ledger).uncounted).to_json()
    bump(session, run)


def _record(
    session: Session,
    run: Run,
    kind: str,
    actor: str,
    params: dict[str, Any],
    request_id: str | None,
    *,
    supersedes: tuple[str, ...] = INTENT_KINDS,
) -> Operation:
    supersede_operations(session, kinds=supersedes, by=kind, run_id=run.id)
    operation = create_operation(
        session, kind=kind, actor=actor, run=run, intent=run.intent, params=params, request_id=request_id
    )
    words = kind.replace("_", " ")
    reason = "".join(part.title() for part in kind.split("_")) + "Requested"
    why = params.get("reason")
    message = f"{words} requested" + (f": {why}" if why and why != f"{words} requested" else "")
    _tell(
        session, run, actor, reason, message, {**params, "operation": operation.id}, request_id, operation.id
    )
    return operation


def _restart_request(
    session: Session, run: Run, *, when: str, save: bool, resume: str | None, reason: str
) -> dict[str, Any]:
    return {
        "intent": run.intent,
        "when": when,
        "save": save,
        "resume": resume,
        "reason": reason,
        "requested_at": now_of(session).isoformat(),
    }


def _awaits_first(session: Session, run: Run) -> bool:
    """Whether a start was asked for whose attempt does not exist yet."""
    newest = list_run_attempts(session, run.id, limit=1)
    return run.hold is None and (not newest or newest[0].intent < run.intent)


def _refuse_quarantine(run: Run, live: Attempt | None) -> None:
    if live is not None and live.state == AttemptState.QUARANTINED:
        raise ConflictError(
            f"attempt {live.number} of run {run.name} is quarantined: its process cannot be killed",
            reason="Quarantined",
            hint="restart the container or the host, which ends it; or give it up: "
            f"dflashctl declare-lost {run.name} --force",
            state=live.state,
        )


def _check_resume(resume: str | None) -> None:
    if resume is None or resume in ("latest", "scratch"):
        return
    if not resume.startswith("/") or "\0" in resume:
        raise RequestError(
            f"resume must be latest, scratch or the absolute path of a checkpoint: {resume!r}",
            reason="BadField",
            field="resume",
        )


def _tell(
    session: Session,
    run: Run,
    actor: str,
    reason: str,
    message: str,
    data: dict[str, Any],
    request_id: str | None,
    operation_id: str | None = None,
) -> None:
    record_event(
        session,
        actor=actor,
        subject=f"run/{run.name}",
        reason=reason,
        message=message,
        data=data,
        run_id=run.id,
        node_id=run.node_id,
        operation_id=operation_id,
        request_id=request_id,
    )
