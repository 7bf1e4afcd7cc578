"""How an attempt ended and what follows, in the words that every command uses for it.

Used by `ps`, `show`, `explain`, `start` and `logs -f`. Reads what the API answered; asks nothing itself.
"""

from __future__ import annotations

from supervisor.commands.output import Json, clean
from supervisor.domain.outlook import next_try, no_next_try

SETTLED_PHASES = frozenset({"stopped", "succeeded", "failed", "held"})
"""Phases in which no further attempt comes by itself."""


def reason_of(attempt: Json) -> str | None:
    """The reason of the end; where a check or the launch has named the cause, that name and the reason."""
    reason = attempt.get("reason")
    if not reason or attempt.get("state") != "launch_failed":
        return reason
    failed = [item for item in attempt.get("preflight") or () if item.get("status") == "fail"]
    cause = (attempt.get("launch_error") or {}).get("reason") or (failed[0]["reason"] if failed else None)
    return reason if cause in (None, reason) else f"{cause} ({reason})"


def exit_of(attempt: Json) -> str | None:
    """`exit code 3` or `signal 9`; None where there is no exit."""
    if attempt.get("exit_signal") is not None:
        return f"signal {attempt['exit_signal']}"
    code = attempt.get("exit_code")
    return None if code is None else f"exit code {code}"


def describe_end(attempt: Json) -> str:
    """`attempt 3 failed: ExitedNonZero, exit code 4`."""
    parts = ", ".join(part for part in (reason_of(attempt), exit_of(attempt)) if part)
    return clean(f"attempt {attempt['number']} {attempt['state']}" + (f": {parts}" if parts else ""))


def what_follows(run: Json) -> str | None:
    """The next try and when, or that none comes; None while that is not decided."""
    hold, phase = run.get("hold") or {}, run["phase"]
    if phase in SETTLED_PHASES:
        why = hold.get("message") if phase == "held" else None
        return clean(no_next_try("hold" if phase == "held" else None, why or ""))
    if phase == "backoff" and run.get("next_start_at") is None:
        return None
    attempt = run.get("attempt") or {}
    number = int(attempt.get("number") or 0)
    if attempt.get("is_live"):
        return f"attempt {number} follows"
    return next_try(number + 1, starts_in_s=run.get("next_start_in_s"))
