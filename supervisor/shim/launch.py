"""Launch of one attempt: claim its folder, take its locks, create its log, exec its trainer, verify the exec.

`run_start` is called by `__main__` in the process that the supervisor started; it detaches at once, so the
launch goes on whatever happens to the connection. `claim` and `tombstone` decide who owns an attempt id.
No shell, no inherited descriptor, nothing inherited from the caller's environment; never restarts anything.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import sys
import time
from typing import Any, NoReturn

from . import cgroup, locks
from .control import ControlServer
from .proc import identity_of
from .records import AttemptFiles, RefusedError, check_id, dumps, fsync_folder, note_exception, write_json
from .request import MAX_REQUEST_BYTES, StartRequest, parse_start
from .spawn import PausedTrainer, Program, detach
from .supervise import AttemptShim

REPLY_DEADLINE_S = 60.0


def run_start(root: str) -> int:
    """Handle `start`: one request on stdin, one reply line on stdout; returns the exit code."""
    return print_reply(start_detached(root, sys.stdin.buffer.read(MAX_REQUEST_BYTES + 1)))


def run_tombstone(root: str, attempt_id: str) -> int:
    """Handle `tombstone`; returns the exit code."""
    try:
        return print_reply(tombstone(root, attempt_id))
    except RefusedError as failure:
        return print_reply(refusal(failure))
    except OSError as error:
        return print_reply(refusal(_os_failure("attempt folder under " + root, error)))


def print_reply(reply: dict[str, Any]) -> int:
    """Print one reply line; returns the exit code that goes with it."""
    sys.stdout.write(dumps(reply) + "\n")
    sys.stdout.flush()
    return 0 if reply["ok"] else 1


def refusal(failure: RefusedError) -> dict[str, Any]:
    """The reply for a request that was refused."""
    return {"v": 1, "ok": False, "error": failure.to_json()}


def start_detached(root: str, data: bytes) -> dict[str, Any]:
    """Launch in a process of its own and wait for its answer; needs a caller without threads."""
    try:
        request = parse_start(data)
    except RefusedError as failure:
        return refusal(failure)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        _detached(root, request, writer)
    os.close(writer)
    os.waitpid(child, 0)
    try:
        return _read_reply(reader)
    finally:
        os.close(reader)


def _read_reply(reader: int) -> dict[str, Any]:
    deadline = time.monotonic() + REPLY_DEADLINE_S
    data = b""
    while not data.endswith(b"\n"):
        if not select.select([reader], [], [], max(0.0, deadline - time.monotonic()))[0]:
            message = "launch not decided after %d s; ask `list` for this attempt" % REPLY_DEADLINE_S
            return refusal(RefusedError("LaunchPending", message))
        piece = os.read(reader, 65536)
        if not piece:
            message = "the shim ended before it answered; see shim.log in the attempt's folder"
            return refusal(RefusedError("ShimDied", message))
        data += piece
    reply: dict[str, Any] = json.loads(data)
    return reply


def _detached(root: str, request: StartRequest, writer: int) -> NoReturn:
    """The per-attempt shim from its first breath to its last; never returns to the caller's code."""
    code = 1
    try:
        detach(keep=[writer])
        try:
            shim, reply = _start(root, request)
        except RefusedError as failure:
            shim, reply = None, refusal(failure)
        os.write(writer, (dumps(reply) + "\n").encode("ascii"))
        os.close(writer)
        if shim is not None:
            shim.run()
        code = 0
    except BaseException:  # noqa: BLE001 - last line of a detached process: the trace goes to shim.log
        note_exception()
    finally:
        os._exit(code)


