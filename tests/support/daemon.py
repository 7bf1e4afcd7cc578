"""A whole daemon in the test's process, on a state folder and a node root of its own.

`RunningDaemon` speaks to it as the API does: services in a write transaction, then a hint. Waits are bounded
and for a state, never for a time. Attempts that a test leaves behind are ended by identity.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

from sqlmodel import Session, col, select

from supervisor.app import Daemon
from supervisor.domain.spec import parse_run_dict
from supervisor.services import nodes, runs
from supervisor.settings import Settings
from supervisor.store.queries import find_run, get_node, get_operation, list_run_attempts, newest_attempt
from supervisor.store.tables import Attempt, Event, Node, Operation, Run
from tests.support.wheelhouse import build_wheel, fake_pynvml, write_lock

TOY_TRAINER = Path(__file__).parent / "toy_trainer" / "trainer"
WAIT_S = 180.0
ACTOR = "token/test"
STOP = {"grace_s": 60.0, "extend_max_s": 60.0, "term_s": 30.0, "kill_s": 30.0, "verify_s": 120.0}
"""A machine that stalls for seconds must not turn a stop in good order into a kill or a quarantine."""


def make_settings(state_dir: Path, **changes: Any) -> Settings:
    """Settings with short periods, so that a test waits for states and not for clocks."""
    values: dict[str, Any] = {
        "state_dir": state_dir,
        "reconcile_active_s": 0.3,
        "reconcile_idle_s": 1.0,
        "gpu_interval_s": 0.2,
        "environment_interval_s": 0.5,
    }
    return Settings(**{**values, **changes})


def make_spec(node: str, name: str = "toy", **changes: Any) -> dict[str, Any]:
    """A run of the toy trainer as the API would receive it; `args` are appended to the trainer's flags."""
    args = list(changes.pop("args", []))
    output = str(changes.pop("output_dir"))
    spec: dict[str, Any] = {
        "name": name,
        "node": node,
        "source": str(TOY_TRAINER),
        "command": {"args": ["--output-dir", output, *args]},
        "capabilities": {"nvml": "off", "wandb": "off", "flash_linear_attention": "off", "kernels": "off"},
        "restart": {"base_s": 0.2, "cap_s": 1.0, "interval_s": 600.0},
        "stop": STOP,
        "log": {"min_free_bytes": 1000},
    }
    for key, value in changes.items():
        spec[key] = {**spec[key], **value} if isinstance(value, dict) and key in spec else value
    return spec


