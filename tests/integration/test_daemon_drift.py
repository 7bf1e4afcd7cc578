"""A dependency change restarts the run by itself, on an environment beside the old one, or goes back once."""

from __future__ import annotations

import venv
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from supervisor.store.queries import find_run, newest_attempt
from tests.support.daemon import RunningDaemon, end_leftovers, make_lock, make_spec, running_daemon

NOW = {"debounce_s": 0.0, "min_interval_s": 0.0}


@pytest.fixture
async def daemon(tmp_path: Path) -> AsyncIterator[RunningDaemon]:
    async with running_daemon(tmp_path) as running:
        await running.add_local_node(find_links=str(tmp_path / "wheels"))
        operation = await running.deploy(lock=make_lock(tmp_path))
        assert operation.status == "done", operation.error
        yield running
    end_leftovers(tmp_path / "node")


async def start(daemon: RunningDaemon, **changes: Any) -> bytes:
    """Start the toy run on the first pair; returns its log as it is once ready."""
    args = ["--need", "toylib", "--checkpoint-every", "5", "--step-s", "0.1", *changes.pop("args", [])]
    await daemon.put_run(make_spec("local", output_dir=daemon.folder / "out", args=args, **changes))
    operation = await daemon.start()
    assert operation.status == "done", operation.error
    attempt = await daemon.attempt(1, "ready")
    return Path(attempt.log_path).read_bytes()


async def test_a_changed_lock_restarts_the_run_on_a_new_environment_from_its_checkpoint(
    daemon: RunningDaemon,
) -> None:
    before = await start(daemon, drift={"release": "at_next_checkpoint", **NOW})
    old = await daemon.attempt(1)

    operation = await daemon.deploy(lock=make_lock(daemon.folder, toylib="1.1"))
    second = await daemon.attempt(2, "ready")
    await daemon.stop()

    assert operation.status == "done", operation.error
    first = await daemon.attempt(1)
    assert (first.state, first.reason) == ("stopped", "DriftRestart")
    assert second.trigger == "drift"
    assert second.environment_digest != old.environment_digest
    assert (daemon.root / "envs" / old.environment_digest / "complete.json").exists()
    log = Path(second.log_path).read_text()
    assert f"resume latest from step {first.last_checkpoint['step']}, {{'toylib': '1.1'}}" in log
    assert Path(first.log_path).read_bytes().startswith(before)
    found = await daemon.events(reason="DriftFound")
    assert found[0].data["class"] == "release"
    assert "toylib" in found[0].message
    assert found[0].data["cost"]["overhead_s"] is not None


async def test_a_drift_that_is_only_to_be_told_changes_nothing(daemon: RunningDaemon) -> None:
    await start(daemon, drift={"release": "notify", **NOW})

    await daemon.deploy(lock=make_lock(daemon.folder, toylib="1.1"))
    run = await daemon.until(
        lambda s: (r := find_run(s, "toy")) and (r.drift or {}).get("class") and r, "the drift to be seen"
    )
    attempts = await daemon.attempts()

    assert [item.state for item in attempts] == ["ready"]
    kinds = {item["type"]: item["status"] for item in run.conditions}
    assert kinds["EnvironmentInSync"] == "false"
    assert kinds["ReleaseCurrent"] == "true"
    await daemon.restart()
    second = await daemon.attempt(2, "ready")
    await daemon.stop()
    assert "'toylib': '1.1'" in Path(second.log_path).read_text()


async def test_a_new_pair_that_fails_goes_back_once_to_the_last_good_one(daemon: RunningDaemon) -> None:
    await start(daemon, args=["--fail-with", "toylib==1.1"], drift={"release": "now", **NOW})
    good = await daemon.attempt(1)

    await daemon.deploy(lock=make_lock(daemon.folder, toylib="1.1"))
    bad = await daemon.attempt(2, "failed")
    back = await daemon.attempt(3, "ready")
    await daemon.stop()

    assert bad.environment_digest != good.environment_digest
    assert back.trigger == "revert"
    assert back.environment_digest == good.environment_digest
    assert [event.reason for event in await daemon.events(reason="Reverted")] == ["Reverted"]
    assert len(await daemon.attempts()) == 3


