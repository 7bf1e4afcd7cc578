"""Questions about one attempt that its files and /proc answer, with or without a living shim.

Shared by the shim's socket and the agent: status, log ranges, last lines, signal, thread states, ack. Reads
records, never writes the shim's; the one file made here is the mark that the exit record was ingested.
"""

from __future__ import annotations

import os
import time
from typing import Any

from . import cgroup, locks, logfile
from .proc import is_alive, signal_identity, signal_number
from .records import AttemptFiles, RefusedError, write_json

MAX_THREADS = 2000


def attempt_request(files: AttemptFiles, request: dict[str, Any]) -> dict[str, Any]:
    """Answer one request about an existing attempt, or raise RefusedError with reason UnknownOp."""
    handlers = {
        "status": lambda: status(files),
        "tail": lambda: _with_log(files, request, lines=False),
        "tail_lines": lambda: _with_log(files, request, lines=True),
        "signal": lambda: send_signal((files.state() or {}).get("identity"), request.get("signal")),
        "stacks": lambda: threads((files.state() or {}).get("identity")),
        "ack": lambda: acknowledge(files),
    }
    handler = handlers.get(str(request.get("op")))
    if handler is None:
        raise RefusedError("UnknownOp", "unknown op: %r" % (request.get("op"),))
    return handler()


def status(files: AttemptFiles) -> dict[str, Any]:
    """Everything known of the attempt now: records, life of trainer and shim, log size."""
    state, record = files.state(), files.exit()
    return {
        "state": state,
        "exit": record,
        "alive": liveness(files, state, record),
        "shim_alive": is_alive(state.get("shim")) if state and state.get("shim") else False,
        "status": files.status(),
        "log_size": logfile.size(state.get("log_path")) if state else None,
        "acked": files.is_acknowledged(),
    }


def status_by_identity(identity: dict[str, Any], shim: Any) -> dict[str, Any]:
    """What can be said of an attempt whose folder was removed under it: whether its processes live."""
    return {
        "state": None,
        "exit": None,
        "alive": is_alive(identity),
        "shim_alive": is_alive(shim) if isinstance(shim, dict) else False,
        "status": None,
        "log_size": None,
        "acked": False,
        "is_folder_gone": True,
    }


def liveness(files: AttemptFiles, state: dict[str, Any] | None, record: dict[str, Any] | None) -> bool | None:
    """Whether the trainer lives: by its identity, else (before it has one) by the attempt's lock."""
    if record is not None and not record.get("quarantined"):
        return False
    if state is None:
        return None
    if state.get("phase") in ("launch_failed", "abandoned", "exited"):
        return False
    if state.get("identity") is not None:
        return is_alive(state["identity"])
    return None if locks.is_held(files.path(locks.ATTEMPT_LOCK)) else False


def stop_record(request: dict[str, Any]) -> dict[str, Any]:
    """The `stop` part of `state.json` for a stop request, or a BadRequest."""
    stop_id = request.get("stop_id")
    if not isinstance(stop_id, str) or not stop_id or len(stop_id) > 200:
        raise RefusedError("BadRequest", "stop_id: not a usable id: %r" % (stop_id,), field="stop_id")
    return {
        "id": stop_id,
        "reason": str(request.get("reason") or "Requested")[:2000],
        "actor": str(request.get("actor") or "unknown")[:200],
        "requested_at": time.time(),
        "deadline_s": 0.0,
        "step": "asked",
        "save": bool(request.get("save", True)),
    }


def send_signal(identity: Any, name: Any) -> dict[str, Any]:
    """Signal exactly this process; refuses when it is gone or its pid is another's now."""
    number = signal_number(name)
    if not isinstance(identity, dict) or not isinstance(identity.get("pid"), int):
        raise RefusedError("NoSuchProcess", "the attempt has no recorded process")
    if not signal_identity(identity, number):
        message = "pid %d is not the recorded process any more; nothing was signalled" % identity["pid"]
        raise RefusedError("IdentityMismatch", message, identity=identity)
    return {"sent": True, "pid": identity["pid"]}


def threads(identity: Any) -> dict[str, Any]:
    """Name, state and kernel wait point of each thread: tells a hang in a driver from a waiting queue."""
    if is_alive(identity) is not True:
        raise RefusedError("NoSuchProcess", "the recorded process does not live")
    base = "/proc/%d/task" % identity["pid"]
    found = []
    for tid in sorted(os.listdir(base), key=int)[:MAX_THREADS]:
        found.append(
            {
                "tid": int(tid),
                "name": _read(base, tid, "comm"),
                "state": (_read(base, tid, "stat") or "?").rpartition(")")[2].strip()[:1] or None,
                "wchan": _read(base, tid, "wchan"),
                "syscall": (_read(base, tid, "syscall") or "").split(" ")[0] or None,
            }
        )
    return {"pid": identity["pid"], "threads": found}


def acknowledge(files: AttemptFiles) -> dict[str, Any]:
    """Mark the exit record as ingested, so that retention may one day remove the folder."""
    state, record = files.state(), files.exit()
    is_watched = state is not None and is_alive(state.get("shim")) is True
    if record is None and (liveness(files, state, record) is not False or is_watched):
        raise RefusedError("NotEnded", "attempt %s has not ended; nothing to acknowledge" % files.attempt_id)
    # Left over when the shim died before the trainer; an empty group holds nobody.
    cgroup.remove_group((state or {}).get("cgroup"), attempts=1)
    if not files.is_acknowledged():
        write_json(files.path("acked.json"), {"v": 1, "at": time.time()})
    return {"acked": True}


def _with_log(files: AttemptFiles, request: dict[str, Any], lines: bool) -> dict[str, Any]:
    path = (files.state() or {}).get("log_path")
    if not lines:
        return logfile.read_range(path, request.get("offset", 0), request.get("limit", logfile.MAX_READ))
    count = request.get("lines", logfile.MAX_LINES)
    if not isinstance(count, int) or isinstance(count, bool):
        raise RefusedError("BadRequest", "lines: not an integer: %r" % (count,), field="lines")
    return {"lines": logfile.last_lines(path, count), "size": logfile.size(path)}


def _read(base: str, tid: str, name: str) -> str | None:
    try:
        with open(os.path.join(base, tid, name), encoding="utf-8", errors="replace") as file:
            return file.read(4096).strip()
    except OSError:
        return None
