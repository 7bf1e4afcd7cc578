"""Locks in the node: one trainer per run and per GPU, held by whoever lives of shim and trainer.

The shim takes them with flock before it forks; the trainer inherits the descriptors, so a lock is held while
either lives and the kernel gives it back when both are gone, whatever killed them. Lock files are never
deleted, because two processes could then hold "the same" lock. Never for locks that outlive a process.
"""

from __future__ import annotations

import errno
import fcntl
import os
from typing import Any

from .records import LIVE_PHASES, RefusedError, list_attempts

ATTEMPT_LOCK = "attempt.lock"
SHIM_LOCK = "shim.lock"


def try_lock(path: str, exclusive: bool = True) -> int | None:
    """Take a lock without waiting; the descriptor, or None while somebody else holds it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return None
        raise
    return fd


def is_held(path: str) -> bool:
    """Whether a living process holds the lock at `path`."""
    if not os.path.exists(path):
        return False
    fd = try_lock(path, exclusive=False)
    if fd is None:
        return True
    os.close(fd)
    return False


def take_launch_locks(root: str, attempt_id: str, run_id: str, gpus: list[str], share: bool) -> list[int]:
    """Take the run's lock and its GPUs' locks, all or none.

    Raises:
        RefusedError: LockHeld, naming the lock and the attempt that holds it.
    """
    folder = os.path.join(root, "locks")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    wanted = [("run", run_id, True)] + [("gpu", gpu, not share) for gpu in sorted(set(gpus))]
    taken: list[int] = []
    for kind, name, exclusive in wanted:
        path = os.path.join(folder, "%s-%s" % (kind, name))
        fd = try_lock(path, exclusive)
        if fd is None:
            for held in taken:
                os.close(held)
            raise _lock_held(root, attempt_id, kind, name, path)
        taken.append(fd)
    return taken


def _lock_held(root: str, attempt_id: str, kind: str, name: str, path: str) -> RefusedError:
    holders = [h for h in find_holders(root, kind, name) if h["attempt_id"] != attempt_id]
    who = ", ".join(
        "attempt %s of run %s" % (holder["attempt_id"], holder["run_name"] or holder["run_id"])
        for holder in holders
    )
    message = "%s %s is in use by %s; stop it first" % (kind, name, who or "a process that keeps " + path)
    return RefusedError("LockHeld", message, kind=kind, name=name, path=path, holders=holders)


def find_holders(root: str, kind: str, name: str) -> list[dict[str, Any]]:
    """The living attempts that hold the lock `<kind>-<name>`, by their own records."""
    holders = []
    for files in list_attempts(root):
        state = files.state() or {}
        if state.get("phase") not in LIVE_PHASES or not is_held(files.path(ATTEMPT_LOCK)):
            continue
        if name == state.get("run_id") if kind == "run" else name in state.get("gpus", []):
            identity = state.get("identity") or {}
            holders.append(
                {
                    "attempt_id": files.attempt_id,
                    "run_id": state.get("run_id"),
                    "run_name": state.get("run_name"),
                    "pid": identity.get("pid"),
                    "phase": state.get("phase"),
                }
            )
    return holders
