"""`plan`, `drift` and `explain`: what would happen, what has changed, and why the last thing happened."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import shorten
from typing import Annotated, Any

import typer

from supervisor.commands.costs import print_costs
from supervisor.commands.ends import describe_end
from supervisor.commands.naming import NodeArgument, RunArgument, find_object, path_of
from supervisor.commands.output import (
    MISSING,
    Column,
    Format,
    Json,
    OutputOption,
    age,
    clean,
    duration,
    emit,
    print_pairs,
    print_table,
    say,
    second,
)
from supervisor.commands.session import connect

app = typer.Typer(
    help="What a request would do, with its cost; nothing is changed.\n\nExamples:\n\n"
    "  dflashctl plan restart slammed\n\n  dflashctl plan deploy ct200",
    no_args_is_help=True,
)

CHAIN = 10
"""Events that `explain` shows."""
MESSAGE_WIDTH = 200

_ON_THE_WAY = frozenset({"AttemptPlanned", "PreflightStarted", "LaunchRequested", "OperationDone"})
_WATCHED = ("TelemetryOK", "CapabilitiesOK")
"""Conditions that end and start nothing."""
_ENDS = frozenset({"AttemptFailed", "AttemptLost", "LaunchFailed"})

DRIFT_COLUMNS: list[Column] = [
    ("CLASS", lambda change: change.get("class")),
    ("WHAT", lambda change: change.get("name")),
    ("RUNNING", lambda change: change.get("old")),
    ("NEXT START", lambda change: change.get("new")),
    ("MEANS", lambda change: change.get("meaning")),
]


def register(root: typer.Typer) -> None:
    """Add the commands to the program."""
    root.add_typer(app, name="plan")
    root.command("drift")(drift)
    root.command("explain")(explain)


@app.command("start")
def plan_start(ctx: typer.Context, run: RunArgument, output: OutputOption = Format.TABLE) -> None:
    """What starting the run would do."""
    _plan_run(ctx, run, "start", output)


@app.command("stop")
def plan_stop(ctx: typer.Context, run: RunArgument, output: OutputOption = Format.TABLE) -> None:
    """What stopping the run would do, and what would be lost."""
    _plan_run(ctx, run, "stop", output)


@app.command("restart")
def plan_restart(ctx: typer.Context, run: RunArgument, output: OutputOption = Format.TABLE) -> None:
    """What a restart would cost now, and at the next checkpoint."""
    _plan_run(ctx, run, "restart", output)


@app.command("deploy")
def plan_deploy(
    ctx: typer.Context,
    node: NodeArgument,
    source: Annotated[str, typer.Option(help="bundled, none, or a trainer folder.")] = "bundled",
    lock: Annotated[str | None, typer.Option(help="bundled, or a hashed lock.")] = None,
    output: OutputOption = Format.TABLE,
) -> None:
    """What a deploy would send and build, and which runs it would restart."""
    client = connect(ctx)
    found = find_object(client, "nodes", node)
    body = {"source": source} | ({"lock": lock} if lock else {})
    plan = client.post(path_of("nodes", found["name"], "deploy"), body, dry_run="true")
    emit(plan, output, table=lambda: print_plan(plan))


def drift(ctx: typer.Context, run: RunArgument, output: OutputOption = Format.TABLE) -> None:
    """What differs between the running attempt and what the next start would use.

    Examples:
      dflashctl drift slammed

      dflashctl drift slammed -o json
    """
    client = connect(ctx)
    found = find_object(client, "runs", run)
    report = client.get(path_of("runs", found["name"], "drift"))
    emit(report, output, table=lambda: _print_drift(report))


def explain(ctx: typer.Context, run: RunArgument, output: OutputOption = Format.TABLE) -> None:
    """Why a run is in its state: the last decision, and the events that led there, newest last.

    -o yaml adds the evidence that was decided on.

    Examples:
      dflashctl explain slammed

      dflashctl explain slammed -o yaml
    """
    client = connect(ctx)
    found = find_object(client, "runs", run)
    explanation = client.get(path_of("runs", found["name"], "explain"))
    emit(explanation, output, table=lambda: _print_explanation(explanation, found.get("attempt")))


def print_plan(plan: Json) -> None:
    """Summary, steps with their limits, costs and risks; what else the plan says follows as pairs."""
    if plan.get("summary"):
        typer.echo(clean(plan["summary"]))
    refusal = plan.get("would_refuse")
    if refusal:
        typer.echo(f"would be refused now: {clean(refusal['message'])} ({refusal['reason']})")
    for position, step in enumerate(plan.get("steps") or [], start=1):
        limit = f" (at most {duration(step['limit_s'])})" if step.get("limit_s") is not None else ""
        typer.echo(f"  {position}. {clean(step['action'])}: {clean(step['detail'])}{limit}")
    if plan.get("costs"):
        typer.echo("costs:")
        print_costs(plan["costs"])
    if plan.get("risks"):
        typer.echo("risks:")
        _print_nested(plan["risks"])
    for touched in plan.get("affected_runs") or []:
        typer.echo(f"touches: {clean(touched['run'])}, attempt {touched['attempt']}; {_on_change(touched)}")
    known = ("action", "summary", "steps", "costs", "risks", "would_refuse", "affected_runs")
    rest = {key: value for key, value in plan.items() if key not in known and value not in (None, [], {})}
    print_pairs((key.replace("_", " "), _inline(key, value)) for key, value in rest.items())


def _on_change(touched: Json) -> str:
    """What the run does by itself when the deploy changed something of that class."""
    classes = ("release", "capability", "critical", "minor")
    words = [f"{kind} {touched.get(f'on_{kind}_change')}".replace("_", " ") for kind in classes]
    return f"on a change of: {', '.join(words)}"


def _plan_run(ctx: typer.Context, run: str, action: str, output: Format) -> None:
    client = connect(ctx)
    found = find_object(client, "runs", run)
    plan = client.post(path_of("runs", found["name"], action), {}, dry_run="true")
    emit(plan, output, table=lambda: print_plan(plan))


def _print_drift(report: Json) -> None:
    changes = report.get("changes") or []
    print_table(
        changes, DRIFT_COLUMNS, empty="no drift: the running attempt is what the next start would use"
    )
    shown = ("message", "class", "action", "first_seen_at", "last_restart_at", "generation")
    if report.get("is_drifted"):
        print_pairs((key, _inline(key, report.get(key))) for key in shown)


def _print_explanation(explanation: Json, attempt: Json | None) -> None:
    """The few lines that answer why, and how it came to that; the evidence itself is for `-o yaml`."""
    name, phase, hold = explanation["run"], explanation["phase"], explanation.get("hold")
    decision = explanation.get("decision") or {}
    due = explanation.get("next_start_at")
    acted = (decision.get("acted") or {}).get("explanation")
    pairs = [
        ("phase", f"{phase} (wanted: {explanation['desired']})"),
        ("decision", decision.get("explanation") or "none yet"),
        ("because", acted if acted != decision.get("explanation") else None),
        ("next start", due and second(due)),
        ("held", hold and f"{hold['message']} ({hold['reason']})"),
        ("attempt", attempt and describe_end(attempt).removeprefix("attempt ")),
        ("to do", _advice(name, phase, attempt or {})),
    ]
    print_pairs((key, value) for key, value in pairs if value)
    _print_chain(led_here(explanation.get("events") or []))
    say(f"all inputs of the decision: dflashctl explain {name} -o yaml")


def led_here(events: Sequence[Json]) -> list[Json]:
    """Choose the events that answer how a run came to its state, oldest first.

    Args:
        events: of the run, newest first. Steps on the way to a launch are left out, and so is the failed
            request where the end of its attempt says the same.
    """
    ended = {event.get("attempt_id") for event in events if event["reason"] in _ENDS}
    chain = [
        event
        for event in events
        if event["reason"] not in _ON_THE_WAY
        and not str(event["reason"]).startswith(_WATCHED)
        and not (event["reason"] == "OperationFailed" and event.get("attempt_id") in ended)
    ]
    return chain[:CHAIN][::-1]


def _print_chain(events: Sequence[Json]) -> None:
    if not events:
        return
    typer.echo("\nled here (newest last)")
    width = max(len(event["reason"]) for event in events)
    for event in events:
        text = " ".join(clean(event.get("message")).split())
        when = f"{second(event['at'])}  {age(event['at'])} ago"
        typer.echo(
            f"  {when:34}  {clean(event['reason']):{width}}  {shorten(text, MESSAGE_WIDTH, placeholder=' …')}"
        )


def _advice(name: str, phase: str, attempt: Json) -> str:
    """The next command for a run in this phase."""
    if phase in ("held", "failed") and attempt.get("state") == "launch_failed":
        return f"remove the cause, then: dflashctl start {name}"
    after_failure = f"read why: dflashctl logs {name} --tail 50; then: dflashctl start {name}"
    known = {
        "pending": "nothing; the supervisor starts it as soon as it can",
        "backoff": f"nothing, it starts again by itself; or now: dflashctl start {name}",
        "held": after_failure,
        "failed": after_failure,
        "stopped": f"start it: dflashctl start {name}",
        "succeeded": "nothing; it has reached its end",
    }
    return known.get(phase, f"nothing; see its log: dflashctl logs {name} -f")


def _print_nested(value: Any, depth: int = 1) -> None:
    indent = "  " * depth
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if not isinstance(value, dict | list):
        typer.echo(f"{indent}{clean(value)}")
    for key, item in items:
        label = "- " if isinstance(value, list) else f"{clean(key)}: "
        if isinstance(item, dict | list) and item:
            typer.echo(f"{indent}{label.rstrip()}")
            _print_nested(item, depth + 1)
        else:
            typer.echo(f"{indent}{label}{_inline(str(key), item)}")


def _inline(key: str, value: Any) -> str:
    if value in (None, [], {}):
        return MISSING
    if key.endswith("_s") and isinstance(value, int | float) and not isinstance(value, bool):
        return duration(value)
    if isinstance(value, dict):
        return ", ".join(f"{name}={_inline(name, item)}" for name, item in value.items())
    if isinstance(value, list):
        return ", ".join(_inline("", item) for item in value)
    return clean(value)