def claim(root: str, attempt_id: str, state: dict[str, Any]) -> tuple[AttemptFiles, int] | None:
    """Create the attempt's folder with `state` and a held lock in it, in one step.

    Returns:
        The files and the lock's descriptor, or None when the folder exists already.
    """
    parent = os.path.join(root, "attempts")
    temporary = os.path.join(root, "tmp", "attempt-%s-%s" % (attempt_id, os.urandom(8).hex()))
    for folder in (root, parent, os.path.join(root, "tmp")):
        os.makedirs(folder, mode=0o700, exist_ok=True)
    os.mkdir(temporary, 0o700)
    try:
        os.mkdir(os.path.join(temporary, "control"), 0o700)
        lock = locks.try_lock(os.path.join(temporary, locks.ATTEMPT_LOCK))
        assert lock is not None
        write_json(os.path.join(temporary, "state.json"), state)
        try:
            # Fails when the name is taken, because no claimed folder is ever empty.
            os.rename(temporary, os.path.join(parent, attempt_id))
        except OSError as error:
            os.close(lock)
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
                return None
            raise
    finally:
        _discard(temporary)
    fsync_folder(parent)
    return AttemptFiles(root, attempt_id), lock


def _discard(temporary: str) -> None:
    """Remove a folder that was not claimed after all."""
    for folder, folders, names in os.walk(temporary, topdown=False):
        for name in names:
            os.unlink(os.path.join(folder, name))
        for name in folders:
            os.rmdir(os.path.join(folder, name))
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(temporary)


def settle(files: AttemptFiles) -> dict[str, Any] | None:
    """The state of an existing attempt; a launch whose shim died before the exec is closed as failed."""
    state = files.state()
    if state is None or state["phase"] != "launching":
        return state
    lock = locks.try_lock(files.path(locks.ATTEMPT_LOCK))
    if lock is None:
        return state
    try:
        state = files.state()
        if state is not None and state["phase"] == "launching":
            failure = RefusedError("ShimDied", "the shim died before the trainer was executed")
            state.update(phase="launch_failed", launch_error=failure.to_json())
            files.write_state(state)
            files.event("LaunchFailed", failure.message)
            # It may have died between making its group and recording it.
            cgroup.remove_group(state.get("cgroup") or cgroup.group_path(files.root, files.attempt_id))
    finally:
        os.close(lock)
    return state


def tombstone(root: str, attempt_id: str) -> dict[str, Any]:
    """Make sure that no start request for this id can begin; reply as for `start`."""
    check_id(attempt_id, "attempt_id")
    state = new_state(attempt_id, None)
    state["phase"] = "abandoned"
    claimed = claim(root, attempt_id, state)
    if claimed is not None:
        os.close(claimed[1])
        claimed[0].event("Abandoned", "attempt abandoned before it was started")
        return {"v": 1, "ok": True, "existing": False, "state": state}
    return {"v": 1, "ok": True, "existing": True, "state": settle(AttemptFiles(root, attempt_id))}


def new_state(attempt_id: str, request: StartRequest | None) -> dict[str, Any]:
    """The first `state.json` of an attempt."""
    return {
        "v": 1,
        "attempt_id": attempt_id,
        "run_id": request.run_id if request else None,
        "run_name": request.run_name if request else None,
        "phase": "launching",
        "identity": None,
        "shim": identity_of(os.getpid()) if request else None,
        "started_at": None,
        "log_path": request.log_path if request else None,
        "argv": request.argv if request else [],
        "gpus": request.gpus if request else [],
        "share": request.share if request else False,
        "cgroup": None,
        "heartbeat_at": time.time(),
        "stop": None,
        "main_exit": None,
        "launch_error": None,
    }


def _start(root: str, request: StartRequest) -> tuple[AttemptShim | None, dict[str, Any]]:
    state = new_state(request.attempt_id, request)
    try:
        claimed = claim(root, request.attempt_id, state)
    except OSError as error:
        raise _os_failure("attempt folder under " + root, error) from error
    if claimed is None:
        return None, _existing_reply(AttemptFiles(root, request.attempt_id))
    files, lock = claimed
    files.redirect_stderr()
    try:
        shim = _launch(files, request, state, lock)
    except (RefusedError, OSError) as error:
        failure = error if isinstance(error, RefusedError) else _os_failure("launch", error)
        state.update(phase="launch_failed", launch_error=failure.to_json())
        files.event("LaunchFailed", failure.message, cause=failure.reason)
        with contextlib.suppress(OSError):
            files.write_state(state)
        raise failure from error
    return shim, {"v": 1, "ok": True, "existing": False, "state": state}


