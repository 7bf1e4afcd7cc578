"""Runs that spoil what they share with the supervisor: their reports, and the folder of their attempt."""

from __future__ import annotations

import shutil
import signal
import sys
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from sqlmodel import Session, select

from supervisor.shim.proc import is_alive, signal_identity
from supervisor.store.queries import find_run
from supervisor.store.tables import MetricLine
from tests.support.daemon import RunningDaemon, end_leftovers, make_spec, running_daemon

STOP = {"grace_s": 1.0, "extend_max_s": 1.0, "term_s": 1.0}
"""Over soon for those that take no notice; what a kill may take stays long."""
REPORTS = {
    "types": """
        report = {"v": 1, "phase": {"a": [1]}, "step": "many", "phase_since": 1e300}
        report["stop"] = {"extend_s": 10**400}
        report["last_checkpoint"] = {"step": "x", "path": ["y"], "saved_at": 1e300}
        (folder / "status.json").write_text(json.dumps(report))
        line = {"t": 10**400, "step": 10**40, "train": {"tok_s": 10**400}}
        (folder / "metrics.ndjson").write_text(json.dumps(line) + chr(10))
        """,
    "pipes": """
        os.mkfifo(folder / "status.json")
        os.mkfifo(folder / "metrics.ndjson")
        """,
}


@pytest.fixture
async def daemon(tmp_path: Path) -> AsyncIterator[RunningDaemon]:
    async with running_daemon(tmp_path) as running:
        await running.add_local_node()
        yield running
    end_leftovers(tmp_path / "node")


def spec_of_program(folder: Path, code: str, name: str = "toy") -> dict[str, Any]:
    head = "import json, os, pathlib, signal, time\nfolder = pathlib.Path(os.environ['DFLASH_RUN_DIR'])\n"
    body = head + textwrap.dedent(code) + "\nprint('here', flush=True)\nwhile True: time.sleep(0.1)\n"
    return make_spec(
        "local",
        name,
        output_dir=folder / "out",
        source="none",
        environment={"python": sys.executable},
        command={"args": None, "argv": [sys.executable, "-c", body]},
        restart={"policy": "never"},
        stop=STOP,
    )


@pytest.mark.parametrize("kind", REPORTS)
async def test_a_run_with_senseless_reports_can_be_stopped_and_spoils_no_other(
    daemon: RunningDaemon, kind: str
) -> None:
    writes_metrics = """
        line = json.dumps({"v": 1, "t": time.time(), "step": 1, "train": {"loss": 1.0}})
        (folder / "metrics.ndjson").write_text(line + chr(10))
        """
    await daemon.put_run(spec_of_program(daemon.folder, REPORTS[kind]))
    assert (await daemon.start()).status == "done"
    await daemon.put_run(spec_of_program(daemon.folder, writes_metrics, name="neighbour"))
    await daemon.start("neighbour")

    await daemon.until(
        lambda session: session.exec(select(MetricLine).where(MetricLine.step == 1)).first(),
        "the neighbour's metrics",
    )
    operation = await daemon.stop()
    assert operation.status == "done", operation.error
    assert (await daemon.attempt(1)).state == "stopped"
    assert (await daemon.stop("neighbour")).status == "done"


async def test_a_run_whose_folder_was_removed_is_watched_and_stopped_by_its_identity(
    daemon: RunningDaemon,
) -> None:
    await daemon.put_run(spec_of_program(daemon.folder, "signal.signal(signal.SIGTERM, signal.SIG_IGN)"))
    await daemon.start()
    attempt = await daemon.attempt(1, "ready")
    shutil.rmtree(daemon.root / "attempts")

    def has_noticed(session: Session) -> bool:
        run = find_run(session, "toy")
        assert run is not None
        return any(item["reason"] == "FolderGone" for item in run.conditions)

    await daemon.until(has_noticed, "the condition that the folder is gone")
    assert (await daemon.attempt(1)).state == "ready"
    operation = await daemon.stop()

    assert operation.status == "done", operation.error
    assert (await daemon.attempt(1)).state == "stopped"
    assert attempt.identity is not None
    assert is_alive(attempt.identity) is False
    assert attempt.shim_identity is not None
    assert is_alive(attempt.shim_identity) is False


async def test_a_run_that_dies_after_its_folder_was_removed_is_lost_and_not_running_for_ever(
    daemon: RunningDaemon,
) -> None:
    await daemon.put_run(spec_of_program(daemon.folder, ""))
    await daemon.start()
    attempt = await daemon.attempt(1, "ready")
    shutil.rmtree(daemon.root / "attempts")
    assert attempt.identity is not None

    assert signal_identity(attempt.identity, signal.SIGKILL)

    assert (await daemon.attempt(1, "lost")).reason == "ShimLost"
