"""Reports of trainers: whatever a program writes there, what comes out can be judged and stored."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from supervisor.domain.health import READY_PHASES
from supervisor.domain.reports import MAX_TEXT, clean_metrics, clean_status
from supervisor.reconciler.observe import checkpoint_time

GOOD_STATUS: dict[str, Any] = {
    "v": 1,
    "phase": "training",
    "phase_since": 1.5,
    "step": 3,
    "total_steps": 10,
    "last_progress_at": 2.5,
    "last_checkpoint": {"step": 2, "path": "/c", "saved_at": 2.0},
    "message": "",
    "stop": {"id": "s", "seen_at": 1.0, "extend_s": 5.0, "why": "saving"},
}
ANYTHING = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.floats(),
        st.integers(),
        st.just(10**400),
        st.text(st.characters(exclude_categories=()), max_size=5),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=2), st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=5,
)


def test_a_record_by_the_contract_is_not_touched() -> None:
    assert clean_status(GOOD_STATUS) == GOOD_STATUS
    assert clean_metrics({"t": 1.0, "step": 3, "train": {"loss": 2}}) == {
        "t": 1.0,
        "step": 3,
        "train": {"loss": 2},
    }


@pytest.mark.parametrize(
    ("fields", "ignored"),
    [
        ({"phase": {"a": 1}}, "phase"),
        ({"step": 10**40}, None),
        ({"step": -1}, "step"),
        ({"step": True}, "step"),
        ({"phase_since": 1e300}, "phase_since"),
        ({"last_checkpoint": "abc"}, "last_checkpoint"),
        ({"last_checkpoint": {"step": "abc", "path": "/c"}}, "last_checkpoint.step"),
        ({"last_checkpoint": {"step": 1, "path": ["/c"]}}, "last_checkpoint.path"),
        ({"last_checkpoint": {"step": 1, "path": "/c", "saved_at": 1e300}}, "last_checkpoint.saved_at"),
        ({"stop": []}, "stop"),
    ],
)
def test_a_field_of_the_wrong_kind_is_null_and_named(fields: dict[str, Any], ignored: str | None) -> None:
    cleaned = clean_status({**GOOD_STATUS, **fields})

    assert cleaned.get("ignored") == ([ignored] if ignored else None)
    first = (ignored or "step").split(".")[0]
    assert {key: value for key, value in cleaned.items() if key not in (first, "ignored")} == {
        key: value for key, value in GOOD_STATUS.items() if key != first
    }


@given(st.dictionaries(st.sampled_from([*GOOD_STATUS, "checkpoint_interval_s"]), ANYTHING))
@settings(derandomize=True, max_examples=300, deadline=None)
def test_any_status_can_be_judged_and_stored(value: dict[str, Any]) -> None:
    cleaned = clean_status(value)

    json.dumps(cleaned, ensure_ascii=False, allow_nan=False).encode()
    assert cleaned.get("phase") not in READY_PHASES or cleaned["phase"] == value["phase"]
    assert (cleaned.get("step") or 0) < 1 << 63
    saved = checkpoint_time(cleaned)
    assert saved is None or saved.replace(tzinfo=UTC) < datetime.max.replace(tzinfo=UTC)
    assert ((cleaned.get("last_checkpoint") or {}).get("step") or 0) >= 0
    assert len(cleaned.get("message") or "") <= MAX_TEXT


@given(st.dictionaries(st.sampled_from(["t", "step", "train", "queue", "x"]), ANYTHING))
@settings(derandomize=True, max_examples=300, deadline=None)
def test_any_line_can_be_stored_or_is_none(value: dict[str, Any]) -> None:
    cleaned = clean_metrics(value)

    if cleaned is not None:
        json.dumps(cleaned, ensure_ascii=False, allow_nan=False).encode()
        assert 0 <= float(cleaned["t"]) < 1 << 40
        assert (cleaned.get("step") or 0) < 1 << 63


@pytest.mark.parametrize("value", [None, [], "x", 3, {}, {"t": None}, {"t": 10**400}, {"t": True}])
def test_a_line_without_a_time_is_none(value: Any) -> None:
    assert clean_metrics(value) is None