def _existing_reply(files: AttemptFiles) -> dict[str, Any]:
    state = settle(files)
    if state is None:
        message = "%s exists without a readable state.json; look at it by hand" % files.folder
        raise RefusedError("BadState", message)
    if state["phase"] == "abandoned":
        message = "attempt %s was abandoned before it started; use a new attempt" % files.attempt_id
        raise RefusedError("Tombstone", message)
    return {"v": 1, "ok": True, "existing": True, "state": state}


def _launch(files: AttemptFiles, request: StartRequest, state: dict[str, Any], lock: int) -> AttemptShim:
    shim_lock = locks.try_lock(files.path(locks.SHIM_LOCK))
    assert shim_lock is not None
    held = locks.take_launch_locks(
        files.root, request.attempt_id, request.run_id, request.gpus, request.share
    )
    held.append(lock)
    _check_space(files.root, request)
    server = ControlServer(files.folder)
    write_json(files.path("spec.json"), request.spec)
    log = _create_log(request.log_path)
    environment = request.environment(files.folder)
    trainer = PausedTrainer(Program(request.argv, request.cwd, environment, log, held))
    os.close(log)
    try:
        _record(files, request, state, trainer.pid)
        trainer.release()
    except BaseException:
        trainer.abandon()
        state["identity"] = None
        cgroup.remove_group(state["cgroup"])
        raise
    state.update(phase="running", started_at=time.time())
    shim = AttemptShim(files, state, server, child=trainer.pid, keep=[*held, shim_lock])
    shim.save()
    files.event("Started", "trainer executed", pid=trainer.pid, cgroup=state["cgroup"])
    return shim


def _record(files: AttemptFiles, request: StartRequest, state: dict[str, Any], pid: int) -> None:
    """Put on disk whatever is needed to find the trainer again, before it may execute anything."""
    if request.use_cgroup:
        state["cgroup"] = cgroup.create_group(files.root, request.attempt_id, pid)
    state["identity"] = identity_of(pid)
    launch = {
        "v": 1,
        "token": request.token,
        "stop": request.stop,
        "orphan_after_s": request.orphan_after_s,
        "oom_kills_before": cgroup.oom_kills(state["cgroup"] or cgroup.own_group()),
    }
    write_json(files.path("launch.json"), launch)
    files.write_state(state)


def _check_space(root: str, request: StartRequest) -> None:
    folder = os.path.dirname(request.log_path)
    try:
        os.makedirs(folder, mode=0o755, exist_ok=True)
    except OSError as error:
        raise _os_failure("log folder " + folder, error) from error
    for path in (root, folder):
        usage = os.statvfs(path)
        free = usage.f_bavail * usage.f_frsize
        if free < request.min_free_bytes:
            message = "%s has %d bytes free, the run wants %d; free some or lower [log] min_free_bytes" % (
                path,
                free,
                request.min_free_bytes,
            )
            raise RefusedError("NoSpace", message, errno.ENOSPC, path=path, free_bytes=free)


def _create_log(path: str) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        fd = os.open(path, flags, 0o644)
        os.fchmod(fd, 0o644)
    except FileExistsError as error:
        message = "log %s exists already and is never overwritten; use the next attempt number" % path
        raise RefusedError("LogExists", message, error.errno, path=path) from error
    except OSError as error:
        raise _os_failure("log " + path, error) from error
    fsync_folder(os.path.dirname(path))
    return fd


def _os_failure(what: str, error: OSError) -> RefusedError:
    names = {
        errno.ENOSPC: "NoSpace",
        errno.EDQUOT: "NoSpace",
        errno.EROFS: "ReadOnly",
        errno.EACCES: "Denied",
    }
    reason = names.get(error.errno or 0, "SystemError")
    return RefusedError(reason, "%s: %s" % (what, error.strerror or error), error.errno)
