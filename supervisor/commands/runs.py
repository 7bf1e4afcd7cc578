"""`run`, `start`, `stop`, `restart`, `ps`, `show` and `rm`: runs from file to end."""

from __future__ import annotations

import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from supervisor.commands.ends import describe_end, exit_of, reason_of, what_follows
from supervisor.commands.naming import RunArgument, find_object, path_of
from supervisor.commands.output import (
    Column,
    Format,
    Json,
    OutputOption,
    YesOption,
    age,
    clean,
    clear_screen,
    confirm,
    emit,
    emit_line,
    number,
    print_pairs,
    print_table,
    say,
    until_interrupted,
)
from supervisor.commands.plans import print_plan
from supervisor.commands.session import connect
from supervisor.commands.waiting import (
    DryRunOption,
    NoWaitOption,
    TimeoutOption,
    finish_operation,
    print_operation,
    wait_for_success,
)
from supervisor.domain.errors import ConfigError, SupervisorError

if TYPE_CHECKING:
    from supervisor.client import Client

WATCH_S = 2.0
POLL_S = 0.5


class WaitFor(StrEnum):
    """How far `start` waits."""

    STARTED = "started"
    READY = "ready"
    DONE = "done"


class When(StrEnum):
    """When a restart takes place."""

    NOW = "now"
    NEXT_CHECKPOINT = "next_checkpoint"


class AttemptEndedError(SupervisorError):
    """The attempt ended before it got as far as the wait asked for."""

    reason = "AttemptEnded"


WaitOption = Annotated[
    WaitFor,
    typer.Option("--wait", help="Wait until the process runs, training has begun, or the run has ended."),
]
ResumeOption = Annotated[
    str | None,
    typer.Option(metavar="latest|scratch|PATH", help="Where training begins; default: the run file's."),
]

COLUMNS: list[Column] = [
    ("NAME", lambda run: run["name"]),
    ("NODE", lambda run: run["node"]),
    ("PHASE", lambda run: run["phase"]),
    ("ATTEMPT", lambda run: _attempt(run).get("number")),
    ("STEP", lambda run: _progress(run)),
    ("LOSS", lambda run: _train(run, "loss", 3)),
    ("TOK/S", lambda run: _train(run, "tok_s", 0)),
    ("SINCE", lambda run: age(_attempt(run).get("started_at"))),
    ("REASON", lambda run: _reason(run)),
]
ATTEMPT_COLUMNS: list[Column] = [
    ("ATTEMPT", lambda attempt: attempt["number"]),
    ("STATE", lambda attempt: attempt["state"]),
    ("REASON", lambda attempt: reason_of(attempt)),
    ("EXIT", lambda attempt: _exit(attempt)),
    ("STARTED", lambda attempt: attempt.get("started_at")),
    ("ENDED", lambda attempt: attempt.get("ended_at")),
    ("LOG", lambda attempt: attempt.get("log_path")),
]


def register(root: typer.Typer) -> None:
    """Add the commands to the program."""
    for function in (run, start, stop, restart, ps, show, rm):
        root.command(function.__name__)(function)


def run(
    ctx: typer.Context,
    file: Annotated[
        Path, typer.Argument(metavar="FILE.toml", help="Run file; - reads stdin.", allow_dash=True)
    ],
    is_no_start: Annotated[bool, typer.Option("--no-start", help="Only store it.")] = False,
    wait: WaitOption = WaitFor.STARTED,
    is_no_wait: NoWaitOption = False,
    timeout: TimeoutOption = None,
    output: OutputOption = Format.TABLE,
) -> None:
    """Store a run file as a new generation of its run, and start it.

    Examples:
      dflashctl run slammed.toml

      dflashctl run slammed.toml --no-start
    """
    spec = _read_run_file(file)
    client = connect(ctx)
    before = _generation_of(client, spec["name"])
    stored = client.post("/v1/runs", spec)
    say(f"run {stored['name']}: {_stored_text(stored, before)}")
    if is_no_start:
        emit(stored, output, table=lambda: typer.echo(stored["name"]))
        return
    _start(client, stored["name"], {}, wait=wait, is_no_wait=is_no_wait, timeout=timeout, output=output)


