"""What a node and an interpreter can do, asked by really trying: preflight's and drift's source.

Called by the agent for `probe`, `fingerprint` and `processes`. Everything about an interpreter is answered
by a guarded child run under that interpreter. Reports, never changes anything, never signals anything.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from typing import Any

from .proc import Stat, is_alive, read_stat
from .records import LIVE_PHASES, RefusedError, list_attempts
from .samplers import child_argv

CHILD_DEADLINE_S = 60.0
MODULE_DEADLINE_S = 120.0
MAX_PATHS = 500

CAPABILITY_MODULES = {
    "nvml": "pynvml",
    "wandb": "wandb",
    "flash_linear_attention": "fla",
    "kernels": "liger_kernel",
    "cuda": "torch",
    "gpu_direct": "torch",
    "torch": "torch",
}


def probe(root: str, request: dict[str, Any]) -> dict[str, Any]:
    """Interpreter, disk, GPUs and declared capabilities, each with a reason where it is not usable."""
    python = request.get("python") or sys.executable
    capabilities = [name for name in _names(request, "capabilities") if name in CAPABILITY_MODULES]
    wanted = [CAPABILITY_MODULES[name] for name in capabilities] + _names(request, "modules")
    modules = {name: _module(python, name) for name in dict.fromkeys(wanted)}
    gpus = _gpu_sample(python)
    return {
        "python": _interpreter(python),
        "disk": {path: _disk(path) for path in [root, *_names(request, "paths")]},
        "gpus": gpus,
        "modules": modules,
        "capabilities": {name: _capability(name, modules, gpus) for name in capabilities},
        "nproc": len(os.sched_getaffinity(0)),
        "mem_total": _mem_total(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "agent_python": platform.python_version(),
    }


def look_at_paths(request: dict[str, Any]) -> dict[str, Any]:
    """What lies at each path, and what room there is; no child process, so it may precede every launch."""
    found: dict[str, Any] = {}
    for path in _names(request, "paths")[:MAX_PATHS]:
        found[path] = {
            "exists": os.path.lexists(path),
            "is_file": os.path.isfile(path),
            "is_dir": os.path.isdir(path),
            "executable": os.path.isfile(path) and os.access(path, os.X_OK),
            "disk": _disk(path),
        }
    return {"paths": found}


def fingerprint(python: Any) -> dict[str, Any]:
    """The environment of `python` as that interpreter describes it."""
    return _run(str(python or sys.executable), ["fingerprint"], CHILD_DEADLINE_S)


def processes(root: str, python: Any) -> dict[str, Any]:
    """Processes that hold NVIDIA device files, each with the reason it is listed and whether it is ours."""
    ours = {}
    for files in list_attempts(root):
        state = files.state() or {}
        if state.get("phase") in LIVE_PHASES and is_alive(state.get("identity")):
            ours[state["identity"]["pid"]] = files.attempt_id
    found = []
    for name in os.listdir("/proc"):
        stat = _stat(name)
        devices = _nvidia_devices(name) if stat is not None else []
        if stat is None or not (devices or int(name) in ours):
            continue
        found.append(
            {
                "pid": int(name),
                "start_ticks": stat.start_ticks,
                "argv": _cmdline(name),
                "attempt_id": ours.get(int(name)),
                "reasons": (["RecordedTrainer"] if int(name) in ours else [])
                + (["OpensNvidiaDevice"] if devices else []),
                "devices": devices,
            }
        )
    return {"processes": sorted(found, key=lambda row: row["pid"]), "gpus": _gpu_sample(python)}


def _names(request: dict[str, Any], field: str) -> list[str]:
    value = request.get(field) or []
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise RefusedError("BadRequest", "%s: not a list of strings" % field, field=field)
    return list(value)


def _run(python: str, arguments: list[str], deadline_s: float) -> dict[str, Any]:
    """Run a child mode under `python`; its last JSON line, or a RefusedError with the cause."""
    argv = child_argv(python, *arguments)
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=deadline_s, check=False
        )
    except subprocess.TimeoutExpired:
        message = "%s %s gave no answer within %.0f s" % (python, arguments[0], deadline_s)
        raise RefusedError("Timeout", message) from None
    except OSError as error:
        message = "cannot run %s: %s" % (python, error.strerror)
        raise RefusedError("InterpreterMissing", message, error.errno, path=python) from error
    for line in reversed(done.stdout.splitlines()):
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            return value
    tail = done.stderr.decode("utf-8", "replace")[-2000:].strip()
    message = "%s %s ended with status %d: %s" % (python, arguments[0], done.returncode, tail)
    raise RefusedError("InterpreterFailed", message, exit_code=done.returncode)


def _failed(failure: RefusedError) -> dict[str, Any]:
    return {"reason": failure.reason, "message": failure.message}


def _interpreter(python: str) -> dict[str, Any]:
    try:
        full = fingerprint(python)
    except RefusedError as failure:
        return {"path": python, "version": None, "prefix": None, **_failed(failure)}
    return {
        "path": python,
        "version": full["python"],
        "prefix": full["prefix"],
        "driver": full["driver"],
        "torch_cuda": full["torch_cuda"],
        "reason": None,
        "message": None,
    }


def _module(python: str, name: str) -> dict[str, Any]:
    try:
        result: dict[str, Any] = _run(python, ["modules", name], MODULE_DEADLINE_S)[name]
    except RefusedError as failure:
        return {
            "present": None,
            "usable": False,
            "version": None,
            "reason": failure.reason,
            "error": failure.message,
        }
    return result


def _gpu_sample(python: Any) -> dict[str, Any]:
    try:
        return _run(str(python or sys.executable), ["nvml", "0"], CHILD_DEADLINE_S)
    except RefusedError as failure:
        return {"gpus": [], **_failed(failure)}


def _capability(name: str, modules: dict[str, Any], gpus: dict[str, Any]) -> dict[str, Any]:
    module = modules[CAPABILITY_MODULES[name]]
    finding = {
        "available": bool(module["usable"]),
        "reason": module["reason"],
        "message": module["error"],
        "version": module["version"],
    }
    if name == "nvml" and finding["available"] and gpus.get("reason") is not None:
        finding.update(available=False, reason=gpus["reason"], message=gpus.get("message"))
    needs_cuda = name in ("cuda", "gpu_direct") and finding["available"]
    if needs_cuda and not module.get("cuda_available"):
        message = "torch %s sees no CUDA device" % module["version"]
        finding.update(available=False, reason="NoCuda", message=message)
    return finding


def _disk(path: str) -> dict[str, Any]:
    present = path
    while not os.path.exists(present) and present != "/":
        present = os.path.dirname(present)
    try:
        usage = os.statvfs(present)
    except OSError as error:
        return {"free": None, "total": None, "exists": False, "reason": error.strerror}
    return {
        "free": usage.f_bavail * usage.f_frsize,
        "total": usage.f_blocks * usage.f_frsize,
        "exists": present == path,
        "writable": os.access(present, os.W_OK),
        "reason": None,
    }


def _mem_total() -> int | None:
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemTotal:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        return None
    return None


def _stat(name: str) -> Stat | None:
    try:
        return read_stat(int(name)) if name.isdigit() else None
    except OSError:
        return None


def _nvidia_devices(name: str) -> list[str]:
    folder = "/proc/%s/fd" % name
    found = set()
    try:
        for fd in os.listdir(folder):
            target = os.readlink(os.path.join(folder, fd))
            if target.startswith("/dev/nvidia"):
                found.add(target)
    except OSError:
        return sorted(found)
    return sorted(found)


def _cmdline(name: str) -> list[str]:
    try:
        with open("/proc/%s/cmdline" % name, "rb") as file:
            return file.read(16384).decode("utf-8", "replace").rstrip("\0").split("\0")
    except OSError:
        return []
