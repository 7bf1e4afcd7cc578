"""A stand-in for the module of nvidia-ml-py, played from the JSON file that FAKE_NVML names.

`{"init_error": 18, "driver": "580.1", "gpus": [{"uuid", "name", "util", "used", "total", "power_mw", "temp",
"clock"}], "hang": true}`; a value of the form `{"error": 3}` raises NVMLError 3. The file is read again at
each call, so a test can change what the next sample sees. For tests only.
"""

# ruff: noqa: N802, N816 - the names are those of the real module
import json
import os
import time
from pathlib import Path

NVML_TEMPERATURE_GPU = 0
NVML_CLOCK_SM = 1
NVML_CLOCK_MEM = 2
nvmlMemory_v2 = 0x02000028


class NVMLError(Exception):
    """Carries NVML's number as `value`, as the real one does."""

    def __init__(self, value):
        super().__init__(f"NVML error {value}")
        self.value = value


class _Record:
    def __init__(self, **fields):
        self.__dict__.update(fields)


def _scene():
    return json.loads(Path(os.environ["FAKE_NVML"]).read_text())


def _value(index, name):
    value = _scene()["gpus"][index][name]
    if isinstance(value, dict):
        raise NVMLError(value["error"])
    return value


def nvmlInit():
    scene = _scene()
    while scene.get("hang"):
        time.sleep(0.1)
    if scene.get("init_error"):
        raise NVMLError(scene["init_error"])


def nvmlShutdown():
    pass


def nvmlSystemGetDriverVersion():
    return _scene().get("driver", "580.1")


def nvmlDeviceGetCount():
    return len(_scene()["gpus"])


def nvmlDeviceGetHandleByIndex(index):
    return index


def nvmlDeviceGetUUID(handle):
    return _value(handle, "uuid")


def nvmlDeviceGetName(handle):
    return _value(handle, "name")


def nvmlDeviceGetUtilizationRates(handle):
    return _Record(gpu=_value(handle, "util"), memory=0)


def nvmlDeviceGetMemoryInfo(handle, version=None):
    """As the real one: version 1 counts the reserve as used; an old driver lacks version 2."""
    if version is not None and _scene().get("old_driver"):
        raise NVMLError(13)
    reserve = 0 if version is not None else _scene().get("reserved", 0)
    fields = {"used": _value(handle, "used") + reserve, "total": _value(handle, "total"), "free": 0}
    return _Record(**fields) if version is None else _Record(**fields, reserved=_scene().get("reserved", 0))


def nvmlDeviceGetPowerUsage(handle):
    return _value(handle, "power_mw")


def nvmlDeviceGetTemperature(handle, sensor):
    return _value(handle, "temp")


def nvmlDeviceGetClockInfo(handle, clock):
    return _value(handle, "clock")


def nvmlDeviceGetCurrentClocksThrottleReasons(handle):
    return _scene()["gpus"][handle].get("throttle", 0)


def nvmlDeviceGetComputeRunningProcesses(handle):
    return [_Record(pid=pid, usedGpuMemory=None) for pid in _scene()["gpus"][handle].get("pids", [])]
