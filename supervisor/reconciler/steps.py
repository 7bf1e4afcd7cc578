"""Carries out the actions that `decide` chose: each a few short transactions around one slow request.

Used by `loop`. Every step is safe to repeat: intent is committed before the request that acts on it, requests
are idempotent by id, and what came back is written only while the run's lease holds.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any, Protocol, TypeVar

import structlog
from sqlmodel import Session

from supervisor.domain import layout as layouts
from supervisor.domain.actions import (
    Action,
    Advance,
    EndRun,
    FinishAttempt,
    Hold,
    PassGate,
    PlanAttempt,
    ResolveLaunch,
    Revert,
    ScheduleRestart,
    Stop,
)
from supervisor.domain.errors import ContainerError, ShimError, SupervisorError, TransportError
from supervisor.domain.run import LIVE, AttemptState, ConditionType
from supervisor.reconciler import act, apply
from supervisor.reconciler.connections import NodeConnection
from supervisor.reconciler.crash import crash
from supervisor.reconciler.observe import Look
from supervisor.reconciler.prepare import LaunchContext, Prepared, prepare_launch
from supervisor.reconciler.runtime import Runtime, Snapshot
from supervisor.store.attempts import apply_transition, bump
from supervisor.store.events import now_of
from supervisor.store.facts import spec_of
from supervisor.store.queries import deployment_for_run, live_attempt, newest_attempt
from supervisor.store.tables import Attempt, Run
from supervisor.store.writer import Store

log = structlog.get_logger(__name__)

LOG_LOOKAHEAD = 50
NODE_TROUBLE = (TransportError, ContainerError, ShimError)

T = TypeVar("T")


class Guard(Protocol):
    """Returns the run's row while our lease on it holds, else raises LeaseLostError."""

    def __call__(self, session: Session) -> Run:
        """See the class."""
        ...


