"""Rules of `decide` that hold whatever is seen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from supervisor.domain import actions as act
from supervisor.domain.facts import (
    ExitFacts,
    GpuMemory,
    LaunchError,
    PreflightResult,
    ShimAnswer,
    StopCause,
    StopFacts,
    Trigger,
)
from supervisor.domain.restart import Ledger
from supervisor.domain.run import LIVE, TERMINAL, AttemptState, DesiredState, Reason
from supervisor.domain.spec import RunSpec
from supervisor.domain.transitions import check_transition
from tests.support.decisions import SPEC, ask, drift
from tests.support.domain_builders import (
    T0,
    make_desired,
    make_facts,
    make_history,
    make_observed,
    make_spec,
)

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
    gpu_memory=st.sampled_from(GpuMemory),
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
