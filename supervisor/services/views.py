"""What the API answers: rows as JSON dicts, with everything derived that a reader should not have to derive.

Called by routes and by the live streams. Keys are snake_case, times RFC 3339 UTC, durations `*_s`; unknown is
null or `unknown`, never a guess.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlmodel import Session

from supervisor.clock import Clock
from supervisor.domain.decide import derive_phase
from supervisor.domain.restart import Ledger
from supervisor.domain.run import LIVE, AttemptState
from supervisor.services.events import list_events
from supervisor.services.telemetry import gpu_snapshot, metric_view
from supervisor.store.events import now_of
from supervisor.store.facts import desired_of, history_from, history_of, spec_of
from supervisor.store.queries import (
    count_attempts,
    current_deployment,
    deployment_for_run,
    list_live_attempts,
    list_newest_attempts,
    list_newest_metrics,
    list_node_runs,
    list_open_operations,
    list_run_attempts,
    live_attempt,
)
from supervisor.store.tables import Attempt, Deployment, Event, MetricLine, Node, Operation, Run

MAX_CHECKPOINT_ATTEMPTS = 200
POLICY_CLASSES = ("release", "capability", "critical", "minor")


def run_view(session: Session, run: Run, clock: Clock | None = None) -> dict[str, Any]:
    """A run with its phase, newest attempt, conditions, queue and GPU snapshot and restart budget."""
    return {
        **run_summaries(session, [run], clock)[0],
        "operations": [
            operation_view(session, found) for found in list_open_operations(session, run_id=run.id)
        ],
        "last_decision": run.last_decision,
    }


def run_summaries(session: Session, runs: Sequence[Run], clock: Clock | None = None) -> list[dict[str, Any]]:
    """Runs as lines of a list; the number of queries does not grow with the number of runs."""
    ids = [run.id for run in runs]
    attempts = list_newest_attempts(session, ids, each=2)
    counts = count_attempts(session, ids)
    lines = list_newest_metrics(session, [found[0].id for found in attempts.values()])
    nodes = {run.node_id: session.get(Node, run.node_id) for run in runs}
    gpus = {node.id: gpu_snapshot(session, node) for node in nodes.values() if node is not None}
    views = []
    deployments = []  # kept: the session forgets rows that nobody holds, and would read them for every run
    for run in runs:
        found = attempts.get(run.id) or []
        deployment = deployment_for_run(session, run)
        deployments.append(deployment)
        rows = _RunRows(
            node=nodes[run.node_id],
            attempts=found,
            attempt_count=counts.get(run.id, 0),
            line=lines.get(found[0].id) if found else None,
            gpus=gpus.get(run.node_id),
            deployment=deployment,
        )
        views.append(_run_summary(session, run, rows, clock))
    return views


@dataclass(frozen=True, slots=True, kw_only=True)
class _RunRows:
    """What a summary shows beside the run's own row; attempts newest first, at most two."""

    node: Node | None
    attempts: Sequence[Attempt]
    attempt_count: int
    line: MetricLine | None
    gpus: Mapping[str, Any] | None
    deployment: Deployment | None


def _run_summary(session: Session, run: Run, rows: _RunRows, clock: Clock | None) -> dict[str, Any]:
    now = clock.now() if clock else now_of(session)
    newest = rows.attempts[0] if rows.attempts else None
    metrics = metric_view(session, rows.line) if rows.line is not None else None
    record: Mapping[str, Any] = metrics or {}
    return {
        "id": run.id,
        "name": run.name,
        "node": rows.node.name if rows.node else None,
        "node_id": run.node_id,
        "version": run.version,
        "generation": run.generation,
        "created_at": text(run.created_at),
        "updated_at": text(run.updated_at),
        "phase": derive_phase(desired_of(session, run), history_from(run, rows.attempts)).value,
        "desired": run.desired,
        "desired_reason": run.desired_reason,
        "desired_actor": run.desired_actor,
        "desired_at": text(run.desired_at),
        "intent": run.intent,
        "conditions": run.conditions,
        "attempt": attempt_view(session, newest, clock) if newest else None,
        "attempt_count": rows.attempt_count,
        "status": _status_of(newest) if newest else None,
        "status_age_s": age_s(newest.last_status_at if newest else None, now),
        "metrics": metrics,
        "queue": record.get("queue"),
        "train": record.get("train"),
        "gpu": _leased_gpus(rows.gpus, newest),
        "hold": run.hold,
        "next_start_at": text(run.next_start_at),
        "next_start_in_s": _until(run.next_start_at, now),
        "restarts": restart_view(run, now),
        "drift": run.drift,
        "deployment": _pair_of(rows.deployment),
        "spec": run.spec,
    }


