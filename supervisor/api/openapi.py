"""The OpenAPI document: the routes' own, plus the run file's schema and the error body of every operation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi.openapi.utils import get_openapi

from supervisor.api.schemas import Problem
from supervisor.domain.spec import RunSpec

if TYPE_CHECKING:
    from fastapi import FastAPI

Json = dict[str, Any]

TITLE = "dflash-supervisor"
SUMMARY = "Supervises DFlash drafter trainings on nodes."
REF = "#/components/schemas/{model}"


def install_openapi(app: FastAPI) -> None:
    """Replace the application's document; built at the first request, then kept."""

    def document() -> Json:
        if app.openapi_schema is None:
            app.openapi_schema = build_document(app)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def build_document(app: FastAPI) -> Json:
    """The document for the routes that the application has."""
    schema = get_openapi(title=TITLE, version=app.version, summary=SUMMARY, routes=app.routes)
    components: Json = schema["components"]["schemas"]
    for model in (RunSpec, Problem):
        described = model.model_json_schema(ref_template=REF, mode="validation")
        components.update(described.pop("$defs", {}))
        components[model.__name__] = described
    for name in ("HTTPValidationError", "ValidationError"):
        components.pop(name, None)
    for path in schema["paths"].values():
        for operation in path.values():
            _add_problem(operation)
    return schema


def _add_problem(operation: Json) -> None:
    responses = operation["responses"]
    responses.pop("422", None)
    reference = {"schema": {"$ref": REF.format(model="Problem")}}
    responses["default"] = {
        "description": "What went wrong, and what to do.",
        "content": {"application/problem+json": reference},
    }
