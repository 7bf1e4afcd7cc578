"""A real `dflashctl serve` in a process of its own, and the commands that a user types at it.

`ServedDaemon` is what the suites of the user's view see of the product: URL, token file, exit codes and
texts. It can be killed and started again on the same state folder. Must not reach into the daemon.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from supervisor import cli
from supervisor.client import Client
from tests.support.sshd import REPOSITORY

WAIT_S = 180.0
PERIODS = "reconcile_active_s = 0.3\nreconcile_idle_s = 1.0\ngpu_interval_s = 0.2\n"
"""Short, so that a test waits for states and not for clocks."""
_READY = "listening on "

T = TypeVar("T")


@dataclass(frozen=True)
class Result:
    """What the operator saw of one command."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        """Standard output as the one document that `-o json` prints."""
        return json.loads(self.out)


class ServedDaemon:
    """`with ServedDaemon(tmp_path) as daemon: daemon.ctl("ps")`."""

    def __init__(self, folder: Path) -> None:
        self.state_dir = folder / "state"
        self.log = folder / "daemon.log"
        self.url = ""
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> ServedDaemon:
        self.state_dir.mkdir(parents=True, exist_ok=True)
        (self.state_dir / "config.toml").write_text(PERIODS, "utf-8")
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """Of the daemon that serves now."""
        assert self._process is not None
        return self._process.pid

    @property
    def token_file(self) -> Path:
        """The admin token, which the first start wrote."""
        return self.state_dir / "admin.token"

    def command(self, *words: str) -> list[str]:
        """The words of `dflashctl serve` on this state folder."""
        return [
            *(sys.executable, "-m", "supervisor", "serve"),
            *("--state-dir", str(self.state_dir), "--port", "0", *words),
        ]

    def start(self) -> None:
        """Start and wait for the line with the address."""
        with self.log.open("a", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                self.command(),
                cwd=REPOSITORY,
                env={name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        watchdog = threading.Timer(WAIT_S, self._process.kill)
        watchdog.start()
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        watchdog.cancel()
        assert line.startswith(_READY), self.log.read_text("utf-8")
        self.url = line.removeprefix(_READY).partition("/#")[0]

    def kill(self) -> None:
        """SIGKILL: no goodbye of any kind."""
        assert self._process is not None
        self._process.kill()
        self._end()

    def stop(self) -> None:
        """SIGTERM, and SIGKILL when that does not help in time."""
        assert self._process is not None
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(WAIT_S)
        self._process.kill()
        self._end()

    def _end(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        self._process.wait(WAIT_S)
        self._process.stdout.close()

    def ctl(self, *words: object) -> Result:
        """Run a command as the console script does, in this process: imports are paid once."""
        environment = {"DFLASHCTL_URL": self.url, "DFLASHCTL_TOKEN_FILE": str(self.token_file)}
        out, err = _Capture(), _Capture()
        with _environment(environment), redirect_stdout(out), redirect_stderr(err):
            try:
                cli.main([str(word) for word in words])
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 0
        return Result(code, out.text(), err.text())

    def done(self, *words: object) -> Result:
        """A command that must end well."""
        result = self.ctl(*words)
        assert result.code == 0, f"dflashctl {' '.join(map(str, words))}\n{result}\n{self.tail()}"
        return result

    def get(self, path: str, **params: Any) -> Any:
        """Body of a GET of the REST interface."""
        with Client(self.url, self.token_file.read_text("utf-8").strip()) as client:
            return client.get(path, **params)

    def attempts(self, run: str) -> list[dict[str, Any]]:
        """All attempts of a run, oldest first."""
        return list(reversed(self.get(f"/v1/runs/{run}/attempts")["items"]))

    def until(self, read: Callable[[], T | None], what: str) -> T:
        """Wait until `read` gives something."""
        end = time.monotonic() + WAIT_S
        while time.monotonic() < end:
            if found := read():
                return found
            time.sleep(0.05)
        shown = [self.ctl(*words) for words in (["ps"], ["events"])]
        raise AssertionError(f"waited {WAIT_S:g} s for {what}\n{shown}\n{self.tail()}")

    def tail(self) -> str:
        """The end of the daemon's log."""
        return self.log.read_text("utf-8", "replace")[-3000:]


class _Capture(io.TextIOWrapper):
    def __init__(self) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8", write_through=True)

    def text(self) -> str:
        return self.buffer.getvalue().decode("utf-8")  # type: ignore[attr-defined,no-any-return]


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
