"""The trainer's own NVML reader: units, reasons for what is missing, and a driver that hangs."""

import sys
import threading
import types

import pytest

from tests.support.trainer_runs import await_until
from trainer.flags import resolve
from trainer.telemetry.fields import FIELDS
from trainer.telemetry.nvml import NvmlReader, name_devices
from trainer.telemetry.setup import Telemetry

PATHS = {"target-model": "model", "data-dir": "data", "output-dir": "out"}


class FakeNvml(types.ModuleType):
    NVML_TEMPERATURE_GPU = NVML_CLOCK_SM = NVML_CLOCK_MEM = 0

    def __init__(self, **broken):
        super().__init__("pynvml")
        self.broken = broken

    def __getattr__(self, name):
        if not name.startswith("nvml"):
            raise AttributeError(name)
        if name == "nvmlMemory_v2":
            return self._version(name)
        if name in self.broken:
            return self._raise(self.broken[name])
        values = {
            "nvmlDeviceGetCount": 2,
            "nvmlDeviceGetUUID": "GPU-1",
            "nvmlDeviceGetUtilizationRates": types.SimpleNamespace(gpu=98),
            "nvmlDeviceGetMemoryInfo": types.SimpleNamespace(used=7, total=9, reserved=1),
            "nvmlDeviceGetPowerUsage": 590_000,
            "nvmlDeviceGetTemperature": 61,
            "nvmlDeviceGetClockInfo": 1900,
            "nvmlDeviceGetCurrentClocksThrottleReasons": 0x44,
        }
        return lambda *_, **_versions: values.get(name)

    def _version(self, name):
        if name in self.broken:
            raise AttributeError(name)
        return 2

    @staticmethod
    def _raise(text):
        def call(*_):
            raise RuntimeError(text)

        return call


def read_patiently():
    """One reading, however long this machine takes for it."""
    return NvmlReader(start_deadline_s=120.0, read_deadline_s=120.0).read()


def test_nvml_readings_have_units_and_no_reason_when_complete(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())

    records = read_patiently()

    assert len(records) == 2
    assert records[1]["index"] == 1
    assert (records[0]["util_ratio"], records[0]["power_w"], records[0]["temp_c"]) == (0.98, 590.0, 61)
    assert (records[0]["mem_used_bytes"], records[0]["mem_reserved_bytes"]) == (7, 1)
    assert records[0]["throttle"] == "sw_power_cap|hw_thermal"
    assert records[0]["reason"] is None


def test_nvml_records_have_every_documented_field_also_when_the_card_is_lost(monkeypatch):
    documented = {field.path for field in FIELDS if field.group == "gpu"}
    for broken in ({}, {"nvmlDeviceGetHandleByIndex": "GPU is lost"}):
        monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(**broken))

        record = name_devices(read_patiently(), {"GPU-1": 0})[0]

        assert {f"gpu/*/{key}" for key in record} == documented
    assert record["reason"] == "handle: GPU is lost"


def test_nvml_memory_of_an_old_driver_is_told_apart(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(nvmlMemory_v2=""))

    record = read_patiently()[0]

    assert (record["mem_used_bytes"], record["mem_reserved_bytes"]) == (7, None)
    assert "used includes the driver's reserve" in record["reason"]


class HangingNvml(FakeNvml):
    """Answers until `hang` is set, then hangs in `hangs_in` until `release`."""

    def __init__(self, hangs_in):
        super().__init__()
        self.hangs_in, self.hang, self.release = hangs_in, threading.Event(), threading.Event()

    def __getattr__(self, name):
        call = super().__getattr__(name)
        if name != self.hangs_in:
            return call

        def guarded(*words, **options):
            if self.hang.is_set():
                self.release.wait(600)
            return call(*words, **options)

        return guarded


def test_hanging_nvml_costs_its_fields_once_and_comes_back(monkeypatch):
    fake = HangingNvml("nvmlDeviceGetPowerUsage")
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    reader = NvmlReader(start_deadline_s=120.0, read_deadline_s=0.05)
    # a reading that a busy machine did not answer in time gives no card, or one without its fields
    await_until(lambda: any(record["power_w"] is not None for record in reader.read()))

    fake.hang.set()
    hung = reader.read()
    again = reader.read()
    fake.release.set()
    backs = []
    await_until(lambda: backs.append(reader.read()) or backs[-1][0]["power_w"] is not None)

    assert [record["uuid"] for record in hung] == ["GPU-1", "GPU-1"]
    assert (hung[0]["temp_c"], again[0]["temp_c"]) == (None, None)
    assert "NVML has not answered for" in hung[0]["reason"]
    assert backs[-1][0]["reason"] is None


def test_driver_that_hangs_at_start_is_a_reason(monkeypatch):
    fake = HangingNvml("nvmlInit")
    fake.hang.set()
    monkeypatch.setitem(sys.modules, "pynvml", fake)

    reader = NvmlReader(start_deadline_s=0.05)

    assert reader.read() == []
    assert "the driver hangs" in reader.reason
    fake.release.set()


def test_cards_are_matched_to_torch_devices_by_uuid_not_by_number():
    readings = [{"index": 0, "uuid": "GPU-a"}, {"index": 1, "uuid": "GPU-b"}]

    named = name_devices(readings, {"GPU-b": 0})

    assert [record["cuda_index"] for record in named] == [None, 0]


def test_unsupported_nvml_field_is_null_with_a_reason_and_the_others_stay(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(nvmlDeviceGetPowerUsage="Not Supported"))

    record = read_patiently()[0]

    assert record["power_w"] is None
    assert record["temp_c"] == 61
    assert record["reason"] == "power_w: Not Supported"


@pytest.mark.parametrize(
    ("module", "reason"),
    [(None, "module pynvml cannot be imported"), (FakeNvml(nvmlInit="Driver mismatch"), "Driver mismatch")],
    ids=["missing", "driver"],
)
def test_missing_nvml_is_a_reason_not_an_error(monkeypatch, module, reason):
    monkeypatch.setitem(sys.modules, "pynvml", module)

    reader = NvmlReader()

    assert reader.read() == []
    assert reason in reader.reason


def test_the_flag_against_gpu_metrics_reaches_the_reader_and_the_report(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(nvmlInit="must not be called"))
    for name in ("model", "data", "out"):
        (tmp_path / name).mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    flags = {f"--{flag}": str(tmp_path / name) for flag, name in PATHS.items()}

    config = resolve({**flags, "--no-wandb-gpu-metrics": True}, environ={}).config
    telemetry = Telemetry(config, has_cuda=False, has_wandb_key=False)

    nvml = next(entry for entry in telemetry.found if entry.name == "nvml")
    assert (nvml.level, nvml.is_on, nvml.reason) == ("off", False, "switched off by the configuration")


def test_unwanted_nvml_is_not_touched(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(nvmlInit="must not be called"))

    assert NvmlReader(is_wanted=False).reason == "switched off by the configuration"
