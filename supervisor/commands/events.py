"""`events`: the append-only history, printed or followed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from supervisor.commands.naming import find_object
from supervisor.commands.output import Format, OutputOption, clean, emit, emit_line, second, until_interrupted
from supervisor.commands.session import connect

if TYPE_CHECKING:
    from supervisor.client import Client

Names = Mapping[str, str]
"""Actor as it is stored, and as people call it."""


def register(root: typer.Typer) -> None:
    """Add the command to the program."""
    root.command("events")(events)


def events(
    ctx: typer.Context,
    run: Annotated[str | None, typer.Argument(metavar="[RUN]", help="Only this run's.")] = None,
    is_following: Annotated[
        bool, typer.Option("-f", "--follow", help="Go on as they happen; Ctrl-C ends it (exit 0).")
    ] = False,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="How many of the newest.")] = 50,
    output: OutputOption = Format.TABLE,
) -> None:
    """What happened, who asked for it and why.

    Examples:
      dflashctl events slammed

      dflashctl events -f -o json
    """
    client = connect(ctx)
    name = find_object(client, "runs", run)["name"] if run else None
    newest = client.list_all("/v1/events", maximum=limit, run=name, order="desc", limit=min(limit, 200))
    past = newest[::-1]
    names = _token_names(client) if output is Format.TABLE else {}
    if not is_following:
        emit(past, output, table=lambda: _print_events(past, names))
        return
    with until_interrupted():
        for event in past:
            _emit_event(event, output, names)
        last_id = past[-1]["id"] if past else 0
        for kind, event in client.events(last_id=last_id, run=name):
            if kind == "event":
                _emit_event(event, output, names)


def _token_names(client: Client) -> Names:
    """Actor to `token NAME`; only an administrator may list tokens, others see the ids."""
    from supervisor.client import ApiError

    try:
        tokens = client.list_all("/v1/tokens")
    except ApiError as error:
        if error.status != 403:
            raise
        return {}
    return {f"token/{token['id']}": f"token {token['name']}" for token in tokens}


def _emit_event(event: dict[str, Any], output: Format, names: Names) -> None:
    if output is Format.TABLE:
        _print_event(event, names)
    else:
        emit_line(event)


def _print_events(events: list[dict[str, Any]], names: Names) -> None:
    for event in events:
        _print_event(event, names)


def _print_event(event: dict[str, Any], names: Names) -> None:
    at, actor = second(event["at"]), names.get(event["actor"], event["actor"])
    line = f"{at}  {event['subject']}  {event['reason']}  {event['message']}  ({actor})"
    typer.echo(clean(line).replace("\n", " "))
