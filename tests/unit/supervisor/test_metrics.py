"""Metric records: JSON-safe, read by name, thinned out with nulls kept."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from supervisor.domain.metrics import (
    down_sample,
    finite,
    mean_record,
    nest,
    non_finite_names,
    numeric_names,
    read_metric,
    split_evenly,
)

RECORD = {"t": 1.0, "train": {"loss": 2.5, "on": True}, "queue": {"buckets": [{"upto": 512, "depth": 3}]}}
NESTED = st.recursive(
    st.one_of(st.none(), st.booleans(), st.floats(), st.integers(), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=10,
)


@given(NESTED)
@settings(derandomize=True, max_examples=200, deadline=None)
def test_anything_becomes_strict_json(value: Any) -> None:
    json.dumps(finite(value), allow_nan=False)


def test_non_finite_values_are_named() -> None:
    record = {"a": float("nan"), "b": [1.0, float("-inf")], "c": "Infinity", "d": "nano", "e": 1}
    assert non_finite_names(record) == ["a", "b.1", "c"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("train.loss", 2.5),
        ("queue.buckets.0.depth", 3),
        ("queue.buckets.1.depth", None),
        ("train.nothing", None),
        ("train.loss.more", None),
        ("", None),
    ],
)
def test_values_are_read_by_dotted_name(name: str, value: Any) -> None:
    assert read_metric(RECORD, name) == value


def test_only_numbers_are_named() -> None:
    assert numeric_names(RECORD) == ["t", "train.loss", "queue.buckets.0.upto", "queue.buckets.0.depth"]


def test_thinning_keeps_nulls_and_peaks() -> None:
    points = [(float(n), {"a": None if n < 50 else 1.0, "b": 100.0 if n == 77 else 0.0}) for n in range(100)]
    thin = down_sample(points, names=["a", "b"], limit=10)
    assert len(thin) == 10
    assert [item["values"]["a"] for item in thin] == [None] * 5 + [1.0] * 5
    assert max(item["max"]["b"] for item in thin) == 100.0
    assert sum(item["n"] for item in thin) == 100


@given(
    times=st.lists(st.floats(0, 1e6), max_size=60).map(sorted),
    limit=st.integers(1, 20),
)
@settings(derandomize=True, max_examples=150, deadline=None)
def test_splitting_loses_nothing_and_keeps_the_limit(times: list[float], limit: int) -> None:
    points = [(t, index) for index, t in enumerate(times)]
    groups = split_evenly(points, limit)
    assert [point for group in groups for point in group] == points
    assert len(groups) <= limit or (points and points[0][0] == points[-1][0] and len(groups) == 1)
    assert all(groups)


def test_a_gap_in_time_stays_a_gap() -> None:
    points = [(t, {"a": 1.0}) for t in (*range(20), *range(1000, 1020))]
    times = [item["t"] for item in down_sample(points, names=["a"], limit=10)]
    assert times == [19, 1019]


def test_names_become_nested_records() -> None:
    assert nest({"train.loss": 1, "train.lr": 2, "t": 3}) == {"train": {"loss": 1, "lr": 2}, "t": 3}


def test_a_mean_record_has_the_shape_of_the_newest_one() -> None:
    records = [
        {"train": {"loss": 1.0, "eal": None}, "queue": {"buckets": [1]}},
        {"train": {"loss": 3.0, "eal": 2.0}, "queue": None},
        {"train": {"loss": None, "eal": None}, "queue": {"buckets": [2]}, "note": "x"},
    ]
    mean = mean_record(records)
    assert mean == {"train": {"loss": 2.0, "eal": 2.0}, "queue": {"buckets": [2]}, "note": "x"}
    assert math.isclose(mean["train"]["loss"], 2.0)
