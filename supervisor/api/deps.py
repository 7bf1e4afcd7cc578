"""What the routes need from the running daemon, and how a request gets it.

`app.py` hangs one object on `app.state.supervisor`; its shape is `SupervisorState`, the only contract between
the composition root and this package. Routes read it through the aliases at the end of this module. Nothing
here builds anything: no engine, no transport, no loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from supervisor.clock import Clock
    from supervisor.settings import Settings
    from supervisor.store.tables import Attempt
    from supervisor.store.writer import Store


class LogReader(Protocol):
    """Log bytes of an attempt, from the node while it is reachable."""

    async def read(self, attempt: Attempt, offset: int, limit: int) -> tuple[bytes, int, int]:
        """Return `(data, offset, size)`: at most `limit` bytes from `offset`, and the log's present size.

        `offset` past the end returns no bytes. `limit` is 0 for a question about the size alone.

        Raises:
            TransportError, ContainerError, ShimError: the node cannot be asked now.
            NotFoundError: the attempt never had a log (it was not launched).
        """
        ...


class HubMessage(Protocol):
    """One thing that happened, already JSON-ready."""

    @property
    def topic(self) -> str:
        """`event`, `state`, `status`, `metrics`, `gpu`, `log`, `operation` ..."""
        ...

    @property
    def run(self) -> str | None:
        """Name of the run concerned, if any."""
        ...

    @property
    def node(self) -> str | None:
        """Name of the node concerned, if any."""
        ...

    @property
    def data(self) -> Mapping[str, Any]:
        """The payload; for topic `event` the event's view with its integer `id`."""
        ...


class Subscription(Protocol):
    """One client's bounded queue."""

    async def get(self) -> HubMessage | None:
        """Next message; None once the queue has overflowed, `close()` was called or the hub was closed."""
        ...

    def close(self) -> None:
        """Give the queue back; idempotent."""
        ...


class Hub(Protocol):
    """In-memory fan-out; losing a message costs a client latency only."""

    def subscribe(self, *, max_queue: int = 1000) -> Subscription:
        """Start receiving."""
        ...


class SupervisorState(Protocol):
    """`app.state.supervisor`."""

    store: Store
    settings: Settings
    clock: Clock
    hub: Hub
    logs: LogReader

    def hint(self, object_id: str) -> None:
        """Look at this run or node now; called after the commit that changed its intent."""
        ...
