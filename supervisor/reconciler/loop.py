"""One pass over one run: lease, observe, decide, act, apply. The heart of the supervisor.

Called by `scheduler`, one task per run. Slow work happens between transactions; what came of it is written
only while the run's lease still holds. The choice itself is `domain.decide`, which is pure; this module has
it carried out, records it with its inputs, and says whether to look again at once.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import structlog
from sqlmodel import Session

from supervisor.domain.actions import (
    Action,
    Advance,
    Decision,
    FinishAttempt,
    Launch,
    Nothing,
    PlanAttempt,
    Preflight,
    ResolveLaunch,
    Stop,
)
from supervisor.domain.decide import decide
from supervisor.domain.errors import LeaseLostError
from supervisor.domain.facts import GpuMemory, Observed
from supervisor.domain.metrics import finite
from supervisor.domain.run import LIVE, AttemptState
from supervisor.reconciler import apply, drift, leases
from supervisor.reconciler.conditions import ConditionView, run_conditions
from supervisor.reconciler.connections import NodeConnection
from supervisor.reconciler.crash import crash
from supervisor.reconciler.deploy_rows import interpreter_path
from supervisor.reconciler.observe import AttemptMemory, Evidence, Look, Scene, observe
from supervisor.reconciler.operations import end_operations
from supervisor.reconciler.progress import recall, save_progress
from supervisor.reconciler.runtime import Runtime, Snapshot, load_snapshot
from supervisor.reconciler.steps import Steps
from supervisor.store.attempts import bump
from supervisor.store.events import now_of
from supervisor.store.queries import newest_attempt
from supervisor.store.tables import Attempt, Run

log = structlog.get_logger(__name__)

MAX_STEPS = 25
"""Passes in a row while each of them changes something; then the others get their turn."""

_ON_THE_WAY = (PlanAttempt, Preflight, Launch)
"""Steps of a start, each followed by the next at once: the last pass settles for all of them."""

SOON_S = 1.0
_SOON = frozenset({"Stopping", "Launching", "LaunchUnknown", "GpuBusy"})
"""Waits that end within moments and that no event of the agent may announce."""


@dataclass(slots=True, kw_only=True)
class PassResult:
    """What the scheduler does next with this run."""

    is_changed: bool = False
    is_active: bool = False
    wake_in_s: float | None = None
    is_gone: bool = False


class RunLoop:
    """Reconciles one run."""

    def __init__(self, run_id: str, runtime: Runtime) -> None:
        self._run_id = run_id
        self._rt = runtime
        self._token: str | None = None
        self._leased_until_s = 0.0
        self._acted: dict[str, Any] | None = None
        """The newest decision that changed something, for the explanation of the run."""
        self._steps = Steps(runtime, self._guarded)

    async def reconcile(self) -> PassResult:
        """Pass after pass until nothing changes any more, bounded."""
        result = PassResult()
        for _ in range(MAX_STEPS):
            result = await self.one_pass()
            if not result.is_changed:
                break
        return result

    async def one_pass(self) -> PassResult:
        """Lease, observe, decide, act, apply."""
        if not await self._lease():
            return PassResult(is_gone=await self._is_gone())
        snapshot = await self._rt.store.read(lambda session: load_snapshot(session, self._run_id))
        if snapshot is None:
            return PassResult(is_gone=True)
        connection = self._rt.connections.find(snapshot.run.node_id)
        evidence = await observe(self._scene(snapshot, connection))
        observed, look = evidence.observed, evidence.look
        decision = decide(
            snapshot.desired,
            observed,
            snapshot.history,
            snapshot.spec,
            observed.at,
            seed_of(self._run_id),
        )
        is_changed = False
        try:
            for action in decision.actions:
                is_changed |= await self._act(action, snapshot, connection, look)
            if is_changed:
                self._acted = {**finite(decision.to_json()), "at": observed.at.isoformat()}
            if not (is_changed and isinstance(decision.actions[-1], _ON_THE_WAY)):
                fingerprint = self._fingerprint(snapshot, connection)
                is_changed |= await self._rt.store.write(
                    lambda session: self._settle(
                        session, snapshot, connection, evidence, decision, fingerprint
                    )
                )
        except LeaseLostError as error:
            log.warning("result dropped", run=snapshot.run.name, error=error.message)
            self._token = None
        # A pass that changed something is followed by the next at once: what it began with is still so.
        is_live = snapshot.attempt is not None and AttemptState(snapshot.attempt.state) in LIVE
        return PassResult(
            is_changed=is_changed,
            is_active=is_live or decision.reason in ("Backoff", "GpuBusy", "Start"),
            wake_in_s=self._wake_in_s(snapshot, decision),
        )

    def _wake_in_s(self, snapshot: Snapshot, decision: Decision) -> float | None:
        start_at = snapshot.history.next_start_at
        if decision.reason == "Backoff" and start_at is not None:
            return (start_at - self._rt.clock.now()).total_seconds()
        if decision.reason in _SOON:
            return SOON_S
        is_live = snapshot.attempt is not None and AttemptState(snapshot.attempt.state) in LIVE
        return snapshot.spec.health.period_s if is_live else None

    async def _lease(self) -> bool:
        now_s = self._rt.clock.monotonic()
        if self._token is not None and now_s < self._leased_until_s:
            return True
        self._token = await self._rt.store.write(
            lambda session: leases.claim(session, Run, self._run_id, self._rt.owner)
        )
        self._leased_until_s = now_s + leases.LEASE_S / 2
        return self._token is not None

    async def _is_gone(self) -> bool:
        return await self._rt.store.read(lambda session: session.get(Run, self._run_id) is None)

    def _scene(self, snapshot: Snapshot, connection: NodeConnection | None) -> Scene:
        attempt = snapshot.attempt
        memory = self._rt.memories.get(self._run_id)
        if memory is None or attempt is None or memory.attempt_id != attempt.id:
            memory = recall(attempt) if attempt is not None else AttemptMemory()
            self._rt.memories[self._run_id] = memory
        return Scene(
            connection=connection,
            attempt=attempt,
            spec=snapshot.spec,
            sampler=self._rt.sampler,
            memory=memory,
            clock=self._rt.clock,
            drift=drift.facts_of(snapshot.run, attempt),
        )

    async def _act(
        self, action: Action, snapshot: Snapshot, connection: NodeConnection | None, look: Look
    ) -> bool:
        """Carry out one action; True when something changed and the run deserves another look at once."""
        match action:
            case Nothing():
                return False
            case PlanAttempt():
                return await self._steps.plan(action, snapshot, connection)
            case Preflight():
                return await self._steps.preflight(snapshot, connection)
            case Launch():
                return await self._steps.launch(snapshot, connection)
            case ResolveLaunch():
                return await self._steps.resolve(action, connection)
            case Stop():
                return await self._steps.stop(action, connection, look)
            case FinishAttempt():
                return await self._steps.finish(action, snapshot, connection, look)
            case Advance():
                return await self._steps.advance(action, look)
            case _:
                return await self._steps.policy(action)

    def _settle(
        self,
        session: Session,
        snapshot: Snapshot,
        connection: NodeConnection | None,
        evidence: Evidence,
        decision: Decision,
        fingerprint: dict[str, Any] | None,
    ) -> bool:
        """Bookkeeping of one pass: decision, conditions, progress, drift, GPU gate, ended operations.

        Returns:
            Whether something came up that the next decision should see at once.
        """
        observed = evidence.observed
        run = self._guarded(session)
        attempt = newest_attempt(session, run.id)
        save_decision(session, run, decision, snapshot, observed, acted=self._acted)
        if attempt is not None:
            self._note_first_output(session, attempt, evidence.look)
            memory = self._rt.memories.get(run.id)
            if memory is not None and memory.attempt_id == attempt.id:
                save_progress(session, attempt, memory)
            if (
                observed.gpu_memory is GpuMemory.FREE
                and attempt.ended_at is not None
                and attempt.gpu_clean_at is None
            ):
                attempt.gpu_clean_at = now_of(session)
                bump(session, attempt)
        view = ConditionView(
            run=run,
            attempt=attempt,
            observed=observed,
            look=evidence.look,
            health=evidence.health,
            reach=connection.reach if connection is not None else None,
            gpu_view=self._rt.sampler.gpus(run.node_id),
            spec=snapshot.spec,
            monotonic_s=self._rt.clock.monotonic(),
        )
        for kind, status, reason, message in run_conditions(view):
            apply.set_condition(session, run, kind, status, reason=reason, message=message)
        has_drifted = drift.update_drift(session, run, attempt, fingerprint)
        crash("operation.before_end")
        end_operations(session, run, decision, connection.reach if connection is not None else None)
        return has_drifted

    def _note_first_output(self, session: Session, attempt: Attempt, look: Look) -> None:
        has_output = bool(look.reply.get("log_size") or look.reply.get("status"))
        if has_output and attempt.first_output_at is None and AttemptState(attempt.state) in LIVE:
            attempt.first_output_at = now_of(session)
            bump(session, attempt)

    def _fingerprint(self, snapshot: Snapshot, connection: NodeConnection | None) -> dict[str, Any] | None:
        """Newest fingerprint of the interpreter that the live attempt runs with."""
        python, attempt = snapshot.spec.environment.python, snapshot.attempt
        if python is None and snapshot.environment is not None:
            python = interpreter_path(snapshot.environment, root=snapshot.node.root)
        is_ready = attempt is not None and attempt.state == AttemptState.READY
        if connection is None or not connection.is_open or python is None or not is_ready:
            return None
        return self._rt.drift.fingerprint(connection, python, self._run_id)

    def _guarded(self, session: Session) -> Run:
        """The run's row, while our lease holds; renews the lease on the way."""
        assert self._token is not None
        run = leases.require(session, Run, self._run_id, self._token)
        assert isinstance(run, Run)
        return run


