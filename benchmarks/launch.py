"""Start latency and planned restart of a run in a container, beside the bare commands.

A start is measured from the POST to the arrival of `AttemptStarted` in a client's event stream: only then the
process has been verified and its identity is stored. Each round also runs a bare `pct exec CT -- true` on a
warm connection and one cold `ssh host pct exec CT -- true`, so that all three meet the same load.
"""

from __future__ import annotations

import subprocess
import time

import paramiko

from benchmarks.bed import NODE, Bed
from benchmarks.tables import Figure, Ratio, Table
from supervisor.transport.ssh.connect import connect
from tests.support.pct_host import DEFAULT_VMID

ROUNDS = 25
RESTARTS = 10
PCT_TRUE = ("/usr/sbin/pct", "exec", str(DEFAULT_VMID), "--", "true")
FAILURES = frozenset({"LaunchFailed", "AttemptFailed", "RunHeld"})


def launch_table(bed: Bed) -> Table:
    """Starts and stops one run again and again."""
    bed.put_run(NODE, "launch", "/workspace/launch", "--step-s", "0.02")
    warm_link = connect(bed.host.target(port=bed.host.direct_port))
    starts, stops, warm, cold = [], [], [], []
    try:
        for number in range(ROUNDS + 1):
            start_s = _start(bed)
            stop_s = _stop(bed)
            warm_s, cold_s = _warm_exec(warm_link), _cold_exec(bed)
            if number:  # the first round pays for the first connection of everything
                starts.append(start_s * 1e3)
                stops.append(stop_s * 1e3)
                warm.append(warm_s * 1e3)
                cold.append(cold_s * 1e3)
    finally:
        warm_link.close()
    start_figure = Figure("POST start → process verified", "ms", starts)
    warm_figure = Figure("warm pct exec CT -- true (bare paramiko)", "ms", warm)
    cold_figure = Figure("cold ssh host pct exec CT -- true", "ms", cold)
    above = start_figure.p50 - warm_figure.p50
    above_95 = start_figure.p95 - warm_figure.p50
    return Table(
        "start of a run in a container",
        [start_figure, Figure("POST stop → absence verified", "ms", stops), warm_figure, cold_figure],
        [
            Ratio(name="start above warm pct exec, p50", value=above, unit="ms", at_most=150),
            Ratio(name="start p95 above warm pct exec p50", value=above_95, unit="ms", at_most=400),
            Ratio(name="start / cold ssh pct exec, p50", value=start_figure.p50 / cold_figure.p50, at_most=1),
        ],
    )


def restart_table(bed: Bed) -> Table:
    """Planned restarts of a run whose trainer needs at most 20 ms to notice, save and load."""
    bed.put_run(NODE, "again", "/workspace/again", "--step-s", "0.02")
    bed.client.post("/v1/runs/again/start", {})
    bed.events.wait("again", "AttemptReady", problems=FAILURES)
    times = []
    for _ in range(RESTARTS):
        begin = time.perf_counter()
        bed.client.post("/v1/runs/again/restart", {"when": "now"})
        times.append(bed.events.wait("again", "AttemptStarted", problems=FAILURES) - begin)
        bed.events.wait("again", "AttemptReady", problems=FAILURES)
    bed.finish(bed.client.post("/v1/runs/again/stop", {}))
    figure = Figure("POST restart → next process verified", "s", times)
    return Table(
        "planned restart in a container (stop, verified absence, preflight, start)",
        [figure],
        [Ratio(name="beside the trainer's own save and load, p95", value=figure.p95, unit="s", at_most=5)],
        ["the toy trainer saves and loads in milliseconds: all of this is the supervisor's"],
    )


def _start(bed: Bed) -> float:
    begin = time.perf_counter()
    bed.client.post("/v1/runs/launch/start", {})
    return bed.events.wait("launch", "AttemptStarted", problems=FAILURES) - begin


def _stop(bed: Bed) -> float:
    bed.events.wait("launch", "AttemptReady", problems=FAILURES)
    begin = time.perf_counter()
    operation = bed.client.post("/v1/runs/launch/stop", {})
    stopped = bed.events.wait("launch", "AttemptStopped", problems=FAILURES) - begin
    bed.finish(operation)
    return stopped


def _warm_exec(link: paramiko.Transport) -> float:
    begin = time.perf_counter()
    channel = link.open_session()
    channel.exec_command(" ".join(PCT_TRUE))
    status = channel.recv_exit_status()
    channel.close()
    assert status == 0, f"pct exec ended with {status}"
    return time.perf_counter() - begin


def _cold_exec(bed: Bed) -> float:
    begin = time.perf_counter()
    words = [*bed.host.ssh_words(), *PCT_TRUE]
    subprocess.run(words, check=True, stdin=subprocess.DEVNULL, capture_output=True)
    return time.perf_counter() - begin