def restart_view(run: Run, now: datetime) -> dict[str, Any]:
    """Counters of the restart policy and what is left of each budget."""
    spec = spec_of(run)
    ledger = Ledger.from_json(run.ledger)
    remaining = ledger.remaining(spec.restart, now)
    return {
        "policy": spec.restart.policy,
        "counted_failures": ledger.streak,
        "restarts": ledger.restarts,
        "uncounted_24h": spec.restart.uncounted_per_day - remaining["uncounted"],
        "without_progress": ledger.no_progress,
        "remaining": remaining,
        "verdict": ledger.verdict,
    }


def node_view(session: Session, node: Node, clock: Clock | None = None) -> dict[str, Any]:
    """A node with conditions, last check, deployment and newest GPU sample."""
    now = clock.now() if clock else now_of(session)
    return {
        "id": node.id,
        "name": node.name,
        "version": node.version,
        "transport": node.transport,
        "host": node.host,
        "port": node.port,
        "user": node.user,
        "vmid": node.vmid,
        "identity_file": node.identity_file,
        "host_key_fingerprint": node.host_key_fingerprint,
        "root": node.root,
        "log_dir": node.log_dir,
        "python": node.python,
        "find_links": node.find_links,
        "torch_index_url": node.torch_index_url,
        "created_at": text(node.created_at),
        "updated_at": text(node.updated_at),
        "last_seen_at": text(node.last_seen_at),
        "last_seen_age_s": age_s(node.last_seen_at, now),
        "conditions": node.conditions,
        "facts": node.facts,
        "unreachable_since": text(node.unreachable_since),
        "check_status": check_status(node.check_report),
        "check_report": node.check_report,
        "checked_at": text(node.checked_at),
        "checked_age_s": age_s(node.checked_at, now),
        "deployment": _pair_of(current_deployment(session, node)),
        "runs": [run.name for run in list_node_runs(session, node.id)],
        "live_attempts": len(list_live_attempts(session, node_id=node.id)),
        "gpu": gpu_snapshot(session, node),
        "operations": [
            operation_view(session, found) for found in list_open_operations(session, node_id=node.id)
        ],
    }


def check_status(report: Sequence[Mapping[str, Any]] | None) -> str:
    """Worst status of a check report: ok, warn, fail, or unknown before the first."""
    if report is None:
        return "unknown"
    found = {item.get("status") for item in report}
    return "fail" if "fail" in found else "warn" if "warn" in found else "ok"


def attempt_view(session: Session, attempt: Attempt, clock: Clock | None = None) -> dict[str, Any]:
    """One attempt: state, times, exit, log, pair, and what it last said."""
    now = clock.now() if clock else now_of(session)
    run = session.get(Run, attempt.run_id)
    is_live = attempt.state in LIVE
    record = attempt.exit_record or {}
    return {
        "id": attempt.id,
        "run": run.name if run else None,
        "number": attempt.number,
        "version": attempt.version,
        "state": attempt.state,
        "is_live": is_live,
        "reason": attempt.reason,
        "message": attempt.message,
        "trigger": attempt.trigger,
        "generation": attempt.generation,
        "intent": attempt.intent,
        "resume_from": attempt.resume_from,
        "created_at": text(attempt.created_at),
        "started_at": text(attempt.started_at),
        "first_output_at": text(attempt.first_output_at),
        "ready_at": text(attempt.ready_at),
        "stopping_at": text(attempt.stopping_at),
        "ended_at": text(attempt.ended_at),
        "duration_s": _duration(attempt, now),
        "time_to_ready_s": _between(attempt.started_at, attempt.ready_at),
        "exit_code": attempt.exit_code,
        "exit_signal": attempt.exit_signal,
        "is_oom": record.get("oom"),
        "last_lines": record.get("last_lines") or [],
        "launch_error": attempt.launch_error,
        "is_counted": attempt.is_counted,
        "cause": attempt.cause_fingerprint,
        "stop": attempt.stop,
        "identity": attempt.identity,
        "argv": attempt.argv,
        "log_path": attempt.log_path,
        "log_size": attempt.log_size,
        "gpus": attempt.gpus,
        "release_digest": attempt.release_digest,
        "environment_digest": attempt.environment_digest,
        "deployment_id": attempt.deployment_id,
        "status": attempt.last_status,
        "status_age_s": age_s(attempt.last_status_at, now) if is_live else None,
        "last_checkpoint": attempt.last_checkpoint,
        "last_step": attempt.last_step,
        "preflight": attempt.preflight,
        "observed_age_s": age_s(attempt.observed_at, now) if is_live else None,
    }


