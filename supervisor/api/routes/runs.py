"""Runs: store a spec, start, stop, restart, and understand what happened."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from sqlmodel import Session

from supervisor.api import schemas
from supervisor.api.conditional import IfMatch, check_if_match, tagged
from supervisor.api.deps import Cursor, DryRun, Limit, State, SupervisorState
from supervisor.api.errors import HttpError
from supervisor.api.paging import page_of
from supervisor.api.writes import PLANNED, Reply, Write, WriteDep, accepted, to_response
from supervisor.domain.spec import RunSpec, parse_run_dict
from supervisor.services import plans, runs, telemetry, views
from supervisor.store import queries

router = APIRouter(prefix="/runs", tags=["runs"])

RunName = Annotated[str, Path(max_length=128, description="Name or id of a run.")]
Json = dict[str, Any]

SPEC_BODY = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/RunSpec"}}},
    }
}
MERGE_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "application/merge-patch+json": {"schema": {"type": "object"}},
            "application/json": {"schema": {"type": "object"}},
        },
    }
}


async def _json_object(request: Request) -> Json:
    try:
        body = await request.json()
    except (ValueError, RecursionError) as error:
        raise HttpError(400, "the body is not JSON", reason="MalformedJson") from error
    if not isinstance(body, dict):
        raise HttpError(422, "the body must be a JSON object")
    return body


async def _run_spec(body: Annotated[Json, Depends(_json_object)]) -> RunSpec:
    # Parsed by the domain and not by the framework, so that a typo gets the nearest key as a suggestion.
    return parse_run_dict(body)


@router.get("", response_model=schemas.Page[schemas.RunSummary])
async def list_runs(state: State, limit: Limit = 50, cursor: Cursor = None) -> Any:
    """Runs by name."""

    def read(session: Session) -> Any:
        page = page_of(runs.list_runs(session), key=lambda run: run.name, limit=limit, cursor=cursor)
        return {**page, "items": views.run_summaries(session, page["items"], state.clock)}

    return await state.store.read(read)


@router.post(
    "",
    response_model=schemas.RunView,
    status_code=201,
    responses={200: {"description": "The run existed already.", "model": schemas.RunView}},
    openapi_extra=SPEC_BODY,
)
async def put_run(spec: Annotated[RunSpec, Depends(_run_spec)], state: State, write: WriteDep) -> Any:
    """Store a run, or a new generation of the run with that name; a live attempt keeps its own."""

    def effect(session: Session) -> Reply:
        is_new = queries.find_run(session, spec.name) is None
        run = runs.put_run(session, spec, actor=write.actor, request_id=write.request_id)
        view = views.run_view(session, run, state.clock)
        headers = {"Location": f"/v1/runs/{run.name}", **tagged(view)}
        return Reply(201 if is_new else 200, view, headers, hint=run.id)

    return await write.answer(effect)


@router.get("/{run}", response_model=schemas.RunView)
async def get_run(run: RunName, state: State, response: Response) -> Any:
    """One run: spec, phase, conditions, newest attempt, queue and GPU snapshot."""
    view = await state.store.read(
        lambda session: views.run_view(session, runs.get_run(session, run), state.clock)
    )
    response.headers.update(tagged(view))
    return view


@router.patch("/{run}", response_model=schemas.RunView, openapi_extra=MERGE_BODY)
async def update_run(
    run: RunName,
    changes: Annotated[Json, Depends(_json_object)],
    state: State,
    write: WriteDep,
    if_match: IfMatch = None,
) -> Any:
    """Change the spec by a JSON merge patch (RFC 7396); stored as a new generation."""

    def effect(session: Session) -> Reply:
        found = runs.get_run(session, run)
        check_if_match(if_match, found.version)
        spec = parse_run_dict(_merged(found.spec, changes))
        if spec.name != found.name:
            raise HttpError(
                422, f"a run keeps its name: {found.name}", hint="store a new run under the other name"
            )
        changed = runs.put_run(session, spec, actor=write.actor, request_id=write.request_id)
        view = views.run_view(session, changed, state.clock)
        return Reply(200, view, tagged(view), hint=changed.id)

    return await write.answer(effect)


@router.delete("/{run}", status_code=204, response_model=None)
async def delete_run(run: RunName, write: WriteDep, if_match: IfMatch = None) -> Any:
    """Delete a run that is not live; its logs and checkpoints in the node stay."""

    def effect(session: Session) -> Reply:
        found = runs.get_run(session, run)
        check_if_match(if_match, found.version)
        runs.delete_run(session, found, actor=write.actor, request_id=write.request_id)
        return Reply(204, None)

    return await write.answer(effect)


@router.post("/{run}/start", response_model=schemas.OperationView, status_code=202, responses=PLANNED)
async def start_run(
    run: RunName,
    state: State,
    write: WriteDep,
    body: schemas.StartBody | None = None,
    dry_run: DryRun = False,
) -> Any:
    """Start a run; refused with 409 while it is live."""
    wanted = (body or schemas.StartBody()).model_dump()
    if dry_run:
        return await _plan(state, run, plans.plan_start, wanted)
    return await _request(write, run, runs.request_start, wanted)


@router.post("/{run}/stop", response_model=schemas.OperationView, status_code=202, responses=PLANNED)
async def stop_run(
    run: RunName,
    state: State,
    write: WriteDep,
    body: schemas.StopBody | None = None,
    dry_run: DryRun = False,
) -> Any:
    """Stop a run gracefully; of a stopped run the operation is done at once."""
    wanted = (body or schemas.StopBody()).model_dump()
    if dry_run:
        return await _plan(state, run, plans.plan_stop, wanted)
    return await _request(write, run, runs.request_stop, wanted)


@router.post("/{run}/restart", response_model=schemas.OperationView, status_code=202, responses=PLANNED)
async def restart_run(
    run: RunName,
    state: State,
    write: WriteDep,
    body: schemas.RestartBody | None = None,
    dry_run: DryRun = False,
) -> Any:
    """Stop, verify absence, start with the next log number."""
    wanted = (body or schemas.RestartBody()).model_dump()
    if dry_run:
        return await _plan(state, run, plans.plan_restart, wanted)
    return await _request(write, run, runs.request_restart, wanted)


@router.post("/{run}/rollback", response_model=schemas.OperationView, status_code=202, responses=PLANNED)
async def rollback_run(
    run: RunName,
    state: State,
    write: WriteDep,
    body: schemas.RollbackBody | None = None,
    dry_run: DryRun = False,
) -> Any:
    """Pin the run to the release and environment that it used before, and restart it on them."""
    wanted = (body or schemas.RollbackBody()).model_dump()
    if dry_run:
        return await _plan(state, run, plans.plan_rollback, wanted)
    return await _request(write, run, runs.request_rollback, wanted)


@router.post("/{run}/declare-lost", response_model=schemas.OperationView, status_code=202, responses=PLANNED)
async def declare_run_lost(
    run: RunName,
    state: State,
    write: WriteDep,
    body: schemas.DeclareLostBody | None = None,
    dry_run: DryRun = False,
) -> Any:
    """End the live attempt as lost on an operator's word; signals nothing, and the run is held."""
    wanted = (body or schemas.DeclareLostBody()).model_dump()
    if dry_run:
        return await _plan(state, run, plans.plan_declare_lost, wanted)
    return await _request(write, run, runs.request_declare_lost, wanted)


