"""What the workers know, as the parts of a metrics line: `queue`, `profile`, `workers`, `batch`, `cuda`.

`connect_sources` is called by `trainer.train` once the workers exist; the telemetry thread then reads through
it. Any number of workers. Host counters only: nothing here waits for a device. A stage without a time is null
and the record says why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from trainer.pipeline.queues import QueueSnapshot
from trainer.pipeline.timers import StageTimers, WorkerStats, cuda_memory, find_uuid
from trainer.telemetry.metrics import DRAFTER_STAGES, TARGET_STAGES, bucket_entropy
from trainer.telemetry.nvml import name_devices
from trainer.telemetry.reporter import Sources

NOT_ON_CPU = ("d2h", "h2d")
"""Copies between host and device: a CPU worker has none."""


class WorkerFacts(Protocol):
    """What any worker tells."""

    name: str
    stats: WorkerStats
    timers: StageTimers


class TargetFacts(WorkerFacts, Protocol):
    """What a target worker tells on top: totals since the start."""

    sequences: int
    padded_tokens: int
    valid_tokens: int
    bucket_batches: dict[int, int]


def connect_sources(
    sources: Sources,
    *,
    feed_depth: Callable[[], int],
    snapshot: Callable[[], QueueSnapshot],
    edges: Sequence[int],
    token_budget: int,
    targets: Sequence[TargetFacts],
    drafters: Sequence[WorkerFacts],
    devices: Sequence[str],
    tokens: Callable[[], int],
    checkpoint: Callable[[], Mapping[str, Any]] = dict,
) -> None:
    """Tell the reporter where the parts of a line come from.

    Args:
        sources: of the reporter; replaced part by part.
        feed_depth: batches that wait for a target worker.
        snapshot: of the hidden-states queue.
        edges: upper lengths of the buckets.
        token_budget: padded tokens that one batch may have.
        targets: all target workers of this process.
        drafters: all drafter workers of this process.
        devices: torch names of all devices in use.
        tokens: tokens trained on so far.
        checkpoint: durations of the latest save.
    """
    sources.tokens = tokens
    sources.queue = lambda: queue_record(feed_depth(), snapshot(), edges)
    sources.profile = lambda: {**profile_record(targets, drafters), "checkpoint": checkpoint()}
    sources.workers = lambda: worker_records(targets, drafters)
    sources.cuda = lambda: cuda_memory(devices)
    sources.batch = lambda: batch_record(targets, buckets=len(edges), token_budget=token_budget)
    if all(device == "cpu" for device in devices):
        sources.reasons["cuda"] = lambda: "all workers run on the CPU"
    read_gpus, index_of = sources.gpu, _cuda_indices(devices)
    sources.gpu = lambda: name_devices(read_gpus(), index_of)


def _cuda_indices(devices: Sequence[str]) -> dict[str, int]:
    """Return torch's index by uuid of the CUDA devices in use."""
    found = {find_uuid(device): int(device.rpartition(":")[2]) for device in devices if device != "cpu"}
    return {uuid: index for uuid, index in found.items() if uuid is not None}


def queue_record(feed: int, snapshot: QueueSnapshot, edges: Sequence[int]) -> Mapping[str, Any]:
    """Return the `queue` part of a metrics line."""
    return {
        "feed": feed,
        "hs": snapshot.depth,
        "min_ready": snapshot.min_ready,
        "max_depth": snapshot.max_depth,
        "hs_per_max_ratio": round(snapshot.depth / snapshot.max_depth, 4),
        "hs_per_min_ready_ratio": round(snapshot.depth / snapshot.min_ready, 4),
        "bytes": snapshot.nbytes,
        "buckets": [
            {"upto": edge, "depth": depth} for edge, depth in zip(edges, snapshot.buckets, strict=True)
        ],
        "put_blocked_s": round(snapshot.put_blocked_s, 3),
        "get_blocked_s": round(snapshot.get_blocked_s, 3),
        "starved_ratio": round(snapshot.starved_ratio, 4),
        "full_ratio": round(snapshot.full_ratio, 4),
    }


def profile_record(targets: Sequence[WorkerFacts], drafters: Sequence[WorkerFacts]) -> Mapping[str, Any]:
    """Return mean ms per stage: of each kind (mean over its workers), and of each worker by name."""
    record: dict[str, Any] = {}
    for kind, stages, workers in (
        ("target", TARGET_STAGES, targets),
        ("drafter", DRAFTER_STAGES, drafters),
    ):
        by_name = {worker.name: _stage_record(worker.timers, stages) for worker in workers}
        record[kind] = _mean_stages(list(by_name.values()), stages)
        record |= by_name
    return record


def worker_records(
    targets: Sequence[WorkerFacts], drafters: Sequence[WorkerFacts]
) -> list[Mapping[str, Any]]:
    """Return one record per worker; `balance_ratio` compares the tokens of its kind, most to least."""
    records: list[Mapping[str, Any]] = []
    for workers in (targets, drafters):
        taken = [worker.stats.take() for worker in workers]
        tokens = [entry["tokens"] for entry in taken]
        balance = round(max(tokens) / min(tokens), 4) if tokens and min(tokens) else None
        reason = None if balance is not None else "a worker of this kind has no tokens yet"
        records += [{**entry, "balance_ratio": balance, "reason": reason} for entry in taken]
    return records


def batch_record(targets: Sequence[TargetFacts], *, buckets: int, token_budget: int) -> Mapping[str, Any]:
    """Return the part of `batch` that the target workers know (totals since the start)."""
    padded = sum(worker.padded_tokens for worker in targets)
    valid = sum(worker.valid_tokens for worker in targets)
    counts = [sum(worker.bucket_batches.get(bucket, 0) for worker in targets) for bucket in range(buckets)]
    return {
        "sequences": sum(worker.sequences for worker in targets),
        "padding_ratio": round(1.0 - valid / padded, 4) if padded else None,
        "budget_fill_ratio": round(padded / (sum(counts) * token_budget), 4) if padded else None,
        "bucket_entropy": bucket_entropy(counts),
        "bucket_batches": counts,
    }


def _stage_record(timers: StageTimers, stages: Sequence[str]) -> dict[str, Any]:
    taken = timers.take()
    record: dict[str, Any] = {f"{stage}_ms": taken.get(f"{stage}_ms") for stage in stages}
    missing = [stage for stage in stages if record[f"{stage}_ms"] is None]
    texts = [
        f"{stage}: no copy on the CPU"
        if stage in NOT_ON_CPU and timers.device == "cpu"
        else f"{stage}: not run yet"
        for stage in missing
    ]
    return {**record, "reason": "; ".join(texts) or None}


def _mean_stages(records: Sequence[Mapping[str, Any]], stages: Sequence[str]) -> dict[str, Any]:
    means: dict[str, Any] = {}
    for stage in stages:
        values = [record[f"{stage}_ms"] for record in records if record[f"{stage}_ms"] is not None]
        means[f"{stage}_ms"] = round(sum(values) / len(values), 3) if values else None
    means["reason"] = next((record["reason"] for record in records if record["reason"]), None)
    return means
