"""What a run's policy makes of health, requests, failures, drift and bad pairs."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from supervisor.domain import actions as act
from supervisor.domain.decide import derive_phase
from supervisor.domain.facts import (
    GpuMemory,
    HoldFacts,
    RestartRequest,
    StopCause,
    Trigger,
)
from supervisor.domain.restart import Ledger
from supervisor.domain.run import AttemptState, DesiredState, Reason, RunPhase
from supervisor.domain.spec import RunSpec
from tests.support.decisions import SPEC, STOPPED, ask, drift, ended, launching, only, started, stopping
from tests.support.domain_builders import (
    T0,
    make_desired,
    make_facts,
    make_history,
    make_observed,
    make_spec,
)

# --- health --------------------------------------------------------------------------------------------


def test_ready_follows_the_probe() -> None:
    step = only(ask(make_desired(), make_observed(is_ready=True), make_history(started())))
    assert step == act.Advance(attempt_id="a1", state=AttemptState.READY)


def test_ready_timeout_stops_and_unknown_readiness_never_does() -> None:
    late = SPEC.health.ready_timeout_s
    at = T0 + timedelta(seconds=late)
    history = make_history(started())
    step = only(ask(make_desired(), make_observed(is_ready=False, at=at), history, after_s=late))
    assert (step.cause, step.save) == (StopCause.READY_TIMEOUT, False)
    step = only(ask(make_desired(), make_observed(is_ready=None, at=at), history, after_s=late))
    assert isinstance(step, act.Nothing)


@pytest.mark.parametrize(
    ("changes", "seen", "cause"),
    [
        ({"health": {"progress": {"action": "log_only"}}}, {"is_progress_late": True}, None),
        ({"health": {"progress": {"action": "restart"}}}, {"is_progress_late": True}, StopCause.PROGRESS),
        ({"health": {"progress": {"action": "restart"}}}, {"is_progress_late": None}, None),
        ({}, {"is_non_finite": True}, None),
        ({"health": {"quality": {"nan": "hold"}}}, {"is_non_finite": True}, StopCause.QUALITY),
        ({"health": {"quality": {"action": "hold"}}}, {"is_quality_bad": True}, StopCause.QUALITY),
        ({"health": {"quality": {"action": "hold"}}}, {"is_quality_bad": True, "is_non_finite": True}, None),
        ({}, {"is_disk_low": True}, None),
        ({"log": {"action": "stop_at_checkpoint"}}, {"is_disk_low": True}, StopCause.DISK),
    ],
)
def test_enforcement_is_a_switch_of_the_run(changes: Any, seen: Any, cause: Any) -> None:
    spec = make_spec(**changes)
    step = only(ask(make_desired(), make_observed(**seen), make_history(make_facts()), spec=spec))
    assert step.cause is cause if cause else isinstance(step, act.Nothing)


def test_old_evidence_triggers_nothing() -> None:
    spec = make_spec(health={"progress": {"action": "restart"}})
    old = make_observed(is_progress_late=True, at=T0 - timedelta(seconds=500))
    step = only(ask(make_desired(), old, make_history(make_facts()), spec=spec))
    assert step == act.Nothing(reason="StaleObservation")


def test_a_long_healthy_attempt_passes_the_gate_and_forgets_failures() -> None:
    ledger = Ledger(streak=3, no_progress=2, counted=(T0,))
    healthy = make_facts(progress_checks=1, deployment_id="d2")
    history = make_history(healthy, ledger=ledger, good_deployment_id="d1")
    at = T0 + timedelta(seconds=600)
    step = only(ask(make_desired(), make_observed(at=at), history, after_s=600))
    assert isinstance(step, act.PassGate)
    assert (step.deployment_id, step.ledger.streak, step.ledger.no_progress) == ("d2", 0, 0)
    assert step.ledger.counted == (T0,)
    for other in (replace(healthy, progress_checks=0), replace(healthy, ready_at=T0 + timedelta(seconds=60))):
        later = replace(history, attempts=(other,))
        assert isinstance(only(ask(make_desired(), make_observed(at=at), later, after_s=600)), act.Nothing)


# --- operator restart ----------------------------------------------------------------------------------


def request(when: Any = "now", **changes: Any) -> Any:
    wish = RestartRequest(
        intent=2, when=when, requested_at=T0 - timedelta(seconds=1), reason="new data", **changes
    )
    return make_desired(intent=2, restart=wish)


def test_a_restart_stops_first_and_starts_when_the_old_one_has_ended() -> None:
    step = only(ask(request(), make_observed(), make_history(make_facts())))
    assert (step.cause, step.reason, step.save) == (StopCause.RESTART, "new data", True)
    gone = ended(AttemptState.STOPPED, reason=Reason.RESTART_REQUESTED, stop=stopping(StopCause.RESTART).stop)
    step = only(ask(request(resume="scratch"), make_observed(), make_history(gone)))
    assert step == act.PlanAttempt(trigger=Trigger.OPERATOR, intent=2, resume="scratch")


def test_a_restart_at_the_next_checkpoint_waits_for_one() -> None:
    history = make_history(make_facts())
    assert only(ask(request("next_checkpoint"), make_observed(), history)) == act.Nothing(
        reason="WaitForCheckpoint"
    )
    before = make_observed(checkpoint_at=T0 - timedelta(seconds=30))
    assert isinstance(only(ask(request("next_checkpoint"), before, history)), act.Nothing)
    during = make_observed(checkpoint_at=T0, phase="checkpointing")
    assert isinstance(only(ask(request("next_checkpoint"), during, history)), act.Nothing)
    after = make_observed(checkpoint_at=T0, phase="training")
    assert only(ask(request("next_checkpoint"), after, history)).cause is StopCause.RESTART


def test_a_new_start_request_ends_the_backoff_and_lifts_a_hold() -> None:
    hold = HoldFacts(reason=Reason.CRASH_LOOP, message="six", intent=1)
    history = make_history(ended(), hold=hold, next_start_at=T0 + timedelta(seconds=99))
    assert only(ask(make_desired(), make_observed(), history)) == act.Nothing(reason="Held")
    assert isinstance(only(ask(make_desired(intent=2), make_observed(), history)), act.PlanAttempt)


# --- restart by policy ---------------------------------------------------------------------------------


def test_a_failure_is_judged_once_then_waited_for_then_followed() -> None:
    failed = ended()
    step = only(ask(make_desired(), make_observed(), make_history(failed)))
    assert isinstance(step, act.ScheduleRestart)
    assert step.is_counted
    delay = (step.at - T0).total_seconds()
    assert 8 <= delay <= 12
    history = make_history(failed, ledger=step.ledger, next_start_at=step.at)
    assert only(ask(make_desired(), make_observed(), history)) == act.Nothing(reason="Backoff")
    follow = only(ask(make_desired(), make_observed(), history, after_s=delay + 1))
    assert follow == act.PlanAttempt(trigger=Trigger.FAILURE, intent=1, resume="latest")


def test_nothing_is_restarted_while_the_node_cannot_be_reached() -> None:
    failed = ended()
    step = only(ask(make_desired(), make_observed(), make_history(failed)))
    history = make_history(failed, ledger=step.ledger, next_start_at=step.at)
    away = make_observed(reachable=False)
    assert only(ask(make_desired(), away, history, after_s=60)) == act.Nothing(reason="Unreachable")


@pytest.mark.parametrize(
    ("reason", "state", "expected"),
    [
        (Reason.CANNOT_BOOT, AttemptState.FAILED, act.EndRun),
        (Reason.OUT_OF_MEMORY, AttemptState.FAILED, act.EndRun),
        (Reason.EXEC_FAILED, AttemptState.LAUNCH_FAILED, act.EndRun),
        (Reason.PREFLIGHT_FAILED, AttemptState.LAUNCH_FAILED, act.EndRun),
        (Reason.NON_FINITE, AttemptState.FAILED, act.Hold),
        (Reason.DECLARED_LOST, AttemptState.LOST, act.Hold),
        (Reason.COMPLETED, AttemptState.SUCCEEDED, act.EndRun),
        (Reason.STOPPED_EXTERNALLY, AttemptState.FAILED, act.ScheduleRestart),
        (Reason.CONTAINER_RESTARTED, AttemptState.LOST, act.ScheduleRestart),
        (Reason.SHIM_LOST, AttemptState.LOST, act.ScheduleRestart),
    ],
)
def test_defaults_by_reason(reason: Reason, state: AttemptState, expected: Any) -> None:
    step = only(
        ask(make_desired(), make_observed(), make_history(ended(state, reason=reason, exit_code=None)))
    )
    assert isinstance(step, expected)


def test_gpus_that_stay_busy_hold_the_run_and_unknown_ones_do_not() -> None:
    failed = ended(has_gpus=True)
    ledger = Ledger(evaluated="a1", verdict="restart")
    history = make_history(failed, ledger=ledger, next_start_at=T0)
    busy = make_observed(gpu_memory=GpuMemory.IN_USE)
    unseen = make_observed(gpu_memory=GpuMemory.AWAITED)
    assert only(ask(make_desired(), busy, history, after_s=10)) == act.Nothing(reason="GpuBusy")
    held = only(ask(make_desired(), busy, history, after_s=60))
    assert (type(held), held.reason) == (act.Hold, Reason.GPU_NOT_RELEASED)
    # no sample since the end says neither that the memory is free nor that it is in use
    assert only(ask(make_desired(), unseen, history, after_s=60)) == act.Nothing(reason="GpuBusy")
    assert isinstance(only(ask(make_desired(), make_observed(), history, after_s=60)), act.PlanAttempt)


# --- drift ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "facts", "seen", "expected"),
    [
        ("notify", drift(), {"checkpoint_at": T0}, "InSync"),
        ("now", drift(), {}, "StopDrift"),
        ("now", drift(age_s=10), {}, "DriftDebounce"),
        ("now", drift(), {"phase": "checkpointing"}, "DriftCheckpointing"),
        ("at_next_checkpoint", drift(), {}, "DriftWaitsForCheckpoint"),
        (
            "at_next_checkpoint",
            drift(),
            {"checkpoint_at": T0 - timedelta(seconds=200)},
            "DriftWaitsForCheckpoint",
        ),
        ("at_next_checkpoint", drift(), {"checkpoint_at": T0}, "StopDrift"),
        ("when_cheap", drift(), {}, "DriftWaitsUntilCheap"),
        ("when_cheap", drift(is_cheap_now=True), {}, "StopDrift"),
        ("now", drift("irrelevant"), {}, "InSync"),
    ],
)
def test_drift_acts_by_its_class_policy(policy: str, facts: Any, seen: Any, expected: str) -> None:
    spec = make_spec(drift={"capability": policy})
    observed = make_observed(drift=facts, **seen)
    assert ask(make_desired(), observed, make_history(make_facts()), spec=spec).reason == expected


def test_a_program_that_has_saved_nothing_is_told_how_its_drift_restart_can_come() -> None:
    spec = make_spec(drift={"capability": "at_next_checkpoint"}, command={"argv": ["/root/run.sh"]})
    history = make_history(make_facts())
    waiting = ask(make_desired(), make_observed(drift=drift()), history, spec=spec)
    assert waiting.reason == "DriftNoCheckpoints"
    assert "by hand" in waiting.explanation
    saved = make_observed(drift=drift(), checkpoint_at=T0)
    assert ask(make_desired(), saved, history, spec=spec).reason == "StopDrift"


def test_drift_restarts_keep_their_distance() -> None:
    spec = make_spec(drift={"capability": "now"})
    history = make_history(make_facts(), last_drift_restart_at=T0 - timedelta(seconds=3600))
    assert ask(make_desired(), make_observed(drift=drift()), history, spec=spec).reason == "DriftInterval"


def test_a_drift_stop_is_followed_at_once_and_uncounted() -> None:
    done = ended(AttemptState.STOPPED, reason=Reason.DRIFT_RESTART, exit_code=9)
    step = only(ask(make_desired(), make_observed(), make_history(done)))
    assert (step.is_counted, step.at, step.trigger) == (False, T0, Trigger.DRIFT)
    history = make_history(done, ledger=step.ledger, next_start_at=step.at)
    follow = only(ask(make_desired(), make_observed(), history))
    assert (follow.trigger, follow.resume) == (Trigger.DRIFT, "latest")


# --- revert --------------------------------------------------------------------------------------------


def test_a_new_pair_that_fails_is_reverted_once_then_held() -> None:
    old = ended(AttemptState.STOPPED, id="a1", deployment_id="d1", reason=Reason.DRIFT_RESTART)
    new = ended(
        id="a2", number=2, deployment_id="d2", reason=Reason.CANNOT_BOOT, trigger=Trigger.DRIFT, ready_at=None
    )
    decision = ask(make_desired(), make_observed(), make_history(new, old))
    back, again = decision.actions
    assert back == act.Revert(attempt_id="a2", bad_deployment_id="d2", good_deployment_id="d1")
    assert (again.trigger, again.is_counted) == (Trigger.REVERT, False)
    third = ended(id="a3", number=3, deployment_id="d1", reason=Reason.CANNOT_BOOT, trigger=Trigger.REVERT)
    held = only(ask(make_desired(), make_observed(), make_history(third, new, old, ledger=again.ledger)))
    assert (type(held), held.reason) == (act.Hold, Reason.GATE_FAILED)


@pytest.mark.parametrize(
    ("changes", "spec"),
    [
        pytest.param(
            {"reason": Reason.CONTAINER_RESTARTED, "state": AttemptState.LOST}, SPEC, id="not its fault"
        ),
        pytest.param({"deployment_id": "d1"}, SPEC, id="the good pair itself"),
        pytest.param({}, make_spec(drift={"auto_revert": False}), id="switched off"),
    ],
)
def test_nothing_is_reverted_without_need(changes: Any, spec: RunSpec) -> None:
    old = ended(AttemptState.STOPPED, id="a1", deployment_id="d1")
    fields = {"id": "a2", "number": 2, "deployment_id": "d2", "ready_at": None, **changes}
    state = fields.pop("state", AttemptState.FAILED)
    history = make_history(ended(state, **fields), old, good_deployment_id="d1")
    decision = ask(make_desired(), make_observed(), history, spec=spec)
    assert not any(isinstance(action, act.Revert) for action in decision.actions)


def test_a_failure_after_the_gate_is_an_ordinary_one() -> None:
    late = {"ended_at": T0 + timedelta(hours=5), "progress_checks": 9}
    old = ended(AttemptState.STOPPED, id="a1", deployment_id="d1")
    new = ended(id="a2", number=2, deployment_id="d2", **late)
    for newest in (new, replace(new, trigger=Trigger.REVERT)):
        history = make_history(newest, old, good_deployment_id="d1")
        assert isinstance(
            only(ask(make_desired(), make_observed(), history, after_s=18_000)), act.ScheduleRestart
        )
    young = replace(new, ended_at=T0)
    history = make_history(young, old, good_deployment_id="d1")
    assert isinstance(ask(make_desired(), make_observed(), history).actions[0], act.Revert)


def test_a_program_that_reports_no_progress_passes_its_gate_by_time() -> None:
    history = make_history(make_facts(is_program=True, deployment_id="d2"))
    at = T0 + timedelta(seconds=600)
    assert isinstance(only(ask(make_desired(), make_observed(at=at), history, after_s=600)), act.PassGate)
    spec = make_spec(health={"progress_regex": "step"})
    step = only(ask(make_desired(), make_observed(at=at), history, spec=spec, after_s=600))
    assert isinstance(step, act.Nothing)


def test_a_pair_that_once_became_ready_is_not_reverted_by_a_later_crash() -> None:
    first = ended(AttemptState.STOPPED, id="a1", deployment_id="d1")
    second = ended(id="a2", number=2, deployment_id="d2")
    third = ended(id="a3", number=3, deployment_id="d2", ready_at=None)
    decision = ask(make_desired(), make_observed(), make_history(third, second, first))
    assert not any(isinstance(action, act.Revert) for action in decision.actions)


# --- phase ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("desired", "history", "phase"),
    [
        (make_desired(state=DesiredState.STOPPED, intent=0), make_history(), RunPhase.PENDING),
        (make_desired(), make_history(), RunPhase.STARTING),
        (make_desired(), make_history(launching()), RunPhase.STARTING),
        (make_desired(), make_history(make_facts()), RunPhase.RUNNING),
        (STOPPED, make_history(stopping()), RunPhase.STOPPING),
        (STOPPED, make_history(ended(AttemptState.STOPPED)), RunPhase.STOPPED),
        (make_desired(), make_history(ended(AttemptState.SUCCEEDED)), RunPhase.SUCCEEDED),
        (make_desired(), make_history(ended()), RunPhase.BACKOFF),
        (
            make_desired(),
            make_history(ended(), ledger=Ledger(evaluated="a1", verdict="fail")),
            RunPhase.FAILED,
        ),
        (make_desired(), make_history(make_facts(state=AttemptState.QUARANTINED)), RunPhase.HELD),
        (
            make_desired(),
            make_history(ended(), hold=HoldFacts(reason=Reason.CRASH_LOOP, message="", intent=1)),
            RunPhase.HELD,
        ),
        (make_desired(intent=2), make_history(ended()), RunPhase.STARTING),
    ],
)
def test_the_phase_is_derived(desired: Any, history: Any, phase: RunPhase) -> None:
    assert derive_phase(desired, history) is phase


def test_a_decision_becomes_json() -> None:
    decision = ask(make_desired(), make_observed(), make_history(ended()))
    shown = decision.to_json()
    assert shown["actions"][0]["action"] == "ScheduleRestart"
    assert shown["actions"][0]["ledger"]["streak"] == 1
