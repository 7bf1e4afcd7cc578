"""Deploys on a local node: what is wrong is said precisely, and what was current stays current."""

from __future__ import annotations

import io
import json
import sys
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from supervisor.domain.errors import CommandFailedError, DeployError
from supervisor.reconciler.scripts import run_script
from supervisor.store.queries import current_deployment, get_node
from supervisor.transport.bundle import build_release
from supervisor.transport.local import LocalTransport
from tests.support.daemon import TOY_TRAINER, RunningDaemon, make_lock, running_daemon


@pytest.fixture
async def daemon(tmp_path: Path) -> AsyncIterator[RunningDaemon]:
    async with running_daemon(tmp_path) as running:
        yield running


async def test_a_deploy_makes_a_verified_pair_current_and_a_second_one_is_unchanged(
    daemon: RunningDaemon,
) -> None:
    await daemon.add_local_node(find_links=str(daemon.folder / "wheels"))

    first = await daemon.deploy(lock=make_lock(daemon.folder))
    again = await daemon.deploy(lock=make_lock(daemon.folder))

    assert first.status == again.status == "done", (first.error, again.error)
    assert (first.result["unchanged"], again.result["unchanged"]) == (False, True)
    release = daemon.root / "releases" / first.result["release"]
    assert (daemon.root / "current").resolve() == release.resolve()
    assert json.loads((release / "manifest.json").read_text())["digest"] == first.result["release"]
    assert list(release.glob("trainer/__pycache__/*.pyc"))
    assert len(await daemon.events(reason="Deployed")) == 1


async def test_a_release_that_cannot_be_imported_is_not_made_current(
    daemon: RunningDaemon, tmp_path: Path
) -> None:
    await daemon.add_local_node(find_links=str(daemon.folder / "wheels"))
    lock = make_lock(daemon.folder)
    good = await daemon.deploy(lock=lock)
    broken = tmp_path / "other" / "trainer"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("")
    (broken / "__main__.py").write_text("import a_module_that_the_lock_lacks\n")

    operation = await daemon.deploy(source=str(broken), lock=lock)

    assert operation.status == "failed"
    assert operation.error["reason"] == "MissingModule"
    assert "a_module_that_the_lock_lacks" in operation.error["message"]
    deployment = await daemon.daemon.store.read(lambda s: current_deployment(s, get_node(s, "local")))
    assert deployment.release_digest == good.result["release"]
    assert (daemon.root / "current").readlink().name == good.result["release"]


async def test_a_failed_environment_leaves_nothing_behind(daemon: RunningDaemon, tmp_path: Path) -> None:
    await daemon.add_local_node(find_links=str(daemon.folder / "wheels"))
    make_lock(daemon.folder)
    lock = tmp_path / "unhashed.txt"
    lock.write_text("toylib==1.0\n")

    operation = await daemon.deploy(lock=lock)

    assert operation.status == "failed"
    assert operation.error["reason"] == "LockNotHashed"
    assert list((daemon.root / "envs").iterdir()) == []


@pytest.mark.parametrize(
    ("source", "lock", "reason"),
    [("/nowhere/trainer", "bundled", "SourceNotFound"), (None, "/nowhere/lock.txt", "LockNotFound")],
    ids=["source", "lock"],
)
async def test_a_wrong_path_is_named(
    daemon: RunningDaemon, source: str | None, lock: str, reason: str
) -> None:
    await daemon.add_local_node()

    operation = await daemon.deploy(source=source, lock=lock)

    assert operation.status == "failed"
    assert operation.error["reason"] == reason
    assert "/nowhere" in operation.error["message"]
    assert operation.error["hint"]


