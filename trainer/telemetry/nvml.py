"""GPU readings through NVML (`nvidia-ml-py`), guarded field by field.

The one place that imports `pynvml`, and the one that says why readings are missing. Called by the reporter
from its own thread. Must not import torch; never raises after construction: a failing field is null with a
reason.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping
from typing import Any

_LOG = logging.getLogger(__name__)

REMEDY = "install nvidia-ml-py into the trainer's environment (not the package named pynvml)"
Readings = list[Mapping[str, Any]]


class NvmlReader:
    """Reads all GPUs of the machine; `reason` says why it cannot, and is empty when it can.

    NVML ignores CUDA_VISIBLE_DEVICES: its `index` is the machine's, the `uuid` identifies the card.
    """

    def __init__(self, *, is_wanted: bool = True) -> None:
        self._nvml: Any = None
        self.reason = ""
        if not is_wanted:
            self.reason = "switched off by the configuration"
            return
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError as error:
            self.reason = f"module pynvml cannot be imported ({error}): {REMEDY}"
            return
        try:
            nvml.nvmlInit()
        except Exception as error:  # noqa: BLE001 - any driver trouble is a reason, not an end of training
            self.reason = f"NVML does not start: {type(error).__name__}: {error}"
            return
        self._nvml = nvml

    @property
    def is_available(self) -> bool:
        """Tell whether readings can be expected."""
        return self._nvml is not None

    def read(self) -> Readings:
        """Return one record per GPU; empty when NVML is not available."""
        if self._nvml is None:
            return []
        try:
            count = self._nvml.nvmlDeviceGetCount()
        except Exception as error:  # noqa: BLE001 - see class docstring
            self.reason = f"NVML lists no devices: {error}"
            return []
        return [self._read_device(index) for index in range(count)]

    def close(self) -> None:
        """Let the library go."""
        if self._nvml is not None:
            try:
                self._nvml.nvmlShutdown()
            except Exception as error:  # noqa: BLE001 - nothing depends on a clean shutdown
                _LOG.debug("nvml shutdown: %s", error)
            self._nvml = None

    def _read_device(self, index: int) -> Mapping[str, Any]:
        nvml = self._nvml
        record: dict[str, Any] = {"index": index}
        failures: list[str] = []

        def take(name: str, read: Callable[[], Any]) -> None:
            try:
                record[name] = read()
            except Exception as error:  # noqa: BLE001 - one unsupported field must not hide the others
                record[name] = None
                failures.append(f"{name}: {error}")

        handle: Any = None
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
        except Exception as error:  # noqa: BLE001 - a lost card is reported in its own record
            failures.append(f"handle: {error}")
        take("uuid", lambda: _text(nvml.nvmlDeviceGetUUID(handle)))
        take("util_ratio", lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100.0)
        take("mem_used_bytes", lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).used))
        take("mem_total_bytes", lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).total))
        take("power_w", lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000.0)
        take("temp_c", lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
        take("sm_clock_mhz", lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
        take("mem_clock_mhz", lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM))
        take("throttle_reasons", lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
        record["reason"] = "; ".join(failures) or None
        return record


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
