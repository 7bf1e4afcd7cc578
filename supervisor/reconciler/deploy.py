"""Carries out deploy operations: shim, release and environment onto a node, verified, then current.

Started by `operations` for each pending deploy. Every thing that arrives is content-addressed and complete or
absent, so the same operation may be run again after a crash at any point and picks up where it was. Nothing
that runs on the node is touched: live attempts keep the pair they were started with.
"""

from __future__ import annotations

import asyncio
import json
import posixpath
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from supervisor.clock import Clock
from supervisor.domain.deploy import environment_digest
from supervisor.domain.errors import ConfigError, DeployError
from supervisor.reconciler import leases
from supervisor.reconciler.act import module_of
from supervisor.reconciler.capabilities import probe_capabilities
from supervisor.reconciler.connections import NodeConnection
from supervisor.reconciler.crash import crash
from supervisor.reconciler.deploy_rows import (
    BUNDLED,
    DeployRequest,
    DeploySources,
    Pair,
    apply_deploy,
    environment_row,
    find_proved,
    release_row,
    save_report,
)
from supervisor.reconciler.environments import (
    EnvironmentBuilder,
    EnvironmentPlan,
    torch_requirement_for,
)
from supervisor.reconciler.preflight import check_node
from supervisor.reconciler.scripts import ensure_folder, run_script
from supervisor.store.tables import Environment, Node, Release
from supervisor.store.writer import Store
from supervisor.transport.bundle import ReleaseArchive, build_release

SCRIPT_DEADLINE_S = 120.0
SELFTEST_DEADLINE_S = 600.0
PUSH_DEADLINE_S = 900.0
OPEN_WAIT_S = 30.0

ReportProgress = Callable[[str, str, int | None, int | None], None]


