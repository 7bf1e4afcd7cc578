"""The agent: one process per connection that multiplexes requests and events as JSON lines.

Started by the supervisor over one channel (`serve`); it ends when its stdin does and leaves nothing behind,
while the per-attempt shims stay. Hostile or broken input costs one error frame, never the agent. It decides
nothing and stops only what an attempt's record identifies.
"""

from __future__ import annotations

import contextlib
import os
import platform
import select
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from . import control, launch, probe
from .attempt import attempt_request, liveness, send_signal, status, status_by_identity, stop_record
from .control import answer
from .launcher import Launcher
from .proc import boot_id, init_ticks, is_alive
from .records import LIVE_PHASES, AttemptFiles, RefusedError, check_id, dumps, list_attempts
from .request import API
from .samplers import GpuSampler, SiteWatcher, script_argv
from .watch import FileWatcher

CAPABILITIES = [
    "ack",
    "fingerprint",
    "list",
    "paths",
    "ping",
    "probe",
    "processes",
    "signal",
    "stacks",
    "start",
    "status",
    "stop",
    "tail",
    "tail_lines",
    "watch",
]
MAX_FRAME = 2 << 20
WORKERS = 6
IDLE_EXIT_S = 900.0
STOP_DEADLINE_S = 8.0
MAX_WAITING = 256


