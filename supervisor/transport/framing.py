"""What came back from a framed command: output between the markers, and how far the command got.

`StreamCollector` is fed raw bytes of one stream, `FramedOutcome` holds the evidence, `conclude` turns
evidence into a result or an error. All of it is pure, so that the difference between "failed", "never ran"
and "nobody knows" is decided in one place. Called by `ssh` and `pct`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from supervisor.domain.errors import CommandFailedError, DeadlineError, OutcomeUnknownError, TransportError
from supervisor.transport.argv import Frame, render
from supervisor.transport.base import CommandResult

_NOISE_KEPT = 64 << 10
_STATUS = re.compile(rb"(\d{1,3})>>")
_STATUS_BYTES = 5


class StreamCollector:
    """Collects one stream of a framed command, at most `limit` bytes of it; earlier text is `noise`."""

    def __init__(self, frame: Frame, limit: int) -> None:
        self._frame = frame
        self._limit = limit
        self._held = bytearray()
        self.noise = bytearray()
        self.data = bytearray()
        self.has_begun = False
        self.exit_code: int | None = None
        self.is_truncated = False

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes; whatever follows the end marker (a stray background child) is dropped."""
        if self.exit_code is not None:
            return
        if not self.has_begun:
            chunk = self._skip_noise(chunk)
            if not self.has_begun:
                return
        self._held += chunk
        self._look_for_end()

    def finish(self) -> None:
        """The stream is over: bytes held back as a possible end marker are data after all."""
        if self.has_begun and self.exit_code is None:
            self._emit(bytes(self._held))
            self._held.clear()

    def _skip_noise(self, chunk: bytes) -> bytes:
        self.noise += chunk
        position = self.noise.find(self._frame.begin)
        if position < 0:
            del self.noise[: max(0, len(self.noise) - _NOISE_KEPT)]
            return b""
        rest = bytes(self.noise[position + len(self._frame.begin) :])
        del self.noise[position:]
        self.has_begun = True
        return rest

    def _look_for_end(self) -> None:
        position = self._held.find(self._frame.end)
        if position >= 0:
            status = _STATUS.match(bytes(self._held[position + len(self._frame.end) :][:_STATUS_BYTES]))
            self._emit(bytes(self._held[:position]))
            del self._held[:position]
            if status:
                self.exit_code = int(status.group(1))
                self._held.clear()
            return
        keep = len(self._frame.end) + _STATUS_BYTES
        if len(self._held) > keep:
            self._emit(bytes(self._held[:-keep]))
            del self._held[:-keep]

    def _emit(self, data: bytes) -> None:
        room = self._limit - len(self.data)
        if len(data) > room:
            self.is_truncated = True
        self.data += data[:room]


@dataclass(frozen=True, slots=True, kw_only=True)
class FramedOutcome:
    """Evidence about one framed command."""

    argv: tuple[str, ...]
    stdout: StreamCollector
    stderr: StreamCollector
    channel_status: int | None
    """Exit status that the SSH server reported for the outer command; None when it reported none."""
    is_expired: bool
    deadline_s: float
    cause: BaseException | None = None

    @property
    def has_begun(self) -> bool:
        """True when the innermost shell was about to start the command."""
        return self.stdout.has_begun or self.stderr.has_begun

    @property
    def exit_code(self) -> int | None:
        """The command's own status, from whichever stream brought it."""
        return self.stdout.exit_code if self.stdout.exit_code is not None else self.stderr.exit_code

    @property
    def outer_text(self) -> str:
        """What was said outside the frame, stderr first: the words of ssh's shell, sudo or pct."""
        parts = (bytes(self.stderr.noise), bytes(self.stdout.noise))
        return "\n".join(part.decode("utf-8", "replace").strip() for part in parts if part.strip())


def command_result(outcome: FramedOutcome, exit_code: int) -> CommandResult:
    """The result of a command whose end marker arrived."""
    return CommandResult(
        argv=outcome.argv,
        exit_code=exit_code,
        stdout=bytes(outcome.stdout.data),
        stderr=bytes(outcome.stderr.data),
        is_truncated=outcome.stdout.is_truncated or outcome.stderr.is_truncated,
    )


def conclude(outcome: FramedOutcome, *, is_read_only: bool) -> CommandResult:
    """Turn evidence into a result, or raise what is certain and nothing more.

    Raises:
        OutcomeUnknownError, DeadlineError: see `Transport.run`.
        CommandFailedError: the outer command ended with a status before ours could start.
    """
    if outcome.exit_code is not None:
        return command_result(outcome, outcome.exit_code)
    if outcome.channel_status is not None and not outcome.has_begun:
        text = outcome.outer_text or "no text"
        raise CommandFailedError(
            f"the host's shell ended with status {outcome.channel_status} before the command started: {text}",
            reason="ShellFailed",
            hint="check the login shell and its start-up files on the node",
            argv=outcome.argv,
            exit_code=outcome.channel_status,
            stderr=text,
        )
    raise unknown_outcome(outcome, is_read_only=is_read_only) from outcome.cause


def unknown_outcome(outcome: FramedOutcome, *, is_read_only: bool) -> TransportError:
    """The error for a command of which only the start, or not even that, is known."""
    shown = render(outcome.argv)
    data: dict[str, Any] = {
        "argv": outcome.argv,
        "has_begun": outcome.has_begun,
        "channel_status": outcome.channel_status,
    }
    if outcome.is_expired:
        if is_read_only:
            return DeadlineError(
                f"no answer within {outcome.deadline_s:g} s from: {shown}",
                deadline_s=outcome.deadline_s,
                **data,
            )
        return OutcomeUnknownError(
            f"no end within {outcome.deadline_s:g} s, the command may still run: {shown}",
            hint="look at the node before repeating it",
            deadline_s=outcome.deadline_s,
            **data,
        )
    if outcome.channel_status is not None:
        message = f"its shell ended with status {outcome.channel_status} and without a report: {shown}"
    else:
        message = f"link lost while it ran, it may have finished: {shown}"
    if is_read_only and outcome.channel_status is None:
        return TransportError(message, reason="LinkLost", **data)
    return OutcomeUnknownError(message, hint="look at the node before repeating it", **data)