class Deployer:
    """Runs one deploy on one node."""

    def __init__(
        self,
        store: Store,
        connection: NodeConnection,
        sources: DeploySources,
        *,
        owner: str,
        clock: Clock,
        report: ReportProgress,
    ) -> None:
        self._store = store
        self._clock = clock
        self._connection = connection
        self._transport = connection.transport
        self._layout = connection.address.layout
        self._sources = sources
        self._owner = owner
        self._report = report

    async def run(self, request: DeployRequest) -> dict[str, Any]:
        """Deploy; returns the operation's result.

        Raises:
            SupervisorError: with reason and remedy; the node's current pair is unchanged.
        """
        node_id = request.node.id
        token = await self._store.write(lambda session: leases.claim(session, Node, node_id, self._owner))
        if token is None:
            raise DeployError(
                f"node {request.node.name} is being deployed to by another worker",
                reason="DeployInProgress",
                hint="wait for that operation to end",
            )
        crash("deploy.after_claim")
        keeper = asyncio.create_task(self._keep_lease(node_id, token))
        try:
            pair = await self._bring(request)
            result = await self._store.write(lambda session: apply_deploy(session, request, pair, token))
            crash("deploy.after_apply")
            return result
        finally:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)
            await self._store.write(lambda session: leases.release(session, Node, node_id, token))

    async def _keep_lease(self, node_id: str, token: str) -> None:
        while True:
            await asyncio.sleep(leases.LEASE_S / 3)
            await self._store.write(lambda session: leases.renew(session, Node, node_id, token))

    async def _bring(self, request: DeployRequest) -> Pair:
        """Bring what is missing; a pair that is on the node and was proved before is not proved again."""
        archive, lock_text = await asyncio.to_thread(self._read_sources, request)
        facts = await self._check(request)
        plan = None
        pair = Pair()
        if archive is not None:
            pair.release = release_row(request.source, archive, self._clock.now())
        if request.python is not None:
            pair.environment = self._external_row(request.python)
        elif lock_text is not None:
            plan = self._plan(request, lock_text, facts)
            python = self._layout.python(plan.digest)
            pair.environment = environment_row(plan, python, facts, self._clock.now())
        there = await self._inspect(pair, plan)
        if not there["shim"]:
            await self._connection.ensure_shim()
        crash("deploy.after_shim")
        known = await self._store.read(lambda session: find_proved(session, request.node.id, pair))
        if known is not None and request.python is None and there["release"] and there["environment"]:
            pair.capabilities = known.capabilities
        else:
            await self._prove(pair, plan, archive, there)
        if pair.release is not None and not there["current"]:
            await self._switch(pair.release.digest)
        crash("deploy.after_switch")
        return pair

    async def _prove(
        self,
        pair: Pair,
        plan: EnvironmentPlan | None,
        archive: ReleaseArchive | None,
        there: Mapping[str, bool],
    ) -> None:
        """Release, environment, self-test, capabilities."""
        if archive is not None and not there["release"]:
            await self._bring_release(archive)
        crash("deploy.after_release")
        if plan is not None:
            await self._bring_environment(plan, pair.release)
        elif pair.environment is not None:
            await self._selftest(pair.environment.python, pair.release)
        crash("deploy.after_environment")
        if pair.environment is None:
            return
        self._report("capabilities", "probing capabilities", None, None)
        await self._connection.wait_open(OPEN_WAIT_S)
        environment = pair.environment
        pair.capabilities = await probe_capabilities(
            self._connection, environment.python, is_external=environment.kind == "external"
        )

    def _read_sources(self, request: DeployRequest) -> tuple[ReleaseArchive | None, str | None]:
        archive = None
        if request.source != "none":
            folder = self._sources.trainer_folder if request.source == BUNDLED else Path(request.source)
            if not folder.is_dir():
                raise ConfigError(
                    f"no such trainer folder: {folder}",
                    reason="SourceNotFound",
                    hint="give the folder of a trainer package, or `bundled`",
                    field="source",
                    value=request.source,
                )
            archive = build_release(folder)
        if request.lock is None:
            return archive, None
        lock = self._sources.lock_file if request.lock == BUNDLED else Path(request.lock)
        try:
            return archive, lock.read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"cannot read the lock: {lock}: {error.strerror}",
                reason="LockNotFound",
                hint="give the path of a lock with hashes on the supervisor's machine, or `bundled`",
                field="lock",
                value=request.lock,
            ) from error

    async def _check(self, request: DeployRequest) -> dict[str, Any]:
        self._report("preflight", "checking the node", None, None)
        report = await check_node(self._connection, needs_installer=request.python is None)
        await self._store.write(lambda session: save_report(session, request.node.id, report))
        if not report.is_passed:
            first = report.failures()[0]
            raise DeployError(
                f"node {request.node.name} cannot take a deploy: {report.summary()}",
                reason=first.reason,
                hint=first.remedy,
                findings=[item.to_json() for item in report.failures()],
            )
        return report.facts

    async def _bring_release(self, archive: ReleaseArchive) -> None:
        """Send, unpack under a temporary name, verify each file in the node, rename."""
        size = len(archive.data)
        target = f"{self._layout.temporary}/release-{archive.digest}-{secrets.token_hex(4)}.tar.gz"
        self._report("release", "sending the release", 0, size)
        await ensure_folder(self._transport, self._layout.temporary)
        await self._transport.put(
            archive.data,
            target,
            progress=lambda done, total: self._report("release", "sending the release", done, total),
            deadline_s=PUSH_DEADLINE_S,
        )
        await run_script(
            self._transport,
            self._connection.address.python,
            "unpack",
            [target, self._layout.root, archive.digest],
            deadline_s=SCRIPT_DEADLINE_S,
        )

    def _plan(self, request: DeployRequest, lock_text: str, facts: dict[str, Any]) -> EnvironmentPlan:
        torch = torch_requirement_for(lock_text, is_bundled_source=request.source == BUNDLED)
        node = request.node
        find_links = node.find_links or self._sources.find_links
        torch_index = node.torch_index_url
        if torch_index is None and node.find_links is None:
            torch_index = self._sources.torch_index_url
        source = (torch_index or find_links) if torch else None
        return EnvironmentPlan(
            digest=environment_digest(
                lock_text,
                torch_requirement=f"{torch} from {source}" if torch else None,
                python=str(facts["python"]["version"]),
                platform=f"{facts['platform']}-{facts['machine']}-{'-'.join(facts['libc'])}",
            ),
            lock_text=lock_text,
            torch_requirement=torch,
            python=self._connection.address.python,
            find_links=find_links,
            torch_index_url=torch_index,
        )

    async def _bring_environment(self, plan: EnvironmentPlan, release: Release | None) -> None:
        builder = EnvironmentBuilder(
            self._transport, self._layout, python=self._connection.address.python, report=self._report
        )
        python = self._layout.python(plan.digest)
        is_new = await builder.build(plan)
        try:
            result = await self._selftest(python, release)
        except DeployError:
            if is_new:
                await builder.discard(plan.digest)
            raise
        if is_new:
            record = {
                "v": 1,
                "digest": plan.digest,
                "python": result["python"],
                "torch_requirement": plan.torch_requirement,
            }
            await builder.complete(plan.digest, record)

    def _external_row(self, python: str) -> Environment:
        digest = environment_digest(
            "", torch_requirement=None, python=f"external:{python}", platform=self._connection.address.id
        )
        return Environment(digest=digest, kind="external", python=python, created_at=self._clock.now())

    async def _selftest(self, python: str, release: Release | None) -> dict[str, Any]:
        """Byte-compile and import by the environment's own interpreter."""
        self._report("self-test", "importing the release with its environment", None, None)
        folder = self._layout.release(release.digest) if release is not None else None
        modules = entry_modules(release)
        request = json.dumps({"release": folder, "modules": modules})
        result = await run_script(
            self._transport, python, "selftest", [request], deadline_s=SELFTEST_DEADLINE_S
        )
        problem = describe_selftest(result)
        if problem is not None:
            raise problem
        return result

    async def _inspect(self, pair: Pair, plan: EnvironmentPlan | None) -> dict[str, bool]:
        """What of it is complete on the node already; what is not wanted counts as there."""
        root = f"{self._layout.root}/"
        want = {"shim": self._connection.shim_path.removeprefix(root)}
        current = None
        if pair.release is not None:
            current = posixpath.join("releases", pair.release.digest)
            want["release"] = posixpath.join(current, "manifest.json")
        if plan is not None:
            want["environment"] = posixpath.join("envs", plan.digest, "complete.json")
        reply = await self._finish("inspect", want=want)
        is_current = current is None or reply["current"] == current
        return {"release": True, "environment": True, **reply["found"], "current": is_current}

    async def _switch(self, digest: str) -> None:
        await self._finish("switch", target=posixpath.join("releases", digest))

    async def _finish(self, action: str, **fields: Any) -> dict[str, Any]:
        request = json.dumps({"action": action, "root": self._layout.root, **fields})
        return await run_script(
            self._transport,
            self._connection.address.python,
            "finish",
            [request],
            deadline_s=SCRIPT_DEADLINE_S,
        )


def entry_modules(release: Release | None) -> list[str]:
    """What must be importable: the release's package with its command line, if it has one, and its training.

    A command line may answer `--help` without the libraries of training, and then proves nothing about them.
    """
    if release is None:
        return []
    package, files = module_of(release), release.manifest.get("files") or {}
    found = [f"{package}.{name}" for name in ("__main__", "train") if f"{package}/{name}.py" in files]
    return found or [package]


def describe_selftest(result: dict[str, Any]) -> DeployError | None:
    """What the environment's own interpreter could not do, or None."""
    if result["compile_error"]:
        return DeployError(
            f"the release does not compile with Python {result['python']}: {result['compile_error']}",
            reason="CompileFailed",
            hint="fix the trainer's source, or use an environment with a newer Python",
        )
    for module, error in result["import_errors"].items():
        is_missing = error["type"] == "ModuleNotFoundError"
        return DeployError(
            f"the environment cannot import {module}: {error['type']}: {error['message']}",
            reason="MissingModule" if is_missing else "ImportFailed",
            hint="add the missing package to the lock and deploy again"
            if is_missing
            else "read the traceback; the environment was not made current",
            traceback=error["traceback"],
        )
    return None
