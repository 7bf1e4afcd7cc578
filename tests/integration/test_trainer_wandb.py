"""W&B for real, without a service: online falls back to offline, training is not harmed, nothing is lost."""

import json
import subprocess
import sys

import pytest

from tests.support.tiny import tiny_target, write_tiny_corpus
from tests.support.trainer_runs import launch, read_status, settings_for

pytest.importorskip("wandb")


def test_unreachable_service_means_offline_files_with_every_line(tmp_path):
    target, data = tiny_target(tmp_path), write_tiny_corpus(tmp_path / "data")
    settings = settings_for(
        target, data, tmp_path / "out", wandb__mode="online", wandb__init_timeout_s=3.0, wandb__project="p"
    )
    run_dir = tmp_path / "run"
    environ = {
        "DFLASH_RUN_DIR": str(run_dir),
        "WANDB_BASE_URL": "http://127.0.0.1:9",
        "WANDB_API_KEY": "a" * 40,
        "WANDB_CONFIG_DIR": str(tmp_path / "config"),
        "WANDB_CACHE_DIR": str(tmp_path / "cache"),
    }

    process = launch(settings, tmp_path / "log", **environ)

    assert process.wait(120) == 0, (tmp_path / "log").read_text()
    log = (tmp_path / "log").read_text()
    assert "W&B ONLINE FAILED" in log
    assert "a" * 40 not in log
    assert read_status(run_dir)["degraded"]["wandb"] == "offline (online failed)"
    file = next(run_dir.glob("wandb/offline-run-*/run-*.wandb"))
    inspected = subprocess.run(
        [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    records = [json.loads(line) for line in inspected.stdout.splitlines() if line.startswith("{")]
    steps = [record["history"]["item"]["step"] for record in records if record["type"] == "history"]
    assert steps[-1] == 18
    assert any("train/loss" in record["history"]["item"] for record in records if record["type"] == "history")