def operation_view(session: Session, operation: Operation) -> dict[str, Any]:
    """One operation with its progress or its end."""
    run = session.get(Run, operation.run_id) if operation.run_id else None
    node = session.get(Node, operation.node_id) if operation.node_id else None
    attempt = session.get(Attempt, operation.attempt_id) if operation.attempt_id else None
    return {
        "id": operation.id,
        "kind": operation.kind,
        "status": operation.status,
        "is_done": operation.status in ("done", "failed", "superseded"),
        "run": run.name if run else None,
        "node": node.name if node else None,
        "attempt": attempt.number if attempt else None,
        "actor": operation.actor,
        "params": operation.params,
        "progress": operation.progress,
        "result": operation.result,
        "error": operation.error,
        "version": operation.version,
        "request_id": operation.request_id,
        "created_at": text(operation.created_at),
        "started_at": text(operation.started_at),
        "finished_at": text(operation.finished_at),
    }


def event_view(event: Event) -> dict[str, Any]:
    """One event."""
    return {
        "id": event.id,
        "at": text(event.at),
        "actor": event.actor,
        "subject": event.subject,
        "level": event.level,
        "reason": event.reason,
        "message": event.message,
        "data": event.data,
        "run_id": event.run_id,
        "node_id": event.node_id,
        "attempt_id": event.attempt_id,
        "operation_id": event.operation_id,
        "request_id": event.request_id,
        "cause_id": event.cause_id,
    }


def deployment_view(session: Session, deployment: Deployment) -> dict[str, Any]:
    """One deployment with its release and environment."""
    pair = _pair_of(deployment)
    assert pair is not None
    node = session.get(Node, deployment.node_id)
    return {
        **pair,
        "is_current": node is not None and node.current_deployment_id == deployment.id,
        "capabilities": deployment.capabilities,
        "error": deployment.error,
        "operation_id": deployment.operation_id,
    }


def drift_view(session: Session, run: Run) -> dict[str, Any]:
    """What differs between the live attempt and the next start, and what policy does about it."""
    drift = run.drift or {}
    live = live_attempt(session, run.id)
    policy = spec_of(run).drift
    kind = drift.get("class")
    changes = list(drift.get("changes") or []) if live else []
    newer = _spec_changes(run, live)
    return {
        "run": run.name,
        "attempt": live.number if live else None,
        "is_drifted": bool(changes or newer),
        "class": kind if changes else None,
        "message": "; ".join(filter(None, [drift.get("message"), *(item["meaning"] for item in newer)])),
        "changes": changes + newer,
        "action": getattr(policy, kind) if changes and kind in POLICY_CLASSES else None,
        "first_seen_at": drift.get("first_seen_at") if changes else None,
        "last_restart_at": drift.get("last_restart_at"),
        "generation": {"live": live.generation if live else None, "stored": run.generation},
        "policy": policy.model_dump(mode="json"),
    }


def _spec_changes(run: Run, live: Attempt | None) -> list[dict[str, Any]]:
    """A run file stored since the live attempt pinned its own, as one more change that no policy acts on."""
    if live is None or live.generation >= run.generation:
        return []
    return [
        {
            "kind": "spec",
            "class": "spec",
            "name": "run file",
            "old": f"generation {live.generation}",
            "new": f"generation {run.generation}",
            "meaning": f"the run file stored since is used by the next start: dflashctl restart {run.name}",
        }
    ]


