"""GPU readings through NVML (`nvidia-ml-py`), guarded field by field and against a driver that hangs.

The one place that imports `pynvml`, and the one that says why readings are missing. Every call into the
library runs in a thread of its own; the reporter waits for it for a bounded time only, so a hung driver costs
the GPU fields and nothing else. Must not import torch; never raises: a failing field is null with a reason.
"""

from __future__ import annotations

import importlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_LOG = logging.getLogger(__name__)

REMEDY = "install nvidia-ml-py into the trainer's environment (not the package named pynvml)"
Readings = list[Mapping[str, Any]]

START_DEADLINE_S = 10.0
READ_DEADLINE_S = 2.0

FIELDS = (
    "util_ratio",
    "mem_used_bytes",
    "mem_total_bytes",
    "mem_reserved_bytes",
    "power_w",
    "temp_c",
    "sm_clock_mhz",
    "mem_clock_mhz",
    "throttle_reasons",
    "throttle",
)
"""What is read of each GPU, besides index and uuid."""

THROTTLE_NAMES: Mapping[int, str] = {
    0x1: "gpu_idle",
    0x2: "applications_clocks",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "hw_power_brake",
    0x100: "display_clocks",
}
"""Bits of NVML's clock event reasons."""


class NvmlReader:
    """Reads all GPUs of the machine; `reason` says why it cannot, and is empty when it can.

    NVML ignores CUDA_VISIBLE_DEVICES: its `index` is the machine's, the `uuid` identifies the card.

    Args:
        is_wanted: False leaves the library alone.
        start_deadline_s: longest wait for the library to start.
        read_deadline_s: longest wait for one reading.
    """

    def __init__(
        self,
        *,
        is_wanted: bool = True,
        start_deadline_s: float = START_DEADLINE_S,
        read_deadline_s: float = READ_DEADLINE_S,
    ) -> None:
        self.reason = "" if is_wanted else "switched off by the configuration"
        self._read_deadline_s = read_deadline_s
        self._requests: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._answered = threading.Event()
        self._asked_s: float | None = None
        self._latest: Readings = []
        self._is_up = False
        if not is_wanted:
            return
        started = threading.Event()
        self.reason = f"NVML does not start within {start_deadline_s:.0f} s: the driver hangs"
        thread = threading.Thread(target=self._serve, args=(started,), name="nvml", daemon=True)
        thread.start()
        started.wait(start_deadline_s)

    @property
    def is_available(self) -> bool:
        """Tell whether readings can be expected."""
        return self._is_up

    def read(self) -> Readings:
        """Return one record per GPU; empty when NVML is not available.

        While NVML does not answer, the known GPUs come back with null fields and the reason.
        """
        if not self._is_up:
            return []
        is_new = self._asked_s is None
        if is_new:
            self._answered.clear()
            self._asked_s = time.monotonic()
            self._requests.put(True)
        # a question that is open since an earlier call has had its time: it is not waited for again
        if not self._answered.wait(self._read_deadline_s if is_new else 0.0):
            return self._unanswered()
        self._asked_s = None
        return list(self._latest)

    def close(self) -> None:
        """Let the library go; a hung one is left to the end of the process."""
        self._is_up = False
        self._requests.put(False)

    def _serve(self, started: threading.Event) -> None:
        """Own the library: start it, answer requests, shut it down (the thread `nvml`)."""
        nvml, reason = _open_library()
        self._is_up, self.reason = nvml is not None, reason
        started.set()
        if nvml is None:
            return
        while self._requests.get():
            self._latest = self._read_all(nvml)
            self._answered.set()
        try:
            nvml.nvmlShutdown()
        except Exception as error:  # noqa: BLE001 - nothing depends on a clean shutdown
            _LOG.debug("nvml shutdown: %s", error)

    def _read_all(self, nvml: Any) -> Readings:
        try:
            count = nvml.nvmlDeviceGetCount()
        except Exception as error:  # noqa: BLE001 - any driver trouble is a reason, not an end of training
            self.reason = f"NVML lists no devices: {error}"
            return []
        self.reason = "" if count else "NVML lists no devices"
        return [_read_device(nvml, index) for index in range(count)]

    def _unanswered(self) -> Readings:
        waited_s = time.monotonic() - (self._asked_s or time.monotonic())
        text = f"NVML has not answered for {waited_s:.0f} s"
        if not self._latest:
            self.reason = text
        return [
            {"index": known["index"], "uuid": known["uuid"], **dict.fromkeys(FIELDS), "reason": text}
            for known in self._latest
        ]