class RunningDaemon:
    """A started daemon and the shortcuts that tests need."""

    def __init__(self, daemon: Daemon, folder: Path) -> None:
        self.daemon = daemon
        self.folder = folder

    @property
    def root(self) -> Path:
        """The local node's root."""
        return self.folder / "node"

    async def add_local_node(self, name: str = "local", **fields: Any) -> Node:
        """Register this machine as a node."""
        values = {"root": str(self.root), "log_dir": str(self.folder / "logs"), **fields}
        node = await self.daemon.store.write(
            lambda session: nodes.add_node(session, name=name, transport="local", actor=ACTOR, **values)
        )
        self.daemon.hint(node.id)
        return node

    async def deploy(self, node: str = "local", *, source: str | None = None, lock: str | Path) -> Operation:
        """Deploy and wait for the end, whatever it is."""
        operation = await self.daemon.store.write(
            lambda session: nodes.request_deploy(
                session,
                get_node(session, node),
                source=source or str(TOY_TRAINER),
                lock=str(lock),
                actor=ACTOR,
            )
        )
        self.daemon.hint(operation.node_id or "")
        return await self.finished(operation.id)

    async def check(self, node: str = "local") -> Operation:
        """Check the node and wait."""
        operation = await self.daemon.store.write(
            lambda session: nodes.request_check(session, get_node(session, node), actor=ACTOR)
        )
        self.daemon.hint(operation.node_id or "")
        return await self.finished(operation.id)

    async def put_run(self, spec: Mapping[str, Any]) -> Run:
        """Store a run."""
        parsed = parse_run_dict(dict(spec))
        return await self.daemon.store.write(lambda session: runs.put_run(session, parsed, actor=ACTOR))

    async def start(self, name: str = "toy", *, wait: bool = True) -> Operation:
        """Ask for a start."""
        return await self._request(
            name, lambda session, run: runs.request_start(session, run, actor=ACTOR), wait
        )

    async def stop(self, name: str = "toy", *, wait: bool = True) -> Operation:
        """Ask for a stop."""
        return await self._request(
            name, lambda session, run: runs.request_stop(session, run, actor=ACTOR), wait
        )

    async def restart(self, name: str = "toy", *, wait: bool = True, **fields: Any) -> Operation:
        """Ask for a restart."""
        return await self._request(
            name, lambda session, run: runs.request_restart(session, run, actor=ACTOR, **fields), wait
        )

    async def declare_lost(self, name: str = "toy", **fields: Any) -> Operation:
        """Declare the live attempt lost."""
        return await self._request(
            name, lambda session, run: runs.request_declare_lost(session, run, actor=ACTOR, **fields), True
        )

    async def _request(
        self, name: str, request: Callable[[Session, Run], Operation], wait: bool
    ) -> Operation:
        def write(session: Session) -> Operation:
            run = find_run(session, name)
            assert run is not None
            return request(session, run)

        operation = await self.daemon.store.write(write)
        self.daemon.hint(operation.run_id or "")
        return await self.finished(operation.id) if wait else operation

    async def finished(self, operation_id: str) -> Operation:
        """The operation once it has ended."""

        def read(session: Session) -> Operation | None:
            operation = get_operation(session, operation_id)
            return operation if operation.status in ("done", "failed", "superseded") else None

        return await self.until(read, f"operation {operation_id} to end")

    async def until(self, read: Callable[[Session], Any], what: str) -> Any:
        """Wait until `read` gives something; fails with what the daemon last decided."""
        deadline = asyncio.get_running_loop().time() + WAIT_S
        while asyncio.get_running_loop().time() < deadline:
            found = await self.daemon.store.read(read)
            if found:
                return found
            await asyncio.sleep(0.05)
        raise AssertionError(f"waited {WAIT_S:g} s for {what}:\n{await self.describe()}")

    async def attempt(self, number: int, *states: str, name: str = "toy") -> Attempt:
        """The attempt with this number once it is in one of these states."""

        def read(session: Session) -> Attempt | None:
            run = find_run(session, name)
            assert run is not None
            for found in list_run_attempts(session, run.id):
                if found.number == number and (not states or found.state in states):
                    return found
            return None

        found = await self.until(read, f"attempt {number} of {name} in {states}")
        assert isinstance(found, Attempt)
        return found

    async def attempts(self, name: str = "toy") -> list[Attempt]:
        """All attempts, oldest first."""

        def read(session: Session) -> list[Attempt]:
            run = find_run(session, name)
            assert run is not None
            return list(reversed(list_run_attempts(session, run.id)))

        return await self.daemon.store.read(read)

    async def run(self, name: str = "toy") -> Run:
        """The run's row."""
        found = await self.daemon.store.read(lambda session: find_run(session, name))
        assert found is not None
        return found

    async def events(self, **filters: Any) -> list[Event]:
        """Events in order, filtered by column values."""

        def read(session: Session) -> list[Event]:
            query = select(Event).order_by(col(Event.id))
            for key, value in filters.items():
                query = query.where(getattr(Event, key) == value)
            return list(session.exec(query).all())

        return await self.daemon.store.read(read)

    async def describe(self) -> str:
        """Everything that explains a wait that was in vain."""

        def read(session: Session) -> str:
            lines = []
            for run in session.exec(select(Run)):
                attempt = newest_attempt(session, run.id)
                lines.append(f"run {run.name}: {run.desired} intent {run.intent} hold {run.hold}")
                lines.append(f"  decision {run.last_decision and run.last_decision.get('explanation')}")
                lines.append(f"  attempt {attempt and (attempt.number, attempt.state, attempt.message)}")
                lines.append(f"  preflight {attempt and attempt.preflight}")
            for node in session.exec(select(Node)):
                lines.append(f"node {node.name}: {node.conditions}")
            for operation in session.exec(select(Operation)):
                lines.append(f"op {operation.kind} {operation.status} {operation.progress} {operation.error}")
            for event in session.exec(select(Event).order_by(col(Event.id).desc()).limit(25)):
                lines.append(f"event {event.id} {event.subject} {event.reason}: {event.message}")
            return "\n".join(lines)

        return await self.daemon.store.read(read)


@contextlib.asynccontextmanager
async def running_daemon(folder: Path, **changes: Any) -> AsyncIterator[RunningDaemon]:
    """Start a daemon on `folder`, stop it at the end; trainers go on."""
    daemon = Daemon(make_settings(folder / "state", **changes))
    await daemon.start()
    try:
        yield RunningDaemon(daemon, folder)
    finally:
        await daemon.stop()


def end_leftovers(root: Path) -> None:
    """End the processes of attempts below a root, by the identities in their own records."""
    for record in (root / "attempts").glob("*/state.json"):
        state = json.loads(record.read_text())
        for key in ("identity", "shim"):
            identity = state.get(key) or {}
            pid, ticks = identity.get("pid"), identity.get("start_ticks")
            if pid and ticks is not None and _start_ticks(pid) == ticks:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def live_processes(root: Path, run_name: str) -> list[int]:
    """Pids of the trainers of a run that live now, by the identities in their own records."""
    found = []
    for record in (root / "attempts").glob("*/state.json"):
        state = json.loads(record.read_text())
        identity = state.get("identity") or {}
        if run_name not in str(state.get("log_path")) or not identity.get("pid"):
            continue
        if _start_ticks(identity["pid"]) == identity["start_ticks"]:
            found.append(identity["pid"])
    return found


def _start_ticks(pid: int) -> int | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(text.rpartition(")")[2].split()[19])


def make_lock(folder: Path, *, toylib: str = "1.0", nvml: bool = False, name: str = "lock.txt") -> Path:
    """A lock over the tiny wheels in `folder/wheels`, rewritten in place."""
    wheels = [build_wheel(folder / "wheels", "toylib", toylib)]
    if nvml:
        wheels.append(fake_pynvml(folder / "wheels"))
    return write_lock(folder / name, wheels)
