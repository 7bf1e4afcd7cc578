"""Brings a run's `[stage] copy` trees into place inside the node before its launch.

Called in preflight. A target that exists is left alone; a copy goes to a temporary name beside it and is
renamed, so an interrupted one is never mistaken for the whole.
"""

from __future__ import annotations

import asyncio

from supervisor.domain.errors import DeployError
from supervisor.domain.spec import RunSpec
from supervisor.reconciler.checks import Finding
from supervisor.reconciler.connections import NodeConnection
from supervisor.reconciler.preflight import finding_of
from supervisor.reconciler.scripts import ensure_folder

COPY_DEADLINE_S = 7200.0
STEP_DEADLINE_S = 60.0
QUICK_S = 0.5


class Staging:
    """Copies in the background, so that a run whose tree is being copied can still be stopped."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[list[Finding]]] = {}

    async def advance(
        self, attempt_id: str, connection: NodeConnection, spec: RunSpec
    ) -> list[Finding] | None:
        """Findings once everything is in place or has failed; None while it is being copied.

        Raises:
            TransportError, ContainerError, ShimError: the node could not be asked; the next pass tries again.
        """
        if not spec.stage.copy_:
            return []
        task = self._tasks.get(attempt_id)
        if task is None:
            task = asyncio.create_task(stage_copies(connection, spec), name=f"stage-{attempt_id}")
            self._tasks[attempt_id] = task
        await asyncio.wait([task], timeout=QUICK_S)
        if not task.done():
            return None
        del self._tasks[attempt_id]
        return task.result()

    async def aclose(self) -> None:
        """Stop waiting; a copy that was begun is begun anew under its temporary name."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)


async def stage_copies(connection: NodeConnection, spec: RunSpec) -> list[Finding]:
    """Copy what is missing; one finding for each tree.

    Raises:
        TransportError, ContainerError: the node could not be asked; the next pass tries again.
    """
    if not spec.stage.copy_:
        return []
    targets = [copy.target for copy in spec.stage.copy_]
    reply = await connection.request("paths", paths=targets)
    findings = []
    for copy in spec.stage.copy_:
        if reply["paths"][copy.target]["exists"]:
            findings.append(Finding(name="stage", status="ok", value=f"{copy.target} is there"))
        else:
            findings.append(await _copy(connection, copy.source, copy.target))
    return findings


async def _copy(connection: NodeConnection, source: str, target: str) -> Finding:
    transport = connection.transport
    parent, temporary = target.rsplit("/", 1)[0] or "/", f"{target}.staging"
    try:
        await ensure_folder(transport, parent)
    except DeployError as error:
        return finding_of(error, name="stage")
    steps = (
        (["rm", "-rf", "--", temporary], STEP_DEADLINE_S),
        (["cp", "-a", "--", source, temporary], COPY_DEADLINE_S),
        (["mv", "-T", "--", temporary, target], STEP_DEADLINE_S),
    )
    for argv, deadline_s in steps:
        result = await transport.run(argv, deadline_s=deadline_s)
        if result.exit_code != 0:
            stderr = result.stderr.decode(errors="replace").strip()
            await transport.run(steps[0][0], deadline_s=STEP_DEADLINE_S)
            return Finding(
                name="stage",
                status="fail",
                value=target,
                reason="NoSpace" if "No space left" in stderr else "StagingFailed",
                message=f"cannot copy {source} to {target} on the node: {stderr}",
                remedy="check both paths and the free space of the target's file system",
            )
    return Finding(name="stage", status="ok", value=f"{source} was copied to {target}")
