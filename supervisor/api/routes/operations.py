"""Operations: what somebody asked for, and how far it is."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path

from supervisor.api import schemas
from supervisor.api.deps import State
from supervisor.services import views
from supervisor.store import queries

router = APIRouter(prefix="/operations", tags=["operations"])


@router.get("/{operation}", response_model=schemas.OperationView)
async def get_operation(operation: Annotated[str, Path(max_length=128)], state: State) -> Any:
    """Progress, and at the end result or error."""
    return await state.store.read(
        lambda session: views.operation_view(session, queries.get_operation(session, operation))
    )
