"""Training runs on the tiny target for tests: settings, in-process runs, and real subprocesses.

Needs no network and no GPU. `settings_for` gives flags and overrides of a run that takes about a second once
torch is loaded; `launch` starts the real command line. Must not be used outside tests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]

DEFAULTS: dict[str, object] = {
    "optim.epochs": 2,
    "drafter.num_layers": 2,
    "drafter.block_size": 4,
    "loss.max_anchors": 16,
    "data.token_budget": 128,
    "data.max_seq_len": 64,
    "queue.hs_min_ready": 2,
    "queue.hs_max_depth": 4,
    "checkpoint.every": 0,
    "telemetry.log_every": 2,
    "devices.cpu_threads": 1,
}


def settings_for(model: Path, data: Path, output: Path, **changes: object) -> list[str]:
    """`table.key=value` texts; `changes` use `__` for the dot."""
    values = DEFAULTS | {key.replace("__", "."): value for key, value in changes.items()}
    paths = {"paths.target_model": model, "paths.data_dir": data, "paths.output_dir": output}
    return [f"{key}={_toml(value)}" for key, value in (paths | values).items()]


def run_here(settings: list[str], **environ: str) -> int:
    """Run `Trainer.train` in this process (main thread)."""
    from trainer.flags import resolve
    from trainer.train import Trainer

    return Trainer(resolve({}, overrides=settings, environ=environ)).train()


def launch(settings: list[str], log: Path, **environ: str) -> subprocess.Popen[bytes]:
    """Start `python -m trainer train` as its own process; its output goes to `log`."""
    words = [word for text in settings for word in ("--set", text)]
    with log.open("wb") as stream:
        return subprocess.Popen(
            [sys.executable, "-m", "trainer", "train", *words],
            stdout=stream,
            stderr=subprocess.STDOUT,
            cwd=REPOSITORY,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | environ,
        )


def read_status(run_dir: Path) -> dict[str, Any]:
    """The status record, empty before the first one is there."""
    try:
        record: dict[str, Any] = json.loads((run_dir / "status.json").read_text())
    except FileNotFoundError:
        return {}
    return record


def await_status(
    process: subprocess.Popen[bytes], run_dir: Path, wanted: Callable[[Mapping[str, Any]], bool]
) -> dict[str, Any]:
    """Wait until the status record satisfies `wanted`; fails when the process ends before."""
    for _ in range(36_000):
        status = read_status(run_dir)
        if status and wanted(status):
            return status
        assert process.poll() is None, (
            f"the trainer ended with {process.returncode} before the awaited status"
        )
        time.sleep(0.005)
    raise AssertionError(f"the awaited status did not come: {read_status(run_dir)}")


def await_until(is_so: Callable[[], bool], limit_s: float = 120.0) -> None:
    """Wait until something holds."""
    end = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < end, f"waited {limit_s:g} s in vain"
        time.sleep(0.005)


def await_end_of_workers() -> None:
    """Wait for threads that a failed run in this process has left: those of the next one have their names."""
    for thread in threading.enumerate():
        if thread.name.startswith(("feeder", "target-", "drafter-", "checkpoint")):
            thread.join(120)


def metrics_lines(run_dir: Path) -> list[dict[str, Any]]:
    """All lines of `metrics.ndjson`."""
    return [json.loads(line) for line in (run_dir / "metrics.ndjson").read_text().splitlines()]


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(list(value)) if isinstance(value, tuple | list) else str(value)
