"""A cgroup v2 of the attempt's own, where the node allows one: whole-group kill and memory evidence.

Used by the launcher and the per-attempt shim. A writable `/sys/fs/cgroup` proves nothing (with v1 it is a
tmpfs), so a group counts only when it lies under the shim's own `0::` line and the new folder holds
`cgroup.kill`. Without one, session and subreaper do the work and OOM evidence is unknown, not false.
"""

from __future__ import annotations

import binascii
import contextlib
import os
import signal
import time


def own_group() -> str | None:
    """Folder of this process's v2 cgroup, or None where there is no v2 hierarchy."""
    try:
        with open("/proc/self/cgroup", encoding="utf-8") as file:
            lines = file.read().splitlines()
        with open("/proc/self/mountinfo", encoding="utf-8") as file:
            mounts = [line.split() for line in file]
    except OSError:
        return None
    paths = [line[3:] for line in lines if line.startswith("0::")]
    if not paths or ".." in paths[0].split("/"):
        return None
    for fields in mounts:
        if fields[fields.index("-") + 1] == "cgroup2":
            base = fields[3].rstrip("/")
            inside = paths[0][len(base) :] if paths[0].startswith(base) else paths[0]
            return os.path.join(fields[4], inside.lstrip("/")).rstrip("/")
    return None


def group_path(root: str, attempt_id: str) -> str | None:
    """Where this process would make the attempt's group, None where there is no v2 hierarchy.

    The root is part of the name: two roots on one machine may hold the same attempt id (a copied state
    folder), and a group that one of them had just left would be killed by the other.
    """
    parent = own_group()
    if parent is None:
        return None
    place = binascii.crc32(os.fsencode(os.path.realpath(root)))
    return os.path.join(parent, "dflash-%08x-%s" % (place, attempt_id))


def create_group(root: str, attempt_id: str, pid: int) -> str | None:
    """Make the attempt's group with `pid` in it; None where it cannot be made, killed or entered."""
    path = group_path(root, attempt_id)
    if path is None:
        return None
    try:
        os.mkdir(path)
    except OSError:
        return None
    if os.path.exists(os.path.join(path, "cgroup.kill")):
        with contextlib.suppress(OSError), open(os.path.join(path, "cgroup.procs"), "w") as file:
            file.write(str(pid))
            file.flush()
            return path
    remove_group(path)
    return None


def kill_group(path: str) -> bool:
    """SIGKILL everything in the group at once; False if the kernel refused."""
    try:
        with open(os.path.join(path, "cgroup.kill"), "w", encoding="ascii") as file:
            file.write("1")
    except OSError:
        return False
    return True


def remove_group(path: str | None, attempts: int = 20) -> bool:
    """Remove the group's folder, which only works once it is empty; an ended process may linger a moment."""
    if path is None:
        return True
    for _ in range(attempts):
        try:
            os.rmdir(path)
        except FileNotFoundError:
            return True
        except OSError:
            time.sleep(0.05)
        else:
            return True
    return False


def oom_kills(path: str | None) -> int | None:
    """Number of OOM kills the group's `memory.events` has counted, None where it has no such file."""
    if path is None:
        return None
    with contextlib.suppress(OSError, ValueError), open(os.path.join(path, "memory.events")) as file:
        for line in file:
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None


def oom_evidence(before: int | None, after: int | None, code: int | None, number: int | None) -> bool | None:
    """Whether the kernel's OOM killer ended the trainer: True, False, or None where nothing counts kills."""
    if before is None or after is None:
        return None
    was_killed = number == signal.SIGKILL or code == 128 + signal.SIGKILL
    return was_killed and after > before
