"""Operations: what somebody asked for, and how far it is."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Response

from supervisor.api import schemas
from supervisor.api.conditional import tagged
from supervisor.api.deps import State
from supervisor.services import views
from supervisor.store import queries

router = APIRouter(prefix="/operations", tags=["operations"])


@router.get("/{operation}", response_model=schemas.OperationView)
async def get_operation(
    operation: Annotated[str, Path(max_length=128, description="Id of an operation.")],
    state: State,
    response: Response,
) -> Any:
    """Progress, and at the end result or error."""
    view = await state.store.read(
        lambda session: views.operation_view(session, queries.get_operation(session, operation))
    )
    response.headers.update(tagged(view))
    return view
