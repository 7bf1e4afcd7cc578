"""Metric records: made safe for JSON, read by dotted name, thinned out for a chart.

Used by telemetry, views and health. Pure: no I/O, no clock. A missing value stays null, never 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

MAX_DEPTH = 12
MAX_INT = (1 << 63) - 1
"""Larger integers fit neither a column nor a float."""

T = TypeVar("T")


def finite(value: Any, _depth: int = 0) -> Any:
    """Copy JSON-like data as JSON that can be stored.

    NaN, infinities, integers beyond 64 bits and too deep nesting become null; lone surrogates, which have no
    UTF-8 form, become question marks.
    """
    if _depth > MAX_DEPTH:
        return None
    if isinstance(value, str):
        return _encodable(value)
    if isinstance(value, int):
        return value if abs(value) <= MAX_INT else None
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {_encodable(str(key)): finite(item, _depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item, _depth + 1) for item in value]
    return value


def _encodable(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8")


def non_finite_names(record: Mapping[str, Any]) -> list[str]:
    """Dotted names of the values that are NaN or infinite, also when sent as text."""
    return [name for name, value in _walk(record, ()) if _is_non_finite(value)]


def read_metric(record: Mapping[str, Any], name: str) -> Any:
    """Value at a dotted name (`train.loss`, `queue.buckets`, `gpu.0.util_ratio`); None where absent."""
    value: Any = record
    for part in name.split("."):
        if isinstance(value, Mapping):
            value = value.get(part)
        elif isinstance(value, Sequence) and not isinstance(value, str) and part.isdigit():
            value = value[int(part)] if int(part) < len(value) else None
        else:
            return None
    return value


def numeric_names(record: Mapping[str, Any]) -> list[str]:
    """Dotted names of all numbers in a record, lists by position."""
    return [
        name
        for name, value in _walk(record, ())
        if isinstance(value, int | float) and not isinstance(value, bool)
    ]


def split_evenly(points: Sequence[tuple[float, T]], limit: int) -> list[Sequence[tuple[float, T]]]:
    """Cut a time series into at most `limit` stretches of equal duration; empty ones are left out."""
    if not points or limit < 1:
        return []
    first, last = points[0][0], points[-1][0]
    width = (last - first) / limit
    if len(points) <= limit:
        return [[point] for point in points]
    if width <= 0:
        return [points]
    buckets: dict[int, list[tuple[float, T]]] = {}
    for point in points:
        position = min(limit - 1, int((point[0] - first) / width))
        buckets.setdefault(position, []).append(point)
    return [buckets[position] for position in sorted(buckets)]


def down_sample(
    points: Sequence[tuple[float, Mapping[str, float | None]]], *, names: Sequence[str], limit: int
) -> list[dict[str, Any]]:
    """Thin a time series to at most `limit` buckets of equal duration.

    Returns:
        One dict per bucket that holds a line: `t` (of its last line), and per name the mean, or None when
        the bucket has no value; `min` and `max` beside it, so that a peak is never hidden.
    """
    return [_bucket(group, names) for group in split_evenly(points, limit)]


def _bucket(
    points: Sequence[tuple[float, Mapping[str, float | None]]], names: Sequence[str]
) -> dict[str, Any]:
    values: dict[str, float | None] = {}
    lowest: dict[str, float | None] = {}
    highest: dict[str, float | None] = {}
    for name in names:
        seen = [value for _, record in points if (value := record.get(name)) is not None]
        values[name] = math.fsum(seen) / len(seen) if seen else None
        lowest[name] = min(seen) if seen else None
        highest[name] = max(seen) if seen else None
    return {"t": points[-1][0], "n": len(points), "values": values, "min": lowest, "max": highest}


def nest(values: Mapping[str, Any]) -> dict[str, Any]:
    """Turn dotted names back into nested dicts; positions in lists become keys."""
    root: dict[str, Any] = {}
    for name, value in values.items():
        *path, last = name.split(".")
        place = root
        for part in path:
            child = place.get(part)
            if not isinstance(child, dict):
                child = place[part] = {}
            place = child
        place[last] = value
    return root


def mean_record(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The newest of some records, with each of its numbers replaced by the mean over all of them.

    A number that only some have is the mean over those; what is null in all stays null. Lists keep the
    newest record's value, for their parts need not correspond.
    """
    newest = records[-1]
    return {key: _mean_value([record.get(key) for record in records]) for key in newest}


def _mean_value(values: Sequence[Any]) -> Any:
    newest = values[-1]
    if isinstance(newest, Mapping):
        return mean_record([value for value in values if isinstance(value, Mapping)])
    if isinstance(newest, bool | list | str):
        return newest
    numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    return math.fsum(numbers) / len(numbers) if numbers else None


def _is_non_finite(value: Any) -> bool:
    if isinstance(value, float):
        return not math.isfinite(value)
    return isinstance(value, str) and value.strip("+-").lower() in ("nan", "inf", "infinity")


def _walk(value: Any, path: tuple[str, ...]) -> Iterable[tuple[str, Any]]:
    if len(path) > MAX_DEPTH:
        return
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _walk(item, (*path, str(key)))
    elif isinstance(value, list | tuple):
        for position, item in enumerate(value):
            yield from _walk(item, (*path, str(position)))
    else:
        yield ".".join(path), value
