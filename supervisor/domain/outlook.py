"""What comes after an attempt that ended, in words: the next try and when, or that none follows.

Pure. Said by the reconciler where it ends a request for a start that failed, and by the commands that show or
follow a run. Must not decide anything: it repeats what `judge_end` decided.
"""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the commands load this module, and pydantic behind these is slow to load
    from supervisor.domain.policy import RestartPolicy
    from supervisor.domain.restart import Ledger


def next_try(number: int, *, starts_in_s: float | None, failures_left: int | None = None) -> str:
    """Say that a further attempt comes by itself, when, and how often that can happen again.

    Args:
        number: of the attempt that follows.
        starts_in_s: seconds until its delay is over; None or 0 when it is.
        failures_left: after how many more failures the run is held; None leaves it open.
    """
    when = f"in {round(starts_in_s)} s" if starts_in_s and starts_in_s >= 0.5 else "now"
    return f"attempt {number} starts by itself {when}{_patience(failures_left)}"


def failures_left(ledger: Ledger, policy: RestartPolicy, now: datetime) -> int:
    """How many more failures in a row hold the run, after one that was counted."""
    left = ledger.remaining(policy, now)
    # the failure that finds its budget used up is the one that holds
    found = min(left["restarts"], left["burst"]) + 1
    return min(found, left["no_progress"]) if ledger.no_progress else found


def no_next_try(verdict: str | None, why: str) -> str:
    """Say that nothing more comes by itself, and because of what."""
    held = "the run is held: " if verdict == "hold" else ""
    return f"{held}no further attempt starts by itself" + (f" ({why})" if why else "")


def _patience(left: int | None) -> str:
    if left is None:
        return ""
    return (
        f"; the run is held after {left} more failures" if left > 1 else "; if it fails too, the run is held"
    )
