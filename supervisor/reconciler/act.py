"""The node's side of an action: send a start request, send a stop request, make a late start impossible.

Called by the loop between two transactions, never inside one. A launch is committed as `launching` before it
is sent, is idempotent by attempt id, and has three outcomes: started with an identity, refused with a cause,
or unknown, which is resolved by asking and never by sending again blindly.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import structlog

from supervisor.domain.errors import (
    CommandFailedError,
    ContainerError,
    ShimError,
    TransportError,
)
from supervisor.domain.facts import LaunchError
from supervisor.domain.spec import RunSpec
from supervisor.reconciler.connections import NodeConnection
from supervisor.store.tables import Attempt, Environment, Release, Run
from supervisor.transport.agent import build_shim_argv, parse_start_reply

log = structlog.get_logger(__name__)

START_DEADLINE_S = 70.0
"""Longer than the shim's own limit for deciding a launch."""
MAX_AGENT_REQUEST_BYTES = 1 << 20
STOP_DEADLINE_S = 20.0
TOMBSTONE_DEADLINE_S = 30.0
_PENDING_REASONS = frozenset({"LaunchPending", "ShimDied", "ShimSilent"})


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """Everything a start request is made of; `secrets` are never stored or shown."""

    run: Run
    attempt: Attempt
    spec: RunSpec
    release: Release | None
    environment: Environment | None
    secrets: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOutcome:
    """What came of a start request; both None means that nobody knows yet."""

    state: dict[str, Any] | None = None
    error: LaunchError | None = None
    unknown: str = ""


def render_argv(
    spec: RunSpec, *, release: Release | None, environment_python: str | None, resume_from: str
) -> list[str]:
    """The words that are run in the node, as they are recorded with the attempt.

    Programs run as they are given. Trainer flags run under the environment's interpreter, with the resume
    choice of this attempt last, so that it wins over an earlier one.
    """
    if spec.command.argv is not None:
        return list(spec.command.argv)
    assert spec.command.args is not None
    assert environment_python is not None
    args = list(spec.command.args)
    has_own = any(word == "--resume" or word.startswith("--resume=") for word in args)
    if not (has_own and resume_from == spec.resume.start):
        args += ["--resume", resume_from]
    return [environment_python, "-u", "-m", module_of(release), "train", *args]


def module_of(release: Release | None) -> str:
    """Name of the package that a release carries: its one top folder."""
    for path in (release.manifest.get("files") or {}) if release is not None else {}:
        return str(path).split("/", 1)[0]
    return "trainer"


def render_request(plan: LaunchPlan, connection: NodeConnection) -> dict[str, Any]:
    """The start request for the shim, secrets included: for stdin only."""
    layout, attempt, spec = connection.address.layout, plan.attempt, plan.spec
    env = dict(spec.env)
    if plan.release is not None and not spec.command.is_program:
        env["PYTHONPATH"] = layout.release(plan.release.digest)
        env["PYTHONDONTWRITEBYTECODE"] = "1"  # a release is never modified, not even by byte code
    return {
        "v": 1,
        "attempt_id": attempt.id,
        "run_id": plan.run.id,
        "run_name": plan.run.name,
        "argv": list(attempt.argv),
        "cwd": layout.root if not spec.command.is_program else None,
        "env": env,
        "secrets": dict(plan.secrets),
        "log_path": attempt.log_path,
        "gpus": [str(gpu["uuid"]) for gpu in attempt.gpus],
        "share": spec.gpus.share,
        "stop": {
            "signal": spec.stop.signal,
            "grace_s": spec.stop.grace_s,
            "extend_max_s": spec.stop.extend_max_s,
            "term_s": spec.stop.term_s,
            "kill_s": spec.stop.kill_s,
            "verify_s": spec.stop.verify_s,
        },
        "orphan_after_s": spec.stop.orphan_after_s,
        "spec": dict(attempt.spec),
        "limits": {"min_free_bytes": spec.log.min_free_bytes},
    }


