"""Reads NVML through `pynvml`, imported here and nowhere else; runs only inside a guarded child process.

Every failure has a reason word; a field that a GPU cannot give is None with its own reason while the others
go on. Utilisation and memory are read at each sample; power, temperature and clocks every five seconds.
"""

from __future__ import annotations

import importlib
from typing import Any, Callable

SLOW_INTERVAL_S = 5.0

REASONS = {
    1: "Uninitialized",
    2: "InvalidArgument",
    3: "Unsupported",
    4: "NoPermission",
    6: "NotFound",
    9: "DriverNotLoaded",
    10: "Timeout",
    12: "LibraryNotFound",
    13: "FunctionNotFound",
    15: "GpuLost",
    16: "ResetRequired",
    17: "OperatingSystemRefused",
    18: "DriverMismatch",
    999: "Unknown",
}
REMEDIES = {
    "LibraryNotFound": "no NVIDIA driver library here; install the host's version without kernel module",
    "DriverMismatch": "the libraries here are not of the host's driver version; install exactly that version",
    "DriverNotLoaded": "the kernel driver is not loaded, or the device nodes are missing here",
    "NoPermission": "this user may not open the NVIDIA device nodes",
}


def open_reader() -> tuple[NvmlReader | None, dict[str, Any] | None]:
    """A reader, or the reason and message why there is none."""
    try:
        pynvml = importlib.import_module("pynvml")
    except ImportError as error:
        message = "module pynvml is missing (%s); install the distribution nvidia-ml-py" % error
        return None, {"reason": "MissingDependency", "message": message}
    if not hasattr(pynvml, "nvmlInit"):
        message = "module pynvml at %s is not that of nvidia-ml-py" % getattr(pynvml, "__file__", "?")
        return None, {"reason": "WrongModule", "message": message}
    try:
        pynvml.nvmlInit()
        return NvmlReader(pynvml), None
    except pynvml.NVMLError as error:
        reason = reason_of(error)
        remedy = REMEDIES.get(reason, "see the driver's state on this node")
        return None, {"reason": reason, "message": "%s; %s" % (error, remedy)}


def reason_of(error: Exception) -> str:
    """The reason word for an NVML error."""
    value = getattr(error, "value", None)
    return REASONS.get(value if isinstance(value, int) else -1, "NvmlError")


def driver_version() -> str | None:
    """The driver's version, None where NVML does not say."""
    reader, _ = open_reader()
    if reader is None:
        return None
    try:
        return _text(reader.nvml.nvmlSystemGetDriverVersion())
    except reader.nvml.NVMLError:
        return None


class NvmlReader:
    """Takes samples of all GPUs; keeps the slow fields between their readings."""

    def __init__(self, pynvml: Any) -> None:
        self.nvml = pynvml
        self._slow: dict[int, tuple[dict[str, Any], dict[str, str]]] = {}
        self._slow_at = float("-inf")

    def sample(self, now: float) -> dict[str, Any]:
        """One sample: `t`, `gpus`, and a reason when the whole reading failed."""
        try:
            count = int(self.nvml.nvmlDeviceGetCount())
        except self.nvml.NVMLError as error:
            return {"t": now, "gpus": [], "reason": reason_of(error), "message": str(error)}
        is_slow_due = abs(now - self._slow_at) >= SLOW_INTERVAL_S
        if is_slow_due:
            self._slow_at = now
        gpus = [self._gpu(index, is_slow_due) for index in range(count)]
        return {"t": now, "gpus": gpus, "reason": None, "message": None}

    def _gpu(self, index: int, is_slow_due: bool) -> dict[str, Any]:
        nvml = self.nvml
        reasons: dict[str, str] = {}
        gpu: dict[str, Any] = {"index": index}
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
        except nvml.NVMLError as error:
            return {**gpu, **dict.fromkeys(FIELDS), "reason": reason_of(error), "reasons": {}}
        gpu["uuid"] = self._field("uuid", reasons, lambda: _text(nvml.nvmlDeviceGetUUID(handle)))
        gpu["name"] = self._field("name", reasons, lambda: _text(nvml.nvmlDeviceGetName(handle)))
        rates = self._field("util_ratio", reasons, lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
        gpu["util_ratio"] = None if rates is None else rates.gpu / 100.0
        memory = self._field("mem_used_bytes", reasons, lambda: self._memory(handle))
        gpu["mem_used_bytes"] = None if memory is None else int(memory.used)
        gpu["mem_total_bytes"] = None if memory is None else int(memory.total)
        if is_slow_due or index not in self._slow:
            self._slow[index] = self._slow_fields(handle)
        values, slow_reasons = self._slow[index]
        gpu.update(values)
        reasons.update(slow_reasons)
        gpu["reason"] = "; ".join("%s: %s" % item for item in sorted(reasons.items())) or None
        gpu["reasons"] = reasons
        return gpu

    def _memory(self, handle: Any) -> Any:
        """Memory as nvidia-smi shows it; version 1 counts the driver's own reserve as used, for ever."""
        version = getattr(self.nvml, "nvmlMemory_v2", None)
        if version is not None:
            try:
                return self.nvml.nvmlDeviceGetMemoryInfo(handle, version=version)
            except self.nvml.NVMLError as error:
                if reason_of(error) not in ("FunctionNotFound", "Unsupported", "InvalidArgument"):
                    raise
        return self.nvml.nvmlDeviceGetMemoryInfo(handle)

    def _slow_fields(self, handle: Any) -> tuple[dict[str, Any], dict[str, str]]:
        nvml = self.nvml
        reasons: dict[str, str] = {}
        power = self._field("power_w", reasons, lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        sensor, clock = getattr(nvml, "NVML_TEMPERATURE_GPU", 0), getattr(nvml, "NVML_CLOCK_SM", 1)
        return {
            "power_w": None if power is None else power / 1000.0,
            "temp_c": self._field("temp_c", reasons, lambda: nvml.nvmlDeviceGetTemperature(handle, sensor)),
            "sm_clock_mhz": self._field(
                "sm_clock_mhz", reasons, lambda: nvml.nvmlDeviceGetClockInfo(handle, clock)
            ),
        }, reasons

    def _field(self, name: str, reasons: dict[str, str], read: Callable[[], Any]) -> Any:
        try:
            return read()
        except self.nvml.NVMLError as error:
            reasons[name] = reason_of(error)
            return None


FIELDS = (
    "uuid",
    "name",
    "util_ratio",
    "mem_used_bytes",
    "mem_total_bytes",
    "power_w",
    "temp_c",
    "sm_clock_mhz",
)


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
