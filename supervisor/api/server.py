"""Runs the application under uvicorn: bind, announce, serve, and end every stream before the daemon stops.

Called by `dflashctl serve` and by tests. The application's lifespan is entered here and not by uvicorn, so
that a start that is refused (a second daemon, a newer database) reaches the caller as the error it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import uvicorn

from supervisor.api.access import begin_shutdown
from supervisor.domain.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from fastapi import FastAPI

    from supervisor.settings import Settings

GRACE_S = 3
"""Requests under way may take this long after a stop was asked for; streams end at once."""

MAX_HEADER_BYTES = 16_384
KEEP_ALIVE_S = 75

Announce = Callable[[str], Awaitable[None]]
"""Called with the URL once connections are accepted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """Where to listen and how."""

    host: str
    port: int
    tls_cert: Path | None = None
    tls_key: Path | None = None
    is_behind_proxy: bool = False

    @property
    def scheme(self) -> str:
        """`https` with a certificate of our own."""
        return "https" if self.tls_cert is not None else "http"

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """As the settings say; they have refused what would be unsafe."""
        return cls(
            host=settings.host,
            port=settings.port,
            tls_cert=settings.tls_cert,
            tls_key=settings.tls_key,
            is_behind_proxy=settings.is_behind_proxy,
        )


class DaemonServer(uvicorn.Server):
    """uvicorn's server with our start and end."""

    def __init__(self, app: FastAPI, binding: Binding, announce: Announce) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                host=binding.host,
                port=binding.port,
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=binding.is_behind_proxy,
                ssl_certfile=binding.tls_cert,
                ssl_keyfile=binding.tls_key,
                timeout_graceful_shutdown=GRACE_S,
                timeout_keep_alive=KEEP_ALIVE_S,
                h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            )
        )
        self._app = app
        self._binding = binding
        self._announce = announce

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Bind, then say where."""
        await super().startup(sockets=sockets)
        if not self.should_exit:
            await self._announce(self._url())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the streams first: uvicorn would wait for them, and they never end by themselves."""
        begin_shutdown(self._app)
        await super().shutdown(sockets=sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop on SIGINT and SIGTERM without raising them again, so that the lifespan ends in order."""
        loop = asyncio.get_running_loop()
        caught: tuple[signal.Signals, ...] = (signal.SIGINT, signal.SIGTERM)
        try:
            for number in caught:
                loop.add_signal_handler(number, self.handle_exit, number, None)
        except (RuntimeError, ValueError):  # not the main thread: whoever started us stops us
            caught = ()
        try:
            yield
        finally:
            for number in caught:
                loop.remove_signal_handler(number)

    def _url(self) -> str:
        port = self._binding.port
        for server in self.servers:
            for bound in server.sockets:
                port = bound.getsockname()[1]
        host = f"[{self._binding.host}]" if ":" in self._binding.host else self._binding.host
        return f"{self._binding.scheme}://{host}:{port}"


async def serve_app(app: FastAPI, binding: Binding, announce: Announce) -> None:
    """Enter the lifespan, serve until a signal, leave the lifespan.

    Raises:
        ConfigError: the address cannot be bound.
        SupervisorError: whatever the lifespan refuses to start for.
    """
    async with app.router.lifespan_context(app):
        # Bound after the lifespan took the state folder: its refusal names the other daemon.
        with bind(binding) as listener:
            await DaemonServer(app, binding, announce).serve(sockets=[listener])


def bind(binding: Binding) -> socket.socket:
    """A listening socket; the server itself would end the process when it cannot have one."""
    family = socket.AF_INET6 if ":" in binding.host else socket.AF_INET
    try:
        listener = socket.create_server((binding.host, binding.port), family=family, backlog=512)
        # Inherited by every connection: without it an answer's body waits 40 ms for the client's delayed ACK.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {binding.host}:{binding.port}: {error.strerror}",
            reason="CannotListen",
            hint="another program may have it: name another with --port, or 0 for a free one",
        ) from error
