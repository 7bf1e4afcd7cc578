"""The stop protocol: who asked, what was answered, and whether the save was abandoned.

Used by `trainer.train`'s main thread, which calls `look` a few times a second. Must not stop anything itself:
it answers in the status record and leaves the rest to the caller.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from trainer.lifecycle.heartbeat import StatusFile
from trainer.lifecycle.signals import SignalCounter, StopFile, StopRequest

_LOG = logging.getLogger(__name__)


class StopWatch:
    """Joins signals and `control/stop.json` into one request.

    Args:
        needed_s: estimates how long finishing the step and saving takes; becomes `extend_s` where the
            request's deadline is shorter.

    A request with a deadline is abandoned by the trainer itself when deadline and extension are over: what
    is half written is left under its temporary name, and the exit code still says that it was a stop.
    """

    def __init__(
        self,
        run_dir: Path,
        status: StatusFile,
        signals: SignalCounter,
        *,
        needed_s: Callable[[], float],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.request: StopRequest | None = None
        self.is_abandoned = False
        self._file = StopFile(run_dir)
        self._status = status
        self._signals = signals
        self._needed_s = needed_s
        self._monotonic = monotonic
        self._give_up_at_s = float("inf")

    def clear_stale(self) -> None:
        """Forget a request that was meant for an earlier process in this folder."""
        self._file.clear_stale()

    def look(self) -> bool:
        """Take up what has come; True when a request was accepted just now."""
        is_new = False
        # the file may come just after the signal that goes with it: it still decides id and save
        if self.request is None or self.request.id is None:
            request = self._file.read()
            if request is None and self.request is None and self._signals.count:
                request = StopRequest(id=None, reason=self._signals.last, deadline_s=None, save=True)
            if request is not None:
                self._accept(request)
                is_new = True
        if self.is_abandoned:
            return is_new
        if self._signals.count >= 2:
            self._abandon("second signal", self._signals.last)
        elif self._monotonic() > self._give_up_at_s:
            self._abandon("deadline", "the time given for the stop is over")
        return is_new

    def join(self, request: StopRequest) -> None:
        """Take up what another machine of the same run was asked for, unless this one was asked itself."""
        if self.request is None:
            self._accept(request)

    def _accept(self, request: StopRequest) -> None:
        self.request = request
        deadline_s = request.deadline_s
        extend_s = 0.0 if deadline_s is None else max(0.0, self._needed_s() - deadline_s)
        if deadline_s is not None:
            self._give_up_at_s = self._monotonic() + deadline_s + extend_s
        why = "finishing the step" + (", then saving" if request.save else ", without saving")
        self._status.answer_stop(request.id, extend_s=round(extend_s, 1), why=why)
        _LOG.info("stop requested (%s): %s", request.reason, why)

    def _abandon(self, cause: str, detail: str) -> None:
        self.is_abandoned = True
        request_id = self.request.id if self.request else None
        self._status.answer_stop(request_id, extend_s=0.0, why=f"{cause}: save abandoned")
        _LOG.warning("%s (%s): the save is abandoned", cause, detail)
