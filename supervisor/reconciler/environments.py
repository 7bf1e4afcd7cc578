"""Builds a Python environment on a node from a hashed lock, beside the others, with the installer we bring.

Called by `deploy`. An environment lives at its final path from the first byte (environments cannot be moved)
and counts only once `complete.json` lies in it, written last; what an interrupted build left is removed.
A running environment is never touched. Nothing is resolved on the node but torch.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import platform
import posixpath
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import uv

from supervisor.domain.errors import CommandFailedError, DeployError
from supervisor.domain.layout import Layout
from supervisor.reconciler.scripts import ensure_folder, run_script
from supervisor.transport.base import CommandResult, Transport

BUNDLED_TORCH = "torch==2.13.0"
"""What the bundled trainer runs on; the node's find-links folder or torch index decides which build."""

INSTALL_DEADLINE_S = 3600.0
PUSH_DEADLINE_S = 900.0
SCRIPT_DEADLINE_S = 120.0
_TORCH_LINE = re.compile(r"^torch(?:\[[^\]]*\])?\s*(?:==|@|>=|~=)", re.MULTILINE)
_TORCH_COMMENT = re.compile(r"^#\s*torch:\s*(torch\s*==\s*[0-9A-Za-z.+!_-]+)\s*$", re.MULTILINE)
_OUTPUT_TAIL = 4000
_UNKNOWN_ISSUER = b"UnknownIssuer"

Report = Callable[[str, str, int | None, int | None], None]
"""Progress: step, message, done, total."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentPlan:
    """What is to be built, and where."""

    digest: str
    lock_text: str
    torch_requirement: str | None
    python: str
    find_links: str | None
    torch_index_url: str | None


@lru_cache(maxsize=1)
def find_uv() -> tuple[Path, str]:
    """The installer's file and its SHA-256, computed once per process."""
    path = Path(uv.find_uv_bin())
    hasher = hashlib.sha256()
    with path.open("rb") as handle:
        while chunk := handle.read(1 << 20):
            hasher.update(chunk)
    return path, hasher.hexdigest()


def local_machine() -> str:
    """Processor name of the machine that our installer binary is for."""
    return platform.machine()


def torch_requirement_for(lock_text: str, *, is_bundled_source: bool) -> str | None:
    """Which torch the environment gets beside its lock.

    A lock that names torch itself needs nothing more. A comment line `# torch: torch==X` in it asks for that
    one. The bundled trainer always needs torch; any other source gets none when its lock says nothing.
    """
    if _TORCH_LINE.search(lock_text):
        return None
    comment = _TORCH_COMMENT.search(lock_text)
    if comment is not None:
        return re.sub(r"\s+", "", comment.group(1))
    return BUNDLED_TORCH if is_bundled_source else None


