"""Keeps an attempt's progress on its row: checks passed, so that health survives a restart of the daemon.

Called by the loop once a pass. A check is passed when the step counter moved since the last one.
"""

from __future__ import annotations

from typing import Any

from sqlmodel import Session

from supervisor.domain.run import AttemptState
from supervisor.reconciler.observe import AttemptMemory, Look
from supervisor.store.attempts import bump
from supervisor.store.tables import Attempt


def update_progress(
    session: Session, attempt: Attempt, memory: AttemptMemory, look: Look, monotonic_s: float
) -> None:
    """Count one passed check when the step counter moved."""
    step = step_of(look, memory)
    if attempt.state != AttemptState.READY or step is None or step == memory.step:
        return
    if memory.step is not None and step > memory.step:
        attempt.progress_checks += 1
        attempt.last_step = step
        bump(session, attempt)
    memory.step, memory.step_s = step, monotonic_s


def step_of(look: Look, memory: AttemptMemory) -> int | None:
    """The step counter: from the status record, else from the progress pattern."""
    status: dict[str, Any] = look.reply.get("status") or {}
    step = status.get("step")
    return step if isinstance(step, int) and not isinstance(step, bool) else memory.scan.step
