"""What a restart of a run would cost, from its own earlier attempts.

Used by services (plans) and the reconciler (the event that tells of a drift). Reads rows only; what no
attempt has shown yet is not known, never zero.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlmodel import Session

from supervisor.domain.deploy import PhaseTimes, RestartCost, restart_cost
from supervisor.store.events import now_of
from supervisor.store.queries import list_run_attempts
from supervisor.store.tables import Attempt, Run

SAMPLES = 20


def phase_times(session: Session, run: Run) -> PhaseTimes:
    """Medians of stop, launch and warm-up over earlier attempts of the run."""
    samples: dict[str, list[float]] = {"stop": [], "launch": [], "ready": [], "save": []}
    for attempt in list_run_attempts(session, run.id, limit=SAMPLES):
        for name, start, end in (
            ("stop", attempt.stopping_at, attempt.ended_at),
            ("launch", attempt.created_at, attempt.started_at),
            ("ready", attempt.started_at, attempt.ready_at),
        ):
            if start is not None and end is not None:
                samples[name].append((end - start).total_seconds())
        saved_s = (attempt.last_checkpoint or {}).get("duration_s")
        if isinstance(saved_s, int | float):
            samples["save"].append(float(saved_s))
    return PhaseTimes.from_samples(samples)


def cost_of(session: Session, run: Run, live: Attempt) -> RestartCost:
    """Cost of replacing the live attempt."""
    now = now_of(session)
    saved = _epoch((live.last_checkpoint or {}).get("saved_at"))
    since_s = max(0.0, now.timestamp() - saved) if saved is not None else None
    started = live.started_at
    if since_s is None and started is not None and live.last_checkpoint is None and live.ready_at is not None:
        since_s = (now - live.ready_at).total_seconds()
    interval = (live.last_status or {}).get("checkpoint_interval_s")
    return restart_cost(
        gpus=len(live.gpus),
        times=phase_times(session, run),
        since_checkpoint_s=since_s,
        checkpoint_interval_s=float(interval) if isinstance(interval, int | float) else None,
        elapsed_s=(now - started).total_seconds() if started else None,
    )


def _epoch(value: Any) -> float | None:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, str):
        try:
            return datetime.fromisoformat(value).timestamp()
        except ValueError:
            return None
    return None
