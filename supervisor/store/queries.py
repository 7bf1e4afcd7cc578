"""Look-ups that services and reconciler share. `get_` raises, `find_` returns None, `list_` a list.

Reads only, on the session of the caller. Names and ids are accepted alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from sqlalchemy.orm import aliased
from sqlmodel import Session, col, func, or_, select

from supervisor.domain.errors import NotFoundError
from supervisor.domain.near import unknown_name_hint
from supervisor.domain.run import LIVE, TERMINAL
from supervisor.store.tables import Attempt, Deployment, GpuSample, MetricLine, Node, Operation, Run

T = TypeVar("T")

LIVE_STATES = tuple(state.value for state in LIVE)
OPEN_OPERATIONS = ("pending", "running")
MAX_LOOK_BACK = 200
"""Attempts that are searched for an earlier pair."""


def find_node(session: Session, name_or_id: str) -> Node | None:
    """Node by name or id."""
    return session.exec(select(Node).where(or_(Node.name == name_or_id, Node.id == name_or_id))).first()


def get_node(session: Session, name_or_id: str) -> Node:
    """Node by name or id; NotFoundError otherwise."""
    found = find_node(session, name_or_id)
    known = () if found else session.exec(select(Node.name)).all()
    return _found(found, kind="node", name=name_or_id, known=known)


def find_run(session: Session, name_or_id: str) -> Run | None:
    """Run by name or id."""
    return session.exec(select(Run).where(or_(Run.name == name_or_id, Run.id == name_or_id))).first()


def get_run(session: Session, name_or_id: str) -> Run:
    """Run by name or id; NotFoundError otherwise."""
    found = find_run(session, name_or_id)
    known = () if found else session.exec(select(Run.name)).all()
    return _found(found, kind="run", name=name_or_id, known=known)


def get_attempt(session: Session, run: Run, number: int) -> Attempt:
    """Attempt of a run by number; NotFoundError otherwise."""
    query = select(Attempt).where(Attempt.run_id == run.id, Attempt.number == number)
    return _found(session.exec(query).first(), kind="attempt", name=f"{run.name}/{number}")


def get_operation(session: Session, operation_id: str) -> Operation:
    """Operation by id; NotFoundError otherwise."""
    return _found(session.get(Operation, operation_id), kind="operation", name=operation_id)


def newest_attempt(session: Session, run_id: str) -> Attempt | None:
    """The attempt with the highest number."""
    query = select(Attempt).where(Attempt.run_id == run_id).order_by(col(Attempt.number).desc()).limit(1)
    return session.exec(query).first()


def live_attempt(session: Session, run_id: str) -> Attempt | None:
    """The attempt that has not ended; there is at most one."""
    query = select(Attempt).where(Attempt.run_id == run_id, col(Attempt.state).in_(LIVE_STATES))
    return session.exec(query.order_by(col(Attempt.number).desc())).first()


def list_run_attempts(session: Session, run_id: str, *, limit: int = 50) -> list[Attempt]:
    """Newest first."""
    query = select(Attempt).where(Attempt.run_id == run_id).order_by(col(Attempt.number).desc()).limit(limit)
    return list(session.exec(query).all())


def list_newest_attempts(
    session: Session, run_ids: Sequence[str], *, each: int = 1
) -> dict[str, list[Attempt]]:
    """The newest attempts of several runs, newest first, in one query; runs without any are left out."""
    other = aliased(Attempt)
    newest = (
        select(col(other.id))
        .where(col(other.run_id) == col(Run.id))
        .order_by(col(other.number).desc())
        .limit(each)
        .correlate(Run)
    )
    query = (
        select(Attempt)
        .join(Run, col(Attempt.run_id) == col(Run.id))
        .where(col(Run.id).in_(run_ids), col(Attempt.id).in_(newest))
        .order_by(col(Attempt.run_id), col(Attempt.number).desc())
    )
    found: dict[str, list[Attempt]] = {}
    for attempt in session.exec(query):
        found.setdefault(attempt.run_id, []).append(attempt)
    return found


def count_attempts(session: Session, run_ids: Sequence[str]) -> dict[str, int]:
    """How many attempts each of these runs has had; runs without any are left out."""
    query = select(Attempt.run_id, func.count()).where(col(Attempt.run_id).in_(run_ids))
    return dict(session.exec(query.group_by(col(Attempt.run_id))).all())


def list_live_attempts(session: Session, *, node_id: str | None = None) -> list[Attempt]:
    """All attempts that have not ended, for recovery at start and for GPU leases."""
    query = select(Attempt).where(col(Attempt.state).in_(LIVE_STATES))
    if node_id is not None:
        query = query.where(Attempt.node_id == node_id)
    return list(session.exec(query.order_by(col(Attempt.created_at))).all())


def list_unacknowledged_attempts(session: Session, node_id: str) -> list[Attempt]:
    """Ended attempts whose exit record is stored but whose shim was not told."""
    terminal = tuple(state.value for state in TERMINAL)
    query = select(Attempt).where(
        Attempt.node_id == node_id,
        col(Attempt.state).in_(terminal),
        col(Attempt.acknowledged_at).is_(None),
        col(Attempt.exit_record).is_not(None),
    )
    return list(session.exec(query).all())


def list_node_runs(session: Session, node_id: str) -> list[Run]:
    """Runs of a node, by name."""
    return list(session.exec(select(Run).where(Run.node_id == node_id).order_by(col(Run.name))).all())


def list_all_runs(session: Session) -> list[Run]:
    """Every run, by name."""
    return list(session.exec(select(Run).order_by(col(Run.name))).all())


def list_all_nodes(session: Session) -> list[Node]:
    """Every node, by name."""
    return list(session.exec(select(Node).order_by(col(Node.name))).all())


def list_open_operations(
    session: Session,
    *,
    kinds: Sequence[str] = (),
    run_id: str | None = None,
    node_id: str | None = None,
) -> list[Operation]:
    """Operations that have not reached an end, oldest first."""
    query = select(Operation).where(col(Operation.status).in_(OPEN_OPERATIONS))
    if kinds:
        query = query.where(col(Operation.kind).in_(kinds))
    if run_id is not None:
        query = query.where(Operation.run_id == run_id)
    if node_id is not None:
        query = query.where(Operation.node_id == node_id)
    return list(session.exec(query.order_by(col(Operation.created_at), col(Operation.id))).all())


def current_deployment(session: Session, node: Node) -> Deployment | None:
    """The newest ready deployment of a node."""
    return session.get(Deployment, node.current_deployment_id) if node.current_deployment_id else None


def deployment_for_run(session: Session, run: Run) -> Deployment | None:
    """The pair that the run's next attempt will use: its own pin, else the node's current one."""
    node = session.get(Node, run.node_id)
    current = node.current_deployment_id if node else None
    if run.pinned_deployment_id and (run.pinned_against_id is None or run.pinned_against_id == current):
        return session.get(Deployment, run.pinned_deployment_id)
    return session.get(Deployment, current) if current else None


def find_earlier_deployment(session: Session, run: Run) -> Deployment | None:
    """The pair of the run's newest attempt that used another one than its last attempt did."""
    attempts = list_run_attempts(session, run.id, limit=MAX_LOOK_BACK)
    used = [attempt.deployment_id for attempt in attempts if attempt.deployment_id is not None]
    earlier = next((deployment for deployment in used if deployment != used[0]), None)
    return session.get(Deployment, earlier) if earlier else None


