"""A run's conditions, derived from one pass's evidence: what is true, false or not known, and why.

Called by the loop; pure, so each rule can be tested by itself. `unknown` is used whenever nobody could look:
a link that is down turns conditions unknown and changes no state.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from supervisor.domain.facts import GpuMemory, Observed, ShimAnswer
from supervisor.domain.run import LIVE, AttemptState, ConditionType
from supervisor.domain.spec import RunSpec
from supervisor.reconciler.observe import HealthView, Look
from supervisor.reconciler.reachability import Reachability
from supervisor.reconciler.sampler import GpuView
from supervisor.store.tables import Attempt, Run

Condition = tuple[ConditionType, bool | None, str, str]

_OF_THE_LIVING = (
    ConditionType.SHIM_PRESENT,
    ConditionType.PROGRESSING,
    ConditionType.QUALITY_OK,
    ConditionType.TELEMETRY_OK,
    ConditionType.DISK_OK,
)
"""Nothing can be said about these once the attempt has ended; events and a hold keep what was wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConditionView:
    """What the rules look at."""

    run: Run
    attempt: Attempt | None
    observed: Observed
    look: Look
    health: HealthView
    reach: Reachability | None
    gpu_view: GpuView | None
    spec: RunSpec
    monotonic_s: float

    @property
    def state(self) -> AttemptState | None:
        """State of the newest attempt."""
        return AttemptState(self.attempt.state) if self.attempt is not None else None

    @property
    def is_live(self) -> bool:
        """Whether the newest attempt has not ended."""
        return self.state is not None and self.state in LIVE


def run_conditions(view: ConditionView) -> Iterator[Condition]:
    """All conditions that this pass can say something about."""
    yield _reachable(view)
    if view.state is None:
        return
    yield _alive(view)
    yield _ready(view)
    if view.is_live:
        yield _shim_present(view)
        yield _progressing(view)
        yield _quality(view)
        yield _telemetry(view)
        yield _disk(view)
    else:
        yield from ((kind, None, "Ended", "") for kind in _OF_THE_LIVING)
    if view.attempt is not None and view.attempt.gpus and view.attempt.ended_at is not None:
        yield _gpu_clean(view)


def _reachable(view: ConditionView) -> Condition:
    reach = view.reach
    if reach is None:
        return (ConditionType.REACHABLE, None, "NoConnection", "")
    return (ConditionType.REACHABLE, reach.is_reachable, reach.reason, reach.message)


def _alive(view: ConditionView) -> Condition:
    kind = ConditionType.ALIVE
    if not view.is_live:
        return (kind, False, "Ended", "")
    if view.look.answer is not ShimAnswer.KNOWN:
        return (kind, None, "NotAnswered", view.look.error)
    alive = view.observed.alive
    return (kind, alive, "IdentityVerified" if alive else "NotFound" if alive is False else "NotKnown", "")


def _ready(view: ConditionView) -> Condition:
    kind = ConditionType.READY
    if view.state is AttemptState.READY:
        return (kind, True, "TrainingBegan", "")
    if view.state is AttemptState.STARTED:
        return (kind, view.health.ready.ok, view.health.ready.reason, view.health.ready.message)
    return (kind, False, "NotYet" if view.is_live else "Ended", "")


def _shim_present(view: ConditionView) -> Condition:
    kind = ConditionType.SHIM_PRESENT
    present = view.observed.shim_alive
    if view.look.answer is not ShimAnswer.KNOWN or present is None:
        return (kind, None, "NotAnswered", "")
    if view.look.is_folder_gone:
        message = "the attempt's folder was removed from the node: its exit code will not be known"
        return (kind, False, "FolderGone", message)
    if present:
        return (kind, True, "Answers", "")
    return (kind, False, "ShimGone", "the trainer goes on; its exit code will not be known")


def _progressing(view: ConditionView) -> Condition:
    verdict = view.health.progress
    return (ConditionType.PROGRESSING, verdict.ok, verdict.reason, "" if verdict.ok else verdict.message)


def _quality(view: ConditionView) -> Condition:
    verdict = view.health.quality
    return (ConditionType.QUALITY_OK, verdict.ok, verdict.reason, "" if verdict.ok else verdict.message)


def _telemetry(view: ConditionView) -> Condition:
    kind = ConditionType.TELEMETRY_OK
    gpu = view.gpu_view
    if view.spec.capabilities.nvml == "off":
        return (kind, None, "Off", "the run file says nvml = off: its absence is no fault")
    if gpu is None:
        return (kind, None, "NoSampleYet", "")
    if gpu.sample.get("reason"):
        return (kind, False, str(gpu.sample["reason"]), str(gpu.sample.get("message") or ""))
    if gpu.is_stale(view.monotonic_s):
        return (kind, None, "Stale", "the newest GPU sample is too old")
    return (kind, True, "Sampling", "")


def _disk(view: ConditionView) -> Condition:
    kind = ConditionType.DISK_OK
    low = view.observed.is_disk_low
    if low is None:
        return (kind, None, "NotKnown", "")
    if low:
        return (kind, False, "DiskLow", "the log is above warn_bytes or free space below min_free_bytes")
    return (kind, True, "Enough", "")


def _gpu_clean(view: ConditionView) -> Condition:
    kind = ConditionType.GPU_CLEAN
    if view.attempt is not None and view.attempt.gpu_clean_at is not None:
        return (kind, True, "Released", "")
    match view.observed.gpu_memory:
        case GpuMemory.FREE:
            return (kind, True, "Released", "")
        case GpuMemory.IN_USE:
            return (kind, False, "StillInUse", "")
        case GpuMemory.AWAITED:
            return (kind, None, "NotMeasuredYet", "no GPU sample has come since the end")
        case GpuMemory.UNKNOWN:
            return (kind, None, "NotMeasured", "GPU memory cannot be read, so the gate cannot be checked")
