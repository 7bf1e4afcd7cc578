"""How much the transports add: warm commands, requests on a lasting channel, uploads.

A warm command is compared with a bare paramiko channel and with the ssh client, alone and on a shared
connection; uploads with scp; a request to the agent inside the container with a bare echo on such a channel.
All against the test bed's own sshd.
"""

from __future__ import annotations

import asyncio
import os
import posixpath
import subprocess
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from benchmarks.tables import Figure, Ratio, Table
from supervisor.clock import SystemClock
from supervisor.transport.agent import AgentClient, build_shim_argv
from supervisor.transport.base import Channel, Transport
from supervisor.transport.bundle import build_shim
from supervisor.transport.ssh import SshTransport
from supervisor.transport.ssh.connect import connect
from tests.support.pct_host import PctHost

CALLS = 60
SLOW_CALLS = 15
WARM_UP = 3
UPLOADS = 3
UPLOAD_BYTES = 100 << 20
DEADLINE_S = 60.0
ROOT = "/srv/bench"


def transport_tables(host: PctHost, folder: Path) -> list[Table]:
    """Commands and requests, then uploads."""
    source = folder / "source"
    source.write_bytes(os.urandom(UPLOAD_BYTES))
    return [asyncio.run(_command_table(host)), asyncio.run(_upload_table(host, source))]


async def _command_table(host: PctHost) -> Table:
    ssh = SshTransport(host.target(port=host.direct_port))
    pct = host.transport()
    try:
        ours = Figure("run `true` by our ssh transport", "ms", await _run_times(ssh, CALLS))
        bare = Figure("the same by bare paramiko", "ms", await asyncio.to_thread(_bare_paramiko, host))
        client = Figure("the same by ssh", "ms", await asyncio.to_thread(_ssh_client, host))
        shared = Figure("the same by ssh, ControlMaster", "ms", await asyncio.to_thread(_shared_ssh, host))
        inside = Figure("run `true` in the container (pct)", "ms", await _run_times(pct, SLOW_CALLS))
        echo = Figure("echo on a lasting pct channel", "ms", await _echo_times(pct))
        request = Figure("request to the agent on such a channel", "ms", await _request_times(pct))
    finally:
        await ssh.close()
        await pct.close()
    return Table(
        "commands and requests",
        [ours, bare, client, shared, inside, echo, request],
        [
            Ratio(name="warm run by our transport, p50", value=ours.p50, unit="ms", at_most=5),
            Ratio(name="agent request, p50", value=request.p50, unit="ms", at_most=1),
            Ratio(name="our run / bare paramiko", value=ours.p50 / bare.p50),
            Ratio(name="our run / ssh", value=ours.p50 / client.p50),
            Ratio(name="our run / ssh with ControlMaster", value=ours.p50 / shared.p50),
        ],
    )


async def _upload_table(host: PctHost, source: Path) -> Table:
    ssh = SshTransport(host.target(port=host.direct_port))
    pct = host.transport()
    try:
        await ssh.run(["true"], deadline_s=DEADLINE_S)
        put = Figure("put over ssh", "MB/s", await _put_rates(ssh, source))
        scp = Figure("scp", "MB/s", await asyncio.to_thread(_scp_rates, host, source))
        inside = Figure("put into the container (pct)", "MB/s", await _put_rates(pct, source))
    finally:
        await ssh.close()
        await pct.close()
    return Table(
        f"upload of {UPLOAD_BYTES >> 20} MiB of noise",
        [put, scp, inside],
        [
            Ratio(name="put over ssh, p50", value=put.p50, unit="MB/s", at_least=100),
            Ratio(name="put / scp", value=put.p50 / scp.p50),
        ],
        ["put hashes, verifies in the node, syncs and renames; scp only writes"],
    )


