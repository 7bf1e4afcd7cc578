"""Metric lines and GPU samples: kept whole, read back thinned out, pruned by age.

The sampler appends, routes read. Values that JSON cannot hold become null and are named in the record's
`non_finite`; a missing value is null, never 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import delete, func
from sqlmodel import Session, col, select

from supervisor.domain.errors import RequestError
from supervisor.domain.metrics import (
    down_sample,
    finite,
    mean_record,
    nest,
    non_finite_names,
    read_metric,
    split_evenly,
)
from supervisor.store.events import now_of
from supervisor.store.queries import newest_gpu_sample
from supervisor.store.tables import Attempt, GpuSample, MetricLine, Node, Run

MAX_POINTS = 5000
MAX_NAMES = 100
MAX_ROWS = 6_000
"""Rows read for one chart; beyond, every n-th row is taken."""
STALE_S = 30.0
GPU_FIELDS = ("util_ratio", "mem_used_bytes", "mem_total_bytes", "power_w", "temp_c", "sm_clock_mhz")
THINNING = 60
"""At one sample a second, one a minute is left."""


def append_metrics(
    session: Session, *, run_id: str, attempt_id: str, records: Sequence[Mapping[str, Any]]
) -> int:
    """Store lines; one that was stored before (same time and step) is passed over. Returns how many are new.

    A record without a finite `t` gets the transaction's time.
    """
    now = now_of(session).timestamp()
    lines = {(_time(record, now), _step(record)): record for record in records}
    if not lines:
        return 0
    earliest = min(t for t, _ in lines)
    query = select(MetricLine.t, MetricLine.step).where(
        MetricLine.attempt_id == attempt_id, col(MetricLine.t) >= earliest
    )
    known = set(session.exec(query).all())
    fresh = {key: record for key, record in lines.items() if key not in known}
    for (t, step), record in fresh.items():
        stored = finite(dict(record))
        bad = non_finite_names(record)
        if bad:
            stored["non_finite"] = bad
        session.add(MetricLine(run_id=run_id, attempt_id=attempt_id, t=t, step=step, record=stored))
    return len(fresh)


def append_gpu_sample(session: Session, *, node_id: str, sample: Mapping[str, Any]) -> GpuSample:
    """Store one NVML sample as the agent sent it: `t`, `gpus`, `reason`, `message`."""
    row = GpuSample(
        node_id=node_id,
        t=_time(sample, now_of(session).timestamp()),
        gpus=[finite(dict(gpu)) for gpu in sample.get("gpus") or ()],
        reason=sample.get("reason"),
        message=sample.get("message"),
    )
    session.add(row)
    return row


def metric_view(session: Session, row: MetricLine) -> dict[str, Any]:
    """A record with its age in seconds and its attempt."""
    return {**row.record, "t": row.t, "age_s": _age(session, row.t), "attempt_id": row.attempt_id}


def gpu_snapshot(session: Session, node: Node) -> dict[str, Any]:
    """The newest GPU sample with its age; says `unavailable` and why when there is none."""
    row = newest_gpu_sample(session, node.id)
    if row is None:
        return {
            "status": "unavailable",
            "reason": "NoSample",
            "message": "no GPU sample has arrived from this node yet",
            "t": None,
            "at": None,
            "age_s": None,
            "gpus": [],
        }
    age_s = _age(session, row.t)
    is_stale = row.reason is None and age_s > STALE_S
    return {
        "status": "unavailable" if row.reason is not None else "stale" if is_stale else "ok",
        "reason": "Stale" if is_stale else row.reason,
        "message": f"the newest sample is {age_s:.0f} s old" if is_stale else row.message,
        "t": row.t,
        "at": datetime.fromtimestamp(row.t, UTC).isoformat().replace("+00:00", "Z"),
        "age_s": age_s,
        "gpus": row.gpus,
    }


def metric_history(
    session: Session,
    run: Run,
    *,
    names: Sequence[str] = (),
    since: float | None = None,
    until: float | None = None,
    points: int = 500,
    attempt_id: str | None = None,
) -> dict[str, Any]:
    """History of a run over all its attempts, thinned out.

    Args:
        session: open session.
        run: whose.
        names: dotted names (`train.loss`) to reduce each item to; empty = whole records.
        since: epoch seconds.
        until: epoch seconds.
        points: at most so many items; with fewer lines each line is an item.
        attempt_id: one attempt only.

    Returns:
        `items`: records as the trainer wrote them, each the mean over its `n` lines, with `t` and `step` of
        the last one; with `names` also `min` and `max` per name, so that no peak is hidden. `attempts` gives
        number and start for marks in a chart, `is_thinned` says whether lines were joined.

    Raises:
        RequestError: too many names or points, or an empty range.
    """
    _check_range(names, since, until, points)
    conditions: list[Any] = [MetricLine.run_id == run.id]
    if attempt_id is not None:
        conditions.append(MetricLine.attempt_id == attempt_id)
    if since is not None:
        conditions.append(col(MetricLine.t) >= since)
    if until is not None and math.isfinite(until):
        conditions.append(col(MetricLine.t) <= until)
    total = session.exec(select(func.count()).select_from(MetricLine).where(*conditions)).one()
    query = select(MetricLine.t, MetricLine.record).where(*conditions)
    stride = math.ceil(total / MAX_ROWS)
    if stride > 1:
        query = query.where(col(MetricLine.id) % stride == 0)
    rows = session.exec(query.order_by(col(MetricLine.t), col(MetricLine.id))).all()
    attempts = session.exec(
        select(Attempt.number, Attempt.started_at)
        .where(Attempt.run_id == run.id)
        .order_by(col(Attempt.number))
    ).all()
    return {
        "names": list(names),
        "items": [_item(group, names) for group in split_evenly(rows, points)],
        "attempts": [{"number": number, "t": at.timestamp() if at else None} for number, at in attempts],
        "lines": total,
        "is_thinned": stride > 1 or len(rows) > points,
    }


def gpu_history(
    session: Session,
    node: Node,
    *,
    fields: Sequence[str] = GPU_FIELDS,
    since: float | None = None,
    until: float | None = None,
    points: int = 500,
) -> dict[str, Any]:
    """History of a node's GPUs; names are `<index>.<field>`."""
    _check_range(fields, since, until, points)
    conditions: list[Any] = [GpuSample.node_id == node.id]
    if since is not None:
        conditions.append(col(GpuSample.t) >= since)
    if until is not None and math.isfinite(until):
        conditions.append(col(GpuSample.t) <= until)
    total = session.exec(select(func.count()).select_from(GpuSample).where(*conditions)).one()
    query = select(GpuSample.t, GpuSample.gpus).where(*conditions)
    stride = math.ceil(total / MAX_ROWS)
    if stride > 1:
        query = query.where(col(GpuSample.id) % stride == 0)
    rows = session.exec(query.order_by(col(GpuSample.t))).all()
    indices = sorted({gpu.get("index", 0) for _, gpus in rows for gpu in gpus})
    names = [f"{index}.{field}" for index in indices for field in fields]
    series = []
    for t, gpus in rows:
        by_index = {gpu.get("index", 0): gpu for gpu in gpus}
        series.append(
            (
                t,
                {
                    f"{i}.{field}": _number(by_index.get(i, {}).get(field))
                    for i in indices
                    for field in fields
                },
            )
        )
    return {
        "names": names,
        "points": down_sample(series, names=names, limit=points),
        "is_thinned": stride > 1,
    }