def start(
    ctx: typer.Context,
    run: RunArgument,
    resume: ResumeOption = None,
    wait: WaitOption = WaitFor.STARTED,
    is_dry_run: DryRunOption = False,
    is_no_wait: NoWaitOption = False,
    timeout: TimeoutOption = None,
    output: OutputOption = Format.TABLE,
) -> None:
    """Start a run and wait until its process runs and has shown a sign of life.

    Examples:
      dflashctl start slammed

      dflashctl start slammed --resume scratch --wait ready
    """
    client = connect(ctx)
    found = find_object(client, "runs", run)
    body = {"resume": resume} if resume else {}
    if is_dry_run:
        _show_plan(client, found["name"], "start", body, output)
        return
    _start(client, found["name"], body, wait=wait, is_no_wait=is_no_wait, timeout=timeout, output=output)


def stop(
    ctx: typer.Context,
    run: RunArgument,
    is_unsaved: Annotated[bool, typer.Option("--no-save", help="Do not wait for a checkpoint.")] = False,
    reason: Annotated[str, typer.Option(help="Kept in the history.")] = "",
    is_dry_run: DryRunOption = False,
    is_no_wait: NoWaitOption = False,
    timeout: TimeoutOption = None,
    output: OutputOption = Format.TABLE,
) -> None:
    """Stop a run gracefully: checkpoint, then TERM, then KILL, then its absence is verified.

    Examples:
      dflashctl stop slammed

      dflashctl stop slammed --no-save --reason "wrong data"
    """
    client = connect(ctx)
    found = find_object(client, "runs", run)
    body = {"save": not is_unsaved, "reason": reason}
    if is_dry_run:
        _show_plan(client, found["name"], "stop", body, output)
        return
    operation = client.post(path_of("runs", found["name"], "stop"), body)
    finish_operation(
        client, operation, fmt=output, is_waiting=not is_no_wait, timeout_s=timeout, subject=found["name"]
    )


def restart(
    ctx: typer.Context,
    run: RunArgument,
    when: Annotated[When, typer.Option(help="Now, or when the next checkpoint has been written.")] = When.NOW,
    resume: ResumeOption = None,
    is_unsaved: Annotated[bool, typer.Option("--no-save", help="Do not wait for a checkpoint.")] = False,
    reason: Annotated[str, typer.Option(help="Kept in the history.")] = "",
    is_dry_run: DryRunOption = False,
    is_no_wait: NoWaitOption = False,
    timeout: TimeoutOption = None,
    output: OutputOption = Format.TABLE,
) -> None:
    """Stop, verify absence, start again with the next log number.

    Examples:
      dflashctl restart slammed

      dflashctl restart slammed --when next_checkpoint --no-wait
    """
    client = connect(ctx)
    found = find_object(client, "runs", run)
    body: dict[str, Any] = {"when": when.value, "save": not is_unsaved, "reason": reason}
    if resume:
        body["resume"] = resume
    if is_dry_run:
        _show_plan(client, found["name"], "restart", body, output)
        return
    operation = client.post(path_of("runs", found["name"], "restart"), body)
    finish_operation(
        client, operation, fmt=output, is_waiting=not is_no_wait, timeout_s=timeout, subject=found["name"]
    )


def ps(
    ctx: typer.Context,
    is_watching: Annotated[
        bool, typer.Option("-w", "--watch", help="Print again every 2 s; Ctrl-C ends it (exit 0).")
    ] = False,
    output: OutputOption = Format.TABLE,
) -> None:
    """List the runs with phase, step, loss and throughput.

    Examples:
      dflashctl ps

      dflashctl ps -o json
    """
    client = connect(ctx)
    with until_interrupted():
        while True:
            _print_runs(client.list_all("/v1/runs"), output, is_watching=is_watching)
            if not is_watching:
                return
            time.sleep(WATCH_S)


