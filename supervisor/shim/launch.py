"""Launch of one attempt: claim its folder, take its locks, create its log, exec its trainer, verify the exec.

`run_start` is called by `__main__` in the process that the supervisor started; it detaches at once, so the
launch goes on whatever happens to the connection. `claim` and `tombstone` decide who owns an attempt id.
No shell, no inherited descriptor, nothing inherited from the caller's environment; never restarts anything.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import select
import shutil
import signal
import sys
import time
import traceback
import uuid
from typing import Any, NoReturn

from . import cgroup, locks
from .proc import identity_of
from .records import AttemptFiles, RefusedError, check_id, dumps, fsync_folder, write_json
from .request import MAX_REQUEST_BYTES, StartRequest, parse_start
from .supervise import AttemptShim

REPLY_DEADLINE_S = 60.0
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def run_start(root: str) -> int:
    """Handle `start`: one request on stdin, one reply line on stdout; returns the exit code."""
    try:
        request = parse_start(sys.stdin.buffer.read(MAX_REQUEST_BYTES + 1))
    except RefusedError as failure:
        return _print({"v": 1, "ok": False, "error": failure.to_json()})
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        _detached(root, request, writer)
    os.close(writer)
    os.waitpid(child, 0)
    return _print(_read_reply(reader))


def _print(reply: dict[str, Any]) -> int:
    sys.stdout.write(dumps(reply) + "\n")
    sys.stdout.flush()
    return 0 if reply["ok"] else 1


def _read_reply(reader: int) -> dict[str, Any]:
    deadline = time.monotonic() + REPLY_DEADLINE_S
    data = b""
    while not data.endswith(b"\n"):
        if not select.select([reader], [], [], max(0.0, deadline - time.monotonic()))[0]:
            message = "launch not decided after %d s; ask `list` for this attempt" % REPLY_DEADLINE_S
            return {"v": 1, "ok": False, "error": RefusedError("LaunchPending", message).to_json()}
        piece = os.read(reader, 65536)
        if not piece:
            message = "the shim ended before it answered; see shim.log in the attempt's folder"
            return {"v": 1, "ok": False, "error": RefusedError("ShimDied", message).to_json()}
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
            shim, reply = None, {"v": 1, "ok": False, "error": failure.to_json()}
        os.write(writer, (dumps(reply) + "\n").encode("ascii"))
        os.close(writer)
        if shim is not None:
            shim.run()
        code = 0
    except BaseException:  # noqa: BLE001 - last line of a detached process: the trace goes to shim.log
        traceback.print_exc()
    finally:
        os._exit(code)


def detach(keep: list[int]) -> bool:
    """Cut every tie to the caller: streams, descriptors, folder, signals; become a subreaper if we can."""
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    close_descriptors([0, 1, 2, *keep])
    os.chdir("/")
    os.umask(0o077)
    reset_signals()
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    return become_subreaper()


def become_subreaper() -> bool:
    """Have orphaned descendants re-parented to this process; False where the kernel or libc refuses."""
    return _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_parent_death_signal(number: int) -> bool:
    """Have the kernel signal this process when the thread that made it is gone; False where refused."""
    return _prctl(_PR_SET_PDEATHSIG, number)


def _prctl(option: int, argument: int) -> bool:
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        return int(libc.prctl(option, argument, 0, 0, 0)) == 0
    except (OSError, AttributeError):
        return False


def close_descriptors(keep: list[int]) -> None:
    """Close all descriptors but `keep`."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in keep:
            with contextlib.suppress(OSError):
                os.close(int(name))


def reset_signals() -> None:
    """Give every signal its default action and unblock all."""
    for number in signal.valid_signals():
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            with contextlib.suppress(OSError, ValueError):
                signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def claim(root: str, attempt_id: str, state: dict[str, Any]) -> tuple[AttemptFiles, int] | None:
    """Create the attempt's folder with `state` and a held lock in it, in one step.

    Returns:
        The files and the lock's descriptor, or None when the folder exists already.
    """
    parent = os.path.join(root, "attempts")
    temporary = os.path.join(root, "tmp", "attempt-%s-%s" % (attempt_id, uuid.uuid4().hex))
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
        shutil.rmtree(temporary, ignore_errors=True)
    fsync_folder(parent)
    return AttemptFiles(root, attempt_id), lock


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
    redirect_stderr(files)
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


