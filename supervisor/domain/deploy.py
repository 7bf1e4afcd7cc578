"""Releases and environments as data: digests, what differs between two of them, and what a restart costs.

Used by the reconciler (drift, deploys) and the services (plans, views). Every change is classified and
explained in one sentence. No I/O, no clock.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from statistics import median
from typing import Any

from supervisor.domain.markers import marker_applies


class DriftClass(StrEnum):
    """How much a change matters; a change that fits several takes the first."""

    CRITICAL = "critical"
    CAPABILITY = "capability"
    RELEASE = "release"
    MINOR = "minor"
    IRRELEVANT = "irrelevant"


PRECEDENCE: tuple[DriftClass, ...] = tuple(DriftClass)

CAPABILITY_PACKAGES: Mapping[str, str] = {
    "nvidia-ml-py": "nvml",
    "wandb": "wandb",
    "flash-linear-attention": "flash_linear_attention",
    "fla-core": "flash_linear_attention",
    "causal-conv1d": "flash_linear_attention",
    "liger-kernel": "kernels",
    "cut-cross-entropy": "kernels",
    "flash-attn": "kernels",
    "nixl": "gpu_direct",
}
"""Distribution → capability of the run file."""

CAPABILITY_MEANING: Mapping[str, str] = {
    "nvml": "GPU telemetry",
    "wandb": "logging to W&B",
    "flash_linear_attention": "the fast kernels of linear-attention targets",
    "kernels": "compiled loss and attention kernels",
    "gpu_direct": "transfers between GPUs without the host",
}

_CRITICAL = re.compile(
    r"torch|triton|pytorch-triton.*|nvidia-(?:nccl|cuda|cudnn|cublas|cusparse|cufft|curand|cusolver|nvshmem|nvtx|nvjitlink)\b.*|cuda-.*|libcudart.*"
)
_IRRELEVANT = frozenset({"pip", "setuptools", "wheel", "uv", "virtualenv", "distlib", "certifi", "tzdata"})
_REQUIREMENT = re.compile(
    r"^([A-Za-z0-9][A-Za-z0-9._-]*)(?:\[[^\]]*\])?\s*==\s*([^\s;\\]+)\s*(?:;\s*([^\\#]*?))?\s*(?:\\|#|$)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One difference between what runs and what a new start would use."""

    kind: str
    """distribution | python | driver | cuda | release."""
    name: str
    old: str | None
    new: str | None
    drift_class: DriftClass
    meaning: str

    def to_json(self) -> dict[str, Any]:
        """As stored and shown; `class` is the drift class."""
        data = asdict(self)
        data["class"] = data.pop("drift_class").value
        return data


def normalize_name(name: str) -> str:
    """A distribution's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def parse_lock(text: str, facts: Mapping[str, str] | None = None) -> dict[str, str]:
    """Pinned versions of a lock, by normalized name; lines whose marker does not apply are left out.

    Args:
        text: requirements with `name==version`, hashes and markers.
        facts: of the interpreter, see `markers.marker_facts`; without them every line applies.
    """
    found = {}
    for line in text.splitlines():
        match = _REQUIREMENT.match(line)
        if match is None:
            continue
        name, version, marker = match.groups()
        if facts is None or not marker or marker_applies(marker, facts):
            found[normalize_name(name)] = version
    return found


def lock_digest(text: str) -> str:
    """SHA-256 over the lines that matter: comments and blank lines do not."""
    lines = [
        line.rstrip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def environment_digest(lock_text: str, *, torch_requirement: str | None, python: str, platform: str) -> str:
    """Identity of a built environment: lock, torch, Python and platform."""
    facts = [lock_digest(lock_text), torch_requirement, python, platform]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def diff_locks(
    old: str,
    new: str,
    *,
    facts: Mapping[str, str] | None = None,
    needs: Mapping[str, str] | None = None,
    missing: Collection[str] = (),
) -> list[Change]:
    """Differences between two locks, on one interpreter; see `diff_distributions`."""
    return diff_distributions(parse_lock(old, facts), parse_lock(new, facts), needs=needs, missing=missing)


def diff_fingerprints(
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    *,
    needs: Mapping[str, str] | None = None,
    missing: Collection[str] = (),
) -> list[Change]:
    """Differences between two fingerprints of interpreters, as the agent takes them.

    A part that either of them lacks is no difference: it is not known.
    """
    changes = []
    for key, kind, label in (
        ("python", "python", "Python"),
        ("driver", "driver", "NVIDIA driver"),
        ("torch_cuda", "cuda", "CUDA of torch"),
    ):
        before, after = old.get(key), new.get(key)
        if before is not None and after is not None and before != after:
            changes.append(
                Change(
                    kind=kind,
                    name=label,
                    old=str(before),
                    new=str(after),
                    drift_class=DriftClass.CRITICAL,
                    meaning=f"{label} changed from {before} to {after}: numbers and speed may change",
                )
            )
    before, after = old.get("distributions"), new.get("distributions")
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        changes += diff_distributions(_versions(old), _versions(new), needs=needs, missing=missing)
    return changes


def diff_distributions(
    old: Mapping[str, str],
    new: Mapping[str, str],
    *,
    needs: Mapping[str, str] | None = None,
    missing: Collection[str] = (),
) -> list[Change]:
    """Differences between two sets of installed packages.

    Args:
        old: normalized name → version, of what runs.
        new: of what a new start would use.
        needs: `[capabilities]` of the run: capability → required | wanted | off.
        missing: capabilities that the running attempt lacks.
    """
    names = sorted(set(old) | set(new))
    return [
        _distribution_change(name, old.get(name), new.get(name), needs or {}, missing)
        for name in names
        if old.get(name) != new.get(name)
    ]


def diff_releases(old: str | None, new: str | None, *, files: Sequence[str] = ()) -> list[Change]:
    """The trainer's source, by digest; `files` names what differs, when the manifests are known."""
    if old == new or old is None or new is None:
        return []
    shown = f" ({', '.join(files[:5])}{' …' if len(files) > 5 else ''})" if files else ""
    return [
        Change(
            kind="release",
            name="trainer source",
            old=old,
            new=new,
            drift_class=DriftClass.RELEASE,
            meaning=f"the trainer's source was deployed anew{shown}: the running process keeps the old code",
        )
    ]


