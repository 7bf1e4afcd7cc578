"""Client of the node's agent: requests and events as JSON lines over one long-lived channel.

Owned by the reconciler's connections, one per node. Multiplexes requests, gives each its own deadline, hands
events to subscribers, and notices a silent link by its own pings. It never reconnects (the caller does) and
never repeats a request; a stop or signal whose answer is lost is an unknown outcome, not a failure.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from supervisor.clock import Clock
from supervisor.domain.errors import (
    DeadlineError,
    OutcomeUnknownError,
    ShimError,
    SupervisorError,
    TransportError,
    VersionMismatchError,
)
from supervisor.transport.base import Channel

SUPPORTED_APIS = (1,)
EFFECT_OPS = frozenset({"start", "stop", "signal"})
MAX_FRAME_BYTES = 64 << 20
MAX_NOISE_BYTES = 1 << 20

ChannelFactory = Callable[[], Awaitable[Channel]]
Subscriber = Callable[[Mapping[str, Any]], None]

logger = logging.getLogger(__name__)


def build_shim_argv(python: str, shim_path: str, command: str, root: str, *extra: str) -> list[str]:
    """Argv for a shim command (`start`, `serve`, `tombstone`) in the node."""
    return [python, shim_path, command, "--root", root, *extra]


class AgentClient:
    """One connection to one agent.

    Args:
        channel_factory: opens the channel on which the agent runs (`serve`).
        clock: for ping intervals.
        ping_interval_s: how often an idle link is tested.
        ping_deadline_s: silence after which the link counts as gone.
    """

    def __init__(
        self,
        channel_factory: ChannelFactory,
        clock: Clock,
        *,
        ping_interval_s: float = 5.0,
        ping_deadline_s: float = 12.0,
    ) -> None:
        self._channel_factory = channel_factory
        self._clock = clock
        self._ping_interval_s = ping_interval_s
        self._ping_deadline_s = ping_deadline_s
        self._channel: Channel | None = None
        self._hello: Mapping[str, Any] | None = None
        self._hello_seen = asyncio.Event()
        self._closed = asyncio.Event()
        self._failure: SupervisorError | None = None
        self._pending: dict[int, asyncio.Future[Mapping[str, Any]]] = {}
        self._ids = itertools.count(1)
        self._subscribers: list[Subscriber] = []
        self._send_lock = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []
        self._noise_bytes = 0

    @property
    def is_open(self) -> bool:
        """True between a successful `open` and the end of the link."""
        return self._hello is not None and not self._closed.is_set()

    @property
    def hello(self) -> Mapping[str, Any] | None:
        """The agent's first frame: api, capabilities, boot_id, init_ticks, pid, python."""
        return self._hello

    @property
    def failure(self) -> SupervisorError | None:
        """Why the link ended, None while it is open or after `aclose`."""
        return self._failure

    async def open(self, *, deadline_s: float = 30.0) -> Mapping[str, Any]:
        """Start the agent and wait for its hello; noise of login scripts before it is skipped.

        Raises:
            TransportError: the channel could not be opened, ended, or stayed silent.
            VersionMismatchError: the agent speaks another api.
        """
        if self._channel is not None:
            raise ShimError("agent client was opened already; make a new one", reason="AlreadyOpen")
        try:
            async with asyncio.timeout(deadline_s):
                self._channel = await self._channel_factory()
                self._tasks.append(asyncio.create_task(self._read(self._channel), name="agent-read"))
                await self._hello_seen.wait()
        except TimeoutError:
            tail = self._channel.stderr_tail() if self._channel is not None else b""
            await self.aclose()
            raise DeadlineError(
                f"no hello from the agent within {deadline_s:g} s",
                reason="ShimSilent",
                deadline_s=deadline_s,
                stderr=tail.decode("utf-8", "replace")[-2000:],
            ) from None
        except BaseException:
            await self.aclose()
            raise
        if self._hello is None:
            failure = self._failure or TransportError("agent ended before its hello", reason="ShimSilent")
            await self.aclose()
            raise failure
        self._tasks.append(asyncio.create_task(self._keep_alive(), name="agent-ping"))
        return self._hello

    async def request(self, op: str, *, deadline_s: float = 15.0, **fields: Any) -> dict[str, Any]:
        """Ask the agent and wait for its answer.

        Raises:
            ShimError: the agent refused; `reason` and `data` are its own.
            OutcomeUnknownError: a stop or signal went out and its answer did not come.
            DeadlineError, TransportError: no answer to a request without effect.
        """
        if not self.is_open or self._channel is None:
            raise self._lost(op, was_sent=False)
        request_id = next(self._ids)
        future: asyncio.Future[Mapping[str, Any]] = asyncio.get_running_loop().create_future()
        self._pending[request_id] = future
        frame = json.dumps({"id": request_id, "op": op, **fields}, separators=(",", ":"), allow_nan=False)
        try:
            async with asyncio.timeout(deadline_s):
                async with self._send_lock:
                    await self._channel.send(frame.encode() + b"\n", deadline_s=deadline_s)
                reply = await future
        except TimeoutError:
            raise self._no_answer(op, deadline_s) from None
        except TransportError as error:
            self._end(error)
            raise self._lost(op, was_sent=True) from error
        finally:
            self._pending.pop(request_id, None)
            if future.done() and not future.cancelled():
                future.exception()  # marks it as seen: a link that breaks while sending is reported once
        return _result(op, reply)

    def subscribe(self, callback: Subscriber) -> Callable[[], None]:
        """Call `callback` with each event frame, in order; returns the function that ends it."""
        self._subscribers.append(callback)

        def unsubscribe() -> None:
            with contextlib.suppress(ValueError):
                self._subscribers.remove(callback)

        return unsubscribe

    async def wait_closed(self) -> SupervisorError | None:
        """Wait for the end of the link; returns its cause, None after `aclose`."""
        await self._closed.wait()
        return self._failure

    async def aclose(self) -> None:
        """End the connection; pending requests fail. Never raises."""
        self._end(None)
        current = asyncio.current_task()
        tasks = [task for task in self._tasks if task is not current]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._channel is not None:
            await self._channel.close()

    async def _read(self, channel: Channel) -> None:
        buffer = bytearray()
        try:
            while True:
                data = await channel.receive()
                if not data:
                    tail = channel.stderr_tail().decode("utf-8", "replace")[-2000:].strip()
                    message = "agent connection ended" + (f": {tail}" if tail else "")
                    raise TransportError(message, reason="AgentGone", stderr=tail)
                buffer += data
                if b"\n" in data:
                    *lines, rest = buffer.split(b"\n")
                    buffer = bytearray(rest)
                    for line in lines:
                        self._take(bytes(line))
                if len(buffer) > MAX_FRAME_BYTES:
                    raise ShimError(f"agent sent a frame above {MAX_FRAME_BYTES} bytes", reason="BadFrame")
        except SupervisorError as error:
            self._end(error)
        except Exception as error:  # task boundary: whatever broke, waiting requests must hear of it
            logger.exception("agent reader failed")
            self._end(TransportError(f"agent reader failed: {error}", reason="AgentGone"))

    def _take(self, line: bytes) -> None:
        frame = _parse(line)
        if frame is None or (self._hello is None and frame.get("ev") != "hello"):
            self._noise_bytes += len(line) + 1
            if self._noise_bytes > MAX_NOISE_BYTES:
                raise ShimError("what runs at the other end does not speak the agent's protocol")
            return
        if frame.get("ev") == "hello":
            self._greet(frame)
        elif "ev" in frame:
            self._publish(frame)
        elif isinstance(frame.get("id"), int):
            future = self._pending.get(frame["id"])
            if future is not None and not future.done():
                future.set_result(frame)

    def _greet(self, frame: Mapping[str, Any]) -> None:
        if frame.get("api") not in SUPPORTED_APIS:
            raise VersionMismatchError(
                f"the node's shim speaks api {frame.get('api')!r}, this daemon {SUPPORTED_APIS}",
                hint="deploy the node again",
                shim_api=frame.get("api"),
                supported=list(SUPPORTED_APIS),
            )
        self._hello = frame
        self._hello_seen.set()

    def _publish(self, frame: Mapping[str, Any]) -> None:
        for callback in list(self._subscribers):
            try:
                callback(frame)
            except Exception:  # subscriber boundary: one bad listener must not end the link
                logger.exception("agent event listener failed")

    async def _keep_alive(self) -> None:
        while not self._closed.is_set():
            await self._clock.sleep(self._ping_interval_s)
            try:
                await self.request("ping", deadline_s=self._ping_deadline_s)
            except ShimError:
                continue
            except TransportError as error:
                silent = f"agent silent for {self._ping_deadline_s:g} s"
                self._end(TransportError(silent, reason="ShimSilent", cause=str(error)))

    def _end(self, failure: SupervisorError | None) -> None:
        if self._closed.is_set():
            return
        self._failure = failure
        self._closed.set()
        self._hello_seen.set()
        for future in self._pending.values():
            if not future.done():
                future.set_exception(failure or TransportError("agent connection closed", reason="AgentGone"))

    def _lost(self, op: str, *, was_sent: bool) -> SupervisorError:
        cause = str(self._failure) if self._failure else "not connected"
        if was_sent and op in EFFECT_OPS:
            return OutcomeUnknownError(f"{op}: link lost before the answer: {cause}", op=op)
        return TransportError(f"{op}: no connection to the agent: {cause}", reason="AgentGone", op=op)

    def _no_answer(self, op: str, deadline_s: float) -> SupervisorError:
        message = f"{op}: no answer from the agent within {deadline_s:g} s"
        if op in EFFECT_OPS:
            return OutcomeUnknownError(message, op=op, deadline_s=deadline_s)
        return DeadlineError(message, op=op, deadline_s=deadline_s)