def list_newest_metrics(session: Session, attempt_ids: Sequence[str]) -> dict[str, MetricLine]:
    """Newest metrics line of several attempts, in one query; attempts without any are left out."""
    line = aliased(MetricLine)
    newest = (
        select(col(line.id))
        .where(col(line.attempt_id) == col(Attempt.id))
        .order_by(col(line.t).desc(), col(line.id).desc())
        .limit(1)
        .correlate(Attempt)
        .scalar_subquery()
    )
    query = select(MetricLine).join(Attempt, col(MetricLine.id) == newest)
    rows = session.exec(query.where(col(Attempt.id).in_(attempt_ids)))
    return {row.attempt_id: row for row in rows}


def newest_gpu_sample(session: Session, node_id: str) -> GpuSample | None:
    """Newest GPU sample of a node."""
    query = select(GpuSample).where(GpuSample.node_id == node_id)
    return session.exec(query.order_by(col(GpuSample.t).desc(), col(GpuSample.id).desc()).limit(1)).first()


def _found(row: T | None, *, kind: str, name: str, known: Sequence[str] = ()) -> T:
    if row is None:
        raise NotFoundError(
            f"no {kind} is called {name}",
            hint=unknown_name_hint(kind, name, known),
            kind=kind,
            name=name,
        )
    return row
