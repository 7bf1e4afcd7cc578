"""`decide`: launch unknown, stop wins, ends by evidence, restarts, drift, revert, and its properties."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from supervisor.domain import actions as act
from supervisor.domain.facts import (
    ExitFacts,
    LaunchError,
    PreflightResult,
    ShimAnswer,
    StopCause,
    Trigger,
)
from supervisor.domain.restart import Ledger
from supervisor.domain.run import AttemptState, DesiredState, Reason
from tests.support.decisions import SPEC, STOPPED, ask, drift, ended, launching, only, stopping
from tests.support.domain_builders import (
    T0,
    make_desired,
    make_facts,
    make_history,
    make_observed,
    make_spec,
)

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
