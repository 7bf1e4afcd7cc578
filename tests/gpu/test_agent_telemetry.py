"""The agent's NVML values beside nvidia-smi on a real GPU; its twin without one plays a fake NVML."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from tests.support.gpu_compare import compare, differences

pytestmark = pytest.mark.gpu


@pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="needs an NVIDIA GPU")
def test_agent_reads_what_nvidia_smi_reads(tmp_path: Path) -> None:
    result = compare(tmp_path, sys.executable)

    assert result["agent"]
    assert result["differences"] == {gpu["index"]: [] for gpu in result["agent"]}


def test_comparison_names_what_disagrees() -> None:
    gpu = {
        "uuid": "GPU-1",
        "name": "H200",
        "mem_total_bytes": 1000 << 20,
        "mem_used_bytes": 700 << 20,
        "power_w": 100.0,
        "temp_c": 30,
        "sm_clock_mhz": 1980,
        "util_ratio": 0.0,
    }
    row = {"uuid": "GPU-1", "name": "H200", "memory.total": "1000", "memory.used": "4", "power.draw": "101.5"}
    row.update({"temperature.gpu": "31", "clocks.sm": "1980", "utilization.gpu": "0"})

    assert differences(gpu, row) == ["mem_used_bytes"]