def _print_runs(found: list[dict[str, Any]], output: Format, *, is_watching: bool) -> None:
    empty = "no runs yet; store one: dflashctl run FILE.toml"
    if is_watching and output is Format.JSON:
        emit_line(found)
        return
    if is_watching and output is Format.TABLE:
        clear_screen()
    emit(found, output, table=lambda: print_table(found, COLUMNS, empty=empty))


def show(ctx: typer.Context, run: RunArgument, output: OutputOption = Format.TABLE) -> None:
    """Show one run: phase, conditions, progress, attempts.

    Examples:
      dflashctl show slammed

      dflashctl show slammed -o yaml
    """
    client = connect(ctx)
    found = find_object(client, "runs", run)
    if output is not Format.TABLE:
        emit(found, output, table=lambda: None)
        return
    attempts = client.list_all(path_of("runs", found["name"], "attempts"), maximum=20)
    _print_run(found, attempts)


def rm(ctx: typer.Context, run: RunArgument, is_yes: YesOption = False) -> None:
    """Delete a run and its history; refused while it is live. Logs and checkpoints on the node stay.

    Examples:
      dflashctl rm slammed

      dflashctl rm slammed --yes
    """
    client = connect(ctx)
    found = find_object(client, "runs", run)
    confirm(f"Delete run {found['name']} and its history?", is_yes=is_yes)
    client.delete(path_of("runs", found["name"]))
    say(f"run {found['name']} deleted")


def _read_run_file(file: Path) -> dict[str, Any]:
    from supervisor.domain.spec import parse_run_file, render_spec

    try:
        text = typer.get_text_stream("stdin").read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        cause = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ConfigError(f"the run file cannot be read: {file}: {cause}", hint="check the path") from error
    base_dir = Path.cwd() if str(file) == "-" else file.resolve().parent
    return render_spec(parse_run_file(text, str(file), base_dir=str(base_dir)))


def _generation_of(client: Client, name: str) -> int | None:
    from supervisor.client import ApiError

    try:
        return int(client.get(path_of("runs", name))["generation"])
    except ApiError as error:
        if error.status != 404:
            raise
        return None


def _stored_text(stored: Json, before: int | None) -> str:
    generation = stored["generation"]
    if generation == before:
        return f"generation {generation} unchanged"
    is_live = _attempt(stored).get("is_live")
    return f"generation {generation} stored" + ("; used at the next start" if is_live else "")


def _start(
    client: Client,
    name: str,
    body: dict[str, Any],
    *,
    wait: WaitFor,
    is_no_wait: bool,
    timeout: float | None,
    output: Format,
) -> None:
    begun = time.monotonic()
    operation = client.post(path_of("runs", name, "start"), body)
    if not is_no_wait:
        operation = wait_for_success(client, operation, timeout_s=timeout)
        _say_warnings(_require_started(client, name))
    if is_no_wait or wait is WaitFor.STARTED:
        print_operation(operation, output, subject=name)
        return
    left = None if timeout is None else max(0.0, timeout - (time.monotonic() - begun))
    found = _wait_for_phase(client, name, wait, left)
    emit(found, output, table=lambda: typer.echo(f"{name}: {wait.value}"))


def _say_warnings(attempt: Json) -> None:
    """What the checks before the launch found wanting: it runs all the same, but not without a word."""
    for item in attempt.get("preflight") or ():
        if item["status"] == "warn" and item.get("message"):
            remedy = f" (remedy: {clean(item['remedy'])})" if item.get("remedy") else ""
            say(f"warning: {clean(item['message'])}{remedy}")