async def send_start(connection: NodeConnection, request: Mapping[str, Any]) -> LaunchOutcome:
    """Send a start request and read what the shim made of it.

    The open agent launches fastest; a fresh command does when that one cannot (older, or a huge request).
    """
    try:
        reply = await _start_by_agent(connection, request)
        if reply is None:
            reply = await _start_by_command(connection, request)
    except ShimError as error:
        return _refused(error)
    except CommandFailedError as error:
        return LaunchOutcome(
            error=LaunchError(reason=error.reason, message=error.message, errno=error.data.get("errno"))
        )
    except (TransportError, ContainerError) as error:
        # Whether it ran is not known: the attempt stays as it is, and the shim is asked for it next.
        return LaunchOutcome(unknown=error.message)
    return LaunchOutcome(state=reply["state"])


async def _start_by_agent(connection: NodeConnection, request: Mapping[str, Any]) -> dict[str, Any] | None:
    """The shim's reply, or None when this agent cannot start anything and nothing was sent."""
    capabilities = (connection.hello or {}).get("capabilities") or ()
    if "start" not in capabilities or len(json.dumps(request)) >= MAX_AGENT_REQUEST_BYTES:
        return None
    try:
        return await connection.request("start", request=dict(request), deadline_s=START_DEADLINE_S)
    except ShimError as error:
        if error.reason == "LauncherGone":
            return None
        raise


async def _start_by_command(connection: NodeConnection, request: Mapping[str, Any]) -> dict[str, Any]:
    address = connection.address
    argv = build_shim_argv(address.python, connection.shim_path, "start", address.root)
    result = await connection.transport.run(
        argv, stdin=json.dumps(request).encode(), deadline_s=START_DEADLINE_S
    )
    return parse_start_reply(result.stdout)


def _refused(error: ShimError) -> LaunchOutcome:
    if error.reason in _PENDING_REASONS:
        return LaunchOutcome(unknown=error.message)
    return LaunchOutcome(
        error=LaunchError(reason=error.reason, message=error.message, errno=error.data.get("errno"))
    )


async def send_tombstone(connection: NodeConnection, attempt_id: str) -> dict[str, Any]:
    """Make sure that a start request for this attempt, should one still be on its way, is refused.

    Returns:
        The attempt's state in the node: `abandoned`, or what it really is if the start was faster.

    Raises:
        TransportError, ContainerError, ShimError: nothing is known.
    """
    argv = build_shim_argv(
        connection.address.python,
        connection.shim_path,
        "tombstone",
        connection.address.root,
        "--attempt",
        attempt_id,
    )
    result = await connection.transport.run(argv, deadline_s=TOMBSTONE_DEADLINE_S)
    state: dict[str, Any] = parse_start_reply(result.stdout)["state"]
    return state


async def send_signal(connection: NodeConnection, identity: Mapping[str, Any], name: str) -> bool:
    """Signal a recorded process itself, when the folder through which its shim is asked was removed."""
    try:
        await connection.request("signal", identity=dict(identity), signal=name, deadline_s=STOP_DEADLINE_S)
    except (TransportError, ContainerError, ShimError) as error:
        log.warning("signal without an answer", signal=name, reason=error.reason)
        return False
    return True


async def send_stop(
    connection: NodeConnection, attempt_id: str, *, stop_id: str, reason: str, actor: str, save: bool
) -> dict[str, Any] | None:
    """Ask the attempt's shim to stop it; idempotent by `stop_id`.

    Returns:
        The attempt's state, or None when the answer did not come: the loop looks and asks again.
    """
    try:
        reply = await connection.request(
            "stop",
            attempt_id=attempt_id,
            stop_id=stop_id,
            reason=reason,
            actor=actor,
            save=save,
            deadline_s=STOP_DEADLINE_S,
        )
    except (TransportError, ContainerError, ShimError) as error:
        log.warning("stop request without an answer", attempt=attempt_id, reason=error.reason)
        return None
    state: dict[str, Any] = reply["state"]
    return state
