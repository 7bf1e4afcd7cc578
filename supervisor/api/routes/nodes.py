"""Nodes: register, look, change, check, deploy."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Response
from sqlmodel import Session

from supervisor.api import schemas
from supervisor.api.conditional import IfMatch, check_if_match, tagged
from supervisor.api.deps import Cursor, DryRun, Limit, State
from supervisor.api.errors import HttpError
from supervisor.api.hostkeys import HostKey, pinned_key, scan
from supervisor.api.paging import page_of
from supervisor.api.writes import PLANNED, Reply, WriteDep, accepted, rehearse, to_response
from supervisor.services import nodes, plans, telemetry, views
from supervisor.store.tables import Node

router = APIRouter(prefix="/nodes", tags=["nodes"])

NodeName = Annotated[str, Path(max_length=128, description="Name or id of a node.")]


@router.get("", response_model=schemas.Page[schemas.NodeView])
async def list_nodes(state: State, limit: Limit = 50, cursor: Cursor = None) -> Any:
    """Nodes by name."""

    def read(session: Session) -> Any:
        found = [views.node_view(session, node, state.clock) for node in nodes.list_nodes(session)]
        return page_of(found, key=lambda view: view["name"], limit=limit, cursor=cursor)

    return await state.store.read(read)


@router.post(
    "",
    response_model=schemas.NodeView,
    status_code=201,
    responses={
        200: {"description": "With `dry_run`: the plan, and the host's key.", "model": schemas.NodePlan}
    },
)
async def add_node(body: schemas.NodeCreate, state: State, write: WriteDep, dry_run: DryRun = False) -> Any:
    """Register a node. With `dry_run` the answer shows the host key, so that it can be compared first."""
    seen = await scan(body.host, body.port) if body.transport != "local" else None
    fields = body.model_dump(exclude={"host_key_fingerprint"}, exclude_none=True)
    is_shown_only = dry_run and body.host_key_fingerprint is None and seen is not None
    fields |= pinned_key(seen, seen.fingerprint if seen and is_shown_only else body.host_key_fingerprint)

    def add(session: Session) -> Node:
        return nodes.add_node(session, actor=write.actor, request_id=write.request_id, **fields)

    def plan(session: Session) -> dict[str, Any]:
        add(session)
        return schemas.NodePlan.of(body, seen).model_dump(mode="json")

    if dry_run:
        return to_response(Reply(200, await rehearse(state, plan)))

    def effect(session: Session) -> Reply:
        node = add(session)
        view = views.node_view(session, node, state.clock)
        return Reply(201, view, {"Location": f"/v1/nodes/{node.name}", **tagged(view)}, hint=node.id)

    return await write.answer(effect)


@router.get("/{node}", response_model=schemas.NodeView)
async def get_node(node: NodeName, state: State, response: Response) -> Any:
    """One node with its conditions and its last check."""
    view = await state.store.read(
        lambda session: views.node_view(session, nodes.get_node(session, node), state.clock)
    )
    response.headers.update(tagged(view))
    return view


@router.patch("/{node}", response_model=schemas.NodeView)
async def update_node(
    node: NodeName, body: schemas.NodePatch, state: State, write: WriteDep, if_match: IfMatch = None
) -> Any:
    """Change settings; a new address needs the fingerprint of its host key."""
    fields = body.model_dump(exclude={"host_key_fingerprint"}, exclude_unset=True)
    current = await state.store.read(lambda session: nodes.get_node(session, node))
    check_if_match(if_match, current.version)
    if current.transport != "local" and {"host", "port", "host_key_fingerprint"} & body.model_fields_set:
        seen: HostKey = await scan(body.host or current.host, body.port or current.port)
        fields |= pinned_key(seen, body.host_key_fingerprint)

    def effect(session: Session) -> Reply:
        found = nodes.get_node(session, node)
        check_if_match(if_match, found.version)
        changed = nodes.update_node(session, found, fields, actor=write.actor, request_id=write.request_id)
        view = views.node_view(session, changed, state.clock)
        return Reply(200, view, tagged(view), hint=changed.id)

    return await write.answer(effect)


@router.delete("/{node}", status_code=204, response_model=None)
async def delete_node(node: NodeName, write: WriteDep, if_match: IfMatch = None) -> Any:
    """Forget a node that has no runs; nothing in the node is touched."""

    def effect(session: Session) -> Reply:
        found = nodes.get_node(session, node)
        check_if_match(if_match, found.version)
        nodes.delete_node(session, found, actor=write.actor, request_id=write.request_id)
        return Reply(204, None)

    return await write.answer(effect)


@router.post("/{node}/check", response_model=schemas.OperationView, status_code=202)
async def check_node(node: NodeName, write: WriteDep) -> Any:
    """Run the preflight checks."""

    def effect(session: Session) -> Reply:
        found = nodes.get_node(session, node)
        operation = nodes.request_check(session, found, actor=write.actor, request_id=write.request_id)
        return accepted(views.operation_view(session, operation), hint=found.id)

    return await write.answer(effect)


@router.post("/{node}/deploy", response_model=schemas.OperationView, status_code=202, responses=PLANNED)
async def deploy(
    node: NodeName, body: schemas.DeployBody, state: State, write: WriteDep, dry_run: DryRun = False
) -> Any:
    """Bring a release and an environment to the node; unchanged ones are not sent again."""
    if dry_run:

        def plan(session: Session) -> Any:
            found = nodes.get_node(session, node)
            return plans.plan_deploy(session, found, source=body.source, lock=body.lock, python=body.python)

        return to_response(Reply(200, await state.store.read(plan)))

    def effect(session: Session) -> Reply:
        found = nodes.get_node(session, node)
        operation = nodes.request_deploy(
            session,
            found,
            source=body.source,
            lock=body.lock or "bundled",
            python=body.python,
            actor=write.actor,
            request_id=write.request_id,
        )
        return accepted(views.operation_view(session, operation), hint=found.id)

    return await write.answer(effect)


@router.get("/{node}/telemetry", response_model=schemas.TelemetryView)
async def get_telemetry(
    node: NodeName,
    state: State,
    since: Annotated[
        float | None, Query(allow_inf_nan=False, description="Epoch seconds: the history from there on.")
    ] = None,
    until: Annotated[float | None, Query(allow_inf_nan=False, description="Epoch seconds.")] = None,
    points: Annotated[int, Query(ge=1, le=5000, description="At most so many points of history.")] = 500,
) -> Any:
    """Newest GPU sample with its age, or why there is none; with `since` or `until` the history too."""
    if since is not None and until is not None and since > until:
        raise HttpError(422, "since is later than until")

    def read(session: Session) -> Any:
        found = nodes.get_node(session, node)
        snapshot = telemetry.gpu_snapshot(session, found)
        if since is None and until is None:
            return snapshot
        history = telemetry.gpu_history(session, found, since=since, until=until, points=points)
        return {**snapshot, "history": history}

    return await state.store.read(read)


@router.get("/{node}/releases", response_model=schemas.Page[schemas.DeploymentView])
async def list_releases(node: NodeName, state: State, limit: Limit = 50, cursor: Cursor = None) -> Any:
    """What has been deployed, newest first."""

    def read(session: Session) -> Any:
        found = nodes.list_deployments(session, nodes.get_node(session, node))
        shown = [views.deployment_view(session, deployment) for deployment in found]
        return page_of(
            shown, key=lambda view: f"{10**12 - view['sequence']:013d}", limit=limit, cursor=cursor
        )

    return await state.store.read(read)