async def test_a_node_without_python_is_a_finding_with_a_remedy(daemon: RunningDaemon) -> None:
    await daemon.add_local_node(python="/nowhere/python3")

    checked = await daemon.check()
    deployed = await daemon.deploy(lock=make_lock(daemon.folder))

    finding = next(item for item in checked.result["report"] if item["status"] == "fail")
    assert finding["reason"] == "NoPython"
    assert "--python" in finding["remedy"]
    assert deployed.error["reason"] == "NoPython"


async def test_a_root_that_cannot_be_written_is_a_finding(daemon: RunningDaemon, tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("not a folder")
    await daemon.add_local_node(root=str(blocker / "node"))

    checked = await daemon.check()

    assert checked.result["passed"] is False
    finding = next(item for item in checked.result["report"] if item["name"] == "root writable")
    assert finding["status"] == "fail"
    assert str(blocker / "node") in finding["message"]


async def test_a_good_node_passes_every_check(daemon: RunningDaemon) -> None:
    await daemon.add_local_node()

    checked = await daemon.check()

    assert checked.result["passed"] is True, checked.result["report"]
    assert {"reachable", "python", "root writable", "log dir free", "installer", "agent"} <= {
        item["name"] for item in checked.result["report"]
    }


async def unpack(root: Path, archive: bytes, digest: str) -> dict:
    (root / "tmp").mkdir(parents=True, exist_ok=True)
    file = root / "tmp" / "bundle.tar.gz"
    file.write_bytes(archive)
    return await run_script(
        LocalTransport(), sys.executable, "unpack", [str(file), str(root), digest], deadline_s=120.0
    )


async def test_a_release_is_unpacked_whole_and_its_archive_removed(tmp_path: Path) -> None:
    archive = build_release(TOY_TRAINER)

    first = await unpack(tmp_path, archive.data, archive.digest)
    again = await unpack(tmp_path, archive.data, archive.digest)

    assert (first["existing"], again["existing"]) == (False, True)
    unpacked = (tmp_path / "releases" / archive.digest / "trainer" / "__main__.py").read_bytes()
    assert unpacked == (TOY_TRAINER / "__main__.py").read_bytes()
    assert list((tmp_path / "tmp").iterdir()) == []


def tampered(name: str, content: bytes = b"x", kind: bytes = tarfile.REGTYPE) -> bytes:
    """The toy's archive with one more member."""
    source = build_release(TOY_TRAINER)
    buffer = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(source.data)) as old,
        tarfile.open(fileobj=buffer, mode="w:gz") as new,
    ):
        for member in old:
            new.addfile(member, old.extractfile(member))
        extra = tarfile.TarInfo(name)
        extra.size, extra.type, extra.linkname = len(content), kind, "/etc/passwd"
        new.addfile(extra, io.BytesIO(content))
    return buffer.getvalue()


@pytest.mark.parametrize(
    "archive",
    [
        tampered("../../escaped"),
        tampered("/absolute"),
        tampered("trainer/extra.py"),
        tampered("trainer/link", b"", tarfile.SYMTYPE),
        b"not an archive",
        build_release(TOY_TRAINER).data[:-200],
    ],
    ids=["parent", "absolute", "unlisted", "link", "garbage", "cut"],
)
async def test_a_bundle_that_is_not_what_was_sent_is_refused_and_leaves_nothing(
    tmp_path: Path, archive: bytes
) -> None:
    with pytest.raises(DeployError) as caught:
        await unpack(tmp_path / "node", archive, "d" * 64)

    assert caught.value.reason in {"ChecksumMismatch", "NodeFileError"}
    assert not (tmp_path / "node" / "releases" / ("d" * 64)).exists()
    assert not (tmp_path / "escaped").exists()
    assert list((tmp_path / "node" / "tmp").iterdir()) == []


async def test_noise_around_an_answer_is_not_the_answer() -> None:
    with pytest.raises(CommandFailedError) as caught:
        await run_script(LocalTransport(), "/bin/echo", "probe", ["/tmp", "/tmp"], deadline_s=120.0)

    assert caught.value.reason == "NodeScriptFailed"
