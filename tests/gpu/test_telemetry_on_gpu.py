"""Telemetry on CUDA: timing that never waits, allocator figures, and cards matched by uuid.

CPU twins: `tests/unit/trainer/test_pipeline_parts.py` and `tests/unit/trainer/test_nvml.py`.
"""

from __future__ import annotations

import pytest
import torch

from trainer.pipeline.timers import StageTimers, cuda_memory, find_uuid
from trainer.telemetry.fields import FIELDS
from trainer.telemetry.nvml import NvmlReader, name_devices

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    # torch calls its own check for synchronization a prototype
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
]


def test_device_stages_are_timed_without_waiting_and_read_later() -> None:
    timers = StageTimers("cuda:0")
    work = torch.randn(4096, 4096, device="cuda:0")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with timers.stage("forward"):
            for _ in range(20):
                work = work @ work
        timers.take()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()

    assert timers.take()["forward_ms"] > 0


def test_allocator_figures_have_every_documented_field() -> None:
    held = torch.zeros(1 << 20, device="cuda:0")

    record = cuda_memory(["cuda:0"])[0]

    assert {f"cuda/*/{key}" for key in record} == {field.path for field in FIELDS if field.group == "cuda"}
    assert record["allocated_bytes"] >= held.nbytes
    assert record["fragmentation_bytes"] == record["reserved_bytes"] - record["allocated_bytes"]


def test_the_card_of_a_torch_device_is_found_in_nvml_by_its_uuid() -> None:
    reader = NvmlReader()
    readings = reader.read()
    assert reader.reason == ""

    named = name_devices(readings, {find_uuid("cuda:0") or "": 0})

    ours = [record for record in named if record["cuda_index"] == 0]
    assert len(ours) == 1
    assert ours[0]["mem_total_bytes"] == pytest.approx(
        torch.cuda.get_device_properties("cuda:0").total_memory, rel=0.05
    )
    reader.close()
