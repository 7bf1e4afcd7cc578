"""Beside `/v1`: health, readiness, Prometheus, the OpenAPI document and a page that lists it."""

from __future__ import annotations

from html import escape
from importlib import metadata
from typing import Any

from fastapi import APIRouter, Request, Response
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from sqlmodel import Session
from starlette.concurrency import run_in_threadpool
from starlette.responses import HTMLResponse, PlainTextResponse

from supervisor.api import schemas
from supervisor.api.deps import Api, State
from supervisor.api.jsonsafe import SafeJSONResponse
from supervisor.api.prometheus import SnapshotCollector, snapshot

open_router = APIRouter(tags=["health"])
router = APIRouter(tags=["health"])


@open_router.get("/healthz", response_class=PlainTextResponse)
async def healthz() -> str:
    """The process answers; says nothing else, and needs no token."""
    return "ok"


@router.get("/readyz", response_model=schemas.ReadyView)
async def readyz(state: State, response: Response) -> Any:
    """Whether the database takes writes; 503 when it does not."""
    is_ready = await run_in_threadpool(state.store.is_writable)
    response.status_code = 200 if is_ready else 503
    return {"status": "ready" if is_ready else "not ready", "version": version()}


@router.get("/metrics", response_class=PlainTextResponse)
async def prometheus(state: State, api: Api) -> Response:
    """Prometheus text: runs, GPUs, nodes, operations, streams."""

    def read(session: Session) -> SnapshotCollector:
        return snapshot(session, state.clock, open_streams=api.streams.count, version=version())

    registry = CollectorRegistry()
    registry.register(await state.store.read(read))
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


@router.get("/openapi.json", include_in_schema=False)
async def openapi(request: Request) -> Response:
    """The OpenAPI document."""
    return SafeJSONResponse(request.app.openapi())


@router.get("/docs", include_in_schema=False)
async def docs(request: Request) -> HTMLResponse:
    """All routes on one page, without scripts and without anything from elsewhere."""
    rows = [
        f"<tr><td>{method.upper()}</td><td><code>{escape(path)}</code></td>"
        f"<td>{escape(operation.get('description') or operation.get('summary', ''))}</td></tr>"
        for path, operations in request.app.openapi()["paths"].items()
        for method, operation in operations.items()
    ]
    return HTMLResponse(
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>REST interface</title></head>'
        '<body><h1>REST interface</h1><p>The full description: <a href="/openapi.json">/openapi.json</a></p>'
        f"<table><thead><tr><th>Method</th><th>Path</th><th>Does</th></tr></thead><tbody>{''.join(rows)}"
        "</tbody></table></body></html>"
    )


def version() -> str:
    """Version of the installed distribution."""
    try:
        return metadata.version("dflash-supervisor")
    except metadata.PackageNotFoundError:
        return "unknown"
