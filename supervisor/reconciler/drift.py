"""Notices that what runs is not what a new start would use, and says what it means.

Used by the loop (facts for `decide`), after deploys and on the agents' `env` events. Two sources: the pair
that the newest deploy brought, against the pair of the live attempt; and the fingerprint of the attempt's
interpreter, against the one taken at its launch. Whether a drift restarts the run is its policy.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

import structlog
from sqlmodel import Session

from supervisor.clock import Clock
from supervisor.domain.deploy import (
    Change,
    DriftClass,
    changed_files,
    classify_changes,
    describe_changes,
    diff_fingerprints,
    diff_locks,
    diff_releases,
    recommend,
)
from supervisor.domain.errors import ContainerError, ShimError, TransportError
from supervisor.domain.facts import DriftFacts
from supervisor.domain.markers import marker_facts
from supervisor.domain.run import AttemptState, ConditionType
from supervisor.domain.spec import RunSpec
from supervisor.reconciler import apply
from supervisor.reconciler.capabilities import probe_capabilities
from supervisor.reconciler.connections import NodeConnection
from supervisor.store.attempts import bump
from supervisor.store.costs import cost_of
from supervisor.store.events import now_of
from supervisor.store.facts import spec_of
from supervisor.store.queries import deployment_for_run
from supervisor.store.tables import Attempt, Deployment, Environment, Release, Run

log = structlog.get_logger(__name__)

FINGERPRINT_PERIOD_S = 600.0
FINGERPRINT_DEADLINE_S = 90.0
RETRY_S = 30.0
_WATCHED = frozenset({AttemptState.STARTED, AttemptState.READY})

Key = tuple[str, str]


@dataclasses.dataclass(slots=True)
class _Taken:
    """A fingerprint and when it was asked for."""

    value: dict[str, Any] | None
    at_s: float


class DriftWatch:
    """Fingerprints and capabilities of interpreters in the nodes, taken when due and kept a while."""

    def __init__(self, clock: Clock, hint: Callable[[str], None]) -> None:
        self._clock = clock
        self._hint = hint
        self._external: dict[Key, dict[str, Any]] = {}
        self._fingerprints: dict[Key, _Taken] = {}
        self._tasks: dict[Key, asyncio.Task[None]] = {}

    def note_change(self, node_id: str, python: str) -> None:
        """The listing of an interpreter's packages changed: what was known of it is void."""
        self._external.pop((node_id, python), None)
        taken = self._fingerprints.get((node_id, python))
        if taken is not None:
            taken.at_s = float("-inf")

    async def external_capabilities(
        self, connection: NodeConnection, python: str, spec: RunSpec
    ) -> dict[str, Any]:
        """Capabilities of an interpreter that is not ours; probed until it has all, and after a change.

        What was missing may have been installed since: nobody tells us of it while no attempt is live.
        """
        key = (connection.address.id, python)
        names = [name for name, need in spec.capabilities.model_dump().items() if need != "off"]
        known = self._external.get(key)
        if known is None or not set(names) <= set(known):
            known = await probe_capabilities(connection, python, names, is_external=True)
            self._external.pop(key, None)
            if all(entry.get("available") for entry in known.values()):
                self._external[key] = known
        return known

    def fingerprint(self, connection: NodeConnection, python: str, run_id: str) -> dict[str, Any] | None:
        """The newest fingerprint; when one is due it is taken in the background, then the run is hinted."""
        key = (connection.address.id, python)
        taken = self._fingerprints.get(key)
        is_due = taken is None or self._clock.monotonic() - taken.at_s > FINGERPRINT_PERIOD_S
        task = self._tasks.get(key)
        if is_due and (task is None or task.done()):
            self._tasks[key] = asyncio.create_task(self._take(connection, key, run_id))
        return taken.value if taken is not None else None

    async def _take(self, connection: NodeConnection, key: Key, run_id: str) -> None:
        known = self._fingerprints.get(key)
        try:
            value = await connection.request("fingerprint", python=key[1], deadline_s=FINGERPRINT_DEADLINE_S)
        except (TransportError, ContainerError, ShimError) as error:
            log.info("fingerprint not taken", python=key[1], reason=error.reason, error=error.message)
            retry_at_s = self._clock.monotonic() - FINGERPRINT_PERIOD_S + RETRY_S
            self._fingerprints[key] = _Taken(known.value if known else None, retry_at_s)
            return
        self._fingerprints[key] = _Taken(value, self._clock.monotonic())
        if known is None or known.value != value:
            self._hint(run_id)

    async def aclose(self) -> None:
        """End what is being asked."""
        tasks = [task for task in self._tasks.values() if not task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def facts_of(run: Run, attempt: Attempt | None) -> DriftFacts | None:
    """The newest classified drift of the live attempt, for `decide`."""
    drift = run.drift or {}
    if attempt is None or drift.get("attempt_id") != attempt.id or not drift.get("class"):
        return None
    return DriftFacts(
        kind=drift["class"],
        first_seen_at=datetime.fromisoformat(drift["first_seen_at"]),
        message=str(drift.get("message") or ""),
        is_cheap_now=drift.get("is_cheap_now"),
    )


def update_drift(
    session: Session, run: Run, attempt: Attempt | None, fingerprint: Mapping[str, Any] | None
) -> bool:
    """Compare and store; an event and two conditions when it changed. True when it did.

    The launch's own fingerprint is kept on the attempt the first time that one is known.
    """
    if attempt is None or AttemptState(attempt.state) not in _WATCHED:
        return False
    if attempt.fingerprint is None and fingerprint is not None:
        attempt.fingerprint = dict(fingerprint)
        bump(session, attempt)
    changes = pair_changes(session, run, attempt)
    if attempt.fingerprint is not None and fingerprint is not None:
        changes += _new_only(
            diff_fingerprints(attempt.fingerprint, fingerprint, **_needs(session, attempt)), changes
        )
    return _save(session, run, attempt, changes)


def pair_changes(session: Session, run: Run, attempt: Attempt) -> list[Change]:
    """What differs between the attempt's release and environment and those of the next start."""
    target = deployment_for_run(session, run)
    current = session.get(Deployment, attempt.deployment_id or "")
    if target is None or current is None or target.id == current.id:
        return []
    changes = _release_changes(session, current, target)
    if current.environment_digest != target.environment_digest:
        changes += _environment_changes(session, attempt, current, target)
    return changes


def _release_changes(session: Session, current: Deployment, target: Deployment) -> list[Change]:
    old = session.get(Release, current.release_digest or "")
    new = session.get(Release, target.release_digest or "")
    files = changed_files(old.manifest, new.manifest) if old is not None and new is not None else []
    return diff_releases(current.release_digest, target.release_digest, files=files)


def _environment_changes(
    session: Session, attempt: Attempt, current: Deployment, target: Deployment
) -> list[Change]:
    """Differences of the two locks; one that is not critical or a capability counts as a release."""
    old = session.get(Environment, current.environment_digest or "")
    new = session.get(Environment, target.environment_digest or "")
    if old is None or new is None:
        return []
    python = (attempt.fingerprint or {}).get("python")
    changes = [
        dataclasses.replace(change, drift_class=DriftClass.RELEASE)
        if change.drift_class in (DriftClass.MINOR, DriftClass.IRRELEVANT)
        else change
        for change in diff_locks(
            old.lock_text or "",
            new.lock_text or "",
            facts=marker_facts(python, new.platform),
            **_needs(session, attempt),
        )
    ]
    if old.torch_requirement != new.torch_requirement:
        changes.append(_torch_change(old, new))
    return changes or [_rebuilt(old, new)]


def _torch_change(old: Environment, new: Environment) -> Change:
    return Change(
        kind="distribution",
        name="torch",
        old=old.torch_requirement,
        new=new.torch_requirement,
        drift_class=DriftClass.CRITICAL,
        meaning="torch changed: numbers and speed may change with the next start",
    )


def _rebuilt(old: Environment, new: Environment) -> Change:
    return Change(
        kind="python",
        name="environment",
        old=old.digest[:12],
        new=new.digest[:12],
        drift_class=DriftClass.CRITICAL,
        meaning="the environment was built for another Python, platform or package source",
    )


def _needs(session: Session, attempt: Attempt) -> dict[str, Any]:
    """The run's declared capabilities, and those that the attempt's environment lacks."""
    deployment = session.get(Deployment, attempt.deployment_id or "")
    found = deployment.capabilities if deployment is not None else {}
    return {
        "needs": spec_of(attempt).capabilities.model_dump(),
        "missing": [name for name, entry in found.items() if not entry.get("available")],
    }


def _new_only(found: list[Change], known: list[Change]) -> list[Change]:
    names = {(change.kind, change.name) for change in known}
    return [change for change in found if (change.kind, change.name) not in names]


def _save(session: Session, run: Run, attempt: Attempt, changes: list[Change]) -> bool:
    drift_class = classify_changes(changes)
    rendered = [change.to_json() for change in changes]
    old = run.drift or {}
    is_same = old.get("changes", []) == rendered and (not rendered or old.get("attempt_id") == attempt.id)
    if is_same:
        return _set_conditions(session, run, changes)
    message = describe_changes(changes)
    cost = cost_of(session, run, attempt)
    advice, why = recommend(cost)
    run.drift = {
        "changes": rendered,
        "class": drift_class.value if drift_class is not None else None,
        "message": message,
        "attempt_id": attempt.id,
        "first_seen_at": now_of(session).isoformat(),
        "last_restart_at": old.get("last_restart_at"),
        "cost": cost.to_json(),
        "advice": {"when": advice, "why": why},
        "is_cheap_now": None if advice == "unknown" else advice == "now",
    }
    bump(session, run)
    if rendered:
        action = getattr(spec_of(attempt).drift, drift_class.value, "notify") if drift_class else "none"
        apply.tell(
            session,
            run,
            "DriftFound",
            f"{message}; policy: {action}",
            data={
                "class": run.drift["class"],
                "action": action,
                "changes": rendered[:50],
                "cost": run.drift["cost"],
                "advice": run.drift["advice"],
            },
            attempt=attempt,
        )
    _set_conditions(session, run, changes)
    return True


def _set_conditions(session: Session, run: Run, changes: list[Change]) -> bool:
    is_changed = False
    groups = (
        (ConditionType.RELEASE_CURRENT, [item for item in changes if item.kind == "release"]),
        (ConditionType.ENVIRONMENT_IN_SYNC, [item for item in changes if item.kind != "release"]),
    )
    for kind, found in groups:
        is_changed |= apply.set_condition(
            session,
            run,
            kind,
            not found,
            reason="Drift" if found else "InSync",
            message=describe_changes(found) if found else "",
        )
    return is_changed
