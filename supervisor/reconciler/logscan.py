"""Looks for a run's patterns in its log, for programs that write no status file of ours.

Used by `observe`. Reads by byte offset through the agent, a bounded piece a pass, and keeps what it found:
was there a ready line, what was the last progress line. Patterns were checked when the spec was read.
"""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass

from supervisor.domain.policy import HealthPolicy
from supervisor.reconciler.connections import NodeConnection

PIECE_BYTES = 262_144
PIECES_A_PASS = 8
PASSES_AT_THE_END = 32
MAX_LINE = 8192


@dataclass(slots=True)
class LogScan:
    """What one attempt's log has shown so far."""

    offset: int = 0
    partial: bytes = b""
    is_ready: bool = False
    step: int | None = None
    progress_s: float | None = None
    """Monotonic time at which the last progress line was seen."""

    async def advance(
        self, connection: NodeConnection, attempt_id: str, policy: HealthPolicy, monotonic_s: float
    ) -> None:
        """Read on from where the last pass ended.

        Raises:
            TransportError, ShimError: nothing is lost, the next pass goes on from the same place.
        """
        for _ in range(PIECES_A_PASS):
            reply = await connection.request(
                "tail",
                attempt_id=attempt_id,
                offset=self.offset,
                limit=PIECE_BYTES,
                deadline_s=policy.readiness.timeout_s,
            )
            data = base64.b64decode(reply["data_b64"])
            if not data:
                return
            self.offset += len(data)
            self.take(data, policy, monotonic_s)

    async def finish(
        self, connection: NodeConnection, attempt_id: str, policy: HealthPolicy, monotonic_s: float
    ) -> None:
        """Read an ended attempt's log to its end, bounded; its last line may have no line end.

        Raises:
            TransportError, ShimError: as `advance`.
        """
        for _ in range(PASSES_AT_THE_END):
            before = self.offset
            await self.advance(connection, attempt_id, policy, monotonic_s)
            if self.offset == before:
                break
        self.take(b"\n", policy, monotonic_s)

    def take(self, data: bytes, policy: HealthPolicy, monotonic_s: float) -> None:
        """Search the lines that `data` completes; CR bars count as line ends."""
        *lines, self.partial = re.split(rb"[\r\n]+", self.partial + data)
        if len(self.partial) > MAX_LINE:
            lines.append(self.partial)
            self.partial = b""
        for raw in lines:
            self._take_line(raw[:MAX_LINE].decode("utf-8", "replace"), policy, monotonic_s)

    def _take_line(self, line: str, policy: HealthPolicy, monotonic_s: float) -> None:
        if policy.ready_regex and not self.is_ready and re.search(policy.ready_regex, line):
            self.is_ready = True
        if not policy.progress_regex:
            return
        found = re.search(policy.progress_regex, line)
        if found is None:
            return
        step = next((int(group) for group in found.groups() if group and group.isdigit()), None)
        if step is None or step != self.step:
            self.progress_s = monotonic_s
        self.step = step if step is not None else self.step
