"""`dflashctl node …`: the places where runs execute."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from supervisor.commands.naming import NodeArgument, find_object, path_of
from supervisor.commands.output import (
    Column,
    Format,
    Json,
    OutputOption,
    UsageFaultError,
    YesOption,
    age,
    clean,
    confirm,
    emit,
    print_pairs,
    print_table,
    say,
)
from supervisor.commands.plans import print_plan
from supervisor.commands.session import connect
from supervisor.commands.waiting import (
    DryRunOption,
    NoWaitOption,
    OperationFailedError,
    TimeoutOption,
    finish_operation,
    wait,
)
from supervisor.domain.errors import SupervisorError

if TYPE_CHECKING:
    from supervisor.client import Client

app = typer.Typer(
    help="Nodes: where runs execute.\n\nExamples:\n\n  dflashctl node add local --transport local\n\n"
    "  dflashctl node check ct200",
    no_args_is_help=True,
)

PositivePort = Annotated[int | None, typer.Option(min=1, max=65535, help="SSH port; default 22.")]
Host = Annotated[str | None, typer.Option(help="SSH host; for proxmox the Proxmox host.")]
User = Annotated[str | None, typer.Option(help="SSH user.")]
Vmid = Annotated[int | None, typer.Option(min=100, help="Container id on the Proxmox host.")]
Root = Annotated[str | None, typer.Option(help="Folder of ours in the node; default /srv/dflash.")]
LogDir = Annotated[str | None, typer.Option(help="Where logs go in the node; default <root>/logs.")]
Identity = Annotated[
    str | None, typer.Option("--identity", metavar="FILE", help="SSH private key on the daemon's machine.")
]
Python = Annotated[str | None, typer.Option(metavar="PATH", help="Python in the node that runs the shim.")]
FindLinks = Annotated[str | None, typer.Option(metavar="DIR", help="Folder in the node with wheels.")]
TorchIndex = Annotated[str | None, typer.Option("--torch-index-url", help="Index that has the torch build.")]
Fingerprint = Annotated[
    str | None,
    typer.Option(
        metavar="SHA256:…", help="Pin this host key without asking; refused if the host shows another."
    ),
]

OPTIONAL = frozenset({"identity_file", "python", "find_links", "torch_index_url"})
"""Settings that a node can be without."""


class Transport(StrEnum):
    """Ways to a node."""

    LOCAL = "local"
    SSH = "ssh"
    PROXMOX = "proxmox"


class CheckFailedError(SupervisorError):
    """At least one check of the node failed; the report has been printed."""

    reason = "CheckFailed"


COLUMNS: list[Column] = [
    ("NAME", lambda node: node["name"]),
    ("TRANSPORT", lambda node: node["transport"]),
    ("ADDRESS", lambda node: address_of(node)),
    ("REACHABLE", lambda node: _condition(node, "Reachable")),
    ("GPUS", lambda node: _gpu_count(node)),
    ("CHECKED", lambda node: age(node.get("checked_at"))),
]


def register(root: typer.Typer) -> None:
    """Add the group to the program."""
    root.add_typer(app, name="node")


@app.command("add")
def add(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(help="Lower case letters, digits, dot, dash, underscore.")],
    transport: Annotated[Transport, typer.Option(help="How the node is reached.")] = Transport.LOCAL,
    host: Host = None,
    port: PositivePort = None,
    user: User = None,
    vmid: Vmid = None,
    root: Root = None,
    log_dir: LogDir = None,
    identity: Identity = None,
    python: Python = None,
    find_links: FindLinks = None,
    torch_index_url: TorchIndex = None,
    fingerprint: Fingerprint = None,
    output: OutputOption = Format.TABLE,
) -> None:
    """Register a node; its host key is pinned only after you have seen the fingerprint."""
    body = _without_none(
        name=name,
        transport=transport.value,
        host=host,
        port=port,
        user=user,
        vmid=vmid,
        root=root,
        log_dir=log_dir,
        identity_file=identity,
        python=python,
        find_links=find_links,
        torch_index_url=torch_index_url,
        host_key_fingerprint=fingerprint,
    )
    _require_address(transport, host, vmid)
    client = connect(ctx)
    with _options_named(body):
        if transport is not Transport.LOCAL and fingerprint is None:
            body["host_key_fingerprint"] = _confirmed_fingerprint(client, body)
        node = client.post("/v1/nodes", body)
    emit(node, output, table=lambda: typer.echo(f"node {node['name']} added"))
    say(f"next: dflashctl node check {node['name']}")


def _require_address(transport: Transport, host: str | None, vmid: int | None) -> None:
    """Refuse what cannot work before any host is dialled."""
    if transport is not Transport.LOCAL and not host:
        what = "the SSH host" if transport is Transport.SSH else "the Proxmox host"
        raise UsageFaultError(f"--transport {transport.value} needs --host", hint=f"name {what} with --host")
    if transport is Transport.PROXMOX and vmid is None:
        raise UsageFaultError(
            "--transport proxmox needs --vmid", hint="name the container's id, as pct list shows it"
        )


def _unset_if_empty(name: str, value: Any) -> Any:
    if value != "":
        return value
    if name in OPTIONAL:
        return None
    raise UsageFaultError(
        f"{_option(name)} cannot be empty",
        hint=f"only these can be unset: {', '.join(map(_option, sorted(OPTIONAL)))}",
    )


def _option(field: str) -> str:
    renamed = {"identity_file": "--identity", "host_key_fingerprint": "--fingerprint", "name": "NAME"}
    return renamed.get(field, f"--{field.replace('_', '-')}")


@contextmanager
def _options_named(body: Json) -> Iterator[None]:
    """Tell a refused field as the option that was typed, with its value and what is allowed."""
    from supervisor.client import ApiError

    try:
        yield
    except ApiError as error:
        faults = error.body.get("errors") or []
        told = [(fault["field"].removeprefix("body."), fault["message"]) for fault in faults]
        known = [(field, message) for field, message in told if field in body]
        if not known:
            raise
        text = "; ".join(f"{_option(field)} {body[field]!r} {message}" for field, message in known)
        raise UsageFaultError(text, hint="see: dflashctl node add --help") from error


def _confirmed_fingerprint(client: Client, body: Json) -> str:
    host_key = client.post("/v1/nodes", body, dry_run="true")["host_key"]
    shown = f"{clean(host_key['algorithm'])} {clean(host_key['fingerprint'])}"
    say(f"host key of {clean(body.get('host'))}: {shown}")
    say("compare it with the output of `ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub` on that host")
    fingerprint = str(host_key["fingerprint"])
    confirm("Is this the right key?", is_yes=False, flag=f"--fingerprint {fingerprint}")
    return fingerprint


@app.command("ls")
def ls(ctx: typer.Context, output: OutputOption = Format.TABLE) -> None:
    """List the nodes."""
    nodes = connect(ctx).list_all("/v1/nodes")
    empty = "no nodes yet; add one: dflashctl node add local --transport local"
    emit(nodes, output, table=lambda: print_table(nodes, COLUMNS, empty=empty))


@app.command("show")
def show(ctx: typer.Context, node: NodeArgument, output: OutputOption = Format.TABLE) -> None:
    """Show one node: settings, conditions, last check."""
    found = find_object(connect(ctx), "nodes", node)
    emit(found, output, table=lambda: _print_node(found))


@app.command("set")
def set_(
    ctx: typer.Context,
    node: NodeArgument,
    host: Host = None,
    port: PositivePort = None,
    user: User = None,
    vmid: Vmid = None,
    root: Root = None,
    log_dir: LogDir = None,
    identity: Identity = None,
    python: Python = None,
    find_links: FindLinks = None,
    torch_index_url: TorchIndex = None,
    fingerprint: Fingerprint = None,
    output: OutputOption = Format.TABLE,
) -> None:
    """Change settings of a node; what is not named stays, and '' unsets what is optional."""
    changes = _without_none(
        host=host,
        port=port,
        user=user,
        vmid=vmid,
        root=root,
        log_dir=log_dir,
        identity_file=identity,
        python=python,
        find_links=find_links,
        torch_index_url=torch_index_url,
        host_key_fingerprint=fingerprint,
    )
    if not changes:
        raise UsageFaultError(
            "nothing to change", hint="name at least one setting, see: dflashctl node set --help"
        )
    changes = {name: _unset_if_empty(name, value) for name, value in changes.items()}
    client = connect(ctx)
    found = find_object(client, "nodes", node)
    with _options_named(changes):
        changed = client.patch(path_of("nodes", found["name"]), changes)
    emit(changed, output, table=lambda: typer.echo(f"node {changed['name']} changed: {', '.join(changes)}"))


@app.command("check")
def check(
    ctx: typer.Context,
    node: NodeArgument,
    is_no_wait: NoWaitOption = False,
    timeout: TimeoutOption = None,
    output: OutputOption = Format.TABLE,
) -> None:
    """Run the preflight checks and print one line for each: ok, warn or fail, the value, the remedy."""
    client = connect(ctx)
    found = find_object(client, "nodes", node)
    operation = client.post(path_of("nodes", found["name"], "check"))
    say(f"operation {operation['id']}")
    if is_no_wait:
        emit(operation, output, table=lambda: typer.echo(operation["id"]))
        return
    operation = wait(client, operation, timeout_s=timeout)
    report = client.get(path_of("nodes", found["name"])).get("check_report") or []
    if operation["status"] != "done" and not report:
        raise OperationFailedError(operation)
    emit(report, output, table=lambda: _print_report(report))
    if operation["status"] != "done":
        raise OperationFailedError(operation)
    failed = [item["name"] for item in report if item["status"] == "fail"]
    if failed:
        raise CheckFailedError(
            f"checks failed on {found['name']}: {', '.join(failed)}",
            reason="NodeUnreachable" if "reachable" in failed else None,
            hint="the remedies are in the report above",
        )


@app.command("deploy")
def deploy(
    ctx: typer.Context,
    node: NodeArgument,
    source: Annotated[
        str, typer.Option(help="bundled, none, or a trainer folder on the daemon's machine.")
    ] = "bundled",
    lock: Annotated[
        str | None, typer.Option(help="bundled, or a hashed lock on the daemon's machine.")
    ] = None,
    python: Annotated[
        str | None, typer.Option(metavar="PATH", help="External interpreter in the node; it is only probed.")
    ] = None,
    is_dry_run: DryRunOption = False,
    is_no_wait: NoWaitOption = False,
    timeout: TimeoutOption = None,
    output: OutputOption = Format.TABLE,
) -> None:
    """Bring the trainer and its environment to a node; unchanged parts are not sent again."""
    if lock and python:
        raise UsageFaultError(
            "--lock and --python exclude each other", hint="an external interpreter has no lock"
        )
    client = connect(ctx)
    found = find_object(client, "nodes", node)
    path = path_of("nodes", found["name"], "deploy")
    body = _without_none(source=source, lock=lock, python=python)
    if is_dry_run:
        plan = client.post(path, body, dry_run="true")
        emit(plan, output, table=lambda: print_plan(plan))
        return
    operation = client.post(path, body)
    finish_operation(
        client, operation, fmt=output, is_waiting=not is_no_wait, timeout_s=timeout, subject=found["name"]
    )


@app.command("rm")
def rm(ctx: typer.Context, node: NodeArgument, is_yes: YesOption = False) -> None:
    """Forget a node; files in the node stay. Refused while it has runs."""
    client = connect(ctx)
    found = find_object(client, "nodes", node)
    confirm(f"Forget node {found['name']} ({address_of(found)})?", is_yes=is_yes)
    client.delete(path_of("nodes", found["name"]))
    say(f"node {found['name']} removed")


def address_of(node: Json) -> str:
    """Where a node is, for people."""
    if node["transport"] == "local":
        return "this machine"
    user = f"{node['user']}@" if node.get("user") else ""
    port = f":{node['port']}" if node.get("port") not in (None, 22) else ""
    container = f" ct {node['vmid']}" if node.get("vmid") is not None else ""
    return f"{user}{node.get('host')}{port}{container}"


def _condition(item: Json, kind: str) -> str:
    for condition in item.get("conditions") or []:
        if condition["type"] == kind:
            reason = f" ({condition['reason']})" if condition["status"] != "true" else ""
            return f"{condition['status']}{reason}"
    return "unknown"


def _gpu_count(node: Json) -> str | None:
    gpus = (node.get("facts") or {}).get("gpus")
    return str(len(gpus)) if isinstance(gpus, list) else None


def _print_node(node: Json) -> None:
    print_pairs((key, value) for key, value in node.items() if not isinstance(value, dict | list))
    for condition in node.get("conditions") or []:
        typer.echo(f"  {condition['type']:20} {condition['status']:8} {clean(condition.get('reason'))}")
    if node.get("check_report"):
        typer.echo("")
        _print_report(node["check_report"])


def _print_report(report: list[dict[str, Any]]) -> None:
    width = max((len(item["name"]) for item in report), default=0)
    for item in report:
        value = item.get("value")
        text = "  ".join(clean(part) for part in (value, item.get("message")) if part not in (None, ""))
        typer.echo(f"{item['status']:4}  {clean(item['name']).ljust(width)}  {text}".rstrip())
        if item.get("remedy") and item["status"] != "ok":
            typer.echo(f"      {' ' * width}  → {clean(item['remedy'])}")


def _without_none(**fields: Any) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if value is not None}
