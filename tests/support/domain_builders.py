"""Builders with valid defaults for specs, facts and rows, and a clock that a test moves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sqlmodel import Session

from supervisor.domain.facts import AttemptFacts, Desired, History, Observed, Trigger
from supervisor.domain.layout import attempt_id
from supervisor.domain.run import AttemptState, DesiredState
from supervisor.domain.spec import RunSpec, parse_run_dict, render_spec
from supervisor.services import nodes, runs
from supervisor.store.engine import create_file
from supervisor.store.events import now_of
from supervisor.store.tables import Attempt, Run
from supervisor.store.writer import Store

T0 = datetime(2026, 11, 1, 12, 0, tzinfo=UTC)


@dataclass
class FakeClock:
    """Stands still until it is told to move."""

    at: datetime = T0
    mono: float = 1000.0
    slept: list[float] = field(default_factory=list)

    def now(self) -> datetime:
        return self.at

    def monotonic(self) -> float:
        return self.mono

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.move(seconds)

    def move(self, seconds: float) -> None:
        self.at += timedelta(seconds=seconds)
        self.mono += seconds


@contextmanager
def open_store(folder: Path, *, clock: FakeClock | None = None, **options: Any) -> Iterator[Store]:
    """A migrated store in a folder, closed at the end; a file that is there is checked and migrated."""
    path = folder / "supervisor.db"
    is_new = not path.exists()
    if is_new:
        create_file(path)
        path.write_bytes(_migrated_file())
    store = Store(path, clock=clock or FakeClock(), **options)
    try:
        if not is_new:
            store.migrate()
        yield store
    finally:
        store.close()


@lru_cache(maxsize=1)
def _migrated_file() -> bytes:
    """An empty database as the migrations make it; made once, because that takes a quarter of a second."""
    with TemporaryDirectory() as name:
        path = Path(name) / "template.db"
        store = Store(path, clock=FakeClock())
        store.migrate()
        store.close()
        return path.read_bytes()


def make_spec(**changes: Any) -> RunSpec:
    """A spec that needs nothing; tables given replace the defaults' keys."""
    data: dict[str, Any] = {"name": "slammed", "node": "local", "command": {"args": ["--target-gpus", "cpu"]}}
    data.update(changes)
    return parse_run_dict(data)


def make_run(session: Session, **changes: Any) -> Run:
    """A run on node `local`, which is made when it is not there."""
    spec = make_spec(**changes)
    if nodes.find_node(session, spec.node) is None:
        nodes.add_node(session, name=spec.node, transport="local", actor="test")
    return runs.put_run(session, spec, actor="test")


def make_attempt(session: Session, run: Run, *, state: str = "ready", **changes: Any) -> Attempt:
    """The next attempt of a run, in a state of choice."""
    now = now_of(session)
    number = run.next_attempt_number
    run.next_attempt_number += 1
    fields: dict[str, Any] = {
        "id": attempt_id(run.id, number),
        "run_id": run.id,
        "node_id": run.node_id,
        "number": number,
        "intent": run.intent,
        "state": state,
        "generation": run.generation,
        "spec": run.spec,
        "log_path": f"/srv/dflash/logs/train_{run.name}{number}.log",
        "created_at": now,
        "updated_at": now,
    }
    if state in ("started", "ready", "stopping", "succeeded", "stopped", "failed", "lost"):
        fields["started_at"] = now
    attempt = Attempt(**{**fields, **changes})
    session.add(attempt)
    session.add(run)
    session.flush()
    return attempt


def make_facts(**changes: Any) -> AttemptFacts:
    """Attempt 1, ready since a minute."""
    fields: dict[str, Any] = {
        "id": "a1",
        "number": 1,
        "state": AttemptState.READY,
        "intent": 1,
        "trigger": Trigger.START,
        "last_action_at": T0 - timedelta(seconds=120),
        "started_at": T0 - timedelta(seconds=120),
        "ready_at": T0 - timedelta(seconds=60),
        "has_new_checkpoint": False,
    }
    fields.update(changes)
    return AttemptFacts(**fields)


def make_desired(**changes: Any) -> Desired:
    """Wanted, by the first intent."""
    fields: dict[str, Any] = {"state": DesiredState.RUNNING, "intent": 1, "generation": 1}
    fields.update(changes)
    return Desired(**fields)


def make_observed(**changes: Any) -> Observed:
    """A reachable node, nothing known of the attempt."""
    fields: dict[str, Any] = {"at": T0, "reachable": True}
    fields.update(changes)
    return Observed(**fields)


def make_history(*attempts: AttemptFacts, **changes: Any) -> History:
    """Attempts, newest first."""
    return History(attempts=attempts, **changes)


__all__ = [
    "T0",
    "FakeClock",
    "make_attempt",
    "make_desired",
    "make_facts",
    "make_history",
    "make_observed",
    "make_run",
    "make_spec",
    "open_store",
    "render_spec",
]
