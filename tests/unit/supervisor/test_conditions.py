"""Conditions: unknown is its own status, and `since` lives as long as the status does."""

from __future__ import annotations

import pytest

from supervisor.domain.run import ConditionStatus, ConditionType, condition, merge_condition


@pytest.mark.parametrize(
    ("given", "shown"),
    [(True, "true"), (False, "false"), (None, "unknown"), (ConditionStatus.FALSE, "false")],
)
def test_unknown_is_not_false(given: bool | ConditionStatus | None, shown: str) -> None:
    built = condition(ConditionType.REACHABLE, given, reason="R", since="t1")
    assert built == {"type": "Reachable", "status": shown, "reason": "R", "message": "", "since": "t1"}


def test_since_is_kept_while_the_status_stays() -> None:
    first = condition(ConditionType.ALIVE, True, reason="A", since="t1")
    other = condition(ConditionType.READY, None, reason="B", since="t1")
    same = condition(ConditionType.ALIVE, True, reason="C", since="t2")
    changed = condition(ConditionType.ALIVE, False, reason="D", since="t3")

    found = merge_condition([first, other], same)
    assert [(item["reason"], item["since"]) for item in found] == [("C", "t1"), ("B", "t1")]
    found = merge_condition(found, changed)
    assert [(item["reason"], item["since"]) for item in found] == [("D", "t3"), ("B", "t1")]
    assert merge_condition([], first) == [first]
