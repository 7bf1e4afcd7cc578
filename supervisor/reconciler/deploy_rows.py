"""A deploy as rows: its request, what it brought, and the transaction that makes a pair current.

Used by `deploy` and `node_operations`. Rows only; what is on the node is `deploy`'s part.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from sqlmodel import Session, col, func, select

from supervisor.domain.deploy import lock_digest
from supervisor.domain.errors import NotFoundError
from supervisor.domain.layout import Layout
from supervisor.reconciler import apply, leases
from supervisor.reconciler.checks import Report
from supervisor.reconciler.environments import EnvironmentPlan
from supervisor.store.attempts import bump
from supervisor.store.events import now_of, record_event
from supervisor.store.queries import list_node_runs
from supervisor.store.tables import Deployment, Environment, Node, Operation, Release
from supervisor.transport.bundle import ReleaseArchive

BUNDLED = "bundled"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploySources:
    """Where the bundled things lie on the control machine."""

    trainer_folder: Path
    lock_file: Path
    find_links: str | None = None
    """For nodes that name no folder of wheels of their own."""
    torch_index_url: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeployRequest:
    """A deploy operation's parameters, resolved."""

    operation_id: str
    node: Node
    actor: str
    source: str
    lock: str | None
    python: str | None
    """An external interpreter: then there is no lock and nothing is built."""


@dataclass(slots=True, kw_only=True)
class Pair:
    """What a deploy brought: the rows to be written."""

    release: Release | None = None
    environment: Environment | None = None
    capabilities: dict[str, Any] = field(default_factory=dict)

    @property
    def release_digest(self) -> str | None:
        """Digest of the release, if there is one."""
        return self.release.digest if self.release is not None else None

    @property
    def environment_digest(self) -> str | None:
        """Digest of the environment, if there is one."""
        return self.environment.digest if self.environment is not None else None


def apply_deploy(session: Session, request: DeployRequest, pair: Pair, token: str) -> dict[str, Any]:
    """Write rows, make the pair current, tell it; nothing when the same pair was current already."""
    node = leases.require(session, Node, request.node.id, token)
    assert isinstance(node, Node)
    release, environment = pair.release_digest, pair.environment_digest
    current = session.get(Deployment, node.current_deployment_id or "")
    is_same = (
        current is not None
        and current.release_digest == release
        and current.environment_digest == environment
    )
    result = {"release": release, "environment": environment, "unchanged": is_same}
    if is_same:
        assert current is not None
        current.capabilities = pair.capabilities
        session.add(current)
        return {**result, "deployment": current.id}
    for row in (pair.release, pair.environment):
        if row is not None and session.get(type(row), row.digest) is None:
            session.add(row)
    session.flush()
    deployment = _deployment_row(session, node, request, pair)
    session.add(deployment)
    node.current_deployment_id = deployment.id
    _unpin_runs(session, node)
    node.updated_at = now_of(session)
    node.version += 1
    session.add(node)
    record_event(
        session,
        actor=request.actor,
        subject=f"node/{node.name}",
        reason="Deployed",
        message=f"release {_short(release)} and environment {_short(environment)} became current",
        data={**result, "source": request.source, "lock": request.lock},
        node_id=node.id,
        operation_id=request.operation_id,
    )
    return {**result, "deployment": deployment.id}


def _unpin_runs(session: Session, node: Node) -> None:
    """A newer deploy ends a pin: what a run was sent back to is not where it stays for ever."""
    for run in list_node_runs(session, node.id):
        if run.pinned_deployment_id is not None:
            run.pinned_deployment_id = None
            bump(session, run)
            apply.tell(session, run, "Unpinned", "the newest deploy is used from the next start on")


def find_proved(session: Session, node_id: str, pair: Pair) -> Deployment | None:
    """The newest ready deployment of this very pair on the node."""
    query = select(Deployment).where(
        Deployment.node_id == node_id,
        Deployment.release_digest == pair.release_digest,
        Deployment.environment_digest == pair.environment_digest,
        Deployment.state == "ready",
    )
    return session.exec(query.order_by(col(Deployment.sequence).desc()).limit(1)).first()


def load_request(session: Session, operation: Operation) -> DeployRequest:
    """The operation's parameters with its node.

    Raises:
        NotFoundError: the node is gone.
    """
    node = session.get(Node, operation.node_id or "")
    if node is None:
        raise NotFoundError("the node of this deploy was deleted", kind="node", name=operation.node_id)
    params = operation.params
    python = params.get("python")
    return DeployRequest(
        operation_id=operation.id,
        node=node,
        actor=operation.actor,
        source=params.get("source") or BUNDLED,
        lock=None if python else (params.get("lock") or BUNDLED),
        python=python,
    )


def save_report(session: Session, node_id: str, report: Report) -> None:
    """Store a node check's findings and facts."""
    node = session.get(Node, node_id)
    if node is None:
        return
    node.check_report = report.to_json()
    node.facts = {**node.facts, **report.facts}
    node.checked_at = now_of(session)
    node.version += 1
    session.add(node)


def release_row(source: str, archive: ReleaseArchive, now: datetime) -> Release:
    """The row of a packed trainer folder."""
    return Release(
        digest=archive.digest,
        source=source,
        manifest=dict(archive.manifest),
        size_bytes=len(archive.data),
        source_commit=archive.manifest.get("source_commit"),
        created_at=now,
    )


def interpreter_path(environment: Environment, *, root: str) -> str:
    """Where an environment's interpreter lies in a node with this root.

    A built one has one row for all nodes: the path in it is that of the node where it was built first.
    """
    if environment.kind == "built":
        return Layout(root).python(environment.digest)
    return environment.python


def environment_row(plan: EnvironmentPlan, python: str, facts: dict[str, Any], now: datetime) -> Environment:
    """The row of an environment that is, or will be, built."""
    return Environment(
        digest=plan.digest,
        kind="built",
        lock_digest=lock_digest(plan.lock_text),
        lock_text=plan.lock_text,
        python=python,
        torch_requirement=plan.torch_requirement,
        platform=f"{facts['platform']}-{facts['machine']}",
        created_at=now,
    )


def _deployment_row(session: Session, node: Node, request: DeployRequest, pair: Pair) -> Deployment:
    last = session.exec(select(func.max(Deployment.sequence)).where(Deployment.node_id == node.id)).one()
    now = now_of(session)
    return Deployment(
        id=f"d{secrets.token_hex(10)}",
        node_id=node.id,
        sequence=(last or 0) + 1,
        release_digest=pair.release_digest,
        environment_digest=pair.environment_digest,
        state="ready",
        capabilities=pair.capabilities,
        operation_id=request.operation_id,
        created_at=now,
        ready_at=now,
    )


def _short(digest: str | None) -> str:
    return digest[:12] if digest else "none"
