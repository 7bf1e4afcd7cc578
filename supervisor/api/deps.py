"""What the routes need from the running daemon, and how a request gets it.

`app.py` hangs one object on `app.state.supervisor`; its shape is `SupervisorState`, the only contract between
the composition root and this package. Routes read it through the aliases at the end of this module. Nothing
here builds anything: no engine, no transport, no loop.
"""

from __future__ import annotations

from typing import Annotated, Protocol

from fastapi import Depends, Query, Request

from supervisor.api.access import ApiState, authorize
from supervisor.clock import Clock
from supervisor.services.auth import Principal
from supervisor.services.hub import Hub
from supervisor.services.secrets import SecretBox
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


class SupervisorState(Protocol):
    """`app.state.supervisor`."""

    store: Store
    settings: Settings
    clock: Clock
    hub: Hub
    logs: LogReader
    secret_box: SecretBox

    def hint(self, object_id: str) -> None:
        """Look at this run or node now; called after the commit that changed its intent."""
        ...


def get_state(request: Request) -> SupervisorState:
    """The daemon's parts."""
    state: SupervisorState = request.app.state.supervisor
    return state


def get_api_state(request: Request) -> ApiState:
    """This package's own state."""
    state: ApiState = request.app.state.api
    return state


State = Annotated[SupervisorState, Depends(get_state)]
Api = Annotated[ApiState, Depends(get_api_state)]
Caller = Annotated[Principal, Depends(authorize)]
DryRun = Annotated[bool, Query(description="Answer with the plan; change nothing.")]
Limit = Annotated[int, Query(ge=1, le=200, description="Items on a page.")]
Cursor = Annotated[str | None, Query(max_length=256, description="`next_cursor` of the page before.")]
