"""The HTTP interface: routes, errors, access, streams. `install` puts all of it on an application.

It speaks to the rest through `app.state.supervisor` (see `deps.SupervisorState`) and calls services only;
no route touches a transport's process, a loop or a file of a node.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import APIRouter, Depends
from starlette.middleware.gzip import GZipMiddleware

from supervisor.api.access import ApiState, authenticate, authorize, begin_shutdown
from supervisor.api.errors import HttpError, install_error_handlers
from supervisor.api.guard import Guard, Rules
from supervisor.api.jsonsafe import SafeJSONResponse
from supervisor.api.openapi import install_openapi
from supervisor.api.routes import access, attempts, events, nodes, operations, root, runs
from supervisor.api.webui import install_page

if TYPE_CHECKING:
    from fastapi import FastAPI

__all__ = ["begin_shutdown", "install"]

GZIP_FROM_BYTES = 1024
GZIP_LEVEL = 5
BUILT_IN_PATHS = frozenset({"/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json"})


def install(app: FastAPI) -> None:
    """Put everything on an application; `app.state.supervisor` must be filled before it serves."""
    app.state.api = ApiState(monotonic=lambda: app.state.supervisor.clock.monotonic())
    # The framework's own pages load scripts from elsewhere and ask for no token.
    app.router.routes[:] = [
        route for route in app.router.routes if getattr(route, "path", None) not in BUILT_IN_PATHS
    ]
    install_error_handlers(app)
    app.add_middleware(GZipMiddleware, minimum_size=GZIP_FROM_BYTES, compresslevel=GZIP_LEVEL)
    app.add_middleware(Guard, rules=lambda: _rules(app))
    app.include_router(_versioned(), default_response_class=SafeJSONResponse)
    app.include_router(root.open_router)
    app.include_router(root.router, dependencies=[Depends(authorize)])
    install_openapi(app)
    install_page(app)


def _versioned() -> APIRouter:
    v1 = APIRouter(prefix="/v1")
    v1.include_router(access.open_router)
    v1.include_router(access.own_router, dependencies=[Depends(authenticate)])
    for module in (nodes, runs, attempts, operations, events, access):
        v1.include_router(module.router, dependencies=[Depends(authorize)])

    @v1.api_route(
        "/{path:path}",
        methods=["GET", "POST", "PUT", "PATCH", "DELETE"],
        include_in_schema=False,
        dependencies=[Depends(authenticate)],
    )
    async def no_such_route(path: str) -> None:
        # Without this the page's fallback would answer an unknown route with HTML.
        raise HttpError(404, f"no such route: /v1/{path[:200]}", hint="see /openapi.json for the routes")

    return v1


def _rules(app: FastAPI) -> Rules:
    settings = app.state.supervisor.settings
    return Rules.of((settings.host, *settings.allowed_hosts), max_body_bytes=settings.max_body_bytes)
