"""The two forks of a launch: detaching the shim from its caller, and a trainer that waits to exec.

Used by the launcher and the child modes. The trainer is forked paused, so that its identity can be on disk
before it executes anything; a failing exec comes back through a pipe that the exec itself closes. No shell,
no inherited descriptor but the locks, no inherited environment, default signals.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import signal
from typing import Any, NamedTuple, NoReturn

from .records import RefusedError, dumps

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


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


class Program(NamedTuple):
    """What is to be executed, and with what.

    Attributes:
        argv: program and arguments; a program without a slash is looked for in the PATH of `environment`.
        cwd: folder to start in; None means HOME, or `/` where that does not exist.
        environment: the whole environment of the trainer.
        log: descriptor that becomes its stdout and stderr.
        locks: descriptors it inherits.
    """

    argv: list[str]
    cwd: str | None
    environment: dict[str, str]
    log: int
    locks: list[int]


class PausedTrainer:
    """A forked child that executes the program when `release` is called, and ends if it never is."""

    def __init__(self, program: Program) -> None:
        self._argv = program.argv
        go_reader, self._go = os.pipe()
        self._errors, error_writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._go)
            _become_trainer(program, go_reader, error_writer)
        os.close(go_reader)
        os.close(error_writer)

    def release(self) -> None:
        """Let it exec and wait until it has.

        Raises:
            RefusedError: ExecFailed with errno and path; the child is gone then.
        """
        os.write(self._go, b"g")
        with os.fdopen(os.dup(self._errors), "rb") as file:
            report = file.read()
        if report:
            raise _exec_failure(json.loads(report), self._argv)
        os.close(self._go)
        os.close(self._errors)

    def abandon(self) -> None:
        """End the child that did not exec and reap it."""
        os.close(self._go)
        os.close(self._errors)
        os.waitpid(self.pid, 0)


def _exec_failure(report: dict[str, Any], argv: list[str]) -> RefusedError:
    path, number = report["path"], report["errno"]
    message = "cannot %s %s: %s" % (report["step"], path, os.strerror(number) if number else report["text"])
    if number == errno.ENOENT and report["step"] == "execute" and os.path.exists(path):
        message += " (the file is there: the interpreter in its first line is not)"
    return RefusedError("ExecFailed", message, number, path=path, step=report["step"], argv=argv)


def _become_trainer(program: Program, go_reader: int, error_writer: int) -> NoReturn:
    """In the forked child: own session, own streams, then exec; a failure goes up the pipe."""
    step, path = "prepare", program.argv[0]
    try:
        os.setsid()
        if os.read(go_reader, 1) != b"g":
            os._exit(127)
        reset_signals()
        null = os.open("/dev/null", os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(program.log, 1)
        os.dup2(program.log, 2)
        for fd in program.locks:
            os.set_inheritable(fd, True)
        close_descriptors([0, 1, 2, error_writer, *program.locks])
        os.umask(0o022)
        home = program.environment["HOME"]
        step, path = "change folder to", program.cwd or (home if os.path.isdir(home) else "/")
        os.chdir(path)
        step, path = "execute", program.argv[0]
        os.execvpe(path, program.argv, program.environment)  # noqa: S606 - no shell is the point
    except BaseException as error:  # noqa: BLE001 - whatever it is, the parent must hear of it
        number = error.errno if isinstance(error, OSError) else None
        report = {"step": step, "path": path, "errno": number, "text": type(error).__name__}
        os.write(error_writer, dumps(report).encode("ascii"))
    finally:
        os._exit(127)
