"""Checks before anything is changed: a node before a deploy, a launch before its process exists.

Used by `deploy`, the check operation and `act`. Each finding has the value seen, what it means and what to
do; `fail` refuses, `warn` is shown and goes on. Nothing is repaired here.
"""

from __future__ import annotations

from supervisor.domain.errors import ContainerError, DeployError, ShimError, SupervisorError, TransportError
from supervisor.reconciler import checks
from supervisor.reconciler.checks import Finding, Report
from supervisor.reconciler.connections import NodeConnection
from supervisor.reconciler.environments import local_machine
from supervisor.reconciler.reachability import LINK_REMEDIES
from supervisor.reconciler.scripts import run_script
from supervisor.transport.base import NodeProbe

PROBE_DEADLINE_S = 30.0


async def check_node(connection: NodeConnection, *, needs_installer: bool = True) -> Report:
    """Look at a node from the link up; stops at the first layer that does not answer."""
    report = Report()
    address = connection.address
    probe = await connection.transport.probe(deadline_s=PROBE_DEADLINE_S)
    if not probe.is_reachable or probe.reason != "Ok":
        report.add(
            Finding(
                name="reachable",
                status="fail",
                value=probe.container_status or "no",
                reason=probe.reason,
                message=probe.message,
                remedy=LINK_REMEDIES.get(probe.reason, "check address, user and key of the node"),
            )
        )
        report.add(*_check_container_lock(probe))
        return report
    report.add(Finding(name="reachable", status="ok", value=probe.container_status or "yes"))
    report.add(*_check_container_lock(probe))
    try:
        facts = await run_script(
            connection.transport,
            address.python,
            "probe",
            [address.root, address.log_dir],
            deadline_s=PROBE_DEADLINE_S,
            is_read_only=True,
        )
    except (TransportError, ContainerError, DeployError) as error:
        report.add(finding_of(error, name="python" if error.reason == "NoPython" else "probe"))
        return report
    report.facts.update(facts)
    report.add(checks.check_python(facts))
    report.add(*checks.check_folder("root", facts["root"], min_free_bytes=_min_free(needs_installer)))
    report.add(*checks.check_folder("log dir", facts["log_dir"], min_free_bytes=checks.MIN_FREE_TMP_BYTES))
    report.add(*checks.check_folder("tmp", facts["tmp"], min_free_bytes=checks.MIN_FREE_TMP_BYTES))
    if needs_installer:
        report.add(checks.check_uv_platform(facts, machine=local_machine()))
    return report


def _check_container_lock(probe: NodeProbe) -> list[Finding]:
    """A lock of its configuration stops no command in a container, but its start and stop."""
    if probe.container_lock is None:
        return []
    return [
        Finding(
            name="container lock",
            status="warn",
            value=probe.container_lock,
            reason="ContainerLocked",
            message="the host refuses to start or stop the container while this lasts",
            remedy=LINK_REMEDIES["ContainerLocked"],
        )
    ]


def _min_free(needs_installer: bool) -> int:
    return checks.MIN_FREE_TMP_BYTES if not needs_installer else checks.MIN_FREE_ROOT_BYTES


async def check_agent(connection: NodeConnection, report: Report) -> None:
    """Does the agent answer, and what GPUs does it see?"""
    try:
        hello = await connection.request("probe", root=connection.address.root, python=None, capabilities=[])
    except (TransportError, ContainerError, ShimError) as error:
        report.add(finding_of(error, name="agent"))
        return
    report.facts["agent"] = hello
    report.add(Finding(name="agent", status="ok", value="answers"))


def finding_of(error: SupervisorError, *, name: str) -> Finding:
    """An error as a failed check."""
    return Finding(
        name=name,
        status="fail",
        value=str(error.data.get("python") or error.reason),
        reason=error.reason,
        message=error.message,
        remedy=error.hint or "",
    )