def save_decision(
    session: Session,
    run: Run,
    decision: Decision,
    snapshot: Snapshot,
    observed: Observed,
    *,
    acted: dict[str, Any] | None,
) -> None:
    """Keep the newest decision with what it was made from, and the newest one that acted.

    The same one again is not written.
    """
    rendered = decision.to_json()
    last = run.last_decision or {}
    acted = acted or last.get("acted")
    is_same = all(last.get(key) == rendered[key] for key in ("reason", "explanation"))
    if is_same and last.get("acted") == acted:
        return
    run.last_decision = {
        **finite(rendered),
        "at": observed.at.isoformat(),
        "acted": acted,
        "inputs": {
            "desired": to_json(snapshot.desired),
            "observed": to_json(observed),
            "ledger": snapshot.history.ledger.to_json(),
            "attempts": [
                {"number": item.number, "state": item.state.value, "reason": item.reason}
                for item in snapshot.history.attempts[:5]
            ],
        },
    }
    session.add(run)


def to_json(value: Any) -> Any:
    """A frozen fact as JSON; times as ISO text, long texts cut."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: to_json(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value[:20]]
    return value[:500] if isinstance(value, str) else value


def seed_of(run_id: str) -> int:
    """The jitter's seed: the same for a run, so that a decision can be replayed."""
    return int.from_bytes(run_id.encode()[-8:], "big")
