"""Asking `decide` in tests: the spec and the attempts that most of them begin from."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from supervisor.domain.actions import Decision
from supervisor.domain.decide import decide
from supervisor.domain.facts import (
    DriftFacts,
    StopCause,
    StopFacts,
)
from supervisor.domain.run import AttemptState, DesiredState, Reason
from supervisor.domain.spec import RunSpec
from tests.support.domain_builders import (
    T0,
    make_desired,
    make_facts,
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


def started(**changes: Any) -> Any:
    return make_facts(state=AttemptState.STARTED, ready_at=None, **changes)


def drift(kind: str = "capability", age_s: float = 100, **changes: Any) -> DriftFacts:
    return DriftFacts(
        kind=kind, first_seen_at=T0 - timedelta(seconds=age_s), message="pynvml arrived", **changes
    )
