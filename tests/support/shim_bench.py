"""A node folder with the real shim in it, driven as the supervisor drives it: processes, stdin, stdout.

`ShimBench` starts attempts and agents and ends everything it started by identity when the test is over.
Everything is found by recorded pid; nothing is ever selected by name. For tests only.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from supervisor.shim.proc import is_alive, signal_identity
from supervisor.transport.bundle import build_shim

TOY = Path(__file__).with_name("toy_trainer.py")
FAKE_NVML = Path(__file__).with_name("fake_nvml")
WAIT_S = 120.0
PATIENT_STOP = {"grace_s": 120, "extend_max_s": 240, "term_s": 120, "kill_s": 120, "verify_s": 120}
"""Steps end when the processes do; a limit is reached only by a test that sets its own."""
SHORT_STOP = {"grace_s": 0.3, "extend_max_s": 0.3, "term_s": 0.3, "kill_s": 120, "verify_s": 120}
"""For trainers that do not listen: quick up to SIGKILL, patient from there on."""


def wait_for(check: Callable[[], Any], what: str, timeout_s: float = WAIT_S) -> Any:
    """Poll until `check` gives something true; a bounded wait for an event."""
    ends = time.monotonic() + timeout_s
    while time.monotonic() < ends:
        value = check()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError(f"did not happen within {timeout_s} s: {what}")


class AgentProcess:
    """A raw agent: frames in, frames out, no client in between."""

    def __init__(self, argv: list[str], env: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env
        )
        self.events: list[dict[str, Any]] = []
        self._frames: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._id = 0
        threading.Thread(target=self._read, daemon=True).start()
        self.hello = self.next_frame()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.strip():
                self._frames.put(json.loads(line))
        self._frames.put(None)

    def send_raw(self, data: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(data)
        self.process.stdin.flush()

    def next_frame(self) -> dict[str, Any]:
        frame = self._frames.get(timeout=WAIT_S)
        assert frame is not None, "the agent ended"
        return frame

    def ask(self, op: str, **fields: Any) -> dict[str, Any]:
        """The whole reply frame; events that arrive before it are kept in `events`."""
        self._id += 1
        self.send_raw(json.dumps({"id": self._id, "op": op, **fields}).encode() + b"\n")
        while True:
            frame = self.next_frame()
            if frame.get("id") == self._id:
                return frame
            self.events.append(frame)

    def result(self, op: str, **fields: Any) -> dict[str, Any]:
        reply = self.ask(op, **fields)
        assert reply["ok"], reply
        return reply["result"]

    def wait_event(self, check: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The first event, seen already or to come, for which `check` holds."""
        for event in self.events:
            if check(event):
                return event
        ends = time.monotonic() + WAIT_S
        while time.monotonic() < ends:
            event = self.next_frame()
            self.events.append(event)
            if check(event):
                return event
        raise AssertionError(f"no such event among {[e.get('ev') for e in self.events]}")

    def kill(self) -> None:
        self.process.kill()
        self.close()

    def close(self) -> None:
        """Hang up and wait for the agent to leave."""
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None and stream is not self.process.stdout:
                stream.close()
        self.process.wait(timeout=WAIT_S)


