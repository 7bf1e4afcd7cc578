"""The API under a moderate load, and how long a command of the command line takes to begin.

The load: the fleet of `adoption` writing status, metrics and logs, and some clients that hold the live stream
open. Percentiles are of whole answers, as a client on this machine sees them.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from benchmarks.bed import Bed, DaemonProcess
from benchmarks.tables import Figure, Ratio, Table

CALLS = 120
STREAMS = 20
PAUSE_S = 0.05
CLI_CALLS = 7


def api_table(bed: Bed, fleet: int) -> Table:
    """GETs while the fleet reports and `STREAMS` clients listen."""
    stop = threading.Event()
    reader = threading.Thread(target=_listen, args=(bed.daemon, stop), daemon=True)
    reader.start()
    time.sleep(1.0)
    cpu, begin = bed.daemon.cpu_s(), time.perf_counter()
    paths = {"GET /v1/runs": "/v1/runs", "GET /v1/runs/{run}": "/v1/runs/fleet-00"}
    figures = [Figure(name, "ms", [_get_ms(bed, path) for _ in range(CALLS)]) for name, path in paths.items()]
    used = (bed.daemon.cpu_s() - cpu) / (time.perf_counter() - begin)
    idle_cpu, idle_begin = bed.daemon.cpu_s(), time.perf_counter()
    time.sleep(5.0)
    idle = (bed.daemon.cpu_s() - idle_cpu) / (time.perf_counter() - idle_begin)
    resident = bed.daemon.resident_bytes() / 1e6
    stop.set()
    reader.join()
    return Table(
        f"API with {fleet} live runs on one node and {STREAMS} event streams",
        [
            *figures,
            Figure("daemon, share of a core while asked 20 times a second", "%", [used * 100]),
            Figure("daemon, share of a core with the streams alone", "%", [idle * 100]),
            Figure("daemon, memory", "MB", [resident]),
        ],
        [
            *(Ratio(name=f"{item.name}, p95", value=item.p95, unit="ms", at_most=50) for item in figures),
            Ratio(name="share of a core, streams alone", value=idle * 100, unit="%", at_most=60),
            Ratio(name="memory", value=resident, unit="MB", at_most=400),
        ],
    )


def cli_table(bed: Bed) -> Table:
    """Whole runs of two commands, beside the interpreter alone."""
    command = str(Path(sys.executable).with_name("dflashctl"))
    token = str(bed.daemon.state_dir / "admin.token")
    environment = {"DFLASHCTL_URL": bed.daemon.url, "DFLASHCTL_TOKEN_FILE": token, "PATH": "/usr/bin:/bin"}
    words = {
        "dflashctl version": [command, "version"],
        "dflashctl ps": [command, "ps"],
        "python -c pass": [sys.executable, "-c", "pass"],
        "python -c 'import typer, httpx2'": [sys.executable, "-c", "import typer, httpx2"],
    }
    figures = [
        Figure(name, "ms", [_command_ms(argv, environment) for _ in range(CLI_CALLS)])
        for name, argv in words.items()
    ]
    version, listing, python, libraries = figures
    return Table(
        "command line",
        figures,
        [
            Ratio(name="dflashctl version / python -c pass", value=version.p50 / python.p50),
            Ratio(name="dflashctl ps / its two libraries alone", value=listing.p50 / libraries.p50),
        ],
    )


def _listen(daemon: DaemonProcess, stop: threading.Event) -> None:
    """Hold streams open and drop what comes: the clients must not be the load that is measured."""
    with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:
        for _ in range(STREAMS):
            connection = stack.enter_context(socket.create_connection(daemon.address, timeout=10))
            connection.sendall(_stream_request(daemon))
            selector.register(connection, selectors.EVENT_READ)
        while not stop.is_set():
            for key, _ in selector.select(0.2):
                key.fileobj.recv(1 << 16)  # type: ignore[union-attr]


def _stream_request(daemon: DaemonProcess) -> bytes:
    host, port = daemon.address
    lines = [
        "GET /v1/telemetry/stream?events=true HTTP/1.1",
        f"Host: {host}:{port}",
        f"Authorization: Bearer {daemon.token}",
        "Accept: text/event-stream",
    ]
    return "".join(f"{line}\r\n" for line in [*lines, ""]).encode()


def _get_ms(bed: Bed, path: str) -> float:
    time.sleep(PAUSE_S)
    begin = time.perf_counter()
    bed.client.get(path)
    return (time.perf_counter() - begin) * 1e3


def _command_ms(argv: list[str], environment: dict[str, str]) -> float:
    begin = time.perf_counter()
    subprocess.run(argv, check=True, stdin=subprocess.DEVNULL, capture_output=True, env=environment)
    return (time.perf_counter() - begin) * 1e3