async def test_an_unchanged_deploy_changes_nothing(daemon: RunningDaemon) -> None:
    await start(daemon, drift={"release": "now", **NOW})

    operation = await daemon.deploy(lock=make_lock(daemon.folder))

    assert operation.status == "done"
    assert operation.result["unchanged"] is True
    assert [item.state for item in await daemon.attempts()] == ["ready"]
    assert await daemon.events(reason="DriftFound") == []
    await daemon.stop()


async def test_a_package_changed_in_the_running_environment_is_shown_with_its_meaning(
    daemon: RunningDaemon,
) -> None:
    await start(daemon)
    await daemon.until(
        lambda s: (r := find_run(s, "toy")) and _live(s, r).fingerprint is not None, "the launch fingerprint"
    )
    attempt = await daemon.attempt(1)
    packages = next(
        (daemon.root / "envs" / attempt.environment_digest / "lib").glob("python3*/site-packages")
    )
    info = daemon.folder / "nvidia_ml_py-13.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: nvidia-ml-py\nVersion: 13.1\n")
    info.rename(packages / info.name)

    run = await daemon.until(
        lambda s: (r := find_run(s, "toy")) and (r.drift or {}).get("changes") and r, "the drift to be seen"
    )
    await daemon.stop()

    change = run.drift["changes"][0]
    assert (change["name"], change["old"], change["new"]) == ("nvidia-ml-py", None, "13.1")
    assert "next start" in change["meaning"]


async def test_a_package_changed_in_an_environment_of_the_users_own_is_drift_too_and_it_is_never_written_to(
    daemon: RunningDaemon,
) -> None:
    home = daemon.folder / "own"
    venv.create(home, with_pip=False)
    packages = next((home / "lib").glob("python3*/site-packages"))
    with zipfile.ZipFile(next((daemon.folder / "wheels").glob("toylib-*.whl"))) as wheel:
        wheel.extractall(packages)
    before = sorted(path for path in home.rglob("*") if "__pycache__" not in path.parts)
    await start(daemon, environment={"python": str(home / "bin" / "python")})
    await daemon.until(
        lambda s: (r := find_run(s, "toy")) and _live(s, r).fingerprint is not None, "the launch fingerprint"
    )
    after = sorted(path for path in home.rglob("*") if "__pycache__" not in path.parts)
    metadata = next(packages.glob("toylib-*.dist-info")) / "METADATA"
    changed = daemon.folder / "METADATA"
    changed.write_text(metadata.read_text().replace("Version: 1.0", "Version: 2.0"))
    changed.rename(metadata)
    (packages / "touched").mkdir()

    run = await daemon.until(
        lambda s: (r := find_run(s, "toy")) and (r.drift or {}).get("changes") and r, "the drift to be seen"
    )
    condition = next(item for item in run.conditions if item["type"] == "EnvironmentInSync")
    await daemon.stop()

    assert before == after
    change = run.drift["changes"][0]
    assert (change["name"], change["old"], change["new"]) == ("toylib", "1.0", "2.0")
    assert condition["status"] == "false"


async def test_missing_telemetry_is_refused_when_required_and_shown_when_wanted(
    daemon: RunningDaemon,
) -> None:
    await daemon.put_run(
        make_spec("local", "strict", output_dir=daemon.folder / "strict", capabilities={"nvml": "required"})
    )
    refused = await daemon.start("strict")
    await start(daemon, capabilities={"nvml": "wanted"}, drift=NOW)
    run = await daemon.run()
    capabilities = next(item for item in run.conditions if item["type"] == "CapabilitiesOK")

    await daemon.deploy(lock=make_lock(daemon.folder, nvml=True))
    await daemon.attempt(2, "ready")
    condition = await until_true(daemon, "TelemetryOK")
    await until_true(daemon, "CapabilitiesOK")
    await daemon.stop()

    assert refused.status == "failed"
    assert refused.error["reason"] == "MissingDependency"
    assert "nvidia-ml-py" in refused.error["hint"]
    assert capabilities["status"] == "false"
    assert condition["reason"] == "Sampling"


async def until_true(daemon: RunningDaemon, kind: str) -> dict[str, Any]:
    """The run's condition of this kind once it is true."""

    def read(session: Any) -> dict[str, Any] | None:
        conditions = find_run(session, "toy").conditions
        return next((item for item in conditions if (item["type"], item["status"]) == (kind, "true")), None)

    return await daemon.until(read, f"{kind} to become true")


def _live(session: Any, run: Any) -> Any:
    return newest_attempt(session, run.id)
