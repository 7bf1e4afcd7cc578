"""The daemon on a local node, over real processes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlmodel import select

from supervisor.store.tables import MetricLine
from tests.support.daemon import RunningDaemon, end_leftovers, make_lock, make_spec, running_daemon


@pytest.fixture
async def daemon(tmp_path: Path) -> AsyncIterator[RunningDaemon]:
    async with running_daemon(tmp_path) as running:
        yield running
    end_leftovers(tmp_path / "node")


@pytest.fixture
async def deployed(daemon: RunningDaemon) -> RunningDaemon:
    await daemon.add_local_node(find_links=str(daemon.folder / "wheels"))
    operation = await daemon.deploy(lock=make_lock(daemon.folder))
    assert operation.status == "done", operation.error
    return daemon


async def test_a_run_is_launched_becomes_ready_reports_metrics_and_stops(deployed: RunningDaemon) -> None:
    await deployed.put_run(make_spec("local", output_dir=deployed.folder / "out", args=["--need", "toylib"]))

    started = await deployed.start()
    assert started.status == "done", started.error
    attempt = await deployed.attempt(1, "ready")
    lines = await deployed.until(lambda s: s.exec(select(MetricLine)).all(), "metrics")
    stopped = await deployed.stop()

    assert attempt.identity is not None
    assert lines[0].record["queue"]["buckets"] == [{"upto": 512, "depth": 3}]
    assert stopped.status == "done", stopped.error
    ended = await deployed.attempt(1, "stopped")
    assert ended.exit_code == 9
    assert ended.last_checkpoint is not None
    assert Path(ended.log_path).read_text().count("toy trainer: pid") == 1
