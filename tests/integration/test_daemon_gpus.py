"""GPUs as far as NVML tells: chosen by index, checked before launch, measured free before the next start."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlmodel import Session

from supervisor.store.queries import newest_gpu_sample
from tests.support.daemon import RunningDaemon, end_leftovers, make_lock, make_spec, running_daemon

GPUS = ["--target-gpus", "0", "--drafter-gpus", "1"]


@pytest.fixture
async def daemon(tmp_path: Path) -> AsyncIterator[RunningDaemon]:
    """A node whose environment has a pynvml that plays two GPUs."""
    async with running_daemon(tmp_path) as running:
        node = await running.add_local_node(find_links=str(tmp_path / "wheels"))
        operation = await running.deploy(lock=make_lock(tmp_path, nvml=True))
        assert operation.status == "done", operation.error
        await running.until(
            lambda s: (sample := newest_gpu_sample(s, node.id)) and not sample.reason and sample,
            "GPU samples",
        )
        yield running
    end_leftovers(tmp_path / "node")


def use_memory(daemon: RunningDaemon, environment: str, used: int) -> None:
    """Make the played GPUs report this many bytes in use."""
    (daemon.root / "envs" / environment / "fake_nvml.json").write_text(f'{{"used": {used}}}')


def used_bytes(session: Session, node_id: str) -> int | None:
    """What the newest stored sample says of the first GPU."""
    sample = newest_gpu_sample(session, node_id)
    return sample.gpus[0]["mem_used_bytes"] if sample is not None and sample.gpus else None


async def test_the_gpus_of_a_run_are_leased_by_uuid(daemon: RunningDaemon) -> None:
    await daemon.put_run(make_spec("local", output_dir=daemon.folder / "out", args=GPUS))

    await daemon.start()
    attempt = await daemon.attempt(1, "ready")
    locks = {path.name for path in (daemon.root / "locks").iterdir()}
    await daemon.stop()

    assert attempt.gpus == [{"index": 0, "uuid": "GPU-fake-0"}, {"index": 1, "uuid": "GPU-fake-1"}]
    assert {"gpu-GPU-fake-0", "gpu-GPU-fake-1"} <= locks


async def test_a_second_run_on_the_same_gpu_is_refused_and_names_the_holder(daemon: RunningDaemon) -> None:
    await daemon.put_run(make_spec("local", output_dir=daemon.folder / "out", args=GPUS))
    await daemon.put_run(
        make_spec(
            "local", "other", output_dir=daemon.folder / "other", args=GPUS, restart={"policy": "never"}
        )
    )
    await daemon.start()

    refused = await daemon.start("other")
    await daemon.stop()

    assert refused.status == "failed"
    assert refused.error["reason"] == "LockHeld"
    assert (await daemon.attempt(1, name="other")).state == "launch_failed"


async def test_a_gpu_that_does_not_exist_is_refused_before_the_launch(daemon: RunningDaemon) -> None:
    await daemon.put_run(make_spec("local", output_dir=daemon.folder / "out", args=["--target-gpus", "0,7"]))

    operation = await daemon.start()

    assert operation.status == "failed"
    assert operation.error["reason"] == "GpuNotFound"
    assert "GPU 7" in operation.error["message"]
    assert (await daemon.attempt(1)).launching_at is None


async def test_memory_that_is_not_released_holds_the_run_until_it_is(daemon: RunningDaemon) -> None:
    await daemon.put_run(
        make_spec("local", output_dir=daemon.folder / "out", args=GPUS, stop={"gpu_wait_s": 0.5})
    )
    await daemon.start()
    attempt = await daemon.attempt(1, "ready")
    use_memory(daemon, attempt.environment_digest, 1 << 30)
    await daemon.until(lambda s: used_bytes(s, attempt.node_id) == 1 << 30, "the memory to be in use")
    await daemon.stop()

    held = await daemon.start()
    attempts = await daemon.attempts()
    use_memory(daemon, attempt.environment_digest, 1 << 20)
    await daemon.attempt(1, "stopped")
    await daemon.until(lambda s: used_bytes(s, attempt.node_id) == 1 << 20, "the memory to be released")
    again = await daemon.start()
    await daemon.stop()

    assert held.status == "failed"
    assert held.error["reason"] == "GpuNotReleased"
    assert len(attempts) == 1
    assert again.status == "done", again.error