async def _times(action: Callable[[], Awaitable[object]], count: int) -> list[float]:
    """Milliseconds of `action`, after a few calls that do not count."""
    found = []
    for number in range(count + WARM_UP):
        begin = time.perf_counter()
        await action()
        if number >= WARM_UP:
            found.append((time.perf_counter() - begin) * 1e3)
    return found


async def _run_times(transport: Transport, count: int) -> list[float]:
    return await _times(lambda: transport.run(["true"], deadline_s=DEADLINE_S), count)


async def _echo_times(transport: Transport) -> list[float]:
    channel = await transport.open_channel(["cat"], deadline_s=DEADLINE_S)

    async def echo() -> None:
        await channel.send(b"x\n", deadline_s=DEADLINE_S)
        await channel.receive()

    try:
        return await _times(echo, CALLS * 5)
    finally:
        await channel.close()


async def _request_times(transport: Transport) -> list[float]:
    """Pings of the real agent in the container."""
    shim = build_shim()
    path = f"{ROOT}/shim/{shim.digest}.pyz"
    await transport.run(["mkdir", "-p", posixpath.dirname(path)], deadline_s=DEADLINE_S)
    await transport.put(shim.data, path, mode=0o755, deadline_s=DEADLINE_S)

    async def open_channel() -> Channel:
        argv = build_shim_argv("python3", path, "serve", ROOT)
        return await transport.open_channel(argv, deadline_s=DEADLINE_S)

    agent = AgentClient(open_channel, SystemClock())
    await agent.open(deadline_s=DEADLINE_S)
    try:
        return await _times(lambda: agent.request("ping"), CALLS * 5)
    finally:
        await agent.aclose()


def _bare_paramiko(host: PctHost) -> list[float]:
    """One command on a warm paramiko connection, as plainly as it can be done."""
    link = connect(host.target(port=host.direct_port))
    found = []
    for _ in range(CALLS):
        begin = time.perf_counter()
        channel = link.open_session()
        channel.exec_command("true")
        channel.recv_exit_status()
        channel.close()
        found.append((time.perf_counter() - begin) * 1e3)
    link.close()
    return found[WARM_UP:]


def _ssh_client(host: PctHost) -> list[float]:
    return [_ssh_ms(host.ssh_words()) for _ in range(SLOW_CALLS)][WARM_UP:]


def _shared_ssh(host: PctHost) -> list[float]:
    words = host.ssh_words()
    socket = host.folder / "master"
    words[1:1] = ["-o", "ControlMaster=auto", "-o", f"ControlPath={socket}", "-o", "ControlPersist=20"]
    try:
        return [_ssh_ms(words) for _ in range(CALLS)][WARM_UP:]
    finally:
        subprocess.run([*words, "-O", "exit"], check=False, stderr=subprocess.DEVNULL)


def _ssh_ms(words: list[str]) -> float:
    begin = time.perf_counter()
    subprocess.run([*words, "true"], check=True, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return (time.perf_counter() - begin) * 1e3


def _scp_rates(host: PctHost, source: Path) -> list[float]:
    known = host.folder / "known_hosts"
    options = ["-o", f"UserKnownHostsFile={known}", "-o", "BatchMode=yes", "-i", str(host.identity)]
    words = ["scp", "-q", "-F", "none", "-P", str(host.direct_port), *options, str(source)]
    rates = []
    for number in range(UPLOADS):
        begin = time.perf_counter()
        subprocess.run([*words, f"root@127.0.0.1:/root/by-scp-{number}"], check=True)
        rates.append(UPLOAD_BYTES / 1e6 / (time.perf_counter() - begin))
    return rates


async def _put_rates(transport: Transport, source: Path) -> list[float]:
    """Each to a path of its own, so that nothing is there yet."""
    rates = []
    for number in range(UPLOADS):
        begin = time.perf_counter()
        await transport.put(source, f"/root/by-put-{number}", deadline_s=DEADLINE_S)
        rates.append(UPLOAD_BYTES / 1e6 / (time.perf_counter() - begin))
    return rates
