"""What a trainer says about itself, made fit to be believed: `status.json` and lines of `metrics.ndjson`.

A program in a node may write anything there. Each value that the supervisor acts on or stores in a column is
checked here, where reports come in, and becomes null when it is not what the contract says; the names of what
was dropped stand in `ignored`. Called by the sampler, by the look at an attempt and at its end. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from supervisor.domain.metrics import finite

MAX_TEXT = 2000
MAX_EPOCH_S = 253_402_300_799.0
"""The end of the year 9999: later times have no calendar form."""

Check = Callable[[Any], Any]


def clean_status(value: Any) -> dict[str, Any]:
    """A status record with every known field of the right type or null; {} when it is none at all."""
    record = finite(value)
    if not isinstance(record, dict):
        return {}
    ignored: list[str] = []
    _apply(record, _STATUS, "", ignored)
    for name, checks in _PARTS.items():
        part = record.get(name)
        if isinstance(part, dict):
            _apply(part, checks, f"{name}.", ignored)
        elif part is not None:
            record[name] = None
            ignored.append(name)
    if ignored:
        record["ignored"] = ignored
    return record


def clean_metrics(value: Any) -> dict[str, Any] | None:
    """A metrics line whose time and step can be stored; None without a usable time."""
    record = finite(value)
    if not isinstance(record, dict) or _time(record.get("t")) is None:
        return None
    ignored: list[str] = []
    _apply(record, {"step": _count, "train": _table, "queue": _table}, "", ignored)
    if ignored:
        record["ignored"] = ignored
    return record


def _apply(record: dict[str, Any], checks: Mapping[str, Check], prefix: str, ignored: list[str]) -> None:
    for name, check in checks.items():
        value = record.get(name)
        if value is None:
            continue
        record[name] = check(value)
        if record[name] is None:
            ignored.append(prefix + name)


def _text(value: Any) -> str | None:
    return value[:MAX_TEXT] if isinstance(value, str) else None


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _time(value: Any) -> float | None:
    number = _number(value)
    return number if number is not None and 0 <= number <= MAX_EPOCH_S else None


def _moment(value: Any) -> float | str | None:
    if not isinstance(value, str):
        return _time(value)
    try:
        datetime.fromisoformat(value)
    except ValueError:
        return None
    return value


def _table(value: Any) -> dict[str, Any] | None:
    return value if isinstance(value, dict) else None


_STATUS: Mapping[str, Check] = {
    "phase": _text,
    "phase_since": _time,
    "step": _count,
    "total_steps": _count,
    "last_progress_at": _time,
    "message": _text,
    "checkpoint_interval_s": _number,
}
_PARTS: Mapping[str, Mapping[str, Check]] = {
    "last_checkpoint": {"step": _count, "path": _text, "saved_at": _moment},
    "stop": {"id": _text, "seen_at": _time, "extend_s": _number, "why": _text},
}
