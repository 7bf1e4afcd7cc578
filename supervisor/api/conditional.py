"""Strong entity tags from an object's version, and the precondition of PATCH and DELETE."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Header

from supervisor.api.errors import HttpError

IfMatch = Annotated[str | None, Header(alias="If-Match", description="ETag of the version to change.")]


def etag_of(version: int) -> str:
    """The tag of a version."""
    return f'"{version}"'


def check_if_match(if_match: str | None, version: int) -> None:
    """Refuse a change that does not name the present version.

    Raises:
        HttpError: 428 without the header, 412 when it names another version.
    """
    if if_match is None:
        raise HttpError(
            428, "If-Match is missing", hint="GET the object first and send its ETag back as If-Match"
        )
    given = [tag.strip() for tag in if_match.split(",")]
    if "*" not in given and etag_of(version) not in given:
        raise HttpError(
            412,
            f"the object has changed: it is version {version} now, If-Match says {if_match[:100]}",
            hint="GET it again, look at what changed, repeat with the new ETag",
            data_version=version,
        )


def tagged(view: dict[str, Any]) -> dict[str, str]:
    """Response headers for a view that has a version."""
    return {"ETag": etag_of(view["version"])}
