"""The one place that checks a change of an attempt's state, and prints the diagram of all of them.

Called by `store.attempts.apply_transition` for every change. It must not decide anything: that is
`decide.py`'s part.
"""

from __future__ import annotations

from supervisor.domain.errors import InvalidTransitionError
from supervisor.domain.run import TERMINAL, TRANSITIONS, AttemptState


def parse_state(value: str) -> AttemptState:
    """Turn stored or received text into a state.

    Raises:
        InvalidTransitionError: the text is no state; unknown input is never ignored.
    """
    try:
        return AttemptState(value)
    except ValueError as error:
        known = ", ".join(state.value for state in AttemptState)
        raise InvalidTransitionError(
            f"unknown attempt state: {value!r}, known are {known}", old=value, new=None
        ) from error


def check_transition(old: AttemptState | str, new: AttemptState | str) -> AttemptState:
    """Return the new state if the table lists the change.

    Raises:
        InvalidTransitionError: the change is not listed, or one of the two is no state.
    """
    before, after = parse_state(old), parse_state(new)
    if after in TRANSITIONS[before]:
        return after
    if before in TERMINAL:
        raise InvalidTransitionError(
            f"attempt is {before.value}, which is final, and cannot become {after.value}",
            old=before.value,
            new=after.value,
        )
    allowed = ", ".join(sorted(TRANSITIONS[before]))
    raise InvalidTransitionError(
        f"attempt cannot go from {before.value} to {after.value}, only to {allowed}",
        old=before.value,
        new=after.value,
    )


def render_diagram() -> str:
    """Print the table as a Mermaid state diagram, for the documentation."""
    lines = ["stateDiagram-v2", f"    [*] --> {AttemptState.PLANNED.value}"]
    for before, allowed in TRANSITIONS.items():
        lines += [f"    {before.value} --> {after.value}" for after in sorted(allowed)]
    lines += [f"    {state.value} --> [*]" for state in AttemptState if state in TERMINAL]
    return "\n".join(lines) + "\n"
