"""The costs of a plan for people: labels instead of field names, durations and shares instead of digits.

Used by `plan` and `--dry-run`. Says nothing that the API's record does not hold; that one is for programs.
"""

from __future__ import annotations

from collections.abc import Iterator

from supervisor.commands.output import MISSING, Json, clean, duration, print_pairs

_ADVICE = {"now": "restart now", "next_checkpoint": "at the next checkpoint", "unknown": "not known yet"}
_RESTART = "now_gpu_s"
"""Only the record of a live attempt's costs has it."""


def print_costs(costs: Json) -> None:
    """Aligned lines; what a fresh daemon cannot know yet is told as such."""
    print_pairs((f"  {label}", text) for label, text in cost_lines(costs))


def cost_lines(costs: Json) -> Iterator[tuple[str, str]]:
    """Label and text of each cost."""
    if "expected_time_to_ready_s" in costs:
        yield "until training begins", _time(costs["expected_time_to_ready_s"])
    if _RESTART not in costs:
        return
    gpus = int(costs.get("gpus") or 0)
    yield "GPUs", str(gpus) if gpus else "none"
    yield "work since checkpoint", _lost(costs)
    yield "stop, launch, warm-up", _overhead(costs)
    yield "a restart now costs", _device_time(costs[_RESTART], gpus)
    if "recommendation" not in costs:
        return
    later = _device_time(costs.get("next_checkpoint_gpu_s"), gpus)
    wait = costs.get("wait_s")
    yield "at the next checkpoint", later + (f", in {duration(wait)}" if wait is not None else "")
    yield "recommended", _ADVICE.get(str(costs["recommendation"]), clean(costs["recommendation"]))
    if costs.get("advised_checkpoint_interval_s") is not None:
        yield "advised interval", f"a checkpoint every {duration(costs['advised_checkpoint_interval_s'])}"


def _lost(costs: Json) -> str:
    share = costs.get("share_of_elapsed")
    text = _time(costs.get("lost_s"))
    return text if share is None else f"{text}, {100 * share:.0f} % of the attempt so far"


def _overhead(costs: Json) -> str:
    unknown = [part for part in costs.get("unknown") or () if part in ("stop", "launch", "warm-up")]
    text = _time(costs.get("overhead_s"))
    return f"{text} (not known yet: {', '.join(unknown)})" if unknown else text


def _device_time(seconds: float | None, gpus: int) -> str:
    """Time that is paid for: of all GPUs together, or of the one process that has none."""
    if seconds is None:
        return MISSING
    return f"{duration(seconds)} of GPU time" if gpus else duration(seconds)


def _time(seconds: float | None) -> str:
    return "not known yet" if seconds is None else duration(seconds)
