"""The metrics line: its shape, its units, and how it becomes valid JSON.

Called by the reporter. Everything here is plain host data: no device is read, so a line never makes a GPU
wait. A value that is missing is null with a reason, a value that is not finite is null and its path is
listed under `nonfinite`; neither ever becomes 0.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

METRICS_VERSION = 1

TARGET_STAGES = ("wait_input", "forward", "pack", "d2h", "put")
"""Stages of a target worker, in order; each is `<stage>_ms` under `profile`."""
DRAFTER_STAGES = ("wait_hidden_states", "h2d", "forward", "loss", "backward", "all_reduce", "optimizer")
"""Stages of a drafter worker, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalReport:
    """What a drafter worker knows of one interval, read from the device long after it was computed."""

    step: int
    tokens: int
    train: Mapping[str, Any]
    batch: Mapping[str, Any] = field(default_factory=dict)
    evaluation: Mapping[str, Any] | None = None


def empty_train(total_steps: int) -> dict[str, Any]:
    """Return the `train` part of a line before any step is done: nothing is known, so nothing is 0."""
    unknown = dict.fromkeys(("loss", "eal", "lr", "noise_sigma", "tok_s", "epoch"))
    return {**unknown, "skipped": 0, "total_steps": total_steps}


def build_line(
    *,
    t: float,
    report: IntervalReport,
    queue: Mapping[str, Any],
    profile: Mapping[str, Any],
    workers: Sequence[Mapping[str, Any]],
    gpu: Sequence[Mapping[str, Any]],
    cuda: Sequence[Mapping[str, Any]],
    batch: Mapping[str, Any],
    reasons: Mapping[str, str],
    telemetry: Mapping[str, Any],
) -> dict[str, Any]:
    """Assemble one line in the order of the contract; `reasons` says of an empty group why it is."""
    line: dict[str, Any] = {
        "v": METRICS_VERSION,
        "t": round(t, 3),
        "step": report.step,
        "tokens": report.tokens,
        "train": dict(report.train),
        "queue": dict(queue),
        "profile": dict(profile),
        "workers": [dict(entry) for entry in workers],
        "batch": {**batch, **report.batch},
        "gpu": [dict(entry) for entry in gpu],
        "cuda": [dict(entry) for entry in cuda],
        "telemetry": dict(telemetry),
        "reasons": {},
    }
    line["reasons"] = {group: text for group, text in reasons.items() if text and not line.get(group)}
    if report.evaluation is not None:
        line["eval"] = dict(report.evaluation)
    return line


def render_line(line: Mapping[str, Any]) -> str:
    """Return the line as JSON; NaN and infinities become null and are listed under `nonfinite`."""
    bad: list[str] = []
    clean = _finite(line, "", bad)
    if bad:
        clean["nonfinite"] = bad
    return json.dumps(clean, allow_nan=False, separators=(",", ":"))


def flatten(line: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the numbers of a line under their paths joined by `/`, as W&B wants them."""
    flat: dict[str, float] = {}
    for key, value in _children(line):
        path = f"{prefix}{key}"
        if isinstance(value, Mapping | list | tuple):
            flat |= flatten(value, f"{path}/")  # type: ignore[arg-type]
        elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            flat[path] = value
    return flat


def size_text(nbytes: int) -> str:
    """Return bytes for people, in the unit in which they are neither 0.00 nor thousands."""
    if nbytes >= 1000 << 20:
        return f"{nbytes / (1 << 30):,.2f} GiB"
    return f"{nbytes / (1 << 20):,.1f} MiB" if nbytes >= 1000 << 10 else f"{nbytes / (1 << 10):,.1f} KiB"


def bucket_entropy(counts: Sequence[int]) -> float | None:
    """Return the Shannon entropy in nats of how packs spread over the buckets; None without packs."""
    total = sum(counts)
    if not total:
        return None
    return -sum(n / total * math.log(n / total) for n in counts if n) + 0.0


def _children(node: Any) -> list[tuple[str, Any]]:
    if isinstance(node, Mapping):
        return [(str(key), value) for key, value in node.items()]
    return [
        (
            str(value.get("name", value.get("index", place))) if isinstance(value, Mapping) else str(place),
            value,
        )
        for place, value in enumerate(node)
    ]


def _finite(node: Any, path: str, bad: list[str]) -> Any:
    if isinstance(node, Mapping):
        return {
            str(key): _finite(value, f"{path}.{key}" if path else str(key), bad)
            for key, value in node.items()
        }
    if isinstance(node, list | tuple):
        return [_finite(value, f"{path}[{place}]", bad) for place, value in enumerate(node)]
    if isinstance(node, float) and not math.isfinite(node):
        bad.append(path)
        return None
    return node
