"""How much the transports add: `python -m benchmarks.transport` (about 20 s, needs root and OpenSSH).

Compares a warm command with a bare paramiko channel and with the ssh client on a shared connection, and
uploads with scp, against the test bed's own sshd. Prints figures, then the ratios that
`docs/performance.md` bounds.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from supervisor.transport.ssh import SshTransport
from supervisor.transport.ssh.connect import connect
from tests.support.pct_host import PctHost

CALLS = 60
PCT_CALLS = 15
UPLOAD_BYTES = 100 << 20
DEADLINE_S = 60.0


async def p50_ms(action: Callable[[], Awaitable[object]], count: int) -> float:
    """Median time of `action`, after three calls that do not count."""
    times = []
    for number in range(count + 3):
        start = time.perf_counter()
        await action()
        if number >= 3:
            times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def bare_paramiko(host: PctHost) -> float:
    """One command on a warm paramiko connection, as plainly as it can be done."""
    transport = connect(host.target(port=host.direct_port))
    times = []
    for _ in range(CALLS):
        start = time.perf_counter()
        channel = transport.open_session()
        channel.exec_command("true")
        channel.recv(1)
        channel.recv_exit_status()
        channel.close()
        times.append((time.perf_counter() - start) * 1e3)
    transport.close()
    return statistics.median(times)


def ssh_client(host: PctHost, *, is_shared: bool) -> float:
    """One command by the ssh client; `is_shared` over a control master, else with its own connection."""
    words = host.ssh_words()
    if is_shared:
        socket = host.folder / "master"
        words[1:1] = ["-o", "ControlMaster=auto", "-o", f"ControlPath={socket}", "-o", "ControlPersist=20"]
    times = []
    for number in range(12 if not is_shared else CALLS):
        start = time.perf_counter()
        subprocess.run([*words, "true"], check=True, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        if number >= 2:
            times.append((time.perf_counter() - start) * 1e3)
    if is_shared:
        subprocess.run([*words, "-O", "exit"], check=False, stderr=subprocess.DEVNULL)
    return statistics.median(times)


def scp_rate(host: PctHost, source: Path) -> float:
    """MB/s of the scp client, its connection included."""
    known = host.folder / "known_hosts"
    options = ["-o", f"UserKnownHostsFile={known}", "-o", "BatchMode=yes", "-i", str(host.identity)]
    start = time.perf_counter()
    words = ["scp", "-q", "-F", "none", "-P", str(host.direct_port), *options, str(source)]
    subprocess.run([*words, "root@127.0.0.1:/root/by-scp"], check=True)
    return UPLOAD_BYTES / 1e6 / (time.perf_counter() - start)


async def put_rate(transport: SshTransport, source: Path, target: str) -> float:
    """MB/s of `put`, hashing, verification, sync and rename included."""
    start = time.perf_counter()
    await transport.put(source, target, deadline_s=DEADLINE_S)
    return UPLOAD_BYTES / 1e6 / (time.perf_counter() - start)


async def measure(host: PctHost, source: Path) -> dict[str, float]:
    """All figures by name."""
    ssh = SshTransport(host.target(port=host.direct_port))
    pct = host.transport()
    channel = await ssh.open_channel(["cat"], deadline_s=DEADLINE_S)

    async def echo() -> None:
        await channel.send(b"x\n", deadline_s=DEADLINE_S)
        await channel.receive()

    found = {
        "ssh run p50 ms": await p50_ms(lambda: ssh.run(["true"], deadline_s=DEADLINE_S), CALLS),
        "bare paramiko p50 ms": await asyncio.to_thread(bare_paramiko, host),
        "ssh client p50 ms": await asyncio.to_thread(ssh_client, host, is_shared=False),
        "ssh client, shared connection p50 ms": await asyncio.to_thread(ssh_client, host, is_shared=True),
        "channel echo p50 ms": await p50_ms(echo, CALLS * 5),
        "pct run p50 ms (stand-in)": await p50_ms(
            lambda: pct.run(["true"], deadline_s=DEADLINE_S), PCT_CALLS
        ),
        "ssh put MB/s": await put_rate(ssh, source, "/root/by-put"),
        "scp MB/s": await asyncio.to_thread(scp_rate, host, source),
    }
    await channel.close()
    await ssh.close()
    await pct.close()
    return found


def main() -> None:
    """Measure and print; ratios last."""
    with tempfile.TemporaryDirectory() as folder, PctHost(Path(folder) / "host") as host:
        source = Path(folder) / "source"
        source.write_bytes(os.urandom(UPLOAD_BYTES))
        found = asyncio.run(measure(host, source))
    for name, value in found.items():
        print(f"{name:50} {value:10.2f}")
    for name, base in (
        ("ssh run p50 ms", "ssh client p50 ms"),
        ("ssh run p50 ms", "bare paramiko p50 ms"),
        ("ssh put MB/s", "scp MB/s"),
    ):
        print(f"{f'ratio: {name} / {base}':50} {found[name] / found[base]:10.2f}")


if __name__ == "__main__":
    sys.exit(main())
