"""A wheelhouse of tiny wheels and locks with hashes, made on the spot.

Used by the deploy and drift tests: environments are then built by the real uv from a local folder, with no
network and in a fraction of a second.
"""

from __future__ import annotations

import base64
import hashlib
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

_EPOCH = (1980, 1, 1, 0, 0, 0)


def build_wheel(
    folder: Path,
    name: str,
    version: str,
    modules: Mapping[str, str] | None = None,
    *,
    requires: Iterable[str] = (),
) -> Path:
    """Write `<name>-<version>-py3-none-any.whl`; default is one module of that name with `__version__`."""
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    files = dict(modules or {f"{name.replace('-', '_')}.py": f'__version__ = "{version}"\n'})
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    files[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n" + "".join(
        f"Requires-Dist: {item}\n" for item in requires
    )
    files[f"{info}/WHEEL"] = (
        "Wheel-Version: 1.0\nGenerator: wheelhouse\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    record = [f"{path},sha256={_record_hash(text)},{len(text.encode())}" for path, text in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,", ""])
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, text in files.items():
            archive.writestr(zipfile.ZipInfo(path, _EPOCH), text)
    return wheel


def write_lock(path: Path, wheels: Iterable[Path]) -> Path:
    """Write a requirements lock with hashes that names exactly these wheels."""
    lines = []
    for wheel in wheels:
        name, version = wheel.name.split("-")[:2]
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        lines.append(f"{name.replace('_', '-')}=={version} \\\n    --hash=sha256:{digest}\n")
    path.write_text("".join(lines))
    return path


def fake_pynvml(folder: Path, version: str = "13.1") -> Path:
    """A wheel of the distribution `nvidia-ml-py` whose module `pynvml` plays two GPUs."""
    return build_wheel(folder, "nvidia-ml-py", version, {"pynvml.py": _FAKE_PYNVML})


def _record_hash(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


_FAKE_PYNVML = '''"""Plays two GPUs; `<prefix>/fake_nvml.json` may say how many bytes are in use."""
import json
import os
import sys
from types import SimpleNamespace

NVML_TEMPERATURE_GPU = 0
NVML_CLOCK_SM = 1


class NVMLError(Exception):
    """Base class, as in the real module."""


class NVMLError_LibraryNotFound(NVMLError):
    """As in the real module."""


class NVMLError_NotSupported(NVMLError):
    """As in the real module."""


def nvmlInit():
    pass


def nvmlShutdown():
    pass


def nvmlSystemGetDriverVersion():
    return "580.1"


def nvmlDeviceGetCount():
    return 2


def nvmlDeviceGetHandleByIndex(index):
    return index


def nvmlDeviceGetUUID(handle):
    return "GPU-fake-%d" % handle


def nvmlDeviceGetName(handle):
    return "Fake GPU"


def nvmlDeviceGetUtilizationRates(handle):
    return SimpleNamespace(gpu=50 + handle, memory=10)


def nvmlDeviceGetMemoryInfo(handle):
    path = os.path.join(sys.prefix, "fake_nvml.json")
    used = 1 << 28
    if os.path.exists(path):
        with open(path) as handle_file:
            used = json.load(handle_file)["used"]
    return SimpleNamespace(total=80 << 30, used=used + handle, free=79 << 30)


def nvmlDeviceGetPowerUsage(handle):
    return 300000 + handle


def nvmlDeviceGetTemperature(handle, kind):
    return 40 + handle


def nvmlDeviceGetClockInfo(handle, kind):
    return 1500


def nvmlDeviceGetComputeRunningProcesses(handle):
    return []
'''
