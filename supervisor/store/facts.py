"""Rows turned into what `domain.decide` takes: desired and history of a run.

Used by the reconciler before each decision, and by services for plans, explanations and phases. Evidence from
the node is not a row; the reconciler's observation builds it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlmodel import Session

from supervisor.domain.facts import (
    AttemptFacts,
    Desired,
    History,
    HoldFacts,
    RestartRequest,
    StopCause,
    StopFacts,
    Trigger,
)
from supervisor.domain.restart import Ledger
from supervisor.domain.run import AttemptState, DesiredState, Reason
from supervisor.domain.spec import RunSpec, parse_run_dict
from supervisor.store.queries import deployment_for_run, list_run_attempts
from supervisor.store.tables import Attempt, Run

MAX_ATTEMPTS = 50

_ASKED = (StopCause.STOP, StopCause.RESTART, StopCause.DRIFT, StopCause.DISK)


def spec_of(row: Run | Attempt) -> RunSpec:
    """The stored spec, as a model; for an attempt the one it pinned."""
    return parse_run_dict(row.spec, origin="stored run")


def desired_of(session: Session, run: Run) -> Desired:
    """What actors asked for."""
    stop = run.stop_request or {}
    deployment = deployment_for_run(session, run)
    return Desired(
        state=DesiredState(run.desired),
        intent=run.intent,
        generation=run.generation,
        stop_save=bool(stop.get("save", True)),
        stop_reason=str(stop.get("reason") or run.desired_reason),
        restart=_restart_request(run.restart_request),
        declare_lost=(run.declare_lost or {}).get("attempt_id"),
        may_start_unseen=bool((run.declare_lost or {}).get("force", False)),
        deployment_id=deployment.id if deployment else None,
        resume=_resume_of(run),
    )


def history_of(session: Session, run: Run, *, limit: int = MAX_ATTEMPTS) -> History:
    """The newest attempts, newest first, ledger and hold."""
    return history_from(run, list_run_attempts(session, run.id, limit=limit))


def history_from(run: Run, attempts: Sequence[Attempt]) -> History:
    """As `history_of`, from attempts at hand, newest first; two are enough for a phase."""
    return History(
        attempts=tuple(attempt_facts(attempt) for attempt in attempts),
        ledger=Ledger.from_json(run.ledger),
        hold=_hold(run),
        next_start_at=run.next_start_at,
        good_deployment_id=run.good_deployment_id,
        last_drift_restart_at=_time((run.drift or {}).get("last_restart_at")),
    )


def attempt_facts(attempt: Attempt) -> AttemptFacts:
    """One attempt as `decide` sees it."""
    record = attempt.exit_record or {}
    status = attempt.last_status or {}
    error = attempt.launch_error or {}
    stamps = (attempt.created_at, attempt.launching_at, attempt.started_at, attempt.stopping_at)
    return AttemptFacts(
        id=attempt.id,
        number=attempt.number,
        state=AttemptState(attempt.state),
        intent=attempt.intent,
        trigger=Trigger(attempt.trigger),
        reason=_reason(attempt.reason),
        launch_error_reason=error.get("reason"),
        launch_errno=error.get("errno"),
        deployment_id=attempt.deployment_id,
        generation=attempt.generation,
        last_action_at=max(stamp for stamp in stamps if stamp is not None),
        started_at=attempt.started_at,
        ready_at=attempt.ready_at,
        stopping_at=attempt.stopping_at,
        ended_at=attempt.ended_at,
        stop=_stop(attempt.stop),
        exit_code=attempt.exit_code,
        exit_signal=attempt.exit_signal,
        last_lines=tuple(str(line) for line in record.get("last_lines") or ()),
        phase=status.get("phase"),
        has_new_checkpoint=has_new_checkpoint(attempt),
        progress_checks=attempt.progress_checks,
        cause_fingerprint=attempt.cause_fingerprint,
        has_gpus=bool(attempt.gpus),
        is_gpu_clean=attempt.gpu_clean_at is not None,
        is_program=is_program(attempt.spec),
    )


def has_new_checkpoint(attempt: Attempt) -> bool | None:
    """Whether the attempt left a newer checkpoint than it found; None when it cannot be known."""
    if attempt.last_checkpoint is None:
        is_silent = is_program(attempt.spec) and attempt.last_status is None
        cause = (attempt.stop or {}).get("cause")
        is_innocent = attempt.state == AttemptState.LOST or cause in _ASKED
        return None if is_silent or is_innocent else False
    step = attempt.last_checkpoint.get("step")
    if step is None:
        return None
    return attempt.first_checkpoint_step is None or step > attempt.first_checkpoint_step


def is_program(spec: Mapping[str, Any]) -> bool:
    """Whether a stored spec runs the user's own argv."""
    return (spec.get("command") or {}).get("argv") is not None


def _resume_of(run: Run) -> str:
    return str((run.spec.get("resume") or {}).get("from", "latest"))


def _restart_request(data: Mapping[str, Any] | None) -> RestartRequest | None:
    if data is None:
        return None
    return RestartRequest(
        intent=data["intent"],
        when=data["when"],
        save=data["save"],
        resume=data.get("resume"),
        reason=data.get("reason", ""),
        requested_at=datetime.fromisoformat(data["requested_at"]),
    )


def _hold(run: Run) -> HoldFacts | None:
    if run.hold is None:
        return None
    return HoldFacts(
        reason=Reason(run.hold["reason"]),
        message=run.hold["message"],
        intent=int(run.hold.get("intent", run.intent)),
    )


def _stop(data: Mapping[str, Any] | None) -> StopFacts | None:
    if data is None:
        return None
    return StopFacts(
        id=data["id"],
        cause=StopCause(data["cause"]),
        requested_at=datetime.fromisoformat(data["requested_at"]),
        save=bool(data.get("save", True)),
    )


def _reason(text: str | None) -> Reason | None:
    return Reason(text) if text is not None and text in Reason._value2member_map_ else None


def _time(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text) if text else None
