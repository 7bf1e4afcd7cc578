"""What every pass needs, and the rows that one pass looks at.

Built by `app` once (Runtime) and by the loop each pass (Snapshot). Holds no behaviour beyond loading.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from sqlmodel import Session

from supervisor.clock import Clock
from supervisor.domain.facts import Desired, History
from supervisor.domain.run import LIVE, AttemptState
from supervisor.domain.spec import RunSpec
from supervisor.reconciler.connections import Connections
from supervisor.reconciler.drift import DriftWatch
from supervisor.reconciler.observe import AttemptMemory
from supervisor.reconciler.sampler import Sampler
from supervisor.reconciler.staging import Staging
from supervisor.store.facts import desired_of, history_of, spec_of
from supervisor.store.queries import deployment_for_run, newest_attempt
from supervisor.store.tables import Attempt, Deployment, Environment, Node, Release, Run
from supervisor.store.writer import Store


@dataclass(slots=True, kw_only=True)
class Runtime:
    """What every pass needs; one per daemon."""

    store: Store
    connections: Connections
    sampler: Sampler
    clock: Clock
    owner: str
    resolve_secrets: Callable[[Sequence[str]], Awaitable[dict[str, str]]]
    on_attempts_changed: Callable[[str], None]
    """Called with a node id when the set of live attempts there changed."""
    drift: DriftWatch
    staging: Staging = field(default_factory=Staging)
    memories: dict[str, AttemptMemory] = field(default_factory=dict)
    """By run: what is remembered of its newest attempt."""


@dataclass(slots=True, kw_only=True)
class Snapshot:
    """The rows of one pass, detached from their session."""

    run: Run
    node: Node
    desired: Desired
    history: History
    attempt: Attempt | None
    spec: RunSpec
    deployment: Deployment | None
    release: Release | None
    environment: Environment | None


def load_snapshot(session: Session, run_id: str) -> Snapshot | None:
    """The rows of one pass; None when the run is gone."""
    run = session.get(Run, run_id)
    node = session.get(Node, run.node_id) if run is not None else None
    if run is None or node is None:
        return None
    attempt = newest_attempt(session, run.id)
    is_live = attempt is not None and AttemptState(attempt.state) in LIVE
    deployment = deployment_for_run(session, run)
    if is_live and attempt is not None and attempt.deployment_id:
        deployment = session.get(Deployment, attempt.deployment_id)
    return Snapshot(
        run=run,
        node=node,
        desired=desired_of(session, run),
        history=history_of(session, run),
        attempt=attempt,
        spec=spec_of(attempt if is_live and attempt is not None else run),
        deployment=deployment,
        release=session.get(Release, (deployment and deployment.release_digest) or ""),
        environment=session.get(Environment, (deployment and deployment.environment_digest) or ""),
    )
