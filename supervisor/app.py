"""Composition root: builds store, connections, loops and application, starts and stops them in order.

Called by `dflashctl serve` (through `api.server`) and by tests. The only module that sees both services and
reconciler; it hands each what it needs as plain callables. Trainers live on whatever happens here.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import timedelta
from importlib import metadata
from pathlib import Path

import structlog
from fastapi import FastAPI
from sqlmodel import Session, select

import supervisor
from supervisor import api
from supervisor.clock import Clock, SystemClock
from supervisor.domain.errors import ConfigError, NotFoundError, SupervisorError
from supervisor.logging import configure_logging
from supervisor.reconciler.connections import Connections, NodeAddress
from supervisor.reconciler.deploy_rows import DeploySources
from supervisor.reconciler.drift import DriftWatch
from supervisor.reconciler.node_operations import NodeOperations
from supervisor.reconciler.runtime import Runtime
from supervisor.reconciler.sampler import Sampler, flush_forever
from supervisor.reconciler.scheduler import Periods, Scheduler
from supervisor.services import auth, idempotency, telemetry
from supervisor.services.events import prune_events
from supervisor.services.hub import Hub
from supervisor.services.secrets import SecretBox, remember_secrets, resolve_secrets
from supervisor.services.views import event_view
from supervisor.settings import Settings, load_settings, read_environment
from supervisor.store.lock import StateLock
from supervisor.store.tables import Attempt, Event, Token
from supervisor.store.writer import Store
from supervisor.transport.base import Transport
from supervisor.transport.bundle import build_shim
from supervisor.transport.local import LocalTransport
from supervisor.transport.pct import PctTransport
from supervisor.transport.ssh import SshTarget, SshTransport

log = structlog.get_logger(__name__)

STOP_LIMIT_S = 8.0
PRUNE_PERIOD_S = 3600.0
TAIL_LIMIT = 262_144

BuildTransport = Callable[[NodeAddress], Transport]


class LogReader:
    """Log bytes of attempts through the node's agent; see `api.deps.LogReader`."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    async def read(self, attempt: Attempt, offset: int, limit: int) -> tuple[bytes, int, int]:
        """Return `(data, offset, size)`, at most `limit` bytes.

        Raises:
            NotFoundError: the attempt never had a log.
            TransportError, ContainerError, ShimError: the node cannot be asked now.
        """
        if attempt.launching_at is None:
            raise NotFoundError(
                f"attempt {attempt.number} was never launched, it has no log",
                reason="NoLog",
                hint="its state and reason say why",
                kind="log",
                name=str(attempt.number),
            )
        connection = self._connections.get(attempt.node_id)
        reply = await connection.request(
            "tail", attempt_id=attempt.id, offset=offset, limit=min(limit, TAIL_LIMIT)
        )
        return base64.b64decode(reply["data_b64"]), int(reply["offset"]), int(reply["size"] or 0)