def _require_started(client: Client, name: str) -> Json:
    """Return the newest attempt; a start that is done although it is already over has started nothing."""
    attempt = _attempt(client.get(path_of("runs", name)))
    if attempt.get("state") != "launch_failed":
        return attempt
    cause = attempt.get("message") or attempt.get("reason") or attempt["state"]
    raise AttemptEndedError(
        f"{name}: attempt {attempt['number']} was not launched: {clean(cause)}",
        hint=f"see: dflashctl explain {name}; dflashctl logs {name}",
    )


def _wait_for_phase(client: Client, name: str, wait: WaitFor, timeout_s: float | None) -> Json:
    from supervisor.client import WaitTimeoutError

    end = None if timeout_s is None else time.monotonic() + timeout_s
    shown = ""
    while True:
        found: Json = client.get(path_of("runs", name))
        phase = found["phase"]
        if phase != shown:
            say(f"  {phase}{_why_backoff(found) if phase == 'backoff' else ''}")
            shown = phase
        state = _attempt(found).get("state")
        if phase == "succeeded" or (wait is WaitFor.READY and state == "ready"):
            return found
        if phase in ("failed", "held", "stopped"):
            raise AttemptEndedError(
                f"{name} is {phase} before it was {wait.value}: {clean(_reason(found))}",
                hint=f"see: dflashctl explain {name}; dflashctl logs {name}",
            )
        if end is not None and time.monotonic() >= end:
            raise WaitTimeoutError(f"{name} is still {phase} after {timeout_s:g} s", hint="it goes on")
        time.sleep(POLL_S)


def _why_backoff(run: Json) -> str:
    """What ended, and what the supervisor does about it by itself."""
    return f": {describe_end(_attempt(run))}; {what_follows(run) or 'what follows is not decided yet'}"


def _show_plan(client: Client, name: str, action: str, body: dict[str, Any], output: Format) -> None:
    plan = client.post(path_of("runs", name, action), body, dry_run="true")
    emit(plan, output, table=lambda: print_plan(plan))


def _attempt(run: Json) -> Json:
    return run.get("attempt") or {}


def _progress(run: Json) -> str | None:
    status = run.get("status") or {}
    step, total = status.get("step"), status.get("total_steps")
    if step is None:
        step = (run.get("metrics") or {}).get("step")
    if step is None:
        return None
    return f"{step}/{total}" if total else str(step)


def _train(run: Json, name: str, digits: int) -> str:
    return number((run.get("train") or {}).get(name), digits)


def _reason(run: Json) -> str | None:
    hold = run.get("hold") or {}
    return hold.get("reason") or reason_of(_attempt(run))


def _exit(attempt: Json) -> str | None:
    shown = exit_of(attempt)
    return shown and shown.removeprefix("exit code ")


def _print_run(run: Json, attempts: list[dict[str, Any]]) -> None:
    attempt = _attempt(run)
    print_pairs(
        [
            ("name", run["name"]),
            ("id", run["id"]),
            ("node", run["node"]),
            ("phase", run["phase"]),
            ("reason", _reason(run)),
            ("desired", f"{run['desired']} ({run.get('desired_reason') or 'as stored'})"),
            ("generation", run["generation"]),
            ("attempt", attempt.get("number")),
            ("step", _progress(run)),
            ("loss", _train(run, "loss", 4)),
            ("tokens/s", _train(run, "tok_s", 0)),
            ("log", attempt.get("log_path")),
            ("next start", run.get("next_start_at")),
        ]
    )
    conditions = run.get("conditions") or []
    if conditions:
        typer.echo("\nconditions")
    for condition in conditions:
        text = f"  {condition['type']:20} {condition['status']:8} {clean(condition.get('reason'))}"
        message = condition.get("message")
        typer.echo(f"{text}  {clean(message)}" if message and condition["status"] != "true" else text)
    typer.echo("\nattempts")
    print_table(attempts, ATTEMPT_COLUMNS, empty="none yet; start it: dflashctl start " + run["name"])