def prune_metrics(session: Session, *, keep: timedelta) -> int:
    """Remove metric lines older than `keep`; returns how many."""
    limit = now_of(session).timestamp() - keep.total_seconds()
    return int(session.execute(delete(MetricLine).where(col(MetricLine.t) < limit)).rowcount)  # type: ignore[attr-defined]


def prune_gpu_samples(session: Session, *, keep_raw: timedelta, keep: timedelta) -> int:
    """Thin samples older than `keep_raw` to one in sixty and remove those older than `keep`."""
    now = now_of(session).timestamp()
    old = delete(GpuSample).where(col(GpuSample.t) < now - keep.total_seconds())
    thin = delete(GpuSample).where(
        col(GpuSample.t) < now - keep_raw.total_seconds(), col(GpuSample.id) % THINNING != 0
    )
    removed = 0
    for step in (old, thin):
        removed += int(session.execute(step).rowcount)  # type: ignore[attr-defined]
    return removed


def _item(group: Sequence[tuple[float, Mapping[str, Any]]], names: Sequence[str]) -> dict[str, Any]:
    t, newest = group[-1]
    head = {"t": t, "step": newest.get("step"), "n": len(group)}
    if not names:
        return {**mean_record([record for _, record in group]), **head}
    series = [(at, {name: _number(read_metric(record, name)) for name in names}) for at, record in group]
    (bucket,) = down_sample(series, names=names, limit=1)
    return {**nest(bucket["values"]), **head, "min": bucket["min"], "max": bucket["max"]}


def _check_range(names: Sequence[str], since: float | None, until: float | None, points: int) -> None:
    if not 1 <= points <= MAX_POINTS:
        raise RequestError(f"points must be from 1 to {MAX_POINTS}: {points}", reason="BadPoints")
    if len(names) > MAX_NAMES:
        raise RequestError(f"at most {MAX_NAMES} names at once: {len(names)}", reason="BadNames")
    if since is not None and until is not None and since > until:
        raise RequestError(f"since lies after until: {since:g} > {until:g}", reason="BadRange")


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value)


def _time(record: Mapping[str, Any], default: float) -> float:
    value = _number(record.get("t"))
    return value if value is not None and math.isfinite(value) else default


def _step(record: Mapping[str, Any]) -> int:
    value = record.get("step")
    return value if isinstance(value, int) and not isinstance(value, bool) else -1


def _age(session: Session, t: float) -> float:
    return max(0.0, now_of(session).timestamp() - t)