@router.get("/{run}/drift", response_model=schemas.DriftView)
async def get_drift(run: RunName, state: State) -> Any:
    """What differs between the running attempt and what the next start would use."""
    return await state.store.read(lambda session: views.drift_view(session, runs.get_run(session, run)))


@router.get("/{run}/explain", response_model=schemas.ExplainView)
async def explain_run(run: RunName, state: State) -> Any:
    """The last decision with its evidence."""
    return await state.store.read(
        lambda session: views.explain_view(session, runs.get_run(session, run), state.clock)
    )


@router.get("/{run}/checkpoints", response_model=schemas.Page[schemas.CheckpointView])
async def list_checkpoints(run: RunName, state: State) -> Any:
    """Resumable states that the trainer has reported, newest first."""

    def read(session: Session) -> Any:
        return {"items": views.checkpoint_views(session, runs.get_run(session, run)), "next_cursor": None}

    return await state.store.read(read)


@router.get("/{run}/metrics", response_model=schemas.MetricsView)
async def get_metrics(
    run: RunName,
    state: State,
    names: Annotated[
        str, Query(max_length=2000, description="Dotted names, comma separated; all if empty.")
    ] = "",
    since: Annotated[float | None, Query(allow_inf_nan=False, description="Epoch seconds.")] = None,
    until: Annotated[float | None, Query(allow_inf_nan=False, description="Epoch seconds.")] = None,
    points: Annotated[int, Query(ge=1, le=5000, description="At most so many points.")] = 500,
) -> Any:
    """History, down-sampled; a value that was missing is null, never 0."""
    if since is not None and until is not None and since > until:
        raise HttpError(422, "since is later than until")
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    return await state.store.read(
        lambda session: telemetry.metric_history(
            session,
            runs.get_run(session, run),
            names=wanted,
            since=since,
            until=until,
            points=points,
        )
    )


async def _plan(state: SupervisorState, name: str, plan: Any, wanted: Json) -> Response:
    shown = await state.store.read(
        lambda session: plan(session, runs.get_run(session, name), clock=state.clock, **wanted)
    )
    return to_response(Reply(200, shown))


async def _request(write: Write, name: str, request: Any, wanted: Json) -> Response:
    def effect(session: Session) -> Reply:
        run = runs.get_run(session, name)
        operation = request(session, run, actor=write.actor, request_id=write.request_id, **wanted)
        return accepted(views.operation_view(session, operation), hint=run.id)

    return await write.answer(effect)


def _merged(base: Any, changes: Any) -> Any:
    """RFC 7396: objects merge, null removes, anything else replaces."""
    if not isinstance(changes, Mapping):
        return changes
    merged = dict(base) if isinstance(base, Mapping) else {}
    for name, value in changes.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = _merged(merged.get(name), value)
    return merged
