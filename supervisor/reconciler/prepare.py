"""The checks before one launch, and what they settle: interpreter, GPUs, secrets, words to run.

Called by the loop in state `preflight`. Needs one round trip to the agent and no child process, because it
stands before every start. A required thing that is missing refuses the launch; a wanted one is shown
and goes on. When the node cannot be asked, there is no answer and the launch waits.
"""

from __future__ import annotations

import asyncio
import posixpath
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from supervisor.domain.deploy import lock_digest
from supervisor.domain.errors import SupervisorError
from supervisor.domain.spec import RunSpec, flag_value
from supervisor.reconciler import checks
from supervisor.reconciler.act import render_argv
from supervisor.reconciler.capabilities import capability_findings, interpreter_remedy
from supervisor.reconciler.checks import Finding, Report, Status
from supervisor.reconciler.connections import NodeConnection
from supervisor.reconciler.deploy_rows import interpreter_path
from supervisor.reconciler.sampler import GpuView
from supervisor.store.tables import Attempt, Deployment, Environment, Release, Run

PATHS_DEADLINE_S = 15.0
_PATH_FLAGS = ("--target-model", "--data-dir")

ResolveSecrets = Callable[[Sequence[str]], Awaitable[dict[str, str]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchContext:
    """Rows and evidence that the checks look at."""

    run: Run
    attempt: Attempt
    spec: RunSpec
    deployment: Deployment | None
    release: Release | None
    environment: Environment | None
    capabilities: Mapping[str, Any]
    gpu_view: GpuView | None
    node_facts: Mapping[str, Any]
    root: str
    """Of the node."""
    resolve_secrets: ResolveSecrets
    monotonic_s: float

    @property
    def python(self) -> str | None:
        """Interpreter that would run the trainer."""
        if self.spec.environment.python is not None:
            return self.spec.environment.python
        if self.environment is None:
            return None
        return interpreter_path(self.environment, root=self.root)


@dataclass(slots=True)
class Prepared:
    """Outcome: findings, and what the attempt's row gets."""

    report: Report = field(default_factory=Report)
    argv: list[str] = field(default_factory=list)
    gpus: list[dict[str, Any]] = field(default_factory=list)


async def prepare_launch(connection: NodeConnection, context: LaunchContext) -> Prepared:
    """Check one launch.

    Raises:
        TransportError, ContainerError, ShimError: the node could not be asked; nothing was decided.
    """
    prepared = Prepared()
    report = prepared.report
    spec = context.spec
    report.add(*_check_pair(context))
    report.add(*await asyncio.to_thread(_check_lock, context))
    paths = _paths_of(connection, context)
    reply = await connection.request("paths", paths=sorted(set(paths.values())), deadline_s=PATHS_DEADLINE_S)
    found = {name: reply["paths"][path] for name, path in paths.items()}
    report.add(*_check_paths(paths, found, spec))
    prepared.gpus, gpu_findings = choose_gpus(context)
    report.add(*gpu_findings)
    report.add(*capability_findings(spec.capabilities.model_dump(), context.capabilities))
    report.add(*await _check_secrets(context))
    if report.is_passed:
        prepared.argv = render_argv(
            spec,
            release=context.release,
            environment_python=context.python,
            resume_from=context.attempt.resume_from,
        )
    return prepared


def _check_pair(context: LaunchContext) -> list[Finding]:
    """Is there a release and an environment to run, and are they those that the run file names?"""
    spec = context.spec
    findings = []
    if spec.has_release and context.release is None:
        findings.append(_not_deployed(context, "release"))
    if context.python is None and not spec.command.is_program:
        findings.append(_not_deployed(context, "environment"))
    if spec.has_release and context.release is not None and context.release.source != spec.source:
        findings.append(
            Finding(
                name="release source",
                status="warn",
                value=context.release.source,
                reason="OtherSource",
                message=f"the node's current release was made from {context.release.source}, "
                f"the run file names {spec.source}",
                remedy=f"deploy {spec.source}, or change source in the run file",
            )
        )
    return findings


def _check_lock(context: LaunchContext) -> list[Finding]:
    """Does the environment come from the lock that the run file names? A file of this machine is read."""
    lock, environment = context.spec.environment.lock, context.environment
    if lock is None or lock == "bundled" or environment is None or environment.lock_digest is None:
        return []
    remedy = f"`dflashctl node deploy {context.spec.node} --lock {lock}`, or change lock in the run file"
    try:
        text = Path(lock).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "not UTF-8 text"
        message = f"the run file names {lock}, which the supervisor cannot read: {why}"
        return [_other_lock("unknown", "LockNotFound", message, remedy)]
    if lock_digest(text) == environment.lock_digest:
        return [Finding(name="environment lock", status="ok", value=lock)]
    message = f"the node's current environment was not built from {lock} as it is now"
    return [_other_lock(environment.lock_digest[:12], "OtherLock", message, remedy)]


def _other_lock(value: str, reason: str, message: str, remedy: str) -> Finding:
    return Finding(
        name="environment lock", status="warn", value=value, reason=reason, message=message, remedy=remedy
    )


def _not_deployed(context: LaunchContext, what: str) -> Finding:
    return Finding(
        name=what,
        status="fail",
        value="none",
        reason="NotDeployed",
        message=f"no {what} has been deployed to node {context.spec.node}",
        remedy=f"`dflashctl node deploy {context.spec.node}`",
    )


def _paths_of(connection: NodeConnection, context: LaunchContext) -> dict[str, str]:
    layout, spec = connection.address.layout, context.spec
    paths = {"log": context.attempt.log_path, "log dir": posixpath.dirname(context.attempt.log_path)}
    if context.release is not None:
        paths["release"] = f"{layout.release(context.release.digest)}/manifest.json"
    if (
        context.environment is not None
        and context.environment.kind == "built"
        and not spec.environment.python
    ):
        paths["environment"] = f"{layout.environment(context.environment.digest)}/complete.json"
    if context.python is not None and (spec.environment.python or not spec.command.is_program):
        paths["interpreter"] = context.python
    if spec.command.argv is not None:
        paths["program"] = spec.command.argv[0]
    for flag in _PATH_FLAGS:
        value = flag_value(spec.command.args or (), flag)
        if value is not None and value.startswith("/"):
            paths[flag] = value
    for position, copy in enumerate(spec.stage.copy_):
        paths[f"stage source {position}"] = copy.source
    return paths


def _check_paths(
    paths: Mapping[str, str], found: Mapping[str, Mapping[str, Any]], spec: RunSpec
) -> list[Finding]:
    findings = [_check_log_dir(paths["log dir"], found["log dir"], spec)]
    for name, path in paths.items():
        if name in ("log", "log dir"):
            continue
        finding = _check_present(name, path, found[name])
        if name == "interpreter" and finding.status == "fail":
            finding = _explain_interpreter(finding, spec)
        findings.append(finding)
    return findings


def _explain_interpreter(finding: Finding, spec: RunSpec) -> Finding:
    """An external one has its own remedy; a program of the user's starts without it, its GPUs go unread."""
    if spec.environment.python is None:
        return finding
    status: Status = "warn" if spec.command.is_program else "fail"
    return replace(finding, status=status, remedy=interpreter_remedy(spec.environment.python))


_REMEDIES: Mapping[str, tuple[str, str]] = {
    "release": ("ReleaseMissing", "the release is gone from the node: deploy again"),
    "environment": ("EnvironmentMissing", "the environment is gone from the node: deploy again"),
    "interpreter": ("InterpreterMissing", "the environment's interpreter is gone: deploy again"),
    "program": ("ProgramMissing", "correct [command] argv: its first word must be an executable file"),
}


def _check_present(name: str, path: str, entry: Mapping[str, Any]) -> Finding:
    must_execute = name in ("interpreter", "program")
    if entry["exists"] and (entry["executable"] or not must_execute):
        return Finding(name=name, status="ok", value=path)
    reason, remedy = _REMEDIES.get(name, ("PathMissing", f"correct {name}: the path must exist on the node"))
    what = "is not executable" if entry["exists"] else "does not exist on the node"
    return Finding(
        name=name, status="fail", value=path, reason=reason, message=f"{path} {what}", remedy=remedy
    )


def _check_log_dir(path: str, entry: Mapping[str, Any], spec: RunSpec) -> Finding:
    disk = entry["disk"]
    free, limit = disk.get("free"), spec.log.min_free_bytes
    if not disk.get("writable"):
        return Finding(
            name="log dir",
            status="fail",
            value=path,
            reason="NotWritable",
            message=f"cannot write to the log folder {path}",
            remedy="make it writable for the node's user, or set another log_dir on the node",
        )
    if free is not None and free < limit:
        return Finding(
            name="log dir",
            status="fail",
            value=checks.render_bytes(free),
            reason="NoSpace",
            message=f"{path} has {checks.render_bytes(free)} free, [log] min_free_bytes asks for "
            f"{checks.render_bytes(limit)}",
            remedy="free disk space, or lower [log] min_free_bytes",
        )
    value = "unknown" if free is None else f"{checks.render_bytes(free)} free"
    return Finding(name="log dir", status="ok" if free is not None else "warn", value=value)


def choose_gpus(context: LaunchContext) -> tuple[list[dict[str, Any]], list[Finding]]:
    """The GPUs that the run asks for, by index, with the uuids that NVML gave; findings for missing ones."""
    wanted = context.spec.gpu_indices()
    if not wanted:
        return [], []
    known = _known_gpus(context)
    missing = [index for index in wanted if index not in known]
    if missing:
        shown = ", ".join(str(index) for index in missing)
        there = ", ".join(str(index) for index in sorted(known)) or "none"
        return [], [
            Finding(
                name="gpus",
                status="fail",
                value=f"{len(known)} present",
                reason="GpuNotFound",
                message=f"GPU {shown} does not exist on the node; present: {there}",
                remedy="correct the GPU flags or [gpus] indices, or pass the devices into the container",
            )
        ]
    chosen = [{"index": index, "uuid": known[index]} for index in wanted]
    return chosen, [Finding(name="gpus", status="ok", value=", ".join(str(index) for index in wanted))]


def _known_gpus(context: LaunchContext) -> dict[int, str]:
    """Index to uuid: from NVML while it answers, else from the device nodes."""
    view = context.gpu_view
    if view is not None and not view.is_stale(context.monotonic_s) and not view.sample.get("reason"):
        return {int(gpu["index"]): str(gpu["uuid"]) for gpu in view.sample.get("gpus") or ()}
    nodes = context.node_facts.get("gpu_nodes") or []
    indices = [int(path.removeprefix("/dev/nvidia")) for path in nodes]
    return {index: f"index-{index}" for index in indices}


async def _check_secrets(context: LaunchContext) -> list[Finding]:
    findings = []
    for name in context.spec.secrets:
        try:
            await context.resolve_secrets([name])
        except SupervisorError as error:
            findings.append(
                Finding(
                    name=f"secret {name}",
                    status="fail",
                    value="missing",
                    reason="SecretMissing",
                    message=error.message,
                    remedy=error.hint or f"`dflashctl secret set {name}`",
                )
            )
        else:
            findings.append(Finding(name=f"secret {name}", status="ok", value="set"))
    return findings
