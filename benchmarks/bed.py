"""The machines of a benchmark: a Proxmox-like host behind sshd, and a real daemon as its own process.

`daemon_bed` starts `dflashctl serve` on a state folder of its own and yields a `Bed`; it is spoken to by HTTP
only, as a user would. Everything that is started is ended by process id. Used by the benchmarks alone.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from supervisor.client import Client
from tests.support.daemon import TOY_TRAINER, make_lock, make_spec
from tests.support.pct_host import DEFAULT_VMID, PctHost

WAIT_S = 60.0
NODE = "ct200"
LISTENING = "listening on "
POLL_S = 0.2


class BenchmarkError(RuntimeError):
    """The bed is not in the state that a measurement needs."""


class DaemonProcess:
    """`dflashctl serve` on a state folder, started as often as it is killed."""

    def __init__(self, state_dir: Path) -> None:
        self.state_dir = state_dir
        self._process: subprocess.Popen[str] | None = None
        self.url = ""

    def start(self) -> None:
        """Start it and wait for the line that says where it listens."""
        command = str(Path(sys.executable).with_name("dflashctl"))
        words = [command, "serve", "--state-dir", str(self.state_dir), "--port", "0"]
        log = self.state_dir.with_suffix(".log").open("a")
        self._process = subprocess.Popen(
            [*words, "--log-level", "warning"], stdout=subprocess.PIPE, stderr=log, text=True
        )
        log.close()
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(LISTENING):
                self.url = line.removeprefix(LISTENING).split("/#")[0]
                return
        raise BenchmarkError(f"the daemon did not start; see {log.name}")

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process is not None
        return self._process.pid

    def end(self, how: signal.Signals = signal.SIGTERM) -> None:
        """Send the signal and wait until it is gone."""
        if self._process is None:
            return
        self._process.send_signal(how)
        self._process.wait(WAIT_S)
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._process = None

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        host, _, port = self.url.partition("//")[2].partition(":")
        return host, int(port)

    @property
    def token(self) -> str:
        """The admin's token."""
        return (self.state_dir / "admin.token").read_text("utf-8").strip()

    def client(self) -> Client:
        """A connection with the admin's token."""
        return Client(self.url, self.token)

    def cpu_s(self) -> float:
        """Processor time it has used so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text("utf-8").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def resident_bytes(self) -> int:
        """Memory it holds now."""
        return int(Path(f"/proc/{self.pid}/statm").read_text("utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")


class EventLog:
    """The daemon's event stream with the moment at which each event arrived."""

    def __init__(self, client: Client) -> None:
        self._seen: queue.Queue[tuple[float, dict[str, Any]]] = queue.Queue()
        threading.Thread(target=self._read, args=(client,), daemon=True).start()

    def _read(self, client: Client) -> None:
        for name, data in client.events():
            if name == "event":
                self._seen.put((time.perf_counter(), data))

    def wait(self, run: str, reason: str, *, problems: frozenset[str] = frozenset()) -> float:
        """Moment of the next event of this run with this reason; earlier others are dropped."""
        end = time.perf_counter() + WAIT_S
        while (left := end - time.perf_counter()) > 0:
            with contextlib.suppress(queue.Empty):
                at, event = self._seen.get(timeout=left)
                if event["subject"] != f"run/{run}":
                    continue
                if event["reason"] == reason:
                    return at
                if event["reason"] in problems:
                    raise BenchmarkError(f"{run}: {event['reason']}: {event['message']}")
        raise BenchmarkError(f"{run}: no {reason} within {WAIT_S:g} s")


@dataclass(slots=True)
class Bed:
    """A host with container 200, and a daemon with both that container and this machine as nodes."""

    folder: Path
    host: PctHost
    daemon: DaemonProcess
    client: Client
    lock: Path
    events: EventLog = field(init=False)

    def __post_init__(self) -> None:
        self.events = EventLog(self.daemon.client())

    def reconnect(self) -> None:
        """After the daemon was started again: it listens elsewhere."""
        self.client.close()
        self.client = self.daemon.client()

    def finish(self, operation: dict[str, Any]) -> dict[str, Any]:
        """Wait for an operation; an end other than `done` is an error of the bed."""
        ended = self.client.wait_operation(operation["id"], timeout_s=WAIT_S * 2)
        if ended["status"] != "done":
            raise BenchmarkError(f"{ended['kind']} {ended['status']}: {ended.get('error')}")
        return ended

    def add_container_node(self) -> None:
        """Register container 200 and bring the toy trainer there."""
        fields = {
            "name": NODE,
            "transport": "proxmox",
            "host": "127.0.0.1",
            "port": self.host.port,
            "user": "root",
            "vmid": DEFAULT_VMID,
            "identity_file": str(self.host.identity),
            "host_key_fingerprint": self.host.host_fingerprint,
            "root": "/srv/dflash",
            "log_dir": "/workspace",
            "find_links": "/srv/wheels",
        }
        self.client.post("/v1/nodes", fields)
        for wheel in (self.folder / "wheels").iterdir():
            self.host.ct_path(f"/srv/wheels/{wheel.name}").write_bytes(wheel.read_bytes())
        self.deploy(NODE)

    def add_local_node(self) -> Path:
        """Register this machine and bring the toy trainer there; returns the node's root."""
        root = self.folder / "local"
        fields = {"name": "local", "transport": "local", "root": str(root), "log_dir": str(root / "logs")}
        self.client.post("/v1/nodes", {**fields, "find_links": str(self.folder / "wheels")})
        self.deploy("local")
        return root

    def deploy(self, node: str) -> dict[str, Any]:
        """Deploy the toy trainer and wait."""
        body = {"source": str(TOY_TRAINER), "lock": str(self.lock)}
        return self.finish(self.client.post(f"/v1/nodes/{node}/deploy", body))

    def put_run(self, node: str, name: str, output_dir: str, *args: str) -> None:
        """Store a run of the toy trainer."""
        self.client.post("/v1/runs", make_spec(node, name, output_dir=output_dir, args=args))

    def until(
        self, check: Callable[[], bool], what: str, *, every_s: float = POLL_S, limit_s: float = WAIT_S
    ) -> float:
        """Poll until `check` holds; returns that moment. Not too often: polling is a load of its own."""
        end = time.perf_counter() + limit_s
        while time.perf_counter() < end:
            if check():
                return time.perf_counter()
            time.sleep(every_s)
        raise BenchmarkError(f"waited {limit_s:g} s for {what}")


@contextlib.contextmanager
def daemon_bed(folder: Path, host: PctHost) -> Iterator[Bed]:
    """A daemon on an empty state folder beside `host`, ended afterwards."""
    lock = make_lock(folder)
    daemon = DaemonProcess(folder / "state")
    daemon.start()
    try:
        client = daemon.client()
        try:
            bed = Bed(folder, host, daemon, client, lock)
            yield bed
        finally:
            client.close()
    finally:
        daemon.end()
