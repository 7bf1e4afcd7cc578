"""Devices of the pipeline: names, dtypes, CPU threads, memory.

Called by `trainer.train` while it builds the workers. Must not know models.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from trainer.config import TrainConfig
from trainer.errors import ConfigError


def check_devices(config: TrainConfig) -> None:
    """Refuse CUDA indices that do not exist.

    Raises:
        ConfigError: names the flag, the index and how many devices torch sees.
    """
    for flag, devices in (
        ("--target-gpus", config.devices.targets()),
        ("--drafter-gpus", config.devices.drafters()),
    ):
        for device in devices:
            index = device.removeprefix("cuda:")
            if device != "cpu" and int(index) >= torch.cuda.device_count():
                raise ConfigError(
                    f"{flag} names {index}, but torch sees {torch.cuda.device_count()} CUDA devices; "
                    "name others or cpu"
                )


def pick_dtype(choice: str, device: str) -> torch.dtype:
    """Return the dtype for a device.

    `auto` is bf16 on CUDA and fp32 on the CPU, where results are compared exactly; `fast` is bf16 on
    processors that multiply it faster, too.
    """
    if choice in ("auto", "fast"):
        is_bf16 = device != "cpu" or (choice == "fast" and has_fast_bf16())
        return torch.bfloat16 if is_bf16 else torch.float32
    return torch.bfloat16 if choice in ("bf16", "bfloat16") else torch.float32


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype as records and logs name it: `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def has_fast_bf16() -> bool:
    """Tell whether this processor multiplies bf16 faster than fp32."""
    find = getattr(torch.cpu, "get_capabilities", None)  # not in torch 2.11
    has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    has = find() if find is not None and has_onednn else {}
    return bool(has.get("avx512_bf16") or has.get("amx_bf16"))


def pick_attention(choice: str, device: str, *, may_compile: bool) -> str:
    """Return the attention implementation; `auto` is flex where it can be compiled (CUDA), else sdpa."""
    if choice != "auto":
        return choice
    return "flex" if device != "cpu" and may_compile else "sdpa"


def cpu_threads(config: TrainConfig, *, is_alone: bool = False) -> int:
    """Return the torch threads of one CPU worker: its share of the cores, or all while the others idle."""
    workers = [d for d in (*config.devices.targets(), *config.devices.drafters()) if d == "cpu"]
    cores = len(os.sched_getaffinity(0))
    share = 1 if is_alone else max(1, len(workers))
    return config.devices.cpu_threads or max(1, cores // share)


def on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make a CUDA device the current one for a while; nothing to do for the CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def available_bytes() -> int:
    """Return the host memory that is free for use, as the kernel estimates it."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) * 1024
    return 8 << 30


def worker_names(kind: str, devices: Sequence[str]) -> tuple[str, ...]:
    """Return a thread name per worker: `target-gpu3`, `target-cpu`; several on the CPU are numbered."""
    names = [f"{kind}-{device.replace('cuda:', 'gpu')}" for device in devices]
    if len(set(names)) < len(names):
        names = [f"{name}{place}" for place, name in enumerate(names)]
    return tuple(names)
