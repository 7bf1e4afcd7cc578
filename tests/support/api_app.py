"""The real API over a real store in a temporary folder, without reconciler and without nodes.

`build_api` gives the application; `live_server` serves it by uvicorn on a loopback port in a thread. Logs
come from `FileLogs`, which reads attempts' logs from a local folder; everything else is the product's own.
"""

from __future__ import annotations

import asyncio
import functools
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import ResponseValidationError

from supervisor.api import install
from supervisor.api.server import Binding, DaemonServer
from supervisor.clock import SystemClock
from supervisor.domain.errors import ConnectError, NotFoundError
from supervisor.domain.run import LIVE
from supervisor.domain.spec import parse_run_dict
from supervisor.services import auth, nodes, runs
from supervisor.services.hub import Hub
from supervisor.services.secrets import SecretBox
from supervisor.services.views import event_view
from supervisor.settings import load_settings
from supervisor.store.events import now_of
from supervisor.store.operations import new_id
from supervisor.store.tables import Attempt, Node, Run
from supervisor.store.writer import Store

WAIT_S = 60.0


class FileLogs:
    """Reads logs from files named after the attempt's id."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.is_unreachable = False
        self._asked: dict[str, threading.Event] = {}

    def path(self, attempt_id: str) -> Path:
        return self.folder / attempt_id

    def asked(self, attempt_id: str) -> threading.Event:
        """Set once somebody was given, or refused, bytes of that log."""
        return self._asked.setdefault(attempt_id, threading.Event())

    async def read(self, attempt: Any, offset: int, limit: int) -> tuple[bytes, int, int]:
        try:
            return self._read(attempt, offset, limit)
        finally:
            self.asked(attempt.id).set()

    def _read(self, attempt: Any, offset: int, limit: int) -> tuple[bytes, int, int]:
        if self.is_unreachable:
            raise ConnectError("no answer from the host: 10.0.0.6", reason="ConnectTimeout")
        path = self.path(attempt.id)
        if not path.exists():
            raise NotFoundError(f"attempt {attempt.number} was never launched", reason="NoLog")
        data = path.read_bytes()
        return data[offset : offset + limit], offset, len(data)


@dataclass
class State:
    """What `app.py` hangs on `app.state.supervisor`, as far as the API looks at it."""

    store: Store
    settings: Any
    clock: Any
    hub: Hub
    logs: FileLogs
    secret_box: SecretBox
    hints: list[str] = field(default_factory=list)

    def hint(self, object_id: str) -> None:
        self.hints.append(object_id)


@dataclass
class Api:
    """The application with what a test wants to reach."""

    app: FastAPI
    state: State
    tokens: dict[str, str]
    """Scope to token value."""


def build_api(folder: Path, *, clock: Any = None) -> Api:
    """Build the application; close `api.state.store` at the end."""
    clock = clock or SystemClock()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "supervisor.db").write_bytes(_migrated_database())
    store = Store(folder / "supervisor.db", clock=clock)
    state = State(
        store=store,
        settings=load_settings(state_dir=folder),
        clock=clock,
        hub=Hub(),
        logs=FileLogs(folder),
        secret_box=SecretBox(folder / "secrets.key"),
    )
    app = FastAPI(title="dflash-supervisor", version="0.0.0")
    app.state.supervisor = state
    install(app)
    # The product answers and logs; here an answer that does not fit its description fails the test.
    del app.exception_handlers[ResponseValidationError]
    tokens = {
        scope: store.write_sync(
            lambda session, scope=scope: auth.create_token(session, name=scope, scope=scope, actor="test")[1]
        )
        for scope in ("read", "operate", "admin")
    }
    return Api(app, state, tokens)


@functools.cache
def _migrated_database() -> bytes:
    """An empty database of the present schema; migrating once for all tests saves most of their set-up."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "supervisor.db"
        store = Store(path)
        store.migrate()
        store.close()
        return path.read_bytes()