def name_devices(readings: Sequence[Mapping[str, Any]], index_of: Mapping[str, int]) -> Readings:
    """Add to each record the torch index of its card (`cuda_index`), null for cards of other processes.

    Args:
        readings: of NVML, which counts all cards of the machine.
        index_of: torch's index by uuid, of the devices in use.
    """
    return [{**record, "cuda_index": index_of.get(str(record["uuid"]))} for record in readings]


def _open_library() -> tuple[Any, str]:
    """Return the started library and "", or None and why not."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError as error:
        return None, f"module pynvml cannot be imported ({error}): {REMEDY}"
    try:
        nvml.nvmlInit()
    except Exception as error:  # noqa: BLE001 - any driver trouble is a reason, not an end of training
        return None, f"NVML does not start: {type(error).__name__}: {error}"
    return nvml, ""


def _read_device(nvml: Any, index: int) -> Mapping[str, Any]:
    record: dict[str, Any] = {"index": index, "uuid": None, **dict.fromkeys(FIELDS)}
    failures: list[str] = []

    def take(name: str, read: Callable[[], Any]) -> None:
        try:
            record[name] = read()
        except Exception as error:  # noqa: BLE001 - one unsupported field must not hide the others
            failures.append(f"{name}: {error}")

    def take_memory() -> None:
        memory, version = _memory(nvml, handle)
        record["mem_used_bytes"], record["mem_total_bytes"] = int(memory.used), int(memory.total)
        if version == 1:
            raise LookupError("this driver has memory v1 only, used includes the driver's reserve")
        record["mem_reserved_bytes"] = int(memory.reserved)

    def take_throttle() -> None:
        bits = int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
        record["throttle_reasons"], record["throttle"] = bits, throttle_text(bits)

    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
    except Exception as error:  # noqa: BLE001 - a lost card is reported in its own record
        return {**record, "reason": f"handle: {error}"}
    take("uuid", lambda: _text(nvml.nvmlDeviceGetUUID(handle)))
    take("util_ratio", lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100.0)
    _guard("memory", take_memory, failures)
    take("power_w", lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000.0)
    take("temp_c", lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
    take("sm_clock_mhz", lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
    take("mem_clock_mhz", lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM))
    _guard("throttle_reasons", take_throttle, failures)
    return {**record, "reason": "; ".join(failures) or None}


def throttle_text(bits: int) -> str:
    """Return the names of the set clock event bits joined by `|`, `none` for none."""
    names = [name for bit, name in THROTTLE_NAMES.items() if bits & bit]
    unknown = bits & ~sum(THROTTLE_NAMES)
    return "|".join([*names, *([hex(unknown)] if unknown else [])]) or "none"


def _memory(nvml: Any, handle: Any) -> tuple[Any, int]:
    """Return memory as version 2 counts it where the driver can; version 1 adds its reserve to `used`."""
    version = getattr(nvml, "nvmlMemory_v2", None)
    if version is not None:
        try:
            return nvml.nvmlDeviceGetMemoryInfo(handle, version=version), 2
        except Exception as error:  # noqa: BLE001 - an old driver: version 1 still answers
            _LOG.debug("nvml memory v2: %s", error)
    return nvml.nvmlDeviceGetMemoryInfo(handle), 1


def _guard(name: str, read: Callable[[], None], failures: list[str]) -> None:
    try:
        read()
    except Exception as error:  # noqa: BLE001 - one unsupported field must not hide the others
        failures.append(f"{name}: {error}")


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
