"""`decide`: launch unknown, stop wins, ends by evidence, restarts, drift, revert, and its properties."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from supervisor.domain import actions as act
from supervisor.domain.actions import Decision
from supervisor.domain.decide import decide, derive_phase
from supervisor.domain.facts import (
    DriftFacts,
    ExitFacts,
    HoldFacts,
    LaunchError,
    PreflightResult,
    RestartRequest,
    ShimAnswer,
    StopCause,
    StopFacts,
    Trigger,
)
from supervisor.domain.restart import Ledger
from supervisor.domain.run import LIVE, TERMINAL, AttemptState, DesiredState, Reason, RunPhase
from supervisor.domain.spec import RunSpec
from supervisor.domain.transitions import check_transition
from tests.support.domain_builders import (
    T0,
    make_desired,
    make_facts,
    make_history,
    make_observed,
    make_spec,
)

SPEC = make_spec()
STOPPED = make_desired(state=DesiredState.STOPPED, intent=2, stop_reason="enough")


def ask(desired: Any, observed: Any, history: Any, *, spec: RunSpec = SPEC, after_s: float = 0) -> Decision:
    return decide(desired, observed, history, spec, T0 + timedelta(seconds=after_s), 7)


def only(decision: Decision) -> Any:
    (action,) = decision.actions
    assert decision.reason
    assert decision.explanation
    return action


def launching(**changes: Any) -> Any:
    return make_facts(state=AttemptState.LAUNCHING, started_at=None, ready_at=None, **changes)


def stopping(cause: StopCause = StopCause.STOP, **changes: Any) -> Any:
    stop = StopFacts(id="s1", cause=cause, requested_at=T0 - timedelta(seconds=5))
    return make_facts(
        state=AttemptState.STOPPING, stop=stop, stopping_at=T0 - timedelta(seconds=5), **changes
    )


def ended(state: AttemptState = AttemptState.FAILED, **changes: Any) -> Any:
    fields = {"reason": Reason.EXITED_NON_ZERO, "ended_at": T0, "exit_code": 1, **changes}
    return make_facts(state=state, **fields)


# --- start ---------------------------------------------------------------------------------------------


def test_a_wanted_run_without_attempts_gets_one() -> None:
    step = only(ask(make_desired(), make_observed(), make_history()))
    assert step == act.PlanAttempt(trigger=Trigger.START, intent=1, resume="latest")


def test_an_unwanted_run_gets_none() -> None:
    step = only(ask(make_desired(state=DesiredState.STOPPED, intent=0), make_observed(), make_history()))
    assert isinstance(step, act.Nothing)


@pytest.mark.parametrize(
    ("state", "preflight", "expected"),
    [
        (AttemptState.PLANNED, None, act.Preflight),
        (AttemptState.PREFLIGHT, None, act.Preflight),
        (AttemptState.PREFLIGHT, PreflightResult(is_ok=True), act.Launch),
        (AttemptState.PREFLIGHT, PreflightResult(is_ok=False, message="no disk"), act.FinishAttempt),
    ],
)
def test_a_launch_follows_only_a_passed_preflight(state: AttemptState, preflight: Any, expected: Any) -> None:
    history = make_history(make_facts(state=state))
    step = only(ask(make_desired(), make_observed(preflight=preflight), history))
    assert isinstance(step, expected)
    if isinstance(step, act.FinishAttempt):
        assert (step.state, step.reason) == (AttemptState.LAUNCH_FAILED, Reason.PREFLIGHT_FAILED)
        assert step.message == "no disk"


# --- launch unknown ------------------------------------------------------------------------------------


def test_a_launch_without_an_answer_is_resolved_and_never_repeated_blindly() -> None:
    step = only(ask(make_desired(), make_observed(), make_history(launching())))
    assert step == act.ResolveLaunch(attempt_id="a1", tombstone=False)


def test_a_launch_on_an_unreachable_node_waits() -> None:
    step = only(ask(make_desired(), make_observed(reachable=False), make_history(launching())))
    assert step == act.Nothing(reason="Unreachable")


def test_a_launch_goes_back_to_planned_only_on_fresh_proof() -> None:
    proof = make_observed(shim_answer=ShimAnswer.NO_SUCH_ATTEMPT)
    step = only(ask(make_desired(), proof, make_history(launching())))
    assert step == act.Advance(attempt_id="a1", state=AttemptState.PLANNED)
    old = replace(proof, at=T0 - timedelta(seconds=500))
    assert isinstance(only(ask(make_desired(), old, make_history(launching()))), act.ResolveLaunch)


def test_a_launch_that_the_shim_knows_is_started() -> None:
    seen = make_observed(shim_answer=ShimAnswer.KNOWN, shim_phase="running", alive=True)
    step = only(ask(make_desired(), seen, make_history(launching())))
    assert step == act.Advance(attempt_id="a1", state=AttemptState.STARTED)


@pytest.mark.parametrize(
    ("shim_reason", "state", "reason"),
    [
        ("ExecFailed", AttemptState.LAUNCH_FAILED, Reason.EXEC_FAILED),
        ("LogExists", AttemptState.LAUNCH_FAILED, Reason.LOG_EXISTS),
        ("LockHeld", AttemptState.LAUNCH_FAILED, Reason.LOCK_HELD),
        ("Whatever", AttemptState.LAUNCH_FAILED, Reason.LAUNCH_REJECTED),
        ("Tombstone", AttemptState.STOPPED, Reason.TOMBSTONE),
    ],
)
def test_a_refused_launch_keeps_its_cause(shim_reason: str, state: AttemptState, reason: Reason) -> None:
    error = LaunchError(reason=shim_reason, message="no such file", errno=2)
    step = only(ask(make_desired(), make_observed(launch_error=error), make_history(launching())))
    assert (step.state, step.reason) == (state, reason)


# --- stop wins -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (AttemptState.PLANNED, act.FinishAttempt),
        (AttemptState.PREFLIGHT, act.FinishAttempt),
        (AttemptState.LAUNCHING, act.ResolveLaunch),
        (AttemptState.STARTED, act.Stop),
        (AttemptState.READY, act.Stop),
    ],
)
def test_a_stop_wins_at_every_stage(state: AttemptState, expected: Any) -> None:
    seen = make_observed(preflight=PreflightResult(is_ok=True), is_ready=True)
    step = only(ask(STOPPED, seen, make_history(make_facts(state=state))))
    assert isinstance(step, expected)
    if isinstance(step, act.ResolveLaunch):
        assert step.tombstone
    if isinstance(step, act.Stop):
        assert (step.cause, step.reason, step.save) == (StopCause.STOP, "enough", True)


def test_a_stop_wins_right_after_a_crash() -> None:
    step = only(ask(STOPPED, make_observed(), make_history(ended())))
    assert step == act.Nothing(reason="Stopped")


def test_an_abandoned_launch_ends_stopped() -> None:
    seen = make_observed(shim_answer=ShimAnswer.KNOWN, shim_phase="abandoned")
    step = only(ask(STOPPED, seen, make_history(launching())))
    assert (step.state, step.reason) == (AttemptState.STOPPED, Reason.TOMBSTONE)


def test_a_stop_has_one_id_however_often_it_is_decided() -> None:
    history = make_history(make_facts())
    assert only(ask(STOPPED, make_observed(), history)) == only(
        ask(STOPPED, make_observed(), history, after_s=9)
    )


def test_an_unconfirmed_stop_is_sent_again_with_the_same_id_and_a_confirmed_one_is_not() -> None:
    history = make_history(stopping())
    again = only(ask(STOPPED, make_observed(alive=True), history))
    assert (again.stop_id, again.cause) == ("s1", StopCause.STOP)
    step = only(ask(STOPPED, make_observed(alive=True, shim_stop_id="s1"), history))
    assert step == act.Nothing(reason="Stopping")


def test_a_process_that_outlives_all_deadlines_is_quarantined() -> None:
    late = SPEC.stop.longest_s + 10
    seen = make_observed(alive=True, shim_stop_id="s1", at=T0 + timedelta(seconds=late))
    step = only(ask(STOPPED, seen, make_history(stopping()), after_s=late))
    assert step.state is AttemptState.QUARANTINED
    unseen = make_observed(shim_stop_id="s1", at=T0 + timedelta(seconds=late))
    assert isinstance(only(ask(STOPPED, unseen, make_history(stopping()), after_s=late)), act.Nothing)


def test_a_quarantined_process_waits_for_a_person_and_ends_by_evidence() -> None:
    left = replace(stopping(), state=AttemptState.QUARANTINED)
    assert only(ask(STOPPED, make_observed(alive=True), make_history(left))) == act.Nothing(
        reason="Quarantined"
    )
    done = make_observed(exit=ExitFacts(code=0))
    assert only(ask(STOPPED, done, make_history(left))).state is AttemptState.STOPPED


def test_a_launch_that_the_shim_is_about_to_execute_is_waited_for() -> None:
    seen = make_observed(shim_answer=ShimAnswer.KNOWN, shim_phase="launching")
    assert only(ask(make_desired(), seen, make_history(launching()))) == act.Nothing(reason="Launching")
    half = replace(seen, alive=False)
    assert isinstance(only(ask(make_desired(), half, make_history(launching()))), act.Nothing)


def test_a_launch_whose_shim_died_is_closed_in_the_node_before_anything_follows() -> None:
    seen = make_observed(shim_answer=ShimAnswer.KNOWN, shim_phase="launching", alive=False, shim_alive=False)
    step = only(ask(make_desired(), seen, make_history(launching())))
    assert step == act.ResolveLaunch(attempt_id="a1", tombstone=True)
    old = replace(seen, at=T0 - timedelta(seconds=500))
    assert isinstance(only(ask(make_desired(), old, make_history(launching()))), act.Nothing)
    settled = make_observed(launch_error=LaunchError(reason="ShimDied", message="died"))
    step = only(ask(make_desired(), settled, make_history(launching())))
    assert (step.state, step.reason) == (AttemptState.LAUNCH_FAILED, Reason.SHIM_LOST)


def test_too_many_uncounted_restarts_keep_drift_waiting() -> None:
    ledger = Ledger(uncounted=(T0,) * 10)
    spec = make_spec(drift={"capability": "now"})
    history = make_history(make_facts(), ledger=ledger)
    assert ask(make_desired(), make_observed(drift=drift()), history, spec=spec).reason == "DriftCeiling"


# --- end by evidence -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "signal", "oom", "state", "reason"),
    [
        (0, None, None, AttemptState.SUCCEEDED, Reason.COMPLETED),
        (1, None, None, AttemptState.FAILED, Reason.EXITED_NON_ZERO),
        (2, None, None, AttemptState.FAILED, Reason.CANNOT_BOOT),
        (3, None, None, AttemptState.FAILED, Reason.CANNOT_BOOT),
        (4, None, None, AttemptState.FAILED, Reason.CANNOT_BOOT),
        (5, None, None, AttemptState.FAILED, Reason.NON_FINITE),
        (6, None, None, AttemptState.FAILED, Reason.OUT_OF_MEMORY),
        (7, None, None, AttemptState.FAILED, Reason.PIPELINE_FAILED),
        (8, None, None, AttemptState.FAILED, Reason.CANNOT_BOOT),
        (9, None, None, AttemptState.FAILED, Reason.STOPPED_EXTERNALLY),
        (None, 11, None, AttemptState.FAILED, Reason.KILLED_BY_SIGNAL),
        (None, 9, True, AttemptState.FAILED, Reason.OOM_KILLED),
    ],
)
def test_an_exit_nobody_asked_for_is_classified(
    code: Any, signal: Any, oom: Any, state: AttemptState, reason: Reason
) -> None:
    seen = make_observed(exit=ExitFacts(code=code, signal=signal, oom=oom))
    step = only(ask(make_desired(), seen, make_history(make_facts())))
    assert (step.state, step.reason) == (state, reason)


def test_exit_codes_of_other_programs_have_no_meaning_of_ours() -> None:
    seen = make_observed(exit=ExitFacts(code=5))
    step = only(ask(make_desired(), seen, make_history(make_facts(is_program=True))))
    assert step.reason is Reason.EXITED_NON_ZERO


@pytest.mark.parametrize(
    ("cause", "code", "is_program", "state"),
    [
        (StopCause.STOP, 9, False, AttemptState.STOPPED),
        (StopCause.STOP, 0, False, AttemptState.SUCCEEDED),
        (StopCause.STOP, 0, True, AttemptState.STOPPED),
        (StopCause.STOP, None, False, AttemptState.STOPPED),
        (StopCause.READY_TIMEOUT, 0, False, AttemptState.FAILED),
        (StopCause.PROGRESS, 9, False, AttemptState.FAILED),
    ],
)
def test_the_end_of_a_stop_depends_on_why_it_was_begun(
    cause: StopCause, code: Any, is_program: bool, state: AttemptState
) -> None:
    seen = make_observed(exit=ExitFacts(code=code, signal=None if code is not None else 9))
    step = only(ask(make_desired(), seen, make_history(stopping(cause, is_program=is_program))))
    assert step.state is state


@pytest.mark.parametrize("gone", [Reason.CONTAINER_RESTARTED, Reason.CONTAINER_STOPPED, Reason.HOST_REBOOTED])
def test_identity_evidence_makes_lost_or_stopped(gone: Reason) -> None:
    step = only(ask(make_desired(), make_observed(gone=gone), make_history(make_facts())))
    assert (step.state, step.reason) == (AttemptState.LOST, gone)
    step = only(ask(STOPPED, make_observed(gone=gone), make_history(stopping())))
    assert (step.state, step.reason) == (AttemptState.STOPPED, Reason.STOP_REQUESTED)


def test_absence_needs_both_process_and_shim_gone_and_fresh_evidence() -> None:
    absent = make_observed(alive=False, shim_alive=False)
    history = make_history(make_facts())
    assert only(ask(make_desired(), absent, history)).reason is Reason.SHIM_LOST
    for other in (
        replace(absent, shim_alive=True),
        replace(absent, shim_alive=None),
        replace(absent, at=T0 - timedelta(seconds=500)),
    ):
        assert not isinstance(only(ask(make_desired(), other, history)), act.FinishAttempt)


def test_an_operator_may_declare_an_unreachable_attempt_lost() -> None:
    step = only(
        ask(make_desired(declare_lost="a1"), make_observed(reachable=False), make_history(make_facts()))
    )
    assert (step.state, step.reason) == (AttemptState.LOST, Reason.DECLARED_LOST)


def test_a_second_copy_waits_until_the_node_of_a_declared_loss_was_seen() -> None:
    lost = ended(AttemptState.LOST, reason=Reason.DECLARED_LOST)
    again = make_desired(intent=2)
    history = make_history(lost)
    assert only(ask(again, make_observed(reachable=False), history)) == act.Nothing(reason="HostNotSeen")
    assert isinstance(only(ask(again, make_observed(), history)), act.PlanAttempt)
    forced = replace(again, may_start_unseen=True)
    assert isinstance(only(ask(forced, make_observed(reachable=False), history)), act.PlanAttempt)


# --- health --------------------------------------------------------------------------------------------


def started(**changes: Any) -> Any:
    return make_facts(state=AttemptState.STARTED, ready_at=None, **changes)


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
    busy = make_observed(gpu_clean=False)
    assert only(ask(make_desired(), busy, history, after_s=10)) == act.Nothing(reason="GpuBusy")
    held = only(ask(make_desired(), busy, history, after_s=60))
    assert (type(held), held.reason) == (act.Hold, Reason.GPU_NOT_RELEASED)
    assert isinstance(only(ask(make_desired(), make_observed(), history, after_s=60)), act.PlanAttempt)


# --- drift ---------------------------------------------------------------------------------------------


def drift(kind: str = "capability", age_s: float = 100, **changes: Any) -> DriftFacts:
    return DriftFacts(
        kind=kind, first_seen_at=T0 - timedelta(seconds=age_s), message="pynvml arrived", **changes
    )


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


# --- properties ----------------------------------------------------------------------------------------

TRI = st.sampled_from([None, True, False])
CODES = st.sampled_from([None, 0, 1, 2, 5, 9])
OBSERVED = st.builds(
    make_observed,
    reachable=TRI,
    shim_answer=st.sampled_from(list(ShimAnswer)),
    shim_phase=st.sampled_from([None, "launching", "running", "stopping", "exited", "abandoned"]),
    alive=TRI,
    shim_alive=TRI,
    exit=st.one_of(st.none(), st.builds(ExitFacts, code=CODES, is_quarantined=st.booleans())),
    launch_error=st.sampled_from([None, LaunchError(reason="ExecFailed", message="no")]),
    gone=st.sampled_from([None, Reason.CONTAINER_RESTARTED]),
    preflight=st.sampled_from([None, PreflightResult(is_ok=True), PreflightResult(is_ok=False)]),
    gpu_clean=TRI,
    is_ready=TRI,
    is_progress_late=TRI,
    is_non_finite=st.booleans(),
    drift=st.sampled_from([None, drift(), drift("critical")]),
    checkpoint_at=st.sampled_from([None, T0]),
)
UNKNOWN = st.builds(
    make_observed,
    reachable=st.sampled_from([None, False]),
    is_ready=st.none(),
    is_progress_late=st.none(),
)
FACTS = st.builds(
    make_facts,
    state=st.sampled_from(list(AttemptState)),
    intent=st.sampled_from([1, 2]),
    reason=st.sampled_from([None, Reason.EXITED_NON_ZERO, Reason.DRIFT_RESTART, Reason.CANNOT_BOOT]),
    trigger=st.sampled_from(list(Trigger)),
    deployment_id=st.sampled_from([None, "d1", "d2"]),
    ended_at=st.just(T0),
    stop=st.sampled_from([StopFacts(id="s", cause=cause, requested_at=T0) for cause in StopCause]),
    has_gpus=st.booleans(),
)
HISTORY = st.builds(
    lambda newest, older, verdict: make_history(
        newest,
        *[replace(item, id="a0", number=0, state=AttemptState.FAILED) for item in older],
        ledger=Ledger(evaluated=newest.id if verdict else None, verdict=verdict),
        next_start_at=T0,
        good_deployment_id="d1",
    ),
    FACTS,
    st.lists(FACTS, max_size=1),
    st.sampled_from([None, "restart", "fail", "hold"]),
)
DESIRED = st.builds(make_desired, state=st.sampled_from(list(DesiredState)), intent=st.sampled_from([1, 2]))
SPECS = st.sampled_from(
    [
        SPEC,
        make_spec(
            restart={"policy": "always"},
            health={"progress": {"action": "restart"}},
            drift={"critical": "now"},
        ),
    ]
)


@given(
    desired=DESIRED, observed=OBSERVED, history=HISTORY, spec=SPECS, after_s=st.sampled_from([0, 40, 4000])
)
@settings(derandomize=True, max_examples=400, deadline=None)
def test_whatever_is_seen_the_rules_hold(
    desired: Any, observed: Any, history: Any, spec: RunSpec, after_s: float
) -> None:
    decision = ask(desired, observed, history, spec=spec, after_s=after_s)

    assert decision == ask(desired, observed, history, spec=spec, after_s=after_s)
    newest = history.newest
    for action in decision.actions:
        if isinstance(action, act.PlanAttempt):
            assert history.live is None, "never two live attempts"
        if isinstance(action, act.FinishAttempt):
            assert action.state in TERMINAL
            assert check_transition(newest.state, action.state) in TERMINAL
        if isinstance(action, act.Advance):
            assert check_transition(newest.state, action.state) in LIVE
        if isinstance(action, act.Stop | act.Launch | act.Preflight | act.ResolveLaunch):
            assert newest.state in LIVE, "final is final"
        if desired.state is DesiredState.STOPPED:
            forbidden = (act.PlanAttempt, act.Preflight, act.Launch, act.ScheduleRestart, act.Revert)
            assert not isinstance(action, forbidden), "a stop always wins"


@given(
    desired=DESIRED, observed=UNKNOWN, history=HISTORY, spec=SPECS, after_s=st.sampled_from([0, 40, 400_000])
)
@settings(derandomize=True, max_examples=200, deadline=None)
def test_unknown_is_never_dead(
    desired: Any, observed: Any, history: Any, spec: RunSpec, after_s: float
) -> None:
    for action in ask(desired, observed, history, spec=spec, after_s=after_s).actions:
        if isinstance(action, act.FinishAttempt):
            assert history.newest.state in (AttemptState.PLANNED, AttemptState.PREFLIGHT)
        if isinstance(action, act.Stop):
            is_asked = desired.state is DesiredState.STOPPED or history.newest.intent < desired.intent
            is_drift = action.cause is StopCause.DRIFT
            assert is_asked or is_drift or history.newest.state is AttemptState.STOPPING
        assert not (isinstance(action, act.Advance) and action.state is not AttemptState.PLANNED)