class Daemon:
    """Everything that runs. `start` and `stop` once each; the routes see it as `app.state.supervisor`."""

    def __init__(
        self,
        settings: Settings,
        *,
        clock: Clock | None = None,
        build_transport: BuildTransport | None = None,
        sources: DeploySources | None = None,
    ) -> None:
        self.settings = settings
        self.clock: Clock = clock or SystemClock()
        self.hub = Hub()
        self._build_transport = build_transport or build_node_transport
        self._sources = sources or bundled_sources(settings)
        self._lock = StateLock(settings.state_dir)
        self._started_at = self.clock.now().isoformat(timespec="seconds")
        self._tasks: list[asyncio.Task[None]] = []
        self._scheduler: Scheduler | None = None
        self.store: Store
        self.secret_box: SecretBox
        self.connections: Connections
        self.sampler: Sampler
        self.logs: LogReader

    async def start(self) -> None:
        """Lock, migrate, first token, connections, loops.

        Raises:
            ConflictError: another daemon runs on the state folder.
            StoreError, ConfigError: the database, the state folder or a setting cannot be used.
        """
        os.umask(0o077)
        try:
            self.settings.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock.acquire(started_at=self._started_at)
            await self._open()
        except BaseException as error:
            await self.stop()
            if isinstance(error, OSError):
                raise _unusable(self.settings.state_dir, error) from error
            raise

    def note_address(self, url: str) -> None:
        """Where this daemon listens, for whoever finds the folder in use: the port may be any free one."""
        self._lock.note(started_at=self._started_at, url=url)

    async def _open(self) -> None:
        self.store = Store(self.settings.database_target, clock=self.clock)
        backup = await asyncio.to_thread(self.store.migrate)
        if backup is not None:
            log.info("database was migrated", backup=backup)
        self.secret_box = SecretBox(self.settings.key_file)
        await self._remember_secrets()
        await self._first_token()
        await self.store.write(idempotency.abandon_running)
        loop = asyncio.get_running_loop()

        def tell(events: Sequence[Event]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended; the rows are in the store
                loop.call_soon_threadsafe(self._publish_events, list(events))

        self.store.add_commit_listener(tell)
        await self._start_reconciler()
        self._tasks = [
            asyncio.create_task(flush_forever(self.sampler), name="sampler"),
            asyncio.create_task(self._prune_forever(), name="prune"),
        ]

    async def _start_reconciler(self) -> None:
        shim = await asyncio.to_thread(build_shim)
        self.connections = Connections(self._build_transport, shim=shim, clock=self.clock)
        self.logs = LogReader(self.connections)
        self.sampler = Sampler(
            self.store,
            publish=self.hub.publish,
            hint=self.hint,
            on_environment=self._on_environment,
            clock=self.clock,
        )
        runtime = Runtime(
            store=self.store,
            connections=self.connections,
            sampler=self.sampler,
            clock=self.clock,
            owner=f"daemon-{os.getpid()}-{secrets.token_hex(4)}",
            resolve_secrets=self._resolve_secrets,
            on_attempts_changed=self._on_attempts_changed,
            drift=DriftWatch(self.clock, self.hint),
        )
        periods = Periods(
            active_s=self.settings.reconcile_active_s,
            idle_s=self.settings.reconcile_idle_s,
            gpu_s=self.settings.gpu_interval_s,
            environment_s=self.settings.environment_interval_s,
        )
        self._scheduler = Scheduler(runtime, periods=periods)
        self.connections.listen(self._scheduler)
        operations = NodeOperations(runtime, self._sources, on_ended=self._scheduler.on_node_operation)
        await self._scheduler.start(operations)

    async def stop(self) -> None:
        """Streams first, then loops, connections, store, lock; bounded, and trainers live on."""
        self.hub.close()
        try:
            async with asyncio.timeout(STOP_LIMIT_S):
                await self._stop_tasks()
        except TimeoutError:
            log.warning("some tasks did not end in time and were left behind", limit_s=STOP_LIMIT_S)
        store = getattr(self, "store", None)
        if store is not None:
            await asyncio.to_thread(store.close)
        self._lock.release()

    async def _stop_tasks(self) -> None:
        if self._scheduler is not None:
            await self._scheduler.aclose()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        connections = getattr(self, "connections", None)
        if connections is not None:
            await connections.aclose()

    def hint(self, object_id: str) -> None:
        """Look at this run or node now; called after the commit that changed its intent, from any thread."""
        if self._scheduler is not None:
            self._scheduler.hint(object_id)

    def _on_attempts_changed(self, node_id: str) -> None:
        if self._scheduler is not None:
            self._scheduler.on_attempts_changed(node_id)

    def _on_environment(self, node_id: str, python: str) -> None:
        if self._scheduler is not None:
            self._scheduler.on_environment(node_id, python)

    async def _first_token(self) -> None:
        """Make the admin token at first start: its file is written before the row that makes it work."""
        if await self.store.read(lambda session: session.exec(select(Token.id).limit(1)).first()) is not None:
            return
        value = f"{auth.PREFIX}_admin_{secrets.token_urlsafe(auth.TOKEN_BYTES)}"
        await asyncio.to_thread(write_private, self.settings.admin_token_file, value + "\n")
        await self.store.write(
            lambda session: auth.create_token(
                session, name="admin", scope=auth.Scope.ADMIN, actor="supervisor", value=value
            )
        )

    async def _remember_secrets(self) -> None:
        unreadable = await self.store.read(
            lambda session: remember_secrets(session, self.secret_box, read_environment=read_environment)
        )
        if unreadable:
            log.warning("secrets cannot be read", names=unreadable)

    async def _resolve_secrets(self, names: Sequence[str]) -> dict[str, str]:
        if not names:
            return {}
        return await self.store.read(
            lambda session: resolve_secrets(
                session, self.secret_box, names, read_environment=read_environment
            )
        )

    def _publish_events(self, events: Sequence[Event]) -> None:
        for event in events:
            kind, _, name = event.subject.partition("/")
            self.hub.publish(
                "event",
                event_view(event),
                run=name if kind == "run" else None,
                node=name if kind == "node" else None,
            )

    async def _prune_forever(self) -> None:
        while True:
            await self.clock.sleep(PRUNE_PERIOD_S)
            try:
                await self.store.write(self._prune)
            except SupervisorError as error:
                log.warning("old rows were not removed", reason=error.reason, error=error.message)

    def _prune(self, session: Session) -> None:
        keep = self.settings.retention
        telemetry.prune_metrics(session, keep=timedelta(days=keep.metric_days))
        telemetry.prune_gpu_samples(
            session, keep_raw=timedelta(days=keep.gpu_raw_days), keep=timedelta(days=keep.gpu_days)
        )
        prune_events(session, keep=timedelta(days=keep.event_days))
        idempotency.prune_keys(session, keep=timedelta(hours=keep.idempotency_hours))
        auth.prune_sessions(session)


def _unusable(state_dir: Path, error: OSError) -> ConfigError:
    what = f"{error.strerror or error}: {error.filename or state_dir}"
    return ConfigError(
        f"the state folder {state_dir} cannot be used: {what}",
        reason="StateFolderUnusable",
        hint="give it room and write permission, or choose another --state-dir",
        field="state_dir",
        value=str(state_dir),
    )


def write_private(path: Path, text: str) -> None:
    """Write a file that only we can read, whole or not at all."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as handle:
        handle.write(text)
        handle.flush()
        os.fsync(handle.fileno())
    temporary.replace(path)


def build_node_transport(address: NodeAddress) -> Transport:
    """The transport that a node's row asks for.

    Raises:
        ConfigError: the row lacks what its transport needs.
    """
    if address.transport == "local":
        return LocalTransport()
    if address.host is None or address.host_key is None or address.identity_file is None:
        missing = next(
            name for name in ("host", "host_key", "identity_file") if getattr(address, name) is None
        )
        raise ConfigError(
            f"node {address.name} has no {missing}",
            reason="NodeIncomplete",
            hint=f"`dflashctl node set {address.name}` with the missing part",
            field=missing,
        )
    host = SshTransport(
        SshTarget(
            host=address.host,
            port=address.port,
            user=address.user or "root",
            host_key=address.host_key,
            identity=address.identity_file,
        )
    )
    if address.transport == "ssh":
        return host
    if address.vmid is None:
        raise ConfigError(f"node {address.name} has no vmid", reason="NodeIncomplete", field="vmid")
    return PctTransport(host, address.vmid)


def bundled_sources(settings: Settings) -> DeploySources:
    """The trainer and its lock: inside the installed package, or in the source tree."""
    package = Path(supervisor.__file__).parent
    packed = package / "_locks" / "trainer.txt"
    lock = packed if packed.is_file() else package.parent / "requirements" / "trainer.txt"
    return DeploySources(
        trainer_folder=package.parent / "trainer",
        lock_file=lock,
        find_links=settings.find_links,
        torch_index_url=settings.torch_index_url,
    )


def create_app(settings: Settings | None = None) -> FastAPI:
    """The application; its lifespan starts and stops the daemon."""
    chosen = settings or load_settings()
    is_level_chosen = "log_level" in chosen.model_fields_set
    configure_logging(chosen.log_level if is_level_chosen else None, chosen.log_format)
    daemon = Daemon(chosen)

    @contextlib.asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        await daemon.start()
        try:
            yield
        finally:
            await daemon.stop()

    app = FastAPI(title="dflash-supervisor", version=metadata.version("dflash-supervisor"), lifespan=lifespan)
    app.state.supervisor = daemon
    api.install(app)
    return app
