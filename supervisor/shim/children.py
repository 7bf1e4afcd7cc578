"""What runs under the environment's own interpreter: NVML reader, fingerprint, module probe, package folders.

The agent starts these as guarded children with a deadline and reads JSON from their stdout; a crash, a hang
or a missing module here becomes a reason there. Nothing of it runs in the agent or the trainer.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import signal
import sys
import sysconfig
import time
from importlib import metadata
from typing import Any

from . import nvml
from .records import dumps, null_nonfinite
from .spawn import set_parent_death_signal


def run_child(command: str, arguments: list[str], parent: int) -> int:
    """Run one child mode; the exit code is 0 when it could answer."""
    set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != parent:
        return 1  # the agent died before the kernel was told to end us with it
    if command == "nvml":
        return _nvml(float(arguments[0]) if arguments else 1.0)
    if command == "sites":
        return _emit({"folders": package_folders()})
    if command == "fingerprint":
        return _emit(fingerprint())
    return _emit({name: probe_module(name) for name in arguments})


def _emit(value: dict[str, Any]) -> int:
    # Imported packages may print; a line of our own keeps the answer findable.
    sys.stdout.write("\n" + dumps(null_nonfinite(value, "", [])) + "\n")
    sys.stdout.flush()
    return 0


def _nvml(interval_s: float) -> int:
    reader, problem = nvml.open_reader()
    if reader is None:
        _emit({"t": time.time(), "gpus": [], **(problem or {})})
        return 1
    while True:
        sample = reader.sample(time.time())
        try:
            _emit(sample)
        except OSError:
            return 0
        if sample["reason"] is not None:
            return 1
        if interval_s <= 0:
            return 0
        time.sleep(interval_s)


def package_folders() -> list[str]:
    """site-packages of this interpreter, and every further folder that its path files add."""
    paths = sysconfig.get_paths()
    wanted = [paths["purelib"], paths["platlib"]] + [p for p in sys.path if p.endswith("-packages")]
    return sorted({os.path.realpath(path) for path in wanted if os.path.isdir(path)})


def fingerprint() -> dict[str, Any]:
    """Distributions, Python, CUDA of torch and driver, as this interpreter sees them."""
    distributions: dict[str, str] = {}
    direct_urls: dict[str, Any] = {}
    for dist in metadata.distributions():
        name = dist.metadata["Name"] if dist.metadata is not None else None
        if not name:
            continue
        key = name.lower().replace("_", "-").replace(".", "-")
        distributions.setdefault(key, dist.version)
        url = _direct_url(dist)
        if url is not None:
            direct_urls.setdefault(key, url)
    return {
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "executable": sys.executable,
        "prefix": sys.prefix,
        "platform": sysconfig.get_platform(),
        "distributions": dict(sorted(distributions.items())),
        "direct_urls": direct_urls,
        "torch_cuda": _torch_cuda(),
        "driver": nvml.driver_version(),
        "folders": package_folders(),
    }


def _direct_url(dist: metadata.Distribution) -> Any:
    try:
        text = dist.read_text("direct_url.json")
        return json.loads(text) if text else None
    except (OSError, ValueError):
        return None


def _torch_cuda() -> str | None:
    """CUDA version torch was built for, read from its version file: importing torch takes seconds."""
    try:
        folder = metadata.distribution("torch").locate_file("torch")
        with open(os.path.join(str(folder), "version.py"), encoding="utf-8") as file:
            for line in file:
                if line.startswith("cuda"):
                    value = line.rpartition("=")[2].strip().strip("'\"")
                    return None if value == "None" else value
    except (metadata.PackageNotFoundError, OSError):
        return None
    return None


def probe_module(name: str) -> dict[str, Any]:
    """Really import a module: found on disk is not yet usable."""
    try:
        module = importlib.import_module(name)
    except BaseException as error:  # noqa: BLE001 - a package may raise anything on import; it is the finding
        is_missing = isinstance(error, ModuleNotFoundError) and error.name == name.partition(".")[0]
        return {
            "present": not is_missing,
            "usable": False,
            "version": None,
            "reason": "MissingDependency" if is_missing else "ImportFailed",
            "error": "%s: %s" % (type(error).__name__, str(error)[:2000]),
        }
    version = getattr(module, "__version__", None)
    result: dict[str, Any] = {
        "present": True,
        "usable": True,
        "version": str(version) if version is not None else None,
        "reason": None,
        "error": None,
    }
    if name == "torch":
        result["cuda_available"] = bool(module.cuda.is_available())
        result["cuda_devices"] = int(module.cuda.device_count())
        result["cuda"] = module.version.cuda
    return result
