"""The `queue` and `batch` parts of a metrics line, from queues and worker counters.

Called by the telemetry thread through `trainer.train`. Must not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainer.pipeline.queues import QueueSnapshot
from trainer.telemetry.metrics import bucket_entropy


def queue_record(feed: int, snapshot: QueueSnapshot, edges: Sequence[int]) -> Mapping[str, Any]:
    """Return the `queue` part of a metrics line."""
    return {
        "feed": feed,
        "hs": snapshot.depth,
        "min_ready": snapshot.min_ready,
        "max_depth": snapshot.max_depth,
        "bytes": snapshot.nbytes,
        "buckets": [
            {"upto": edge, "depth": depth} for edge, depth in zip(edges, snapshot.buckets, strict=True)
        ],
        "put_blocked_s": round(snapshot.put_blocked_s, 3),
        "get_blocked_s": round(snapshot.get_blocked_s, 3),
        "starved_ratio": round(snapshot.starved_ratio, 4),
        "full_ratio": round(snapshot.full_ratio, 4),
    }


def batch_record(
    *, sequences: int, padded_tokens: int, valid_tokens: int, bucket_batches: Sequence[int]
) -> Mapping[str, Any]:
    """Return the part of `batch` that the target workers know (totals since the start)."""
    has_both = padded_tokens > 0 and valid_tokens > 0
    return {
        "sequences": sequences,
        "padding_ratio": round(1.0 - valid_tokens / padded_tokens, 4) if has_both else None,
        "bucket_entropy": bucket_entropy(bucket_batches),
        "bucket_batches": list(bucket_batches),
    }
