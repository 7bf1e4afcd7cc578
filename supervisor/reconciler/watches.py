"""Tells a node's agent what to report: which attempts, and GPUs read by which interpreter.

Called when an agent opens, when the set of live attempts changes, when one has started and after a deploy. A
node has one GPU reader. It runs under the interpreter of the newest attempt whose process exists, one that
can read the GPUs before others; an interpreter that is not there in one run must not blind the others.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlmodel import Session, col, func, select

from supervisor.domain.run import RUNNING
from supervisor.reconciler.connections import NodeConnection
from supervisor.reconciler.deploy_rows import interpreter_path
from supervisor.reconciler.runtime import Runtime
from supervisor.reconciler.sampler import Tracked
from supervisor.store.queries import current_deployment, list_live_attempts
from supervisor.store.tables import Attempt, Environment, MetricLine, Node, Run

_RUNNING = tuple(state.value for state in RUNNING)


async def refresh_watch(
    runtime: Runtime, connection: NodeConnection, *, gpu_s: float, environment_s: float
) -> None:
    """Watch exactly the live attempts of the node.

    Raises:
        TransportError, ShimError: the next connection sets it up again.
    """
    node_id = connection.address.id
    tracked, python = await runtime.store.read(lambda session: _load(session, node_id))
    runtime.sampler.track(node_id, tracked, is_letting_go=False)
    offsets = runtime.sampler.offsets(node_id)
    await connection.request(
        "watch",
        attempt_ids=[item.attempt_id for item in tracked],
        offsets={key: value for key, value in offsets.items() if value},
        gpu={"python": python, "interval_s": gpu_s},
        env_interval_s=environment_s,
        log=True,
    )
    # only now: the agent has sent what the attempts that ended wrote last
    runtime.sampler.track(node_id, tracked)


def _load(session: Session, node_id: str) -> tuple[list[Tracked], str | None]:
    node = session.get(Node, node_id)
    tracked = []
    candidates: list[tuple[int, str]] = []
    for attempt in list_live_attempts(session, node_id=node_id):
        run = session.get(Run, attempt.run_id)
        if run is None:
            continue
        newest = session.exec(
            select(func.max(col(MetricLine.t))).where(MetricLine.attempt_id == attempt.id)
        ).one()
        tracked.append(
            Tracked(
                attempt_id=attempt.id,
                run_id=run.id,
                run_name=run.name,
                node_id=node_id,
                newest_metric_t=newest or 0.0,
            )
        )
        found = interpreter_of(session, attempt, node)
        if found is not None:
            candidates.append((_rank(attempt), found))
    python = _choose(candidates)
    if python is None and node is not None:
        deployment = current_deployment(session, node)
        environment = session.get(Environment, (deployment and deployment.environment_digest) or "")
        python = interpreter_path(environment, root=node.root) if environment is not None else None
    return tracked, python


def _rank(attempt: Attempt) -> int:
    """3 reads GPUs by its own preflight, 2 runs and may do so, 1 has not started, 0 cannot be run."""
    status = {item.get("name"): item.get("status") for item in attempt.preflight or ()}
    if status.get("interpreter", "ok") != "ok":
        return 0
    if attempt.state not in _RUNNING:
        return 1
    return 3 if status.get("capability nvml") == "ok" else 2


def _choose(candidates: Sequence[tuple[int, str]]) -> str | None:
    """The newest of the best rank, oldest given first; None when no one can be run."""
    best = max((rank for rank, _ in candidates), default=0)
    usable = [python for rank, python in candidates if rank == best and rank > 0]
    return usable[-1] if usable else None


def interpreter_of(session: Session, attempt: Attempt, node: Node | None) -> str | None:
    """The interpreter that an attempt runs with, as far as we know it."""
    external = (attempt.spec.get("environment") or {}).get("python")
    if external:
        return str(external)
    environment = session.get(Environment, attempt.environment_digest or "")
    if environment is None or node is None:
        return None
    return interpreter_path(environment, root=node.root)
