"""Compares the agent's GPU samples with `nvidia-smi` on a machine that has GPUs.

`python -m tests.support.gpu_compare [PYTHON]` prints one JSON object and exits 0 when all values agree.
PYTHON is the interpreter that has `pynvml`, by default this one. Used by the gpu test and by hand; standard
library only.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.support.shim_bench import ShimBench

FIELDS = "index,uuid,name,memory.total,memory.used,power.draw,temperature.gpu,clocks.sm,utilization.gpu"
MIB = 1 << 20


def nvidia_smi() -> list[dict[str, Any]]:
    """One row per GPU as nvidia-smi prints it."""
    argv = ["nvidia-smi", f"--query-gpu={FIELDS}", "--format=csv,noheader,nounits"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
    names = FIELDS.split(",")
    return [
        dict(zip(names, [cell.strip() for cell in line.split(",")], strict=True))
        for line in done.stdout.splitlines()
    ]


def agent_sample(folder: Path, python: str) -> list[dict[str, Any]]:
    """One sample through the whole agent."""
    bench = ShimBench(folder)
    try:
        agent = bench.agent()
        agent.result("watch", attempt_ids=[], gpu={"python": python, "interval_s": 1.0})
        sample = agent.wait_event(lambda event: event["ev"] == "gpu")["sample"]
    finally:
        bench.close()
    if sample["reason"] is not None:
        raise RuntimeError(f"{sample['reason']}: {sample['message']}")
    return sample["gpus"]


def differences(gpu: dict[str, Any], row: dict[str, Any]) -> list[str]:
    """Names of the values that disagree; what moves by itself has a tolerance."""
    checks = {
        "uuid": gpu["uuid"] == row["uuid"],
        "name": gpu["name"] == row["name"],
        "mem_total_bytes": abs(gpu["mem_total_bytes"] / MIB - float(row["memory.total"])) <= 1,
        "mem_used_bytes": abs(gpu["mem_used_bytes"] / MIB - float(row["memory.used"])) <= 64,
        "power_w": abs(gpu["power_w"] - float(row["power.draw"])) <= 0.3 * float(row["power.draw"]) + 10,
        "temp_c": abs(gpu["temp_c"] - float(row["temperature.gpu"])) <= 5,
        "sm_clock_mhz": gpu["sm_clock_mhz"] > 0 and float(row["clocks.sm"]) > 0,
        "util_ratio": abs(gpu["util_ratio"] * 100 - float(row["utilization.gpu"])) <= 30,
    }
    return [name for name, agrees in checks.items() if not agrees]


def compare(folder: Path, python: str) -> dict[str, Any]:
    """Both readings side by side, and what disagrees."""
    gpus, rows = agent_sample(folder, python), nvidia_smi()
    by_uuid = {row["uuid"]: row for row in rows}
    return {
        "agent": gpus,
        "nvidia_smi": rows,
        "differences": {gpu["index"]: differences(gpu, by_uuid[gpu["uuid"]]) for gpu in gpus},
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        result = compare(Path(scratch), sys.argv[1] if len(sys.argv) > 1 else sys.executable)
    print(json.dumps(result, indent=1))
    sys.exit(1 if any(result["differences"].values()) else 0)
