"""Names as people type them: a name, an id, or the unambiguous beginning of either.

Used by every command that takes a RUN or a NODE, and by shell completion. The daemon itself knows names and
ids only; beginnings are resolved here, so that scripts that talk REST are never surprised by a near match.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from supervisor.commands.output import UsageFaultError
from supervisor.commands.session import Session
from supervisor.domain.errors import NotFoundError, SupervisorError
from supervisor.domain.near import unknown_name_hint

if TYPE_CHECKING:
    from supervisor.client import Client

Json = dict[str, Any]
COMPLETION_LIMIT_S = 0.5


def find_object(client: Client, kind: str, text: str) -> Json:
    """The run or node meant by `text`; `kind` is the collection, `runs` or `nodes`.

    Raises:
        NotFoundError: nothing begins like that (exit 3), with the nearest name as a hint.
        UsageFaultError: more than one does (exit 2).
    """
    from supervisor.client import ApiError

    try:
        found: Json = client.get(path_of(kind, text))
    except ApiError as error:
        if error.status not in (404, 422):
            raise
    else:
        return found
    items = client.list_all(f"/v1/{kind}")
    matches = [item for item in items if item["name"].startswith(text) or item["id"].startswith(text)]
    if len(matches) == 1 and text:
        match: Json = client.get(path_of(kind, matches[0]["name"]))
        return match
    if matches and text:
        names = ", ".join(sorted(item["name"] for item in matches)[:8])
        raise UsageFaultError(f"{text!r} is the beginning of several {kind}: {names}", hint="type more of it")
    raise _not_found(kind, text, [item["name"] for item in items])


def _not_found(kind: str, text: str, names: list[str]) -> NotFoundError:
    singular = kind.removesuffix("s")
    error = NotFoundError(
        f"no such {singular}: {text!r}",
        hint=unknown_name_hint(singular, text, names),
        kind=singular,
        name=text,
    )
    return error


def path_of(kind: str, name: str, *rest: str) -> str:
    """URL path of an object, with every part quoted."""
    return "/".join(["/v1", kind, *(quote(part, safe="") for part in (name, *rest))])


def _complete(ctx: typer.Context, kind: str, incomplete: str) -> list[str]:
    """Names that begin like the word being typed; nothing at all when the daemon is slow or away."""
    import httpx2

    root: Any = ctx.find_root()
    url = root.params.get("url") or Session().url
    session = Session(url=url, token_file=root.params.get("token_file"))
    with contextlib.suppress(SupervisorError, httpx2.HTTPError, ValueError, KeyError):
        headers = {"Authorization": f"Bearer {session.read_token()}"}
        answer = httpx2.get(f"{session.url}/v1/{kind}", headers=headers, timeout=COMPLETION_LIMIT_S)
        return [item["name"] for item in answer.json()["items"] if item["name"].startswith(incomplete)]
    return []


def _complete_run(ctx: typer.Context, incomplete: str) -> list[str]:
    return _complete(ctx, "runs", incomplete)


def _complete_node(ctx: typer.Context, incomplete: str) -> list[str]:
    return _complete(ctx, "nodes", incomplete)


RunArgument = Annotated[
    str,
    typer.Argument(metavar="RUN", help="Name, id or unambiguous beginning.", autocompletion=_complete_run),
]
NodeArgument = Annotated[
    str,
    typer.Argument(metavar="NODE", help="Name, id or unambiguous beginning.", autocompletion=_complete_node),
]
