"""Dry runs: what a request would do, what it costs and what could go wrong. Nothing is changed.

Called by the routes for `?dry_run=true`. Every plan has `action`, `summary`, `steps` (action, detail,
`limit_s`), `costs`, `risks` and `would_refuse` (None, or the error that the request would get).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sqlmodel import Session

from supervisor.clock import Clock
from supervisor.domain.deploy import (
    advised_checkpoint_interval_s,
    recommend,
)
from supervisor.domain.layout import render_log_path
from supervisor.domain.run import AttemptState, DesiredState
from supervisor.domain.spec import RunSpec
from supervisor.store.costs import cost_of, phase_times
from supervisor.store.facts import is_program, spec_of
from supervisor.store.queries import (
    current_deployment,
    deployment_for_run,
    find_earlier_deployment,
    list_node_runs,
    list_open_operations,
    list_run_attempts,
    live_attempt,
)
from supervisor.store.tables import Attempt, Node, Run

Plan = dict[str, Any]

SAMPLES = 20


def plan_start(
    session: Session,
    run: Run,
    *,
    clock: Clock | None = None,
    resume: str | None = None,
    force: bool = False,
) -> Plan:
    """What a start would do."""
    del clock, force
    live = live_attempt(session, run.id)
    spec = spec_of(run)
    refusal = None
    if live is not None and run.desired == DesiredState.RUNNING:
        refusal = {"reason": "AlreadyRunning", "message": f"run {run.name} is {live.state} already"}
    times = phase_times(session, run)
    return _plan(
        "start",
        f"start run {run.name} with attempt {run.next_attempt_number}",
        _start_steps(session, run, spec, resume),
        risks=_start_risks(session, run),
        costs={"expected_time_to_ready_s": _sum(times.launch_s, times.ready_s)},
        would_refuse=refusal,
    )


def plan_stop(
    session: Session,
    run: Run,
    *,
    clock: Clock | None = None,
    reason: str = "",
    save: bool = True,
) -> Plan:
    """What a stop would do."""
    del clock, reason
    live = live_attempt(session, run.id)
    if live is None:
        summary = f"run {run.name} has no live attempt: nothing to stop, and none would start by itself"
        return _plan("stop", summary, [], costs={}, risks=[])
    spec = spec_of(live)
    cost = cost_of(session, run, live)
    risks = []
    if not save and cost.lost_s is None:
        risks.append("without saving, all work since the last checkpoint is lost; how much is not known")
    elif not save:
        risks.append(f"without saving, {cost.lost_s:.0f} s of work since the last checkpoint are lost")
    steps = _stop_steps(spec, save=save)
    return _plan(
        "stop", f"stop attempt {live.number} of run {run.name}", steps, costs=cost.to_json(), risks=risks
    )


def plan_restart(
    session: Session,
    run: Run,
    *,
    clock: Clock | None = None,
    when: str = "now",
    save: bool = True,
    resume: str | None = None,
    reason: str = "",
) -> Plan:
    """What a restart would do, with its cost now and at the next checkpoint."""
    del reason
    live = live_attempt(session, run.id)
    if live is None:
        return {**plan_start(session, run, clock=clock, resume=resume), "action": "restart"}
    cost = cost_of(session, run, live)
    refusal = wait_refusal(run, live)
    advice, why = recommend(cost)
    if refusal is not None:
        cost = replace(cost, wait_s=None, next_checkpoint_gpu_s=None)
        advice, why = "now", "the program has reported no checkpoint: waiting for one would save nothing"
    spec = spec_of(live)
    steps = []
    if when == "next_checkpoint":
        detail = "wait until the trainer has written its next checkpoint"
        steps.append({"action": "wait", "detail": detail, "limit_s": None})
    steps += _stop_steps(spec, save=save) + _start_steps(session, run, spec_of(run), resume)
    costs = {**cost.to_json(), "recommendation": advice, "recommendation_reason": why}
    costs["advised_checkpoint_interval_s"] = _advised_interval(session, run)
    return _plan(
        "restart",
        f"replace attempt {live.number} of run {run.name} by attempt {run.next_attempt_number}: {why}",
        steps,
        costs=costs,
        risks=_start_risks(session, run),
        would_refuse=refusal if when == "next_checkpoint" else None,
    )


def plan_rollback(session: Session, run: Run, *, clock: Clock | None = None, when: str = "now") -> Plan:
    """What going back to the pair before would do, with the cost of the restart."""
    earlier = find_earlier_deployment(session, run)
    plan = {**plan_restart(session, run, clock=clock, when=when), "action": "rollback"}
    if earlier is None:
        return {**plan, "would_refuse": earlier_refusal(run)}
    plan["summary"] = f"pin run {run.name} to deployment {earlier.id}, then {plan['summary']}"
    if earlier.is_good is False:
        plan["risks"] = [*plan["risks"], "the release and environment to go back to failed before"]
    return plan


def plan_declare_lost(
    session: Session, run: Run, *, clock: Clock | None = None, reason: str = "", force: bool = False
) -> Plan:
    """What declaring the live attempt lost would do."""
    del clock, reason
    live = live_attempt(session, run.id)
    refusal = loss_refusal(run, live, force=force)
    summary = f"declare attempt {live.number if live else 'none'} of run {run.name} lost; signals nothing"
    steps = [
        {
            "action": "declare",
            "detail": "the attempt ends as lost, its GPUs are given up",
            "limit_s": None,
        },
        {"action": "hold", "detail": "no further attempt until somebody asks for a start", "limit_s": None},
    ]
    risks = ["a process that still runs goes on without a record; its locks in the node keep its GPUs"]
    return _plan("declare_lost", summary, steps, costs={}, risks=risks, would_refuse=refusal)


def earlier_refusal(run: Run) -> dict[str, Any]:
    """Why a run without an earlier pair cannot go back."""
    return {
        "reason": "NoEarlierDeployment",
        "message": f"run {run.name} has never run on another release and environment",
        "hint": "deploy the one you want, then restart",
    }


def wait_refusal(run: Run, live: Attempt | None) -> dict[str, Any] | None:
    """Why a restart may not wait for a checkpoint of the live attempt; None when it may.

    A program of the user's that reports neither a checkpoint nor when it writes one may never do so.
    """
    if live is None or not is_program(live.spec) or live.last_checkpoint is not None:
        return None
    if (live.last_status or {}).get("checkpoint_interval_s") is not None:
        return None
    return {
        "reason": "NoCheckpoints",
        "message": f"attempt {live.number} of run {run.name} has reported no checkpoint to wait for",
        "hint": f"restart it now: dflashctl restart {run.name} --when now",
    }


def loss_refusal(run: Run, live: Attempt | None, *, force: bool) -> dict[str, Any] | None:
    """Why the live attempt may not be declared lost; None when it may."""
    if live is None:
        return {
            "reason": "NotLive",
            "message": f"run {run.name} has no live attempt",
            "hint": f"see what it is: dflashctl show {run.name}",
        }
    status = {item["type"]: item["status"] for item in run.conditions}
    is_seen = status.get("Alive") == "true" and status.get("Reachable") == "true"
    is_quarantined = live.state == AttemptState.QUARANTINED
    if not is_seen or (is_quarantined and force):
        return None
    hint = f"stop it instead: dflashctl stop {run.name}"
    if is_quarantined:
        hint = "restart the container or the host, which ends it; force declares it lost as it is"
    return {
        "reason": "StillAlive",
        "message": f"attempt {live.number} of run {run.name} is alive and its node answers",
        "hint": hint,
    }


def plan_deploy(
    session: Session,
    node: Node,
    *,
    source: str = "bundled",
    lock: str | None = None,
    python: str | None = None,
) -> Plan:
    """What a deploy would do, and which runs it would touch."""
    current = current_deployment(session, node)
    under_way = list_open_operations(session, kinds=("deploy",), node_id=node.id)
    steps = [{"action": "check", "detail": "look at Python, disk and network of the node", "limit_s": None}]
    if source != "none":
        detail = f"send the release built from {source}, verify every digest in the node, byte-compile"
        steps.append({"action": "release", "detail": detail, "limit_s": None})
    if python is not None:
        detail = f"probe the external interpreter {python}; it is never written to"
    else:
        detail = f"build an environment from lock {lock or 'bundled'} beside the old one, import check, probe"
    steps.append({"action": "environment", "detail": detail, "limit_s": None})
    steps.append({"action": "switch", "detail": "make the pair current for the next start", "limit_s": None})
    affected = []
    for run in list_node_runs(session, node.id):
        live = live_attempt(session, run.id)
        if live is not None:
            affected.append({"run": run.name, "attempt": live.number, **_drift_actions(spec_of(run))})
    refusal = None
    if under_way:
        refusal = {"reason": "DeployRunning", "message": f"deploy {under_way[0].id} is under way"}
    return {
        **_plan(
            "deploy",
            f"deploy to node {node.name}; running attempts keep what they have",
            steps,
            costs={},
            risks=[],
        ),
        "current_deployment": current.id if current else None,
        "affected_runs": affected,
        "would_refuse": refusal,
    }


def _start_steps(session: Session, run: Run, spec: RunSpec, resume: str | None) -> list[dict[str, Any]]:
    node = session.get(Node, run.node_id)
    assert node is not None
    log_path = render_log_path(
        spec.log.pattern,
        log_dir=node.log_dir,
        root=node.root,
        name=run.name,
        node=node.name,
        attempt=run.next_attempt_number,
    )
    needed = [name for name, need in spec.capabilities.model_dump().items() if need == "required"]
    checks = "node, release, environment, GPUs, disk" + (f"; required: {', '.join(needed)}" if needed else "")
    start = resume or spec.resume.start
    return [
        {"action": "preflight", "detail": f"check {checks}", "limit_s": None},
        {
            "action": "launch",
            "detail": f"start from {start}, log {log_path} (next free number)",
            "limit_s": None,
        },
        {"action": "verify", "detail": "process identity and first output", "limit_s": None},
        {
            "action": "ready",
            "detail": "wait until training begins",
            "limit_s": spec.health.ready_timeout_s,
        },
    ]


def _stop_steps(spec: RunSpec, *, save: bool) -> list[dict[str, Any]]:
    stop = spec.stop
    asked = f"ask by control/stop.json and {stop.signal}" + (
        ", with a checkpoint" if save else ", without a checkpoint"
    )
    return [
        {"action": "ask", "detail": asked, "limit_s": stop.grace_s},
        {"action": "term", "detail": "SIGTERM to the main process", "limit_s": stop.term_s},
        {"action": "kill", "detail": "SIGKILL to all processes of the attempt", "limit_s": stop.kill_s},
        {"action": "verify", "detail": "verify absence by identity", "limit_s": stop.verify_s},
        {"action": "gpus", "detail": "wait until GPU memory is released", "limit_s": stop.gpu_wait_s},
    ]


def _start_risks(session: Session, run: Run) -> list[str]:
    risks = []
    deployment = deployment_for_run(session, run)
    if deployment is None and spec_of(run).has_release:
        risks.append("nothing has been deployed to the node yet: the preflight will refuse the launch")
    if deployment is not None and deployment.is_good is None:
        risks.append("the release and environment have not proved good yet")
    if deployment is not None and deployment.is_good is False:
        risks.append("the release and environment failed before")
    conditions = {item["type"]: item for item in run.conditions}
    if conditions.get("Reachable", {}).get("status") == "false":
        risks.append(
            f"the node cannot be reached now: {conditions['Reachable'].get('message') or 'no detail'}"
        )
    return risks


def _drift_actions(spec: RunSpec) -> dict[str, str]:
    drift = spec.drift
    return {
        "on_release_change": drift.release,
        "on_capability_change": drift.capability,
        "on_critical_change": drift.critical,
        "on_minor_change": drift.minor,
    }


def _advised_interval(session: Session, run: Run) -> float | None:
    """From the time to save and the mean time between failures; None until both have been seen."""
    save_s = phase_times(session, run).save_s
    attempts = list_run_attempts(session, run.id, limit=SAMPLES)
    failures = [attempt for attempt in attempts if attempt.state in ("failed", "lost") and attempt.started_at]
    lived = [
        (attempt.ended_at - attempt.started_at).total_seconds()
        for attempt in attempts
        if attempt.ended_at and attempt.started_at
    ]
    if save_s is None or not failures or not lived:
        return None
    return advised_checkpoint_interval_s(save_s, sum(lived) / len(failures))


def _plan(
    action: str,
    summary: str,
    steps: Sequence[dict[str, Any]],
    *,
    costs: dict[str, Any],
    risks: Sequence[str],
    would_refuse: dict[str, Any] | None = None,
) -> Plan:
    return {
        "action": action,
        "summary": summary,
        "steps": list(steps),
        "costs": costs,
        "risks": list(risks),
        "would_refuse": would_refuse,
    }


def _sum(*values: float | None) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None
