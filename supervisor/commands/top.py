"""`top`: runs, queues and GPUs at a glance, once or until `q` or Ctrl-C."""

from __future__ import annotations

import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from supervisor.commands.naming import find_object, path_of
from supervisor.commands.output import (
    MISSING,
    Column,
    Format,
    Json,
    OutputOption,
    clean,
    clear_screen,
    duration,
    emit,
    emit_line,
    gib,
    number,
    print_table,
    say,
    until_interrupted,
)
from supervisor.commands.session import connect
from supervisor.domain.errors import NotFoundError

if TYPE_CHECKING:
    from supervisor.client import Client

GPU_COLUMNS: list[Column] = [
    ("NODE", lambda gpu: gpu["node"]),
    ("GPU", lambda gpu: gpu.get("index")),
    ("NAME", lambda gpu: gpu.get("name")),
    ("UTIL", lambda gpu: _percent(gpu.get("util_ratio"))),
    ("MEMORY", lambda gpu: f"{gib(gpu.get('mem_used_bytes'))} / {gib(gpu.get('mem_total_bytes'))}"),
    ("POWER", lambda gpu: _unit(gpu.get("power_w"), "W")),
    ("TEMP", lambda gpu: _unit(gpu.get("temp_c"), "°C")),
    ("AGE", lambda gpu: duration(gpu.get("age_s"))),
]
RUN_COLUMNS: list[Column] = [
    ("RUN", lambda run: run["name"]),
    ("NODE", lambda run: run["node"]),
    ("PHASE", lambda run: run["phase"]),
    ("STEP", lambda run: _step(run)),
    ("LOSS", lambda run: number(_metric(run, "train", "loss"), 4)),
    ("TOK/S", lambda run: number(_metric(run, "train", "tok_s"), 0)),
    ("EAL", lambda run: number(_metric(run, "train", "eal"))),
    ("HS QUEUE", lambda run: _queue(run)),
    ("BUCKETS", lambda run: _buckets(run)),
]


def register(root: typer.Typer) -> None:
    """Add the command to the program."""
    root.command("top")(top)


def top(
    ctx: typer.Context,
    name: Annotated[str | None, typer.Argument(metavar="[RUN|NODE]", help="Only this run or node.")] = None,
    is_once: Annotated[bool, typer.Option("--once", help="Print once and end.")] = False,
    interval: Annotated[float, typer.Option(min=0.5, help="Seconds between two pictures.")] = 2.0,
    output: OutputOption = Format.TABLE,
) -> None:
    """Show runs, hidden-state queues and GPUs; `q` or Ctrl-C ends it (exit 0).

    Examples:
      dflashctl top --once

      dflashctl top slammed
    """
    client = connect(ctx)
    is_live = not is_once and sys.stdout.isatty() and sys.stdin.isatty()
    if is_once or (not is_live and output is not Format.JSON):
        picture = _snapshot(client, name)
        emit(picture, output, table=lambda: _print(picture))
        return
    with _keys() if is_live else until_interrupted():
        while True:
            picture = _snapshot(client, name)
            if output is Format.TABLE:
                clear_screen()
                _print(picture)
            else:
                emit_line(picture)
            if _is_quit(interval, is_live=is_live):
                return


def _snapshot(client: Client, name: str | None) -> dict[str, Any]:
    if name is None:
        runs, nodes = client.list_all("/v1/runs"), client.list_all("/v1/nodes")
    else:
        runs, nodes = _named(client, name)
    telemetry = [
        {"node": node["name"], **client.get(path_of("nodes", node["name"], "telemetry"))} for node in nodes
    ]
    return {"runs": runs, "nodes": telemetry}


def _named(client: Client, name: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    try:
        run = find_object(client, "runs", name)
    except NotFoundError:
        try:
            node = find_object(client, "nodes", name)
        except NotFoundError:
            raise NotFoundError(
                f"no such run or node: {name!r}",
                hint="see: dflashctl ps; dflashctl node ls",
                kind="run or node",
                name=name,
            ) from None
        return [run for run in client.list_all("/v1/runs") if run["node"] == node["name"]], [dict(node)]
    return [dict(run)], [client.get(path_of("nodes", run["node"]))]


def _print(picture: Json) -> None:
    print_table(picture["runs"], RUN_COLUMNS, empty="no runs; store one: dflashctl run FILE.toml")
    if not picture["nodes"]:
        say("no nodes; add one: dflashctl node add local --transport local")
        return
    typer.echo("")
    gpus = [
        {"node": node["node"], "age_s": node.get("age_s"), **gpu}
        for node in picture["nodes"]
        for gpu in node.get("gpus") or []
    ]
    if gpus:
        print_table(gpus, GPU_COLUMNS, empty="")
    for node in picture["nodes"]:
        if not node.get("gpus"):
            why = " ".join(clean(node.get(key)) for key in ("reason", "message") if node.get(key))
            typer.echo(f"{node['node']}: GPU telemetry unavailable: {why or 'no sample yet'}")


def _step(run: Json) -> int | None:
    for record in (run.get("status"), run.get("metrics")):
        step: int | None = (record or {}).get("step")
        if step is not None:
            return step
    return None


def _metric(run: Json, group: str, name: str) -> float | None:
    value = (run.get(group) or {}).get(name)
    return value if isinstance(value, int | float) else None


def _queue(run: Json) -> str:
    depth = _metric(run, "queue", "hs")
    if depth is None:
        return MISSING
    low, high = (number(_metric(run, "queue", name), 0) for name in ("min_ready", "max_depth"))
    return f"{depth:.0f} ({low}–{high})"


def _buckets(run: Json) -> str:
    buckets = (run.get("queue") or {}).get("buckets") or []
    return "[" + ",".join(str(bucket.get("depth")) for bucket in buckets) + "]" if buckets else MISSING


def _percent(ratio: float | None) -> str:
    return MISSING if ratio is None else f"{100 * ratio:.0f} %"


def _unit(value: float | None, unit: str) -> str:
    return MISSING if value is None else f"{value:.0f} {unit}"


@contextmanager
def _keys() -> Iterator[None]:
    """Single keys without Enter, for as long as the picture is live."""
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        with until_interrupted():
            yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _is_quit(interval_s: float, *, is_live: bool) -> bool:
    if not is_live:
        time.sleep(interval_s)
        return False
    ready, _, _ = select.select([sys.stdin], [], [], interval_s)
    return bool(ready) and sys.stdin.read(1) in ("q", "Q")