def publish_commits(state: State, loop: asyncio.AbstractEventLoop) -> None:
    """Tell the hub of each committed event, as the composition root does."""

    def name_of(table: Any, object_id: str | None) -> str | None:
        if object_id is None:
            return None
        found = state.store.read_sync(lambda session: session.get(table, object_id))
        return found.name if found is not None else None

    def listener(events: Any) -> None:
        for event in events:
            run, node = name_of(Run, event.run_id), name_of(Node, event.node_id)
            view = event_view(event)
            loop.call_soon_threadsafe(
                lambda view=view, run=run, node=node: state.hub.publish("event", view, run=run, node=node)
            )

    state.store.add_commit_listener(listener)


@dataclass
class Live:
    """A served application."""

    url: str
    loop: asyncio.AbstractEventLoop
    api: Api

    def publish(self, topic: str, data: dict[str, Any], **fields: Any) -> None:
        """Publish on the server's loop, as the sampler does."""
        self.loop.call_soon_threadsafe(lambda: self.api.state.hub.publish(topic, data, **fields))


@contextmanager
def live_server(api: Api) -> Iterator[Live]:
    """Serve on 127.0.0.1 in a thread until the block ends; the end is the product's own shutdown."""
    ready = threading.Event()
    found: dict[str, Any] = {}

    async def announce(url: str) -> None:
        found["url"] = url
        ready.set()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        found["loop"] = loop
        publish_commits(api.state, loop)
        found["server"] = DaemonServer(api.app, Binding(host="127.0.0.1", port=0), announce)
        await found["server"].serve()

    def serve() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            found["error"] = error
            ready.set()
            raise

    thread = threading.Thread(target=serve, name="api-server", daemon=True)
    thread.start()
    assert ready.wait(WAIT_S), "the server did not start"
    if "error" in found:
        raise RuntimeError("the server failed to start") from found["error"]
    try:
        yield Live(found["url"], found["loop"], api)
    finally:
        found["server"].should_exit = True
        thread.join(WAIT_S)
        assert not thread.is_alive(), "the server did not stop"


def seed_node(state: State, name: str = "local") -> Node:
    """A local node."""
    return state.store.write_sync(
        lambda session: nodes.add_node(session, name=name, transport="local", actor="test")
    )


def run_spec(name: str = "slammed", *, node: str = "local", **changes: Any) -> dict[str, Any]:
    """A run file's content as JSON."""
    return {"name": name, "node": node, "command": {"args": ["--data-dir", "/data"]}, **changes}


def seed_run(state: State, name: str = "slammed", *, node: str = "local", **changes: Any) -> Run:
    """A stored run on an existing node."""
    spec = parse_run_dict(run_spec(name, node=node, **changes))
    return state.store.write_sync(lambda session: runs.put_run(session, spec, actor="test"))


def seed_attempt(
    state: State,
    run: Run,
    *,
    attempt_state: str = "ready",
    log: bytes = b"",
    preflight: list[dict[str, Any]] | None = None,
) -> Attempt:
    """The run's next attempt, with a log of its own; a live one makes the run wanted."""

    def write(session: Any) -> Attempt:
        row = session.get(Run, run.id)
        now = now_of(session)
        attempt = Attempt(
            id=new_id("a"),
            run_id=row.id,
            node_id=row.node_id,
            number=row.next_attempt_number,
            state=attempt_state,
            generation=row.generation,
            spec=row.spec,
            preflight=preflight,
            log_path=f"/srv/dflash/logs/train_{row.name}{row.next_attempt_number}.log",
            created_at=now,
            started_at=now,
            updated_at=now,
        )
        row.next_attempt_number += 1
        if attempt_state in LIVE:
            row.desired = "running"
        session.add_all([attempt, row])
        return attempt

    attempt = state.store.write_sync(write)
    state.logs.path(attempt.id).write_bytes(log)
    return attempt


def end_attempt(
    state: State,
    attempt: Attempt,
    *,
    ended: str = "succeeded",
    exit_code: int | None = 0,
    reason: str | None = None,
) -> None:
    """End an attempt, and the wish for it."""

    def write(session: Any) -> None:
        row = session.get(Attempt, attempt.id)
        row.state, row.exit_code, row.ended_at = ended, exit_code, now_of(session)
        row.reason = reason
        run = session.get(Run, row.run_id)
        run.desired = "stopped"
        session.add_all([row, run])

    state.store.write_sync(write)
