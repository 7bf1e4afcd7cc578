"""Transport to the machine that the supervisor itself runs on: child processes, no shell, no SSH.

Each command is a session of its own with an explicit environment; on a deadline exactly that child is killed,
through the handle of the process we started. Copies run the same small programs as over SSH. Called through
`Transport`; must not signal anything but its own children.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO

from supervisor.domain.errors import DeadlineError, OutcomeUnknownError, SupervisorError, TransportError
from supervisor.transport import files
from supervisor.transport.argv import BASE_ENV, check_argv, render
from supervisor.transport.base import DEFAULT_MAX_OUTPUT, CommandResult, NodeProbe, Progress
from supervisor.transport.deadline import Deadline

_STDERR_KEPT = 64 << 10
_READ_BYTES = 64 << 10
_DRAIN_READS = 32
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126

# The login environment of this "node" is our own process's; only what a login would give, never our settings.
_INHERITED = (
    *("HOME", "USER", "LOGNAME", "SHELL", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "CUDA_HOME"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR"),
    *("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"),
)


def login_environment(source: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of local commands: the base every node has, plus what a login session would bring."""
    known = os.environ if source is None else source
    inherited = {name: known[name] for name in _INHERITED if name in known}
    return {"HOME": str(Path.home()), **inherited, **BASE_ENV}


class LocalChannel:
    """A long-lived local command; see `transport.base.Channel`."""

    def __init__(self, process: subprocess.Popen[bytes], argv: tuple[str, ...]) -> None:
        self._process = process
        self._argv = argv
        self._stdout = asyncio.StreamReader(limit=4 * _READ_BYTES)
        self._stderr = bytearray()
        self._pipes: list[asyncio.BaseTransport] = []
        self._stdin: asyncio.StreamWriter | None = None
        self._pump: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, argv: tuple[str, ...], env: Mapping[str, str]) -> LocalChannel:
        """Start `argv` and put its pipes on the event loop."""
        channel = cls(_spawn(argv, env), argv)
        loop = asyncio.get_running_loop()
        await channel._attach(channel._stdout, channel._process.stdout)
        errors = asyncio.StreamReader(limit=4 * _READ_BYTES)
        await channel._attach(errors, channel._process.stderr)
        pipe, protocol = await loop.connect_write_pipe(
            asyncio.streams.FlowControlMixin, channel._process.stdin
        )
        channel._pipes.append(pipe)
        channel._stdin = asyncio.StreamWriter(pipe, protocol, None, loop)
        channel._pump = asyncio.create_task(channel._collect_stderr(errors), name="local-channel-stderr")
        return channel

    async def send(self, data: bytes, *, deadline_s: float) -> None:
        """Write all of `data`."""
        assert self._stdin is not None
        name = render(self._argv[:1])
        if self._stdin.transport.is_closing():
            raise TransportError(f"{name} has closed its input", reason="ChannelClosed")
        try:
            self._stdin.write(data)
            async with asyncio.timeout(deadline_s):
                await self._stdin.drain()
        except TimeoutError as error:
            message = f"{name} took no input for {deadline_s:g} s"
            raise DeadlineError(message, deadline_s=deadline_s) from error
        except OSError as error:
            raise TransportError(f"{name} has closed its input", reason="ChannelClosed") from error

    async def receive(self) -> bytes:
        """Next bytes from stdout; b"" at the end."""
        return await self._stdout.read(_READ_BYTES)

    def stderr_tail(self) -> bytes:
        """Last 64 KiB of stderr."""
        return bytes(self._stderr)

    async def close(self) -> None:
        """Close the streams; the command sees EOF and may go on, and is reaped when it ends."""
        if self._pump is None:
            return
        self._pump.cancel()
        await asyncio.gather(self._pump, return_exceptions=True)
        self._pump = None
        for pipe in self._pipes:
            pipe.close()
        _reap_later(self._process)

    async def _attach(self, reader: asyncio.StreamReader, pipe: IO[bytes] | None) -> None:
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
        self._pipes.append(transport)

    async def _collect_stderr(self, reader: asyncio.StreamReader) -> None:
        while chunk := await reader.read(_READ_BYTES):
            self._stderr += chunk
            del self._stderr[: max(0, len(self._stderr) - _STDERR_KEPT)]