class ShimBench:
    """One node root with attempts in it."""

    def __init__(self, folder: Path, python: str = sys.executable) -> None:
        self.root = folder / "node"
        self.logs = folder / "logs"
        self.pyz = folder / "dflash-shim.pyz"
        self.pyz.write_bytes(build_shim().data)
        self.python = python
        self._agents: list[AgentProcess] = []
        self._bystanders: list[subprocess.Popen[bytes]] = []

    def command(self, name: str, *arguments: str) -> list[str]:
        return [self.python, str(self.pyz), name, "--root", str(self.root), *arguments]

    def body(self, attempt_id: str, *toy: str, **fields: Any) -> dict[str, Any]:
        """A start request for the toy trainer, with `fields` over it."""
        return {
            "v": 1,
            "attempt_id": attempt_id,
            "run_id": "run-1",
            "run_name": "slammed",
            "argv": [self.python, str(TOY), *toy],
            "log_path": str(self.logs / f"{attempt_id}.log"),
            "stop": PATIENT_STOP,
            "spec": {"name": "slammed"},
            **fields,
        }

    def post(self, body: dict[str, Any] | bytes) -> dict[str, Any]:
        """Run `start`; its reply."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        done = subprocess.run(
            self.command("start"), input=data, capture_output=True, timeout=WAIT_S, check=False
        )
        assert done.stderr == b"", done.stderr
        reply = json.loads(done.stdout)
        assert done.returncode == (0 if reply["ok"] else 1)
        return reply

    def start(self, attempt_id: str, *toy: str, **fields: Any) -> dict[str, Any]:
        """Start a toy trainer that must come up; its state."""
        reply = self.post(self.body(attempt_id, *toy, **fields))
        assert reply["ok"], reply
        return reply["state"]

    def agent(self, env: dict[str, str] | None = None) -> AgentProcess:
        agent = AgentProcess(self.command("serve"), env)
        self._agents.append(agent)
        return agent

    def bystander(self, argv: list[str]) -> subprocess.Popen[bytes]:
        """A stranger's process."""
        process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, start_new_session=True)
        self._bystanders.append(process)
        return process

    def folder(self, attempt_id: str) -> Path:
        return self.root / "attempts" / attempt_id

    def read(self, attempt_id: str, name: str) -> dict[str, Any] | None:
        path = self.folder(attempt_id) / name
        return json.loads(path.read_text()) if path.exists() else None

    def wait_exit(self, attempt_id: str) -> dict[str, Any]:
        """The exit record of an attempt without survivors, once it is written."""

        def ended() -> dict[str, Any] | None:
            is_over = (self.read(attempt_id, "state.json") or {}).get("phase") == "exited"
            return self.read(attempt_id, "exit.json") if is_over else None

        return wait_for(ended, f"exit record of {attempt_id}")

    def wait_training(self, attempt_id: str) -> dict[str, Any]:
        def training() -> dict[str, Any] | None:
            status = self.read(attempt_id, "status.json")
            return status if status and status["phase"] == "training" and status["step"] > 0 else None

        return wait_for(training, f"{attempt_id} trains")

    def children(self, attempt_id: str, count: int) -> list[int]:
        """Pids of the processes that the toy left behind."""
        path = self.folder(attempt_id) / "children.txt"

        def all_there() -> list[int] | None:
            lines = path.read_text().splitlines() if path.exists() else []
            return [int(line) for line in lines] if len(lines) >= count else None

        return wait_for(all_there, "children of the toy")

    def close(self) -> None:
        """End agents, shims and trainers of this bench, by identity."""
        for agent in self._agents:
            if agent.process.poll() is None:
                agent.kill()
        attempts = self.root / "attempts"
        for attempt in sorted(attempts.iterdir()) if attempts.exists() else []:
            self._end_attempt(attempt)
        for process in self._bystanders:
            if process.poll() is None:
                process.kill()
            process.wait(timeout=WAIT_S)

    def _end_attempt(self, attempt: Path) -> None:
        state = self.read(attempt.name, "state.json") or {}
        for identity in (state.get("shim"), state.get("identity")):
            if is_alive(identity):
                signal_identity(identity, signal.SIGKILL)
        children = attempt / "children.txt"
        for line in children.read_text().splitlines() if children.exists() else []:
            if _is_in(int(line), str(attempt)):
                os.kill(int(line), signal.SIGKILL)
        group = Path(state.get("cgroup") or "/nonexistent")
        if group.is_dir():
            (group / "cgroup.kill").write_text("1")
            wait_for(lambda: is_removed(group), f"cgroup {group} removed")


def _is_in(pid: int, folder: str) -> bool:
    try:
        return folder.encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


def is_removed(path: Path) -> bool:
    """Try to remove a control group; False while the kernel still has a process in it."""
    try:
        path.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
