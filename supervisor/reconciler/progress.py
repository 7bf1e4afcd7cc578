"""Keeps an attempt's progress on its row, so that what was learnt survives a restart of the daemon.

Called by the loop once a pass. A check is passed when the step counter moved since the last one.
"""

from __future__ import annotations

from sqlmodel import Session

from supervisor.domain.health import ProgressMemory
from supervisor.domain.run import AttemptState
from supervisor.reconciler.observe import AttemptMemory
from supervisor.store.attempts import bump
from supervisor.store.tables import Attempt


def recall(attempt: Attempt) -> AttemptMemory:
    """The memory of an attempt that this daemon sees for the first time; its clock starts anew."""
    stored = ProgressMemory.from_json({**attempt.progress, "at_s": None}) if attempt.progress else None
    return AttemptMemory(attempt_id=attempt.id, progress=stored or ProgressMemory())


def save_progress(session: Session, attempt: Attempt, memory: AttemptMemory) -> None:
    """Count one passed check when the step counter moved; the row is written only then."""
    learnt = memory.progress
    if attempt.state != AttemptState.READY or learnt.step is None:
        return
    before = (attempt.progress or {}).get("step")
    if before == learnt.step:
        return
    if isinstance(before, int) and learnt.step > before:
        attempt.progress_checks += 1
    attempt.last_step = learnt.step
    attempt.progress = learnt.to_json()
    bump(session, attempt)