class LocalTransport:
    """Runs commands on this machine."""

    def __init__(self, *, env: Mapping[str, str] | None = None) -> None:
        self._env = dict(login_environment() if env is None else env)

    async def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        deadline_s: float,
        max_output: int = DEFAULT_MAX_OUTPUT,
        is_read_only: bool = False,
    ) -> CommandResult:
        """Run to the end; see `Transport.run`."""
        words = check_argv(argv)
        return await self._run(
            words,
            [stdin] if stdin else [],
            deadline=Deadline(deadline_s),
            max_output=max_output,
            is_read_only=is_read_only,
        )

    async def open_channel(self, argv: Sequence[str], *, deadline_s: float) -> LocalChannel:
        """Start a command and keep its streams."""
        words = check_argv(argv)
        async with asyncio.timeout(deadline_s):
            try:
                return await LocalChannel.start(words, self._env)
            except OSError as error:
                raise TransportError(
                    f"cannot start {words[0]}: {error.strerror}", reason="ExecFailed"
                ) from error

    async def put(
        self,
        source: Path | bytes,
        target: str,
        *,
        mode: int = 0o644,
        progress: Progress | None = None,
        deadline_s: float,
    ) -> str:
        """Copy to `target`; see `Transport.put`."""
        place = files.Target.at(target)
        upload = files.Upload(source, progress)
        argv = files.put_argv(place, size=upload.size, mode=mode)
        result = await self._copy(argv, upload.pieces(), deadline_s=deadline_s, path=target)
        upload.check()
        return files.put_digest(result, place, expected=upload.digest)

    async def get(self, source: str, *, max_bytes: int, deadline_s: float) -> bytes:
        """Read a file; see `Transport.get`."""
        argv = check_argv(files.get_argv(source, max_bytes=max_bytes))
        result = await self._copy(argv, [], deadline_s=deadline_s, path=source, max_output=max_bytes + 1)
        return files.get_content(result, source, max_bytes=max_bytes)

    async def probe(self, *, deadline_s: float) -> NodeProbe:  # noqa: ARG002 part of the protocol
        """This machine is always reachable."""
        return NodeProbe(is_reachable=True, reason="Ok", message="this machine")

    async def close(self) -> None:
        """Nothing to release."""

    async def _copy(
        self,
        argv: tuple[str, ...],
        stdin: Iterable[bytes],
        *,
        deadline_s: float,
        path: str,
        max_output: int = DEFAULT_MAX_OUTPUT,
    ) -> CommandResult:
        try:
            return await self._run(
                argv, stdin, deadline=Deadline(deadline_s), max_output=max_output, is_read_only=False
            )
        except SupervisorError as error:
            raise files.harmless(error, path) from error

    async def _run(
        self,
        argv: tuple[str, ...],
        stdin: Iterable[bytes],
        *,
        deadline: Deadline,
        max_output: int,
        is_read_only: bool,
    ) -> CommandResult:
        try:
            process = _spawn(argv, self._env)
        except OSError as error:
            missing = isinstance(error, FileNotFoundError | NotADirectoryError)
            code = _NOT_FOUND if missing else _NOT_EXECUTABLE
            text = f"{argv[0]}: {error.strerror}\n".encode("utf-8", "surrogateescape")
            return CommandResult(argv=argv, exit_code=code, stdout=b"", stderr=text)
        out, err = _Sink(process.stdout, max_output), _Sink(process.stderr, max_output)
        try:
            async with asyncio.timeout(deadline.remaining()):
                status = await _communicate(process, stdin, out, err)
        except TimeoutError as error:
            kind = DeadlineError if is_read_only else OutcomeUnknownError
            raise kind(
                f"no end within {deadline.seconds:g} s, killed: {render(argv)}",
                argv=argv,
                deadline_s=deadline.seconds,
            ) from error
        finally:
            _end(process)
        return CommandResult(
            argv=argv,
            exit_code=128 - status if status < 0 else status,
            stdout=bytes(out.data),
            stderr=bytes(err.data),
            is_truncated=out.is_truncated or err.is_truncated,
        )


