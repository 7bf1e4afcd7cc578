"""The state machine: only listed changes exist, final is final, unknown text is an error."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from supervisor.domain.errors import InvalidTransitionError
from supervisor.domain.run import LIVE, TERMINAL, TRANSITIONS, AttemptState, Reason
from supervisor.domain.transitions import check_transition, parse_state, render_diagram

STATES = st.sampled_from(list(AttemptState))
LISTED = {
    "planned": "preflight stopped",
    "preflight": "launching launch_failed stopped",
    "launching": "started launch_failed lost planned stopped",
    "started": "ready stopping succeeded failed lost",
    "ready": "stopping succeeded failed lost",
    "stopping": "stopped succeeded failed lost quarantined",
    "quarantined": "stopped failed lost",
}


@given(old=STATES, new=STATES)
@settings(derandomize=True, max_examples=200, deadline=None)
def test_exactly_the_listed_changes_are_allowed(old: AttemptState, new: AttemptState) -> None:
    if new.value in LISTED.get(old.value, "").split():
        assert check_transition(old, new) is new
    else:
        with pytest.raises(InvalidTransitionError) as caught:
            check_transition(old, new)
        assert caught.value.data == {"old": old.value, "new": new.value}


def test_live_and_terminal_split_all_states() -> None:
    assert set(AttemptState) == LIVE | TERMINAL
    assert not LIVE & TERMINAL
    assert {state for state, allowed in TRANSITIONS.items() if not allowed} == TERMINAL


def test_every_state_can_be_reached_and_every_live_one_can_end() -> None:
    reached = {AttemptState.PLANNED}
    for _ in AttemptState:
        reached |= {new for old in reached for new in TRANSITIONS[old]}
    assert reached == set(AttemptState)
    can_end = set(TERMINAL)
    for _ in AttemptState:
        can_end |= {old for old, allowed in TRANSITIONS.items() if allowed & can_end}
    assert can_end == set(AttemptState)


@pytest.mark.parametrize("text", ["unreachable", "Ready", "", "done"])
def test_unknown_text_is_an_error_that_names_it(text: str) -> None:
    with pytest.raises(InvalidTransitionError, match="unknown attempt state"):
        parse_state(text)


def test_final_states_say_so() -> None:
    with pytest.raises(InvalidTransitionError, match="failed, which is final"):
        check_transition("failed", "ready")


def test_diagram_shows_every_change() -> None:
    diagram = render_diagram()
    for old, news in LISTED.items():
        for new in news.split():
            assert f"    {old} --> {new}\n" in diagram


@pytest.mark.parametrize("reason", list(Reason))
def test_every_reason_has_a_message(reason: Reason) -> None:
    assert reason.message
    assert reason.message[0].islower() or reason.message.startswith("GPU")
    assert not reason.message.endswith(".")
    assert isinstance(reason.retryable, bool)
