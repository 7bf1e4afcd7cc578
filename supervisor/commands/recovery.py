"""`rollback` and `declare-lost`: the ways out of a bad pair, and of an attempt that nobody can ask about.

Both act through the daemon and wait for its operation. Declaring lost is destructive and asks first: the
supervisor gives the attempt up without knowing whether its process still runs.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from supervisor.commands.naming import RunArgument, find_object, path_of
from supervisor.commands.output import Format, OutputOption, YesOption, confirm, emit
from supervisor.commands.plans import print_plan
from supervisor.commands.runs import When
from supervisor.commands.session import connect
from supervisor.commands.waiting import DryRunOption, NoWaitOption, TimeoutOption, finish_operation


def register(root: typer.Typer) -> None:
    """Add the commands to the program."""
    root.command("rollback")(rollback)
    root.command("declare-lost")(declare_lost)


def rollback(
    ctx: typer.Context,
    run: RunArgument,
    when: Annotated[When, typer.Option(help="Now, or when the next checkpoint has been written.")] = When.NOW,
    is_dry_run: DryRunOption = False,
    is_no_wait: NoWaitOption = False,
    timeout: TimeoutOption = None,
    output: OutputOption = Format.TABLE,
) -> None:
    """Restart a run on the release and environment that it used before, and keep it there.

    Examples:
      dflashctl rollback slammed --dry-run

      dflashctl rollback slammed --when next_checkpoint
    """
    body: dict[str, Any] = {"when": when.value}
    client = connect(ctx)
    found = find_object(client, "runs", run)
    path = path_of("runs", found["name"], "rollback")
    if is_dry_run:
        plan = client.post(path, body, dry_run="true")
        emit(plan, output, table=lambda: print_plan(plan))
        return
    operation = client.post(path, body)
    finish_operation(
        client, operation, fmt=output, is_waiting=not is_no_wait, timeout_s=timeout, subject=found["name"]
    )


def declare_lost(
    ctx: typer.Context,
    run: RunArgument,
    reason: Annotated[str, typer.Option(help="Kept in the history.")] = "",
    is_forced: Annotated[
        bool,
        typer.Option("--force", help="Also for a quarantined attempt; a start then waits for no node."),
    ] = False,
    is_yes: YesOption = False,
    is_dry_run: DryRunOption = False,
    is_no_wait: NoWaitOption = False,
    timeout: TimeoutOption = None,
    output: OutputOption = Format.TABLE,
) -> None:
    """End a run's attempt as lost because its node cannot be asked; signals nothing, the run is held.

    Examples:
      dflashctl declare-lost slammed --reason "the machine burnt"

      dflashctl declare-lost slammed --dry-run
    """
    body = {"reason": reason, "force": is_forced}
    client = connect(ctx)
    found = find_object(client, "runs", run)
    path = path_of("runs", found["name"], "declare-lost")
    if is_dry_run:
        plan = client.post(path, body, dry_run="true")
        emit(plan, output, table=lambda: print_plan(plan))
        return
    confirm(f"Give up the attempt of run {found['name']} without knowing its end?", is_yes=is_yes)
    operation = client.post(path, body)
    finish_operation(
        client, operation, fmt=output, is_waiting=not is_no_wait, timeout_s=timeout, subject=found["name"]
    )