class _Sink:
    """Reads one pipe on the event loop and keeps the first `limit` bytes."""

    def __init__(self, pipe: IO[bytes] | None, limit: int) -> None:
        assert pipe is not None
        self._fd = pipe.fileno()
        self._limit = limit
        self.data = bytearray()
        self.is_truncated = False
        os.set_blocking(self._fd, False)

    def start(self) -> None:
        asyncio.get_running_loop().add_reader(self._fd, self._read)

    def stop(self) -> None:
        asyncio.get_running_loop().remove_reader(self._fd)

    def drain(self) -> None:
        """Take what the pipe holds now; bounded, as a background child may go on writing."""
        for _ in range(_DRAIN_READS):
            if not self._read():
                return

    def _read(self) -> bool:
        try:
            chunk = os.read(self._fd, _READ_BYTES)
        except BlockingIOError:
            return False
        if not chunk:
            self.stop()
            return False
        room = self._limit - len(self.data)
        self.is_truncated = self.is_truncated or len(chunk) > room
        self.data += chunk[:room]
        return True


def _spawn(argv: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start `argv` in a session of its own, so that no terminal or signal of ours reaches it."""
    return subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=env,
        bufsize=0,
        start_new_session=True,
    )


async def _communicate(
    process: subprocess.Popen[bytes], stdin: Iterable[bytes], out: _Sink, err: _Sink
) -> int:
    """Feed stdin, drain both streams, and return the status (negative: signal).

    The end of the process ends it, not EOF: a background child may hold the pipes open for ever.
    """
    out.start()
    err.start()
    writer = asyncio.create_task(_feed(process.stdin, stdin), name="local-stdin")
    try:
        await _ended(process)
        out.drain()
        err.drain()
    finally:
        out.stop()
        err.stop()
        writer.cancel()
        await asyncio.gather(writer, return_exceptions=True)
    return process.wait()


async def _feed(pipe: IO[bytes] | None, pieces: Iterable[bytes]) -> None:
    """Write every piece and close; a command may well end without reading its input."""
    assert pipe is not None
    os.set_blocking(pipe.fileno(), False)
    with contextlib.suppress(BrokenPipeError):
        for piece in pieces:
            await _write(pipe.fileno(), memoryview(piece))
    pipe.close()


async def _write(fd: int, data: memoryview) -> None:
    loop = asyncio.get_running_loop()
    while data:
        try:
            data = data[os.write(fd, data) :]
        except BlockingIOError:
            await _wait_fd(loop.add_writer, loop.remove_writer, fd)


async def _ended(process: subprocess.Popen[bytes]) -> None:
    loop = asyncio.get_running_loop()
    pidfd = os.pidfd_open(process.pid)
    try:
        await _wait_fd(loop.add_reader, loop.remove_reader, pidfd)
    finally:
        os.close(pidfd)


async def _wait_fd(add: Callable[..., None], remove: Callable[[int], bool], fd: int) -> None:
    ready = asyncio.get_running_loop().create_future()
    add(fd, _resolve, ready)
    try:
        await ready
    finally:
        remove(fd)


def _resolve(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill our own child if it has not ended; nobody else has reaped it, so its pid is still its own."""
    if process.poll() is None:
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


def _reap_later(process: subprocess.Popen[bytes]) -> None:
    """Collect the status of a child that may live on, so that it leaves no zombie."""
    if process.poll() is not None:
        return
    loop = asyncio.get_running_loop()
    pidfd = os.pidfd_open(process.pid)

    def reap() -> None:
        loop.remove_reader(pidfd)
        os.close(pidfd)
        process.wait()

    loop.add_reader(pidfd, reap)
