"""How a live attempt ends: by its exit record, by its identity, by an operator's word; never by silence.

A part of `decide`, which asks it first. Pure: no I/O, no clock.
"""

from __future__ import annotations

from supervisor.domain.actions import FinishAttempt
from supervisor.domain.facts import AttemptFacts, Desired, Observed, StopCause
from supervisor.domain.restart import LAUNCH_REASONS, classify_exit
from supervisor.domain.run import AttemptState, Reason
from supervisor.domain.spec import RunSpec

_STOPPED_STATES: dict[StopCause, tuple[AttemptState, Reason]] = {
    StopCause.STOP: (AttemptState.STOPPED, Reason.STOP_REQUESTED),
    StopCause.RESTART: (AttemptState.STOPPED, Reason.RESTART_REQUESTED),
    StopCause.DRIFT: (AttemptState.STOPPED, Reason.DRIFT_RESTART),
    StopCause.READY_TIMEOUT: (AttemptState.FAILED, Reason.READY_TIMEOUT),
    StopCause.PROGRESS: (AttemptState.FAILED, Reason.PROGRESS_TIMEOUT),
    StopCause.QUALITY: (AttemptState.FAILED, Reason.QUALITY_HOLD),
    StopCause.DISK: (AttemptState.STOPPED, Reason.DISK_LOW),
}
"""What the end of a stop means, by why it was begun."""


_ASKED = (StopCause.STOP, StopCause.RESTART, StopCause.DRIFT)


def find_end(
    desired: Desired, live: AttemptFacts, observed: Observed, policy: RunSpec
) -> FinishAttempt | None:
    """The end of the live attempt, if there is evidence for one."""
    if observed.launch_error is not None and live.state is AttemptState.LAUNCHING:
        reason = LAUNCH_REASONS.get(observed.launch_error.reason, Reason.LAUNCH_REJECTED)
        if reason is Reason.TOMBSTONE:
            return finish(live, AttemptState.STOPPED, Reason.TOMBSTONE)
        return finish(live, AttemptState.LAUNCH_FAILED, reason, observed.launch_error.message)
    if observed.shim_phase == "abandoned" and live.state is AttemptState.LAUNCHING:
        return finish(live, AttemptState.STOPPED, Reason.TOMBSTONE)
    if live.state in (AttemptState.PLANNED, AttemptState.PREFLIGHT):
        return None
    if observed.exit is not None and not observed.exit.is_quarantined:
        return _finish_by_exit(live, observed, policy)
    if observed.gone is not None:
        return _finish_without_exit(live, observed.gone)
    if desired.declare_lost == live.id:
        return finish(live, AttemptState.LOST, Reason.DECLARED_LOST)
    is_absent = observed.alive is False and observed.shim_alive is False and observed.at > live.last_action_at
    if is_absent and live.state is not AttemptState.LAUNCHING:
        return _finish_without_exit(live, Reason.SHIM_LOST)
    return None


def _finish_by_exit(live: AttemptFacts, observed: Observed, policy: RunSpec) -> FinishAttempt | None:
    ended = observed.exit
    assert ended is not None
    if live.state is AttemptState.LAUNCHING:
        return None
    is_success = ended.code is not None and ended.code in policy.restart.success_exit_codes
    if _is_stopping(live):
        cause = live.stop.cause if live.stop is not None else StopCause.STOP
        state, reason = _STOPPED_STATES[cause]
        may_succeed = cause in _ASKED and live.state is AttemptState.STOPPING and not live.is_program
        if is_success and may_succeed:
            return finish(
                live, AttemptState.SUCCEEDED, Reason.COMPLETED, "finished while it was being stopped"
            )
        return finish(live, state, reason)
    state, reason = classify_exit(
        ended.code,
        ended.signal,
        oom=ended.oom,
        success_codes=policy.restart.success_exit_codes,
        is_program=live.is_program,
    )
    shown = f"signal {ended.signal}" if ended.signal is not None else f"exit code {ended.code}"
    return finish(live, state, reason, f"{reason.message} ({shown})")


def _is_stopping(live: AttemptFacts) -> bool:
    return live.state in (AttemptState.STOPPING, AttemptState.QUARANTINED)


def _finish_without_exit(live: AttemptFacts, reason: Reason) -> FinishAttempt:
    """Certainly gone, exit status unknowable: what we asked to stop has stopped, anything else is lost."""
    if live.stop is not None and _is_stopping(live):
        state, cause = _STOPPED_STATES[live.stop.cause]
        return finish(live, state, cause, f"{cause.message}; its absence was verified ({reason.value})")
    return finish(live, AttemptState.LOST, reason)


def finish(live: AttemptFacts, state: AttemptState, reason: Reason, message: str = "") -> FinishAttempt:
    """A final state with its reason; the reason's own words when no message is given."""
    return FinishAttempt(attempt_id=live.id, state=state, reason=reason, message=message or reason.message)