def redirect_stderr(files: AttemptFiles) -> None:
    """Let this process write its own trouble to the attempt's shim.log."""
    fd = os.open(files.path("shim.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    os.dup2(fd, 2)
    os.close(fd)


def _launch(files: AttemptFiles, request: StartRequest, state: dict[str, Any], lock: int) -> AttemptShim:
    shim_lock = locks.try_lock(files.path(locks.SHIM_LOCK))
    assert shim_lock is not None
    held = locks.take_launch_locks(
        files.root, request.attempt_id, request.run_id, request.gpus, request.share
    )
    held.append(lock)
    _check_space(files.root, request)
    log = _create_log(request.log_path)
    group = cgroup.create_group(request.attempt_id) if request.use_cgroup else None
    state["cgroup"] = group
    try:
        write_json(files.path("spec.json"), request.spec)
        write_json(
            files.path("launch.json"),
            {
                "v": 1,
                "token": request.token,
                "stop": request.stop,
                "orphan_after_s": request.orphan_after_s,
                "oom_kills_before": cgroup.oom_kills(group or cgroup.own_group()),
            },
        )
        pid = _spawn(files, request, state, held, log)
    finally:
        os.close(log)
        if state["phase"] != "running" and group is not None:
            cgroup.remove_group(group)
    shim = AttemptShim(files, state, child=pid, keep=[*held, shim_lock])
    files.event("Started", "trainer executed", pid=pid, cgroup=group)
    return shim


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


def _spawn(
    files: AttemptFiles, request: StartRequest, state: dict[str, Any], held: list[int], log: int
) -> int:
    """Fork and exec the trainer; its identity is on disk before it may exec, so it can never be lost."""
    go_reader, go_writer = os.pipe()
    error_reader, error_writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(go_writer)
        _become_trainer(files, request, state["cgroup"], go_reader, error_writer, held, log)
    os.close(go_reader)
    os.close(error_writer)
    state["identity"] = identity_of(pid)
    files.write_state(state)
    os.write(go_writer, b"g")
    os.close(go_writer)
    with os.fdopen(error_reader, "rb") as file:
        report = file.read()
    if report:
        os.waitpid(pid, 0)
        state["identity"] = None
        raise _exec_failure(json.loads(report), request)
    state.update(phase="running", started_at=time.time(), heartbeat_at=time.time())
    files.write_state(state)
    return pid


def _exec_failure(report: dict[str, Any], request: StartRequest) -> RefusedError:
    path = report["path"]
    number = report["errno"]
    message = "cannot %s %s: %s" % (report["step"], path, os.strerror(number) if number else report["text"])
    if number == errno.ENOENT and report["step"] == "execute" and os.path.exists(path):
        message += " (the file is there: the interpreter in its first line is not)"
    return RefusedError("ExecFailed", message, number, path=path, step=report["step"], argv=request.argv)


def _become_trainer(
    files: AttemptFiles,
    request: StartRequest,
    group: str | None,
    go_reader: int,
    error_writer: int,
    held: list[int],
    log: int,
) -> NoReturn:
    """In the forked child: own session, own streams, then exec; a failure goes up the pipe."""
    step, path = "prepare", request.argv[0]
    try:
        os.setsid()
        if os.read(go_reader, 1) != b"g":
            os._exit(127)
        if group is not None:
            step, path = "enter", group
            cgroup.enter_group(group)
        reset_signals()
        null = os.open("/dev/null", os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        for fd in held:
            os.set_inheritable(fd, True)
        close_descriptors([0, 1, 2, error_writer, *held])
        os.umask(0o022)
        environment = request.environment(files.folder)
        home = environment["HOME"]
        step, path = "change folder to", request.cwd or (home if os.path.isdir(home) else "/")
        os.chdir(path)
        step, path = "execute", request.argv[0]
        os.execvpe(request.argv[0], request.argv, environment)  # noqa: S606 - the point of the shim
    except BaseException as error:  # noqa: BLE001 - whatever it is, the parent must hear of it
        number = error.errno if isinstance(error, OSError) else None
        report = {"step": step, "path": path, "errno": number, "text": type(error).__name__}
        os.write(error_writer, dumps(report).encode("ascii"))
    finally:
        os._exit(127)
