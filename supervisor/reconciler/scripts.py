"""Runs the node-side programs of `reconciler.nodeside`: text on stdin, one marked JSON line back.

Used by preflight, deploy and environment building. A marker that is new for each call frames the answer, so
login scripts and chatty imports cannot be taken for it. Knows no rows and no policy.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from importlib import resources
from typing import Any

from supervisor.domain.errors import CommandFailedError, DeployError
from supervisor.transport.base import CommandResult, Transport

_STDERR_TAIL = 4000


def load_script(name: str) -> bytes:
    """Text of `nodeside/<name>.py`."""
    return (resources.files("supervisor.reconciler.nodeside") / f"{name}.py").read_bytes()


async def run_script(
    transport: Transport,
    python: str,
    name: str,
    arguments: Sequence[str],
    *,
    deadline_s: float,
    is_read_only: bool = False,
) -> dict[str, Any]:
    """Run a node-side program with `python` and return its result.

    Raises:
        DeployError: the program itself says what is wrong (NoSpace, PermissionDenied ...).
        CommandFailedError: no such interpreter (reason NoPython), or it ended without an answer.
        TransportError, ContainerError: as `Transport.run`.
    """
    marker = f"@dflash-{secrets.token_hex(12)}@"
    argv = [python, "-I", "-", marker, *arguments]
    try:
        result = await transport.run(
            argv, stdin=load_script(name), deadline_s=deadline_s, is_read_only=is_read_only
        )
    except CommandFailedError as error:
        raise no_python(python, error.message) from error
    reply = parse_marked(result.stdout, marker)
    if reply is None:
        raise _no_answer(python, name, result)
    if reply.get("ok"):
        value: dict[str, Any] = reply["result"]
        return value
    problem = reply["error"]
    raise DeployError(
        problem["message"],
        reason=problem["reason"],
        hint=_HINTS.get(problem["reason"]),
        errno=problem.get("errno"),
    )


async def ensure_folder(transport: Transport, path: str) -> None:
    """Create a folder and its parents in the node.

    Raises:
        DeployError: it cannot be created; the message is the node's own.
    """
    result = await transport.run(["mkdir", "-p", "--", path], deadline_s=30.0)
    if result.exit_code != 0:
        stderr = result.stderr.decode(errors="replace").strip()
        reason = "NoSpace" if "No space left" in stderr else "NotWritable"
        raise DeployError(
            f"cannot create {path} on the node: {stderr}",
            reason=reason,
            hint="make the node's root writable for its user, or choose another root",
        )


_HINTS = {
    "NoSpace": "free disk space on the node, or set the node's root to a larger file system",
    "PermissionDenied": "give the node's user write access to the node's root",
    "ReadOnly": "the node's root is on a read-only file system: mount it writable or choose another root",
    "ChecksumMismatch": "deploy again; if it repeats, the link or the node's disk damages data",
}


def parse_marked(output: bytes, marker: str) -> dict[str, Any] | None:
    """The JSON object that follows the marker on a line of its own, or None."""
    start = output.rfind(marker.encode())
    if start < 0:
        return None
    line = output[start + len(marker) :].split(b"\n", 1)[0]
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def no_python(python: str, why: str) -> CommandFailedError:
    """The error of a node whose interpreter cannot be run."""
    return CommandFailedError(
        f"no usable Python on the node: {python}: {why}",
        reason="NoPython",
        hint="install Python 3.9 or newer there, or name one: `dflashctl node set NODE --python PATH`",
        python=python,
    )


def _no_answer(python: str, name: str, result: CommandResult) -> CommandFailedError:
    stderr = result.stderr.decode(errors="replace")[-_STDERR_TAIL:].strip()
    if result.exit_code in (126, 127):
        return no_python(python, stderr or f"exit code {result.exit_code}")
    return CommandFailedError(
        f"{name} ended without an answer on the node: exit code {result.exit_code}: {stderr or 'no output'}",
        reason="NodeScriptFailed",
        exit_code=result.exit_code,
        stderr=stderr,
        python=python,
    )