class Steps:
    """The actions of one run."""

    def __init__(self, runtime: Runtime, guard: Guard) -> None:
        self._rt = runtime
        self._guarded = guard

    async def plan(self, action: PlanAttempt, snapshot: Snapshot, connection: NodeConnection | None) -> bool:
        """Choose the next number whose log does not exist, and create the row."""
        if connection is None or not connection.is_open:
            return False
        run, node, spec = snapshot.run, snapshot.node, snapshot.spec

        def path_of(number: int) -> str:
            return layouts.render_log_path(
                spec.log.pattern,
                log_dir=node.log_dir,
                root=node.root,
                name=run.name,
                node=node.name,
                attempt=number,
            )

        first = run.next_attempt_number
        paths = {number: path_of(number) for number in range(first, first + LOG_LOOKAHEAD)}
        try:
            reply = await connection.request("paths", paths=list(paths.values()), deadline_s=15.0)
        except NODE_TROUBLE as error:
            log.info("attempt not planned yet", run=run.name, reason=error.reason)
            return False
        taken = {number for number, path in paths.items() if reply["paths"][path]["exists"]}
        number = next((candidate for candidate in paths if candidate not in taken), first + LOG_LOOKAHEAD)
        skipped = [candidate for candidate in paths if candidate < number]
        if number not in paths:
            await self._write(lambda session: self._skip_numbers(session, number, skipped, paths))
            return True
        await self._write(lambda session: self._create_attempt(session, action, number, skipped, paths))
        self._rt.on_attempts_changed(node.id)
        return True

    def _skip_numbers(self, session: Session, number: int, skipped: list[int], paths: dict[int, str]) -> None:
        run = self._guarded(session)
        run.next_attempt_number = number
        apply.tell_skipped(session, run, skipped, [paths[item] for item in skipped])

    def _create_attempt(
        self,
        session: Session,
        action: PlanAttempt,
        number: int,
        skipped: list[int],
        paths: dict[int, str],
    ) -> None:
        run = self._guarded(session)
        if live_attempt(session, run.id) is not None:
            return
        before = newest_attempt(session, run.id)
        deployment = deployment_for_run(session, run)
        now = now_of(session)
        attempt = Attempt(
            id=layouts.attempt_id(run.id, number),
            run_id=run.id,
            node_id=run.node_id,
            number=number,
            state=AttemptState.PLANNED.value,
            intent=action.intent,
            trigger=action.trigger.value,
            generation=run.generation,
            spec=run.spec,
            deployment_id=deployment.id if deployment else None,
            release_digest=deployment.release_digest if deployment else None,
            environment_digest=deployment.environment_digest if deployment else None,
            log_path=paths[number],
            resume_from=action.resume,
            first_checkpoint_step=((before and before.last_checkpoint) or {}).get("step"),
            created_at=now,
            updated_at=now,
        )
        run.next_attempt_number = number + 1
        run.next_start_at = None
        if run.hold is not None and int(run.hold.get("intent", 0)) < run.intent:
            run.hold = None
        session.add(attempt)
        session.flush()
        bump(session, run)
        apply.tell_skipped(session, run, skipped, [paths[item] for item in skipped])
        apply.tell(
            session,
            run,
            "AttemptPlanned",
            f"attempt {number} was planned ({action.trigger.value}, resume {action.resume})",
            data={"number": number, "trigger": action.trigger.value, "log_path": attempt.log_path},
            attempt=attempt,
        )

    async def preflight(self, snapshot: Snapshot, connection: NodeConnection | None) -> bool:
        """Stage, check, and store the findings; nothing is decided while the node cannot be asked."""
        attempt = snapshot.attempt
        assert attempt is not None
        if connection is None or not connection.is_open:
            return False
        crash("launch.before_preflight")
        if attempt.state == AttemptState.PLANNED:
            await self._write(lambda session: self._begin_preflight(session, attempt.id))
        try:
            report = await self._rt.staging.advance(attempt.id, connection, snapshot.spec)
            if report is None:
                return False
            prepared = await prepare_launch(connection, await self._launch_context(snapshot, connection))
        except NODE_TROUBLE as error:
            log.info("preflight not answered", run=snapshot.run.name, reason=error.reason)
            return False
        prepared.report.add(*report)
        await self._write(lambda session: self._save_preflight(session, attempt.id, prepared))
        return True

    def _begin_preflight(self, session: Session, attempt_id: str) -> None:
        self._guarded(session)
        attempt = session.get(Attempt, attempt_id)
        if attempt is not None and attempt.state == AttemptState.PLANNED:
            attempt.preflight = None
            apply_transition(session, attempt, AttemptState.PREFLIGHT)

    async def _launch_context(self, snapshot: Snapshot, connection: NodeConnection) -> LaunchContext:
        assert snapshot.attempt is not None
        deployment, spec = snapshot.deployment, snapshot.spec
        capabilities: dict[str, Any] = dict(deployment.capabilities) if deployment is not None else {}
        if spec.environment.python is not None:
            capabilities = await self._rt.drift.external_capabilities(
                connection, spec.environment.python, spec
            )
        return LaunchContext(
            run=snapshot.run,
            attempt=snapshot.attempt,
            spec=spec,
            deployment=deployment,
            release=snapshot.release if spec.has_release else None,
            environment=snapshot.environment,
            capabilities=capabilities,
            gpu_view=self._rt.sampler.gpus(snapshot.node.id),
            node_facts=snapshot.node.facts,
            root=connection.address.root,
            resolve_secrets=self._rt.resolve_secrets,
            monotonic_s=self._rt.clock.monotonic(),
        )

    def _save_preflight(self, session: Session, attempt_id: str, prepared: Prepared) -> None:
        run = self._guarded(session)
        attempt = session.get(Attempt, attempt_id)
        if attempt is None or attempt.state != AttemptState.PREFLIGHT:
            return
        attempt.preflight = prepared.report.to_json()
        attempt.argv = prepared.argv
        attempt.gpus = prepared.gpus
        bump(session, attempt)
        missing = [
            item
            for item in prepared.report.findings
            if item.name.startswith("capability ") and item.status != "ok"
        ]
        apply.set_condition(
            session,
            run,
            ConditionType.CAPABILITIES_OK,
            not missing,
            reason=missing[0].reason if missing else "AllPresent",
            message="; ".join(f"{item.message} ({item.remedy})" for item in missing),
        )
        for item in prepared.report.findings:
            if item.status == "warn" and item.message and item not in missing:
                text = f"{item.message} ({item.remedy})"
                apply.tell(session, run, "LaunchWarning", text, attempt=attempt, level="warning")

    async def launch(self, snapshot: Snapshot, connection: NodeConnection | None) -> bool:
        """Commit `launching`, then send the request; an outcome that is not known is asked for later."""
        attempt = snapshot.attempt
        assert attempt is not None
        if connection is None or not connection.is_open:
            return False
        secrets = await self._rt.resolve_secrets(snapshot.spec.secrets)
        plan = act.LaunchPlan(
            run=snapshot.run,
            attempt=attempt,
            spec=snapshot.spec,
            release=snapshot.release if snapshot.spec.has_release else None,
            environment=snapshot.environment,
            secrets=secrets,
        )
        request = act.render_request(plan, connection)
        crash("launch.before_commit")
        await self._write(lambda session: self._begin_launch(session, attempt.id))
        crash("launch.after_commit")
        async with connection.lock:
            outcome = await act.send_start(connection, request)
        crash("launch.after_start_request")
        if outcome.unknown:
            log.warning("launch outcome unknown", run=snapshot.run.name, why=outcome.unknown)
            return False
        await self._write(lambda session: self._end_launch(session, attempt.id, outcome))
        crash("launch.after_apply")
        self._rt.on_attempts_changed(snapshot.node.id)
        return True

    def _begin_launch(self, session: Session, attempt_id: str) -> None:
        run = self._guarded(session)
        attempt = session.get(Attempt, attempt_id)
        assert attempt is not None
        attempt.launch_error = None
        apply_transition(
            session,
            attempt,
            AttemptState.LAUNCHING,
            data={"argv": attempt.argv, "secrets": list(run.spec.get("secrets") or [])},
        )

    def _end_launch(self, session: Session, attempt_id: str, outcome: act.LaunchOutcome) -> None:
        self._guarded(session)
        attempt = session.get(Attempt, attempt_id)
        if attempt is None or attempt.state != AttemptState.LAUNCHING:
            return
        error = outcome.error
        if error is not None:
            attempt.launch_error = {
                "reason": error.reason,
                "message": error.message,
                "errno": error.errno,
            }
            bump(session, attempt)
        elif outcome.state is not None and outcome.state.get("phase") in ("running", "stopping", "exited"):
            apply.apply_started(session, attempt, outcome.state)

    async def resolve(self, action: ResolveLaunch, connection: NodeConnection | None) -> bool:
        """The asking itself is the next observation; a tombstone is made here."""
        if not action.tombstone or connection is None:
            return False
        try:
            await act.send_tombstone(connection, action.attempt_id)
        except NODE_TROUBLE as error:
            log.warning("launch not abandoned yet", attempt=action.attempt_id, reason=error.reason)
            return False
        return True

    async def stop(self, action: Stop, connection: NodeConnection | None, look: Look) -> bool:
        """Commit the stop, then ask the shim."""
        crash("stop.before_commit")
        stop = await self._write(lambda session: self._begin_stop(session, action))
        crash("stop.after_commit")
        if connection is None or not connection.is_open:
            return False
        if look.is_folder_gone:
            return await self._stop_by_identity(action.attempt_id, connection)
        state = await act.send_stop(
            connection,
            action.attempt_id,
            stop_id=stop["id"],
            reason=stop["reason"],
            actor=stop["actor"],
            save=stop["save"],
        )
        crash("stop.after_request")
        if state is None:
            return False
        await self._write(lambda session: self._note_stop(session, action.attempt_id, state))
        crash("stop.after_apply")
        return True

    async def _stop_by_identity(self, attempt_id: str, connection: NodeConnection) -> bool:
        """The shim of a removed folder cannot be asked: its signal once, and SIGKILL after the grace."""
        attempt = await self._rt.store.read(lambda session: session.get(Attempt, attempt_id))
        if attempt is None or attempt.stop is None or attempt.identity is None:
            return False
        policy, step = spec_of(attempt).stop, attempt.stop.get("step")
        name: str
        asked_at = datetime.fromisoformat(attempt.stop["requested_at"])
        is_over = self._rt.clock.now() - asked_at > timedelta(seconds=policy.grace_s)
        if step == "asked":
            name, step = policy.signal, "term"
        elif step == "term" and is_over:
            name, step = "SIGKILL", "kill"
        else:
            return False
        if not await act.send_signal(connection, attempt.identity, name):
            return False
        await self._write(lambda session: self._note_stop(session, attempt_id, {"stop": {"step": step}}))
        return True

    def _begin_stop(self, session: Session, action: Stop) -> dict[str, Any]:
        run = self._guarded(session)
        attempt = session.get(Attempt, action.attempt_id)
        assert attempt is not None
        return apply.apply_stop(session, run, attempt, action)

    def _note_stop(self, session: Session, attempt_id: str, state: dict[str, Any]) -> None:
        self._guarded(session)
        attempt = session.get(Attempt, attempt_id)
        if attempt is None or AttemptState(attempt.state) not in LIVE or attempt.stop is None:
            return
        step = (state.get("stop") or {}).get("step")
        if step and step != attempt.stop.get("step"):
            attempt.stop = {**attempt.stop, "step": step}
            bump(session, attempt)

    async def advance(self, action: Advance, look: Look) -> bool:
        """Enter a state that is not final."""
        node_id = await self._write(lambda session: self._advance(session, action, look))
        if action.state is AttemptState.STARTED:
            self._rt.on_attempts_changed(node_id)
        return True

    async def policy(self, action: Action) -> bool:
        """Write what policy decided about the run; nothing is asked of the node."""
        crash("restart.before_apply")
        await self._write(lambda session: self._apply_policy(session, action))
        crash("restart.after_apply")
        return True

    def _advance(self, session: Session, action: Advance, look: Look) -> str:
        self._guarded(session)
        attempt = session.get(Attempt, action.attempt_id)
        assert attempt is not None
        if action.state is AttemptState.STARTED:
            apply.apply_started(session, attempt, look.state)
            return attempt.node_id
        if action.state is AttemptState.PLANNED:
            attempt.preflight = None
            attempt.launch_error = None
        apply_transition(session, attempt, action.state, reason=action.reason)
        return attempt.node_id

    async def finish(
        self,
        action: FinishAttempt,
        snapshot: Snapshot,
        connection: NodeConnection | None,
        look: Look,
    ) -> bool:
        """Enter a final state with its evidence, then acknowledge the exit record."""
        crash("finish.before_apply")
        step = await self._last_step(action, snapshot, connection)

        def write(session: Session) -> None:
            self._guarded(session)
            attempt = session.get(Attempt, action.attempt_id)
            assert attempt is not None
            if step is not None:
                attempt.last_step = max(step, attempt.last_step or 0)
            apply.apply_finish(session, attempt, action, exit_record=look.exit, reply=look.reply)

        await self._write(write)
        crash("finish.after_apply")
        if look.exit is not None and connection is not None:
            await acknowledge(self._rt.store, connection, action.attempt_id)
        crash("finish.after_ack")
        self._rt.on_attempts_changed(snapshot.node.id)
        return True

    async def _last_step(
        self, action: FinishAttempt, snapshot: Snapshot, connection: NodeConnection | None
    ) -> int | None:
        """The last step in the log of a program that has ended: passes are seconds apart, its end is not."""
        memory = self._rt.memories.get(snapshot.run.id)
        policy = snapshot.spec.health
        if memory is None or memory.attempt_id != action.attempt_id or not policy.progress_regex:
            return None
        if connection is not None and connection.is_open:
            try:
                await memory.scan.finish(connection, action.attempt_id, policy, self._rt.clock.monotonic())
            except NODE_TROUBLE as error:
                log.info("log could not be read to its end", attempt=action.attempt_id, reason=error.reason)
        return memory.scan.step

    def _apply_policy(self, session: Session, action: Action) -> None:
        run = self._guarded(session)
        attempt = session.get(Attempt, getattr(action, "attempt_id", None) or "")
        match action:
            case Hold():
                apply.apply_hold(session, run, attempt, action)
            case EndRun():
                apply.apply_end(session, run, attempt, action)
            case ScheduleRestart() if attempt is not None:
                apply.apply_schedule(session, run, attempt, action)
            case Revert() if attempt is not None:
                apply.apply_revert(session, run, attempt, action)
            case PassGate() if attempt is not None:
                apply.apply_gate(session, run, attempt, action)
            case _:
                raise AssertionError(f"no handler for {action!r}")

    async def _write(self, function: Callable[[Session], T]) -> T:
        return await self._rt.store.write(function)


async def acknowledge(store: Store, connection: NodeConnection, attempt_id: str) -> None:
    """Tell the shim that the exit record is stored; repeated at the next connection when it fails."""
    try:
        await connection.request("ack", attempt_id=attempt_id)
    except SupervisorError as error:
        log.info("exit record not acknowledged yet", attempt=attempt_id, reason=error.reason)
        return

    def write(session: Session) -> None:
        attempt = session.get(Attempt, attempt_id)
        if attempt is not None:
            attempt.acknowledged_at = now_of(session)
            session.add(attempt)

    await store.write(write)