class EnvironmentBuilder:
    """Builds on one node; `python` is the node's own interpreter, which runs our small programs there."""

    def __init__(self, transport: Transport, layout: Layout, *, python: str, report: Report) -> None:
        self._transport = transport
        self._layout = layout
        self._python = python
        self._report = report

    async def build(self, plan: EnvironmentPlan) -> bool:
        """Make the environment complete. False when it was complete already.

        Raises:
            DeployError: with the installer's last words, reason and remedy.
        """
        begun = await self._finish("begin_environment", digest=plan.digest)
        if begun["is_complete"]:
            return False
        uv_path = await self._push_uv()
        try:
            await self._install(uv_path, plan)
        except DeployError:
            await self._finish("discard_environment", digest=plan.digest)
            raise
        return True

    async def complete(self, digest: str, record: dict[str, Any]) -> None:
        """Declare it an environment: the last step, after its self-test."""
        await self._finish("complete_environment", digest=digest, record=record)

    async def discard(self, digest: str) -> None:
        """Remove a build that did not pass its self-test."""
        await self._finish("discard_environment", digest=digest)

    async def _finish(self, action: str, **fields: Any) -> dict[str, Any]:
        request = json.dumps({"action": action, "root": self._layout.root, **fields})
        return await run_script(
            self._transport, self._python, "finish", [request], deadline_s=SCRIPT_DEADLINE_S
        )

    async def _push_uv(self) -> str:
        path, digest = await asyncio.to_thread(find_uv)
        target = self._layout.uv(digest)
        relative = target.removeprefix(f"{self._layout.root}/")
        found = await self._finish("inspect", want={"uv": relative})
        if not found["found"]["uv"]:
            self._report("installer", "sending the installer", 0, path.stat().st_size)
            await ensure_folder(self._transport, posixpath.dirname(target))
            await self._transport.put(
                path,
                target,
                mode=0o755,
                progress=lambda done, total: self._report("installer", "sending the installer", done, total),
                deadline_s=PUSH_DEADLINE_S,
            )
        return target

    async def _install(self, uv_path: str, plan: EnvironmentPlan) -> None:
        folder = self._layout.environment(plan.digest)
        lock_path = f"{self._layout.temporary}/lock-{plan.digest}.txt"
        self._report("environment", "creating the environment", None, None)
        await self._uv(
            uv_path, ["venv", "--no-project", "--no-python-downloads", "--python", plan.python, folder]
        )
        await self._transport.put(plan.lock_text.encode(), lock_path, deadline_s=SCRIPT_DEADLINE_S)
        python = self._layout.python(plan.digest)
        self._report("packages", "installing the locked packages", None, None)
        await self._install_lock(uv_path, python, lock_path, plan)
        if plan.torch_requirement is not None:
            self._report("torch", f"installing {plan.torch_requirement}", None, None)
            await self._install_torch(uv_path, python, plan)

    async def _install_lock(self, uv_path: str, python: str, lock_path: str, plan: EnvironmentPlan) -> None:
        """From the node's own folder alone if that suffices, else with the index beside it."""
        words = ["pip", "install", "--python", python, "--require-hashes", "--no-deps", "--compile-bytecode"]
        if not plan.lock_text.strip():
            return
        if plan.find_links is not None:
            local = [*words, "--no-index", "--find-links", plan.find_links, "-r", lock_path]
            result = await self._run_uv(uv_path, local)
            if result.exit_code == 0:
                return
            failure = explain_uv_failure(local, result)
            if failure.reason != "PackageNotFound":
                raise failure
            words += ["--find-links", plan.find_links]
        await self._uv(uv_path, [*words, "-r", lock_path])

    async def _install_torch(self, uv_path: str, python: str, plan: EnvironmentPlan) -> None:
        """From the node's torch index, else its folder of wheels, else the installer's default index.

        From an index torch brings its dependencies: a build for CUDA needs the libraries that it names.
        """
        assert plan.torch_requirement is not None
        words = ["pip", "install", "--python", python, "--compile-bytecode"]
        if plan.torch_index_url is not None:
            await self._uv(uv_path, [*words, "--index-url", plan.torch_index_url, plan.torch_requirement])
            return
        if plan.find_links is not None:
            # A build for CUDA brings libraries of its own, a build for CPU nothing that the lock has not.
            for dependencies in ([], ["--no-deps"]):
                local = [*words, *dependencies, "--no-index", "--find-links", plan.find_links]
                result = await self._run_uv(uv_path, [*local, plan.torch_requirement])
                if result.exit_code == 0:
                    return
                failure = explain_uv_failure(local, result)
                if failure.reason != "PackageNotFound":
                    raise failure
        self._report("torch", f"installing {plan.torch_requirement} from the default index", None, None)
        await self._uv(uv_path, [*words, plan.torch_requirement])

    async def _uv(self, uv_path: str, words: Sequence[str]) -> None:
        result = await self._run_uv(uv_path, words)
        if result.exit_code != 0:
            raise explain_uv_failure(words, result)

    async def _run_uv(self, uv_path: str, words: Sequence[str]) -> CommandResult:
        cache = f"{self._layout.root}/tools/uv-cache"
        argv = [uv_path, *words, "--no-config", "--no-progress", "--color", "never", "--cache-dir", cache]
        try:
            result = await self._transport.run(argv, deadline_s=INSTALL_DEADLINE_S)
            if result.exit_code != 0 and _UNKNOWN_ISSUER in result.stderr:
                # An authority that only this site knows may be in the node's own store. Not the first choice,
                # because a minimal container has no store at all.
                result = await self._transport.run([*argv, "--system-certs"], deadline_s=INSTALL_DEADLINE_S)
            return result
        except CommandFailedError as error:
            raise DeployError(
                f"the installer cannot run on the node: {error.message}",
                reason="InstallerUnsupported",
                hint="use an external interpreter: [environment] python = PATH",
            ) from error


_CAUSES: tuple[tuple[str, str, str], ...] = (
    ("No space left on device", "NoSpace", "free disk space on the node's root"),
    (
        "hash mismatch",
        "HashMismatch",
        "the package source offers other files than the lock names: check both",
    ),
    (
        "Hash mismatch",
        "HashMismatch",
        "the package source offers other files than the lock names: check both",
    ),
    (
        "dns error",
        "NoNetwork",
        "give the node network access, or a folder of wheels: node set --find-links DIR",
    ),
    ("Failed to fetch", "NoNetwork", "give the node network access, or a folder of wheels: --find-links DIR"),
    ("error sending request", "NoNetwork", "give the node network access, or wheels: --find-links DIR"),
    (
        "No interpreter found",
        "NoPython",
        "install a Python that the lock supports, or node set --python PATH",
    ),
    (
        "not found in the package registry",
        "PackageNotFound",
        "check the lock, or the node's --find-links folder",
    ),
    ("not found in the provided package locations", "PackageNotFound", "check --find-links on the node"),
    ("there is no version of", "PackageNotFound", "check the lock against the package source"),
    ("must have a hash", "LockNotHashed", "make the lock with `uv pip compile --generate-hashes`"),
    ("must be pinned", "LockNotHashed", "make the lock with `uv pip compile --generate-hashes`"),
    ("all requirements must have", "LockNotHashed", "make the lock with `uv pip compile --generate-hashes`"),
    ("--require-hashes", "LockNotHashed", "make the lock with `uv pip compile --generate-hashes`"),
)


def explain_uv_failure(words: Sequence[str], result: CommandResult) -> DeployError:
    """Turn the installer's output into a reason and a remedy."""
    output = (result.stderr + result.stdout).decode(errors="replace").strip()[-_OUTPUT_TAIL:]
    if result.exit_code in (126, 127):
        reason, remedy = "InstallerUnsupported", "use an external interpreter: [environment] python = PATH"
    else:
        reason, remedy = next(
            ((reason, remedy) for text, reason, remedy in _CAUSES if text in output),
            ("InstallFailed", "read the installer's output; nothing that runs was touched"),
        )
    return DeployError(
        f"`uv {' '.join(words[:2])}` failed on the node: exit code {result.exit_code}: {output}",
        reason=reason,
        hint=remedy,
        exit_code=result.exit_code,
        output=output,
    )