class Agent:
    """State of one connection: where frames go, what is watched."""

    def __init__(self, root: str, out: int) -> None:
        self.root = root
        self._out = out
        self._out_lock = threading.Lock()
        self._launcher = Launcher(root)  # forks, so it must come before the first thread
        self._watcher = FileWatcher(root, self.send)
        self._gpu = GpuSampler(self.send)
        self._sites = SiteWatcher(self.send)
        self._ops: dict[str, control.Handler] = {
            "ping": self._ping,
            "list": self._list,
            "status": self._status,
            "start": self._start,
            "stop": self._stop,
            "signal": self._signal,
            "watch": self._watch,
            "probe": lambda request: probe.probe(self.root, request),
            "paths": probe.look_at_paths,
            "fingerprint": lambda request: probe.fingerprint(request.get("python")),
            "processes": lambda request: probe.processes(self.root, request.get("python")),
        }

    def send(self, frame: dict[str, Any]) -> None:
        """Write one frame; when nobody reads any more the process has no purpose and ends."""
        data = (dumps(frame) + "\n").encode("ascii")
        with self._out_lock:
            try:
                while data:
                    data = data[os.write(self._out, data) :]
            except OSError:
                self.end()

    def hello(self, marker: str | None) -> dict[str, Any]:
        """The first frame."""
        return {
            "ev": "hello",
            "api": API,
            "capabilities": CAPABILITIES,
            "marker": marker,
            "boot_id": boot_id(),
            "init_ticks": init_ticks(),
            "pid": os.getpid(),
            "python": platform.python_version(),
        }

    def respond(self, line: bytes) -> None:
        """Answer one request frame."""
        reply = answer(line, self._dispatch)
        try:
            self.send(reply)
        except ValueError:
            failure = RefusedError("Internal", "the answer holds a number that JSON cannot carry")
            self.send({"id": reply["id"], "ok": False, "error": failure.to_json()})

    def end(self) -> None:
        """Leave at once: helper children first, then this process with all its threads."""
        self._gpu.stop()
        os._exit(0)

    def _dispatch(self, request: dict[str, Any]) -> dict[str, Any]:
        handler = self._ops.get(str(request.get("op")))
        if handler is not None:
            return handler(request)
        if request.get("op") in ("tail", "tail_lines", "stacks", "ack"):
            return attempt_request(self._files(request), request)
        message = "unknown op: %r; this shim knows: %s" % (request.get("op"), " ".join(CAPABILITIES))
        raise RefusedError("UnknownOp", message)

    def _files(self, request: dict[str, Any]) -> AttemptFiles:
        files = AttemptFiles(self.root, check_id(request.get("attempt_id"), "attempt_id"))
        if not files.exists():
            message = "no attempt %s under %s" % (files.attempt_id, self.root)
            raise RefusedError("NoSuchAttempt", message, attempt_id=files.attempt_id)
        return files

    def _ping(self, _request: dict[str, Any]) -> dict[str, Any]:
        return {"t": time.time()}

    def _list(self, _request: dict[str, Any]) -> dict[str, Any]:
        return {"attempts": [_row(files) for files in list_attempts(self.root)]}

    def _status(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            files = self._files(request)
        except RefusedError as failure:
            if failure.reason != "NoSuchAttempt" or not isinstance(request.get("identity"), dict):
                raise
            return status_by_identity(request["identity"], request.get("shim"))
        launch.settle(files)
        return status(files)

    def _start(self, request: dict[str, Any]) -> dict[str, Any]:
        return self._launcher.start(request.get("request"))

    def _signal(self, request: dict[str, Any]) -> dict[str, Any]:
        if request.get("identity") is not None:
            return send_signal(request["identity"], request.get("signal"))
        return attempt_request(self._files(request), request)

    def _stop(self, request: dict[str, Any]) -> dict[str, Any]:
        """Hand the stop to the attempt's shim; a new shim is started for it when the first is dead."""
        files = self._files(request)
        stop_record(request)
        deadline = time.monotonic() + STOP_DEADLINE_S
        adopted = False
        while True:
            state = launch.settle(files)
            record = files.exit()
            if state is None:
                raise RefusedError("BadState", "%s has no readable state.json" % files.folder)
            if state["phase"] not in LIVE_PHASES or (record is not None and not record["quarantined"]):
                return {"state": state}
            try:
                return control.ask(files.folder, request, timeout_s=5.0)
            except RefusedError as failure:
                if failure.reason not in ("ShimGone", "ShimSilent") or time.monotonic() > deadline:
                    raise
            if not adopted and state["identity"] is not None and is_alive(state["shim"]) is not True:
                adopted = True
                argv = script_argv(sys.executable, "adopt", "--root", self.root)
                _run_detached([*argv, "--attempt", files.attempt_id], dumps(request))
            time.sleep(0.05)

    def _watch(self, request: dict[str, Any]) -> dict[str, Any]:
        ids = request.get("attempt_ids") or []
        if not isinstance(ids, list):
            raise RefusedError("BadRequest", "attempt_ids: not a list", field="attempt_ids")
        offsets = request.get("offsets")
        self._watcher.set_targets(
            [check_id(attempt_id, "attempt_ids") for attempt_id in ids],
            with_log=bool(request.get("log")),
            offsets=offsets if isinstance(offsets, dict) else {},
        )
        gpu = request.get("gpu")
        gpu = gpu if isinstance(gpu, dict) else None
        self._gpu.configure(gpu)
        self._sites.configure((gpu or {}).get("python"), request.get("env_interval_s"))
        return {"watching": ids}


def _row(files: AttemptFiles) -> dict[str, Any]:
    """One attempt in a listing; a damaged record makes it unknown and harms no other."""
    acked = files.is_acknowledged()
    row: dict[str, Any] = {"attempt_id": files.attempt_id, "state": None, "exit": None, "alive": None}
    row.update(shim_alive=False, acked=acked, error=None)
    try:
        state, record = launch.settle(files), files.exit()
        row.update(state=state, exit=record, alive=liveness(files, state, record))
        row["shim_alive"] = is_alive((state or {}).get("shim")) or False
        if record is not None and acked:
            record["last_lines"] = []
    except (OSError, KeyError, TypeError, ValueError) as error:
        row["error"] = "%s: %s" % (type(error).__name__, error)
    return row


def _run_detached(argv: list[str], text: str) -> None:
    """Run a program that detaches itself; `text` is its stdin."""
    subprocess.run(
        argv,
        input=text.encode("ascii"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=STOP_DEADLINE_S,
        check=False,
    )


def run_serve(root: str, marker: str | None = None) -> int:
    """Serve one connection on stdin and stdout until stdin ends or falls silent for `IDLE_EXIT_S`."""
    out = os.dup(1)
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 1)
    agent = Agent(root, out)
    # Login scripts may have left half a line before us.
    with contextlib.suppress(OSError):
        os.write(out, b"\n")
    agent.send(agent.hello(marker))
    with ThreadPoolExecutor(WORKERS, thread_name_prefix="request") as pool:
        waiting = threading.BoundedSemaphore(MAX_WAITING)
        for line in _frames(agent):
            waiting.acquire()
            pool.submit(agent.respond, line).add_done_callback(lambda _: waiting.release())
        agent.end()
    return 0


def _frames(agent: Agent) -> Any:
    """Request lines; a line above `MAX_FRAME` is dropped as it arrives and answered once."""
    buffer = bytearray()
    is_dropping = False
    while True:
        if not select.select([0], [], [], IDLE_EXIT_S)[0]:
            return
        piece = os.read(0, 65536)
        if not piece:
            return
        buffer += piece
        while True:
            end = buffer.find(b"\n")
            if end < 0:
                break
            line = bytes(buffer[:end])
            del buffer[: end + 1]
            if is_dropping:
                is_dropping = False
            elif line.strip():
                yield line
        if len(buffer) > MAX_FRAME:
            if not is_dropping:
                failure = RefusedError("FrameTooLarge", "frame larger than %d bytes dropped" % MAX_FRAME)
                agent.send({"id": None, "ok": False, "error": failure.to_json()})
            is_dropping = True
            buffer.clear()
