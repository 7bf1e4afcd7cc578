"""Prometheus metrics from one read of the store: what an operator's dashboards and alarms need.

Labels are node, run, gpu and closed sets of words; never attempt ids, messages or anything that grows. A
value that is not known is left out, so that an alarm on absence works and a missing sensor is never 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from sqlmodel import Session

from supervisor.clock import Clock
from supervisor.domain.run import RunPhase
from supervisor.services import views
from supervisor.store import queries

Json = Mapping[str, Any]

RUN_METRICS: Mapping[str, tuple[str, tuple[str, ...], str]] = {
    "step": ("dflash_run_step", ("step",), "Optimizer step of the newest metrics line."),
    "loss": ("dflash_run_loss", ("train", "loss"), "Training loss."),
    "tok_s": ("dflash_run_tokens_per_second", ("train", "tok_s"), "Training throughput."),
    "eal": (
        "dflash_run_expected_acceptance_length",
        ("train", "eal"),
        "Acceptance length as training estimates it.",
    ),
    "hs": ("dflash_run_hs_queue_depth", ("queue", "hs"), "Batches in the hidden-states queue."),
    "starved": (
        "dflash_run_hs_queue_starved_ratio",
        ("queue", "starved_ratio"),
        "Share of time that drafters waited for the queue.",
    ),
}
GPU_METRICS: Mapping[str, tuple[str, str]] = {
    "util_ratio": ("dflash_gpu_utilization_ratio", "GPU utilisation."),
    "mem_used_bytes": ("dflash_gpu_memory_used_bytes", "GPU memory in use."),
    "mem_total_bytes": ("dflash_gpu_memory_total_bytes", "GPU memory in all."),
    "power_w": ("dflash_gpu_power_watts", "GPU power draw."),
    "temp_c": ("dflash_gpu_temperature_celsius", "GPU temperature."),
}


class SnapshotCollector(Collector):
    """Families gathered before, for one scrape."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterable[Metric]:
        """The families."""
        return self._families


def snapshot(session: Session, clock: Clock, *, open_streams: int, version: str) -> SnapshotCollector:
    """Everything that one scrape shows."""
    runs = [views.run_view(session, run, clock) for run in queries.list_all_runs(session)]
    nodes = queries.list_all_nodes(session)
    families = [
        _single("dflash_build_info", "Version of the daemon.", 1, {"version": version}),
        _single("dflash_streams_open", "Open event and log streams.", open_streams),
        _single(
            "dflash_operations_open",
            "Operations that have not ended.",
            len(queries.list_open_operations(session)),
        ),
        _phases(runs),
        _attempts(runs),
        *(_run_family(runs, *described) for described in RUN_METRICS.values()),
        _reachability(nodes),
        *_gpu_families(session, nodes),
    ]
    return SnapshotCollector(families)


def _single(name: str, text: str, value: float, labels: Mapping[str, str] | None = None) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=list(labels or {}))
    family.add_metric(list((labels or {}).values()), value)
    return family


def _phases(runs: list[dict[str, Any]]) -> GaugeMetricFamily:
    counts = Counter(run["phase"] for run in runs)
    family = GaugeMetricFamily("dflash_runs", "Runs by phase.", labels=["phase"])
    for phase in RunPhase:
        family.add_metric([phase.value], counts[phase.value])
    return family


def _attempts(runs: list[dict[str, Any]]) -> GaugeMetricFamily:
    family = GaugeMetricFamily("dflash_run_attempts", "Attempts so far.", labels=["run"])
    for run in runs:
        family.add_metric([run["name"]], (run.get("attempt") or {}).get("number") or 0)
    return family


def _run_family(runs: list[dict[str, Any]], name: str, path: tuple[str, ...], text: str) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=["run"])
    for run in runs:
        value = _dig(run.get("metrics"), path)
        if value is not None:
            family.add_metric([run["name"]], value)
    return family


def _reachability(nodes: Iterable[Any]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(
        "dflash_node_reachable", "1 reachable, 0 unreachable, absent when unknown.", labels=["node"]
    )
    for node in nodes:
        for condition in node.conditions:
            if condition["type"] == "Reachable" and condition["status"] != "unknown":
                family.add_metric([node.name], float(condition["status"] == "true"))
    return family


def _gpu_families(session: Session, nodes: Iterable[Any]) -> list[GaugeMetricFamily]:
    families = {
        key: GaugeMetricFamily(name, text, labels=["node", "gpu"])
        for key, (name, text) in GPU_METRICS.items()
    }
    for node in nodes:
        sample = queries.newest_gpu_sample(session, node.id)
        for gpu in sample.gpus if sample is not None else ():
            for key, family in families.items():
                value = _dig(gpu, (key,))
                if value is not None:
                    family.add_metric([node.name, str(gpu.get("index"))], value)
    return list(families.values())


def _dig(record: Json | None, path: tuple[str, ...]) -> float | None:
    value: Any = record
    for name in path:
        if not isinstance(value, Mapping):
            return None
        value = value.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
