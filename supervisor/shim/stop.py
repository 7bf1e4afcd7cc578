"""The steps of a stop and their deadlines, as a machine without clock, signals or files.

`AttemptShim` feeds it monotonic time and carries out what it says; the unit tests feed it numbers. Order:
asked (stop request and the configured signal) - term - kill - verify - done. It never goes back.
"""

from __future__ import annotations

from typing import Any

STEPS = ("asked", "term", "kill", "verify", "done")
LEFTOVER_TERM_S = 10.0


class StopPlan:
    """One stop in progress.

    Args:
        policy: grace_s, extend_max_s, term_s, kill_s, verify_s.
        now: monotonic seconds.
        first: step to begin with; `term` when only leftovers of an ended trainer are to be cleared away.
    """

    def __init__(self, policy: dict[str, Any], now: float, first: str = "asked") -> None:
        self.policy = dict(policy)
        self.step = first
        self.started = now
        self._entered = now
        self._announced = False

    def grace_s(self, extend_s: float = 0.0) -> float:
        """Seconds the trainer has in all, its extension counted and capped."""
        grace = float(self.policy["grace_s"])
        return max(grace, min(grace + max(0.0, extend_s), float(self.policy["extend_max_s"])))

    def shorten(self, policy: dict[str, Any], now: float) -> None:
        """Let a second request end the grace earlier; a later end than the present one changes nothing."""
        ends = self.started + self.grace_s()
        wanted = now + float(policy["grace_s"])
        if self.step == "asked" and wanted < ends:
            self.policy["grace_s"] = max(0.0, wanted - self.started)
            self.policy["extend_max_s"] = self.policy["grace_s"]

    def skip_to(self, step: str, now: float) -> None:
        """Go forward to `step`, never back."""
        if STEPS.index(step) > STEPS.index(self.step):
            self.step, self._entered, self._announced = step, now, False

    def tick(self, now: float, extend_s: float = 0.0) -> str | None:
        """Advance to `now`; returns what to do: `ask`, `term`, `kill`, or None.

        `kill` is repeated on every tick of kill and verify, because a process may have forked meanwhile.
        """
        while self.step != "done" and self._announced and now >= self._ends(extend_s):
            self.skip_to(STEPS[STEPS.index(self.step) + 1], now)
        is_new, self._announced = not self._announced, True
        if self.step in ("kill", "verify"):
            return "kill"
        if not is_new:
            return None
        return {"asked": "ask", "term": "term"}.get(self.step)

    def _ends(self, extend_s: float) -> float:
        if self.step == "asked":
            return self.started + self.grace_s(extend_s)
        limits = {"term": "term_s", "kill": "kill_s", "verify": "verify_s"}
        return self._entered + float(self.policy[limits[self.step]])
