"""The per-attempt shim's unix socket: one JSON line in, one JSON line out, then the connection ends.

Served by `AttemptShim`, called by the agent. The path goes through a descriptor of the attempt's folder
(`/proc/self/fd/N/shim.sock`), because a socket address holds 107 bytes and a root may be longer. The folder
is 0700, so whoever can connect may already signal the trainer.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import time
from typing import Any, Callable, Iterator

from .records import RefusedError, dumps

MAX_LINE = 1 << 20
MAX_CLIENTS = 32
CLIENT_DEADLINE_S = 5.0

Handler = Callable[[dict[str, Any]], dict[str, Any]]


class ControlServer:
    """The listening end. `poll` serves what is ready and returns when something happened or time is up."""

    def __init__(self, folder: str) -> None:
        self._selector = selectors.DefaultSelector()
        self._clients: dict[socket.socket, tuple[bytearray, float]] = {}
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server.setblocking(False)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(folder, "shim.sock"))
        with _short_path(folder) as path:
            self._server.bind(path)
        self._server.listen(16)
        self._selector.register(self._server, selectors.EVENT_READ)

    def watch(self, fd: int) -> None:
        """Return from `poll` also when `fd` becomes readable (a pidfd: the process has ended)."""
        self._selector.register(fd, selectors.EVENT_READ)

    def unwatch(self, fd: int) -> None:
        """Forget `fd`."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(fd)

    def poll(self, timeout_s: float, handler: Handler) -> None:
        """Serve ready clients through `handler`; wait at most `timeout_s` for something to happen."""
        for key, _ in self._selector.select(max(0.0, timeout_s)):
            if key.fileobj is self._server:
                self._accept()
            elif isinstance(key.fileobj, socket.socket):
                self._receive(key.fileobj, handler)
        now = time.monotonic()
        for client in [c for c, (_, since) in self._clients.items() if now - since > CLIENT_DEADLINE_S]:
            self._drop(client)

    def close(self) -> None:
        """Stop listening."""
        for client in list(self._clients):
            self._drop(client)
        self._server.close()
        self._selector.close()

    def _accept(self) -> None:
        try:
            client, _ = self._server.accept()
        except OSError:
            return
        if len(self._clients) >= MAX_CLIENTS:
            client.close()
            return
        client.setblocking(False)
        self._clients[client] = (bytearray(), time.monotonic())
        self._selector.register(client, selectors.EVENT_READ)

    def _receive(self, client: socket.socket, handler: Handler) -> None:
        buffer = self._clients[client][0]
        try:
            piece = client.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        buffer += piece
        if piece and b"\n" not in buffer and len(buffer) <= MAX_LINE:
            return
        if b"\n" in buffer:
            reply = answer(bytes(buffer).split(b"\n", 1)[0], handler)
            with contextlib.suppress(OSError):
                client.settimeout(CLIENT_DEADLINE_S)
                client.sendall((dumps(reply) + "\n").encode("ascii"))
        self._drop(client)

    def _drop(self, client: socket.socket) -> None:
        self._clients.pop(client, None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(client)
        client.close()


def answer(line: bytes, handler: Handler) -> dict[str, Any]:
    """Run one request line through `handler`; every failure becomes an error reply."""
    request_id = None
    try:
        try:
            request = json.loads(line)
        except (ValueError, RecursionError):
            raise RefusedError("BadFrame", "frame is not JSON") from None
        if not isinstance(request, dict):
            raise RefusedError("BadFrame", "frame is not a JSON object")
        request_id = request.get("id")
        return {"id": request_id, "ok": True, "result": handler(request)}
    except RefusedError as refusal:
        return {"id": request_id, "ok": False, "error": refusal.to_json()}
    except Exception as error:  # noqa: BLE001 - request boundary: the caller gets it, the server lives on
        failure = RefusedError("Internal", "%s: %s" % (type(error).__name__, error))
        return {"id": request_id, "ok": False, "error": failure.to_json()}


def ask(folder: str, request: dict[str, Any], timeout_s: float = 10.0) -> dict[str, Any]:
    """Send one request to an attempt's shim and return its result.

    Raises:
        RefusedError: as the shim answered; ShimGone when nobody listens; ShimSilent without a timely answer.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(timeout_s)
        try:
            with _short_path(folder) as path:
                client.connect(path)
        except OSError as error:
            raise RefusedError("ShimGone", "no shim listens in %s: %s" % (folder, error)) from error
        try:
            client.sendall((dumps(request) + "\n").encode("ascii"))
            with client.makefile("rb") as file:
                line = file.readline(64 << 20)
        except OSError as error:
            raise RefusedError("ShimSilent", "no answer from the shim in %s: %s" % (folder, error)) from error
    if not line.endswith(b"\n"):
        raise RefusedError("ShimSilent", "the shim in %s closed without an answer" % folder)
    reply = json.loads(line)
    if not reply["ok"]:
        problem = reply["error"]
        raise RefusedError(problem["reason"], problem["message"], problem["errno"], **problem["data"])
    result: dict[str, Any] = reply["result"]
    return result


@contextlib.contextmanager
def _short_path(folder: str) -> Iterator[str]:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield "/proc/self/fd/%d/shim.sock" % fd
    finally:
        os.close(fd)
