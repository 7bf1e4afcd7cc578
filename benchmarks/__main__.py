"""All benchmarks in one run: `python -m benchmarks [TOPIC ...]` (about 4 minutes on 2 cores, root, OpenSSH).

Prints one table per topic with the ratios last. Exits 1 when a bar was missed and 2 when it could
not measure; the test suite never runs it.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.adoption import RUNS, adoption_table, stop_fleet
from benchmarks.api import api_table, cli_table
from benchmarks.bed import BenchmarkError, daemon_bed
from benchmarks.deploy import deploy_table
from benchmarks.launch import launch_table, restart_table
from benchmarks.tables import Table
from benchmarks.transport import transport_tables
from tests.support.daemon import end_leftovers
from tests.support.pct_host import PctHost

TOPICS = ("transport", "container", "fleet")


def main() -> int:
    """Run the chosen topics."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("topics", nargs="*", metavar="TOPIC", help=f"of {', '.join(TOPICS)}; default: all")
    chosen = parser.parse_args().topics or list(TOPICS)
    unknown = set(chosen) - set(TOPICS)
    if unknown:
        parser.error(f"unknown topic: {sorted(unknown)[0]} (known: {', '.join(TOPICS)})")
    print(_heading(), flush=True)
    is_met = True
    try:
        for table in _tables(chosen):
            print(f"\n{table.render()}\n  load {os.getloadavg()[0]:.1f}", flush=True)
            is_met &= not any("NOT MET" in ratio.verdict for ratio in table.ratios)
    except BenchmarkError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0 if is_met else 1


def _tables(chosen: list[str]) -> Iterator[Table]:
    with tempfile.TemporaryDirectory() as name, PctHost(Path(name) / "host") as host:
        folder = Path(name)
        if "transport" in chosen:
            yield from transport_tables(host, folder)
        if {"container", "fleet"} & set(chosen):
            yield from _daemon_tables(folder, host, chosen)


def _daemon_tables(folder: Path, host: PctHost, chosen: list[str]) -> Iterator[Table]:
    with daemon_bed(folder, host) as bed:
        if "container" in chosen:
            yield deploy_table(bed)
            yield launch_table(bed)
            yield restart_table(bed)
        if "fleet" in chosen:
            root = bed.add_local_node()
            try:
                yield adoption_table(bed, root)
                yield api_table(bed, RUNS)
                yield cli_table(bed)
                stop_fleet(bed)
            finally:
                end_leftovers(root)


def _heading() -> str:
    words = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    system = platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())
    return f"{now}  commit {commit}  {os.cpu_count()} cores  {system}  load {os.getloadavg()[0]:.1f}"


if __name__ == "__main__":
    sys.exit(main())
