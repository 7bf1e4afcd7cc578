"""A real HTTP server on loopback that answers chat completions, and misbehaves as a test plans it.

`chat_server(plan)` runs it in threads; `plan(number, body)` is asked for each request (numbered from 1 as
they arrive) and returns an `Act`. Everything received is kept in `server.requests`. Needs no network
but loopback; must not be used outside tests.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

LONGEST_S = 600.0
"""What waits for a test waits longer than any test lasts: a client without limits of its own would hang."""


@dataclass(frozen=True)
class Act:
    """One answer; `fault` is `reset`, `cut`, `dribble` or `hang` in place of a whole one."""

    status: int = 200
    text: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    fault: str = ""
    wait_for: threading.Event | None = None
    message: dict[str, Any] | None = None
    finish_reason: str = "stop"


def answer_to(body: dict[str, Any]) -> str:
    """What the server says to a prompt."""
    return f"re: {body['messages'][-1]['content']}"


class ChatServer(ThreadingHTTPServer):
    """Keeps what it received; `released` lets hanging answers go."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, plan: Callable[[int, dict[str, Any]], Act]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.plan = plan
        self.lock = threading.Lock()
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.released = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def handle_error(self, request, client_address) -> None:
        """Clients that leave early are part of the tests."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ChatServer

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.requests.append(body)
            self.server.headers.append(dict(self.headers.items()))
            self.server.paths.append(self.path)
            number = len(self.server.requests)
        act = self.server.plan(number, body)
        if act.wait_for is not None:
            act.wait_for.wait(LONGEST_S)
        self._perform(act, body)

    def _perform(self, act: Act, body: dict[str, Any]) -> None:
        if act.fault == "hang":
            self.server.released.wait(LONGEST_S)
            return
        if act.fault == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            return
        content = (act.text if act.text is not None else self._completion(act, body)).encode()
        self.send_response(act.status)
        for name, value in act.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if act.fault == "cut":
            self.wfile.write(content[: len(content) // 2])
            self.close_connection = True
            return
        if act.fault == "dribble":
            for byte in content:
                self.wfile.write(bytes([byte]))
                self.wfile.flush()
                if self.server.released.wait(0.05):
                    return
        self.wfile.write(content)

    def _completion(self, act: Act, body: dict[str, Any]) -> str:
        message = act.message or {"role": "assistant", "content": answer_to(body)}
        choice = {"index": 0, "message": message, "finish_reason": act.finish_reason}
        return json.dumps({"choices": [choice], "usage": {"completion_tokens": 3}})


@contextmanager
def chat_server(plan: Callable[[int, dict[str, Any]], Act]) -> Iterator[ChatServer]:
    """Run a server for the length of the block."""
    server = ChatServer(plan)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.released.set()
        server.shutdown()
        server.server_close()
        thread.join(10)
