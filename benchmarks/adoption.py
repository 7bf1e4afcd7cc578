"""A killed daemon: how long until the next one has found all live runs, and that it restarts none."""

from __future__ import annotations

import functools
import signal
import time
from pathlib import Path

from benchmarks.bed import Bed, BenchmarkError
from benchmarks.tables import Figure, Ratio, Table
from supervisor.client import Json
from tests.support.daemon import live_processes

RUNS = 20
ROUNDS = 3
FLEET_LIMIT_S = 150.0
PREFIX = "fleet-"


def start_fleet(bed: Bed, root: Path) -> float:
    """Have `RUNS` toy runs ready on this machine; returns how long their starts took together."""
    names = [f"{PREFIX}{number:02d}" for number in range(RUNS)]
    for name in names:
        bed.put_run("local", name, str(root / "out" / name), "--step-s", "1")
    begin = time.perf_counter()
    for name in names:
        bed.client.post(f"/v1/runs/{name}/start", {})
    try:
        bed.until(lambda: _are_ready(_fleet(bed)), "all runs to be ready", every_s=1.0, limit_s=FLEET_LIMIT_S)
    except BenchmarkError as error:
        waiting = [_told(run) for run in _fleet(bed) if not _are_ready([run])]
        raise BenchmarkError(f"{error}: {'; '.join(waiting)}") from error
    return time.perf_counter() - begin


def adoption_table(bed: Bed, root: Path) -> Table:
    """Kill and start the daemon a few times while the fleet runs."""
    fleet_s = start_fleet(bed, root)
    before = sorted(live_processes(root, PREFIX))
    listening, adopted = [], []
    for _ in range(ROUNDS):
        begin, killed_at = time.perf_counter(), time.time()
        bed.daemon.end(signal.SIGKILL)
        bed.daemon.start()
        listening.append(time.perf_counter() - begin)
        bed.reconnect()
        check = functools.partial(_all_seen, bed, killed_at)
        adopted.append(bed.until(check, "adoption") - begin)
    after = sorted(live_processes(root, PREFIX))
    if before != after or len(after) != RUNS:
        raise BenchmarkError(f"{len(before)} trainers before, {len(after)} after, not the same ones")
    all_adopted = Figure(f"kill -9 → all {RUNS} runs seen alive by the next daemon", "s", adopted)
    return Table(
        f"daemon killed with {RUNS} live runs on one node",
        [
            Figure(f"POST start of {RUNS} runs → all ready", "s", [fleet_s]),
            Figure("kill -9 → the next daemon answers", "s", listening),
            all_adopted,
        ],
        [Ratio(name="all adopted, slowest round", value=max(adopted), unit="s", at_most=5)],
        [f"the same {RUNS} processes run before and after; none was restarted"],
    )


def stop_fleet(bed: Bed) -> None:
    """Stop all runs of the fleet and wait."""
    operations = [bed.client.post(f"/v1/runs/{run['name']}/stop", {"save": False}) for run in _fleet(bed)]
    for operation in operations:
        bed.finish(operation)


def _fleet(bed: Bed) -> list[Json]:
    runs = bed.client.list_all("/v1/runs", limit=200)
    return [run for run in runs if str(run["name"]).startswith(PREFIX)]


def _told(run: Json) -> str:
    attempt = run.get("attempt") or {}
    words = (
        run["name"],
        run["phase"],
        "attempt",
        *(attempt.get(key) for key in ("number", "state", "message")),
    )
    return " ".join(str(word) for word in words)


def _are_ready(fleet: list[Json]) -> bool:
    return {(run.get("attempt") or {}).get("state") for run in fleet} == {"ready"}


def _all_seen(bed: Bed, since: float) -> bool:
    """Whether every run is ready and has a status record that the new daemon itself received."""
    fleet = _fleet(bed)
    ages = [run["status_age_s"] for run in fleet]
    limit = time.time() - since
    return _are_ready(fleet) and all(age is not None and age < limit for age in ages)
