"""Say what a node offers before anything of ours is there: Python, folders, disk, memory, GPUs' device nodes.

Sent on stdin by `reconciler.scripts`; arguments: marker, root, log_dir. Creates the two folders when it can
(that is the check), removes its trial file again, and prints one JSON line after the marker.
"""

from __future__ import annotations

import glob
import json
import os
import platform
import shutil
import sys
from typing import Any


def nearest(path: str) -> str:
    """The path itself or its first existing parent."""
    while not os.path.exists(path) and os.path.dirname(path) != path:
        path = os.path.dirname(path)
    return path


def check_folder(path: str) -> dict[str, Any]:
    """Create and write-test a folder; report free space of the file system it lies on."""
    report: dict[str, Any] = {"path": path, "writable": False, "error": None, "free": None, "total": None}
    try:
        os.makedirs(path, mode=0o755, exist_ok=True)
        trial = os.path.join(path, ".write-test-%d" % os.getpid())
        fd = os.open(trial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        try:
            os.write(fd, b"x" * 4096)
            os.fsync(fd)
        finally:
            os.close(fd)
            os.unlink(trial)
        report["writable"] = True
    except OSError as error:
        report["error"] = error.strerror or str(error)
        report["errno"] = error.errno
    try:
        usage = shutil.disk_usage(nearest(path))
        report["free"], report["total"] = usage.free, usage.total
    except OSError as error:
        report["error"] = report["error"] or str(error)
    return report


def read_memory() -> int | None:
    """MemTotal in bytes as this node sees it (lxcfs shows the container's limit), or None."""
    try:
        with open("/proc/meminfo") as handle:
            for line in handle:
                if line.startswith("MemTotal:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return None
    return None


def main() -> None:
    """Collect and print."""
    marker, root, log_dir = sys.argv[1:4]
    report: dict[str, Any] = {
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "platform": sys.platform,
        "machine": platform.machine(),
        "libc": list(platform.libc_ver()),
        "root": check_folder(root),
        "log_dir": check_folder(log_dir),
        "tmp": check_folder(os.path.join(root, "tmp")),
        "nproc": len(os.sched_getaffinity(0)),
        "mem_total": read_memory(),
        "uid": os.getuid(),
        "gpu_nodes": sorted(glob.glob("/dev/nvidia[0-9]*")),
        "boot_id": None,
    }
    try:
        with open("/proc/sys/kernel/random/boot_id") as handle:
            report["boot_id"] = handle.read().strip()
    except OSError as error:
        report["boot_id_error"] = str(error)
    sys.stdout.write(marker + json.dumps({"ok": True, "result": report}) + "\n")


main()
