"""Nodes: registered, changed, removed; checks and deploys requested.

Called by the routes; each function is one short transaction's work. Nothing here talks to a node: requests
become operations that the reconciler carries out.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from typing import Any

from sqlmodel import Session, col, select

from supervisor.domain.errors import ConflictError, RequestError
from supervisor.domain.layout import NAME, is_name
from supervisor.services.operations import create_operation
from supervisor.services.plans import plan_deploy
from supervisor.store.attempts import bump
from supervisor.store.events import now_of, record_event
from supervisor.store.operations import new_id
from supervisor.store.queries import (
    find_node,
    get_node,
    list_all_nodes,
    list_live_attempts,
    list_node_runs,
    list_open_operations,
)
from supervisor.store.tables import Deployment, Node, Operation

__all__ = [
    "DEFAULT_ROOT",
    "add_node",
    "delete_node",
    "get_node",
    "list_deployments",
    "list_nodes",
    "plan_deploy",
    "request_check",
    "request_deploy",
    "require_version",
    "update_node",
]

TRANSPORTS = ("local", "ssh", "proxmox")
DEFAULT_ROOT = "/srv/dflash"
CHANGEABLE = frozenset(
    {
        "host",
        "port",
        "user",
        "vmid",
        "identity_file",
        "host_key",
        "host_key_fingerprint",
        "root",
        "log_dir",
        "python",
        "find_links",
        "torch_index_url",
    }
)
_FIXED_WHILE_LIVE = frozenset({"host", "port", "vmid", "root"})
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._:%-]{0,252}[A-Za-z0-9])?|\[?[0-9a-fA-F:.]+\]?")
_USER = re.compile(r"[a-z_][a-z0-9_.-]{0,31}\$?", re.IGNORECASE)


def add_node(
    session: Session,
    *,
    name: str,
    transport: str,
    actor: str,
    host: str | None = None,
    port: int = 22,
    user: str | None = None,
    vmid: int | None = None,
    identity_file: str | None = None,
    host_key: str | None = None,
    host_key_fingerprint: str | None = None,
    root: str | None = None,
    log_dir: str | None = None,
    python: str | None = None,
    find_links: str | None = None,
    torch_index_url: str | None = None,
    request_id: str | None = None,
) -> Node:
    """Register a node.

    Args:
        session: open write transaction.
        name: unique, `[a-z0-9][a-z0-9._-]{0,63}`.
        transport: local, ssh or proxmox.
        actor: who asks.
        host: for ssh and proxmox.
        port: of sshd.
        user: on the host; root when absent.
        vmid: container id, for proxmox.
        identity_file: private key on the control machine.
        host_key: the pinned key, `<type> <base64>`.
        host_key_fingerprint: its `SHA256:…`; one of the two is needed except for local.
        root: folder that is ours in the node; `/srv/dflash` when absent.
        log_dir: where logs go; `<root>/logs` when absent.
        python: interpreter for the shim; found by the check when absent.
        find_links: folder of wheels in the node.
        torch_index_url: where torch comes from.
        request_id: of the HTTP request.

    Raises:
        RequestError: a field that cannot work, named in data.
        ConflictError: the name is taken.
    """
    now = now_of(session)
    node = Node(
        id=new_id("n"),
        name=name,
        transport=transport,
        host=host,
        port=port,
        user=user if user or transport == "local" else "root",
        vmid=vmid,
        identity_file=identity_file,
        host_key=host_key,
        host_key_fingerprint=host_key_fingerprint,
        root=_clean_path(root or DEFAULT_ROOT, field="root"),
        log_dir=_clean_path(log_dir or posixpath.join(root or DEFAULT_ROOT, "logs"), field="log_dir"),
        python=python,
        find_links=find_links,
        torch_index_url=torch_index_url,
        created_at=now,
        updated_at=now,
    )
    _check_node(node)
    if find_node(session, name) is not None:
        raise ConflictError(
            f"node {name} exists already",
            reason="NameTaken",
            hint=f"change it with `dflashctl node set {name}` or choose another name",
        )
    session.add(node)
    session.flush()
    record_event(
        session,
        actor=actor,
        subject=f"node/{name}",
        reason="NodeAdded",
        message=f"registered over {transport}",
        data={
            "transport": transport,
            "host": host,
            "vmid": vmid,
            "root": node.root,
            "fingerprint": host_key_fingerprint,
        },
        node_id=node.id,
        request_id=request_id,
    )
    return node


def list_nodes(session: Session) -> list[Node]:
    """All nodes by name."""
    return list_all_nodes(session)


def update_node(
    session: Session,
    node: Node,
    changes: Mapping[str, Any],
    *,
    actor: str,
    expected_version: int | None = None,
    request_id: str | None = None,
) -> Node:
    """Change settings of a node; None removes one.

    Raises:
        RequestError: unknown field, or a value that cannot work.
        ConflictError: StaleVersion, or a live attempt depends on the field.
    """
    require_version(node, expected_version)
    unknown = sorted(set(changes) - CHANGEABLE)
    if unknown:
        raise RequestError(f"a node's {unknown[0]} cannot be changed", reason="BadField", field=unknown[0])
    changed = {name: value for name, value in changes.items() if getattr(node, name) != value}
    fixed = sorted(set(changed) & _FIXED_WHILE_LIVE)
    if fixed and list_live_attempts(session, node_id=node.id):
        raise ConflictError(
            f"{fixed[0]} cannot be changed while an attempt is live on node {node.name}",
            reason="NodeInUse",
            hint="stop its runs first",
        )
    for name, value in changed.items():
        setattr(node, name, _clean_path(value, field=name) if name in ("root", "log_dir") else value)
    _check_node(node)
    if changed:
        bump(session, node)
        record_event(
            session,
            actor=actor,
            subject=f"node/{node.name}",
            reason="NodeChanged",
            message=f"changed {', '.join(sorted(changed))}",
            data=changed,
            node_id=node.id,
            request_id=request_id,
        )
    return node


def delete_node(
    session: Session,
    node: Node,
    *,
    actor: str,
    expected_version: int | None = None,
    request_id: str | None = None,
) -> None:
    """Forget a node; nothing on it is touched.

    Raises:
        ConflictError: runs still belong to it, or StaleVersion.
    """
    require_version(node, expected_version)
    runs = list_node_runs(session, node.id)
    if runs:
        named = ", ".join(run.name for run in runs[:5])
        raise ConflictError(
            f"node {node.name} still has {len(runs)} run(s): {named}",
            reason="NodeInUse",
            hint="remove them first with `dflashctl rm`",
        )
    record_event(
        session,
        actor=actor,
        subject=f"node/{node.name}",
        reason="NodeRemoved",
        message="removed; its folders were left as they are",
        node_id=node.id,
        request_id=request_id,
    )
    session.delete(node)


def list_deployments(session: Session, node: Node) -> list[Deployment]:
    """What has been brought to a node, newest first."""
    query = select(Deployment).where(Deployment.node_id == node.id)
    return list(session.exec(query.order_by(col(Deployment.sequence).desc())).all())


def request_check(session: Session, node: Node, *, actor: str, request_id: str | None = None) -> Operation:
    """Ask for a preflight of the node; a check that waits already is returned again."""
    waiting = list_open_operations(session, kinds=("check",), node_id=node.id)
    if waiting:
        return waiting[0]
    operation = create_operation(session, kind="check", actor=actor, node=node, request_id=request_id)
    record_event(
        session,
        actor=actor,
        subject=f"node/{node.name}",
        reason="CheckRequested",
        message="check requested",
        node_id=node.id,
        operation_id=operation.id,
        request_id=request_id,
    )
    return operation


def request_deploy(
    session: Session,
    node: Node,
    *,
    source: str = "bundled",
    lock: str | None = None,
    actor: str,
    python: str | None = None,
    request_id: str | None = None,
) -> Operation:
    """Ask for a release and an environment on a node.

    Args:
        session: open write transaction.
        node: where.
        source: bundled, none, or the path of a trainer folder on the control machine.
        lock: bundled, or the path of a hashed lock on the control machine; bundled when absent.
        actor: who asks.
        python: external interpreter in the node, in place of a lock.
        request_id: of the HTTP request.

    Raises:
        ConflictError: another deploy of this node is under way.
        RequestError: a value that cannot work.
    """
    for field, value in (("source", source), ("lock", lock), ("python", python)):
        if value is not None and (not value or "\0" in value):
            raise RequestError(f"{field} must not be empty: {value!r}", reason="BadField", field=field)
    if lock is not None and python is not None:
        raise RequestError("give either lock or python, not both", reason="BadField", field="lock")
    if python is not None and not python.startswith("/"):
        raise RequestError(
            f"python must be an absolute path in the node: {python}", reason="BadField", field="python"
        )
    under_way = list_open_operations(session, kinds=("deploy",), node_id=node.id)
    if under_way:
        raise ConflictError(
            f"a deploy of node {node.name} is under way: {under_way[0].id}",
            reason="DeployRunning",
            hint="wait for it, then deploy again",
            operation=under_way[0].id,
        )
    if lock is None and python is None:
        lock = "bundled"
    params = {"source": source, "lock": lock, "python": python}
    operation = create_operation(
        session, kind="deploy", actor=actor, node=node, params=params, request_id=request_id
    )
    record_event(
        session,
        actor=actor,
        subject=f"node/{node.name}",
        reason="DeployRequested",
        message=f"deploy requested: source {source}, {f'python {python}' if python else f'lock {lock}'}",
        data=params,
        node_id=node.id,
        operation_id=operation.id,
        request_id=request_id,
    )
    return operation


def require_version(row: Any, expected: int | None) -> None:
    """Raise ConflictError, reason StaleVersion, unless the caller saw the present version."""
    if expected is not None and row.version != expected:
        raise ConflictError(
            f"{row.name} has changed since it was read: version {row.version}, not {expected}",
            reason="StaleVersion",
            hint="read it again and repeat the change",
            version=row.version,
        )


def _check_node(node: Node) -> None:
    if not is_name(node.name):
        raise _bad("name", node.name, f"must match {NAME.pattern}")
    if node.transport not in TRANSPORTS:
        raise _bad("transport", node.transport, f"known are {', '.join(TRANSPORTS)}")
    for field in ("python", "identity_file"):
        value = getattr(node, field)
        if value is not None and (not value.startswith("/") or "\0" in value):
            raise _bad(field, value, "must be an absolute path")
    for field in ("find_links", "torch_index_url"):
        value = getattr(node, field)
        if value is not None and (not value or value.startswith("-") or not value.isprintable()):
            raise _bad(field, value, "must be a path or an address")
    if node.transport == "local":
        if node.host is not None or node.vmid is not None:
            raise _bad("transport", node.transport, "local takes neither host nor vmid")
        return
    _check_remote(node)


def _check_remote(node: Node) -> None:
    if not node.host or not _HOST.fullmatch(node.host):
        raise _bad("host", node.host, f"{node.transport} needs a host name or address")
    if not 1 <= node.port <= 65535:
        raise _bad("port", node.port, "must be from 1 to 65535")
    if node.user is None or not _USER.fullmatch(node.user):
        raise _bad("user", node.user, "is no user name")
    if node.transport == "proxmox" and (node.vmid is None or not 100 <= node.vmid <= 999_999_999):
        raise _bad("vmid", node.vmid, "proxmox needs a container id from 100 on")
    if node.transport == "ssh" and node.vmid is not None:
        raise _bad("vmid", node.vmid, "only proxmox has containers")
    if node.host_key is None and node.host_key_fingerprint is None:
        raise RequestError(
            f"the host key of {node.host} has not been confirmed",
            reason="HostKeyNotConfirmed",
            hint="compare the fingerprint on the host's console, then give it with --fingerprint SHA256:…",
            field="host_key_fingerprint",
        )


def _clean_path(value: Any, *, field: str) -> str:
    if not isinstance(value, str) or not value.startswith("/") or "\0" in value or "\n" in value:
        raise _bad(field, value, "must be an absolute path in the node")
    clean = posixpath.normpath(value)
    if clean in ("/", "//"):
        raise _bad(field, value, "must not be the root of the file system")
    return clean


def _bad(field: str, value: object, what: str) -> RequestError:
    return RequestError(f"node {field}: {what}: {value!r}", reason="BadField", field=field, value=value)