def explain_view(session: Session, run: Run, clock: Clock | None = None) -> dict[str, Any]:
    """The last decision with its inputs, the restart budget, and the newest attempts with their reasons."""
    now = clock.now() if clock else now_of(session)
    history = history_of(session, run)
    return {
        "run": run.name,
        "phase": derive_phase(desired_of(session, run), history).value,
        "desired": run.desired,
        "decision": run.last_decision,
        "hold": run.hold,
        "next_start_at": text(run.next_start_at),
        "restarts": restart_view(run, now),
        "conditions": run.conditions,
        "attempts": [
            {
                "number": attempt.number,
                "state": attempt.state.value,
                "trigger": attempt.trigger.value,
                "reason": attempt.reason.value if attempt.reason else None,
                "exit_code": attempt.exit_code,
                "exit_signal": attempt.exit_signal,
                "has_new_checkpoint": attempt.has_new_checkpoint,
                "cause": attempt.cause_fingerprint,
            }
            for attempt in history.attempts[:10]
        ],
        "events": [event_view(found) for found in list_events(session, run_id=run.id, limit=20)],
        "detects_within_s": spec_of(run).health.detects_within_s(),
    }


def checkpoint_views(session: Session, run: Run) -> list[dict[str, Any]]:
    """Checkpoints that attempts reported, newest first, each path once."""
    found: dict[str, dict[str, Any]] = {}
    for attempt in list_run_attempts(session, run.id, limit=MAX_CHECKPOINT_ATTEMPTS):
        checkpoint = attempt.last_checkpoint or {}
        path = checkpoint.get("path")
        if path and path not in found:
            found[path] = {
                "step": checkpoint.get("step"),
                "path": path,
                "saved_at": checkpoint.get("saved_at"),
                "attempt": attempt.number,
                "release_digest": attempt.release_digest,
            }
    return list(found.values())


def text(at: datetime | None) -> str | None:
    """RFC 3339, or None."""
    return at.isoformat().replace("+00:00", "Z") if at else None


def age_s(at: datetime | None, now: datetime) -> float | None:
    """Seconds since, never below 0; None when it never was."""
    return max(0.0, (now - at).total_seconds()) if at else None


def _pair_of(deployment: Deployment | None) -> dict[str, Any] | None:
    if deployment is None:
        return None
    return {
        "id": deployment.id,
        "sequence": deployment.sequence,
        "state": deployment.state,
        "is_good": deployment.is_good,
        "release_digest": deployment.release_digest,
        "environment_digest": deployment.environment_digest,
        "created_at": text(deployment.created_at),
        "ready_at": text(deployment.ready_at),
    }


def _status_of(attempt: Attempt) -> dict[str, Any] | None:
    """The trainer's own record; of a program without one, the step that was found in its log."""
    if attempt.last_status is not None or attempt.last_step is None:
        return attempt.last_status
    return {"step": attempt.last_step}


def _leased_gpus(snapshot: Mapping[str, Any] | None, attempt: Attempt | None) -> dict[str, Any] | None:
    """The node's newest sample, cut to the GPUs of the attempt when it leased some."""
    if snapshot is None:
        return None
    leased = {gpu.get("index") for gpu in attempt.gpus} if attempt and attempt.gpus else None
    chosen = [gpu for gpu in snapshot["gpus"] if leased is None or gpu.get("index") in leased]
    return {**snapshot, "gpus": chosen}


def _until(at: datetime | None, now: datetime) -> float | None:
    return max(0.0, (at - now).total_seconds()) if at else None


def _between(start: datetime | None, end: datetime | None) -> float | None:
    return (end - start).total_seconds() if start and end else None


def _duration(attempt: Attempt, now: datetime) -> float | None:
    if attempt.started_at is None:
        return None
    end = attempt.ended_at or (now if attempt.state != AttemptState.LAUNCH_FAILED else None)
    return max(0.0, (end - attempt.started_at).total_seconds()) if end else None
