"""Deploys: the first one of a trainer with its environment, and one that finds nothing to change."""

from __future__ import annotations

import time

from benchmarks.bed import NODE, Bed
from benchmarks.tables import Figure, Ratio, Table

ROUNDS = 6


def deploy_table(bed: Bed) -> Table:
    """Deploys to the container; its first deploy includes pushing shim and uv."""
    begin = time.perf_counter()
    bed.add_container_node()
    first = time.perf_counter() - begin
    unchanged = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        bed.deploy(NODE)
        unchanged.append(time.perf_counter() - begin)
    figure = Figure("unchanged deploy", "s", unchanged)
    return Table(
        "deploy to a container (toy trainer, environment of one wheel)",
        [Figure("first deploy: shim, uv, release, environment", "s", [first]), figure],
        [Ratio(name="unchanged deploy, p95", value=figure.p95, unit="s", at_most=2)],
        ["times include the client's polling of the operation, 0.25 s"],
    )