def parse_start_reply(stdout: bytes) -> dict[str, Any]:
    """The STATE in the reply of `start` or `tombstone`, with `existing` beside it: `{"existing", "state"}`.

    Raises:
        ShimError: the shim refused (its reason, message, errno in data), or printed no reply at all.
    """
    for line in reversed(stdout.splitlines()):
        reply = _parse(line)
        if reply is not None and reply.get("v") == 1 and isinstance(reply.get("ok"), bool):
            if reply["ok"]:
                return {"existing": reply["existing"], "state": reply["state"]}
            raise _shim_error("start", reply["error"])
    raise ShimError(
        "the shim printed no reply", reason="ShimSilent", stdout=stdout[-2000:].decode("utf-8", "replace")
    )


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        frame = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return frame if isinstance(frame, dict) else None


def _result(op: str, reply: Mapping[str, Any]) -> dict[str, Any]:
    result = reply.get("result")
    if reply.get("ok") is True and isinstance(result, dict):
        return result
    raise _shim_error(op, reply.get("error"))


def _shim_error(op: str, error: Any) -> ShimError:
    if not isinstance(error, dict):
        return ShimError(f"{op}: answer not understood", reason="BadFrame", op=op)
    data: Sequence[tuple[str, Any]] = list((error.get("data") or {}).items())
    return ShimError(
        str(error.get("message") or f"{op} refused"),
        reason=str(error.get("reason") or "ShimFailed"),
        op=op,
        errno=error.get("errno"),
        detail=dict(data),
    )