def changed_files(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Paths whose digest differs between two release manifests."""
    before, after = _manifest_files(old), _manifest_files(new)
    return sorted(path for path in set(before) | set(after) if before.get(path) != after.get(path))


def classify_changes(changes: Sequence[Change]) -> DriftClass | None:
    """The class that matters most; None when nothing but irrelevant things changed."""
    found = {change.drift_class for change in changes} - {DriftClass.IRRELEVANT}
    return next((kind for kind in PRECEDENCE if kind in found), None)


def describe_changes(changes: Sequence[Change]) -> str:
    """One sentence about all of them, the most important first."""
    ordered = sorted(changes, key=lambda change: PRECEDENCE.index(change.drift_class))
    relevant = [change for change in ordered if change.drift_class is not DriftClass.IRRELEVANT]
    if not relevant:
        return "nothing that matters changed"
    more = f" (and {len(relevant) - 1} more)" if len(relevant) > 1 else ""
    return f"{relevant[0].meaning}{more}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTimes:
    """How long earlier attempts took; seconds, None where no attempt has shown it yet."""

    stop_s: float | None = None
    launch_s: float | None = None
    ready_s: float | None = None
    save_s: float | None = None

    @classmethod
    def from_samples(cls, samples: Mapping[str, Sequence[float]]) -> PhaseTimes:
        """Medians of what was seen."""
        return cls(**{f"{name}_s": median(values) if values else None for name, values in samples.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartCost:
    """What a restart costs, now and at the next checkpoint. None = not known, never zero."""

    gpus: int
    lost_s: float | None
    """Work since the newest checkpoint, lost by a restart now without saving."""
    overhead_s: float | None
    """Stop, launch and warm-up, by earlier attempts."""
    wait_s: float | None
    """Until the next checkpoint."""
    now_gpu_s: float | None
    next_checkpoint_gpu_s: float | None
    share_of_elapsed: float | None
    unknown: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """As shown in plans."""
        return {**asdict(self), "unknown": list(self.unknown)}


def restart_cost(
    *,
    gpus: int,
    times: PhaseTimes,
    since_checkpoint_s: float | None,
    checkpoint_interval_s: float | None,
    elapsed_s: float | None,
) -> RestartCost:
    """Cost of replacing a running attempt, in GPU-seconds (process-seconds when it has no GPU)."""
    width = max(1, gpus)
    parts = {"stop": times.stop_s, "launch": times.launch_s, "warm-up": times.ready_s}
    unknown = [name for name, value in parts.items() if value is None]
    known = [value for value in parts.values() if value is not None]
    overhead = math.fsum(known) if known else None
    if since_checkpoint_s is None:
        unknown.append("time since the last checkpoint")
    wait = None
    if since_checkpoint_s is not None and checkpoint_interval_s is not None:
        wait = max(0.0, checkpoint_interval_s - since_checkpoint_s)
    now_cost = width * (since_checkpoint_s + overhead) if None not in (since_checkpoint_s, overhead) else None  # type: ignore[operator]
    later_cost = width * overhead if overhead is not None else None
    share = None
    if since_checkpoint_s is not None and elapsed_s:
        share = min(1.0, since_checkpoint_s / elapsed_s)
    return RestartCost(
        gpus=gpus,
        lost_s=since_checkpoint_s,
        overhead_s=overhead,
        wait_s=wait,
        now_gpu_s=now_cost,
        next_checkpoint_gpu_s=later_cost,
        share_of_elapsed=share,
        unknown=tuple(unknown),
    )


def break_even_s(cost_gpu_s: float | None, *, value_per_s: float) -> float | None:
    """How long the gain must last to pay for a restart; None when cost or gain is not known."""
    return cost_gpu_s / value_per_s if cost_gpu_s is not None and value_per_s > 0 else None


def advised_checkpoint_interval_s(save_s: float, mean_time_between_failures_s: float) -> float:
    """About sqrt(2 x time to save x mean time between failures) (Young, 1974)."""
    return math.sqrt(2 * save_s * mean_time_between_failures_s)


def recommend(cost: RestartCost) -> tuple[str, str]:
    """`now`, `next_checkpoint` or `unknown`, and why."""
    if cost.now_gpu_s is None or cost.next_checkpoint_gpu_s is None:
        return "unknown", f"not known yet: {', '.join(cost.unknown)}"
    saved = f"{cost.now_gpu_s - cost.next_checkpoint_gpu_s:.0f} {'GPU-seconds' if cost.gpus else 'seconds'}"
    if (
        cost.overhead_s is not None
        and cost.lost_s is not None
        and cost.lost_s <= 0.1 * max(cost.overhead_s, 1.0)
    ):
        return "now", f"a checkpoint was just written: waiting would save only {saved}"
    return "next_checkpoint", f"waiting for the next checkpoint saves {saved} of work"


def _distribution_change(
    name: str,
    old: str | None,
    new: str | None,
    needs: Mapping[str, str],
    missing: Collection[str],
) -> Change:
    capability = CAPABILITY_PACKAGES.get(name)
    drift_class = _class_of(name, capability, old, new, needs, missing)
    return Change(
        kind="distribution",
        name=name,
        old=old,
        new=new,
        drift_class=drift_class,
        meaning=_meaning(name, old, new, capability, drift_class),
    )


def _class_of(
    name: str,
    capability: str | None,
    old: str | None,
    new: str | None,
    needs: Mapping[str, str],
    missing: Collection[str],
) -> DriftClass:
    if _CRITICAL.fullmatch(name):
        return DriftClass.CRITICAL
    if capability is not None and needs.get(capability, "wanted") != "off":
        appears_or_goes = old is None or new is None
        if appears_or_goes or capability in missing:
            return DriftClass.CAPABILITY
    return DriftClass.IRRELEVANT if name in _IRRELEVANT else DriftClass.MINOR


def _meaning(
    name: str, old: str | None, new: str | None, capability: str | None, drift_class: DriftClass
) -> str:
    if drift_class is DriftClass.CAPABILITY and capability is not None:
        what = CAPABILITY_MEANING[capability]
        if new is None:
            return f"{name} is gone: without it there is no {what} after the next start"
        if old is None:
            return f"{name} {new} is there now: {what} becomes available with the next start"
        return f"{name} changed from {old} to {new}: {what}, missing now, may work with the next start"
    if old is None:
        step = f"{name} {new} was added"
    elif new is None:
        step = f"{name} {old} was removed: an import of it would fail after the next start"
    else:
        step = f"{name} changed from {old} to {new}"
    if drift_class is DriftClass.CRITICAL:
        return f"{step}: numbers and speed may change with the next start"
    if drift_class is DriftClass.IRRELEVANT:
        return f"{step}: the trainer does not use it"
    return step if new is None else f"{step}, taken up with the next start"


def _versions(fingerprint: Mapping[str, Any]) -> dict[str, str]:
    """Versions by normalized name, with the origin of what was not installed from an index."""
    origins = {normalize_name(name): value for name, value in (fingerprint.get("direct_urls") or {}).items()}
    found = {}
    for name, version in fingerprint["distributions"].items():
        key = normalize_name(str(name))
        origin = origins.get(key)
        url = origin.get("url") if isinstance(origin, Mapping) else origin
        found[key] = f"{version} from {str(url).partition('?')[0]}" if url else str(version)
    return found


def _manifest_files(manifest: Mapping[str, Any]) -> Mapping[str, Any]:
    files = manifest.get("files", manifest)
    if isinstance(files, Mapping):
        return files
    return {str(item.get("path")): item.get("sha256") for item in files}
