"""A launcher that is warm: forked from the agent before it has threads, so that a start costs no new Python.

Owned by the agent. Each request is handed to `launch.start_detached` in that child, so a launch is the very
same as by the `start` command: detached, verified, and independent of the agent's life. The child ends with
the agent and must hold none of its streams, or the connection would never close.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from typing import Any, NoReturn

from . import launch
from .records import RefusedError, dumps
from .request import MAX_REQUEST_BYTES
from .spawn import close_descriptors

DEADLINE_S = launch.REPLY_DEADLINE_S + 5.0


class Launcher:
    """Start attempts through a single-threaded child; create it before any thread exists."""

    def __init__(self, root: str) -> None:
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        if os.fork() == 0:
            self._socket.close()
            _serve(root, theirs)
        theirs.close()
        self._socket.settimeout(DEADLINE_S)
        self._file = self._socket.makefile("rb")
        self._is_broken = False

    def start(self, body: Any) -> dict[str, Any]:
        """Launch by a start request; `existing` and `state`, or a RefusedError as the launch gave it."""
        data = (dumps(body) + "\n").encode("ascii")
        with self._lock:
            if self._is_broken:
                message = "this agent's launcher is gone; use the `start` command or a new agent"
                raise RefusedError("LauncherGone", message)
            try:
                self._socket.sendall(data)
                line = self._file.readline()
            except OSError:
                line = b""
            # After a lost answer the next one would be taken for it: such a launcher is not asked again.
            self._is_broken = not line.endswith(b"\n")
        if self._is_broken:
            raise RefusedError("LaunchPending", "no answer from the launcher; ask `list` for this attempt")
        reply = json.loads(line)
        if not reply["ok"]:
            problem = reply["error"]
            raise RefusedError(problem["reason"], problem["message"], problem["errno"], **problem["data"])
        return {"existing": reply["existing"], "state": reply["state"]}


def _serve(root: str, channel: socket.socket) -> NoReturn:
    """In the child: one request line, one reply line, until the agent is gone."""
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    close_descriptors([0, 1, 2, channel.fileno()])
    try:
        with channel.makefile("rb") as lines:
            while True:
                line = lines.readline(MAX_REQUEST_BYTES + 2)
                if not line.endswith(b"\n"):
                    break
                reply = launch.start_detached(root, line)
                channel.sendall((dumps(reply) + "\n").encode("ascii"))
    finally:
        os._exit(0)
