"""Real trainer processes without the wait for torch: one process imports everything, then forks on request.

A fork runs the real command line (`trainer.__main__.main`) with its own pid, signals, log and exit code; only
the imports were done before. `plant` is Python text that runs in the fork first, to slow a phase down or to
kill the process at a chosen point. The server is single-threaded when it forks. For tests only.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.support.trainer_runs import REPOSITORY


class ForkedTrainer:
    """One forked trainer, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, server: TrainerForks, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._server = server

    def poll(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        if self.returncode is None:
            self.returncode = self._server.ask({"poll": self.pid})
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Wait for the end, at most `timeout` seconds."""
        for _ in range(int(timeout / 0.01)):
            code = self.poll()
            if code is not None:
                return code
            time.sleep(0.01)
        raise TimeoutError(f"the trainer still runs after {timeout} s")

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it for certain."""
        self.send_signal(signal.SIGKILL)


class TrainerForks:
    """The server's client."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ask(self, request: dict[str, Any]) -> Any:
        """Send one request and return its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def start(self, settings: Sequence[str], log: Path, *, plant: str = "", **environ: str) -> ForkedTrainer:
        """Fork a trainer with these `table.key=value` settings; its output goes to `log`."""
        words = ["train", *(word for text in settings for word in ("--set", text))]
        return self.start_words(words, log, plant=plant, **environ)

    def start_words(
        self, words: Sequence[str], log: Path, *, plant: str = "", **environ: str
    ) -> ForkedTrainer:
        """Fork any command of `dflash-train`."""
        request = {"words": list(words), "log": str(log), "plant": plant, "environ": environ}
        return ForkedTrainer(self, self.ask(request))


@contextlib.contextmanager
def trainer_forks() -> Iterator[TrainerForks]:
    """Run the server for a while; forks that are left are killed by their pids."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.trainer_forks"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    try:
        yield TrainerForks(process)
    finally:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        try:
            process.wait(180)
        finally:
            process.kill()
            process.wait(180)
            process.stdout.close()


def _serve() -> None:
    # so that forks find it imported
    import transformers
    from transformers.models.llama import modeling_llama  # noqa: F401

    import trainer.__main__
    import trainer.train  # noqa: F401

    _ = transformers.AutoModelForCausalLM, transformers.AutoTokenizer, transformers.PreTrainedTokenizerFast

    ended: dict[int, int | None] = {}
    for line in sys.stdin:
        request = json.loads(line)
        answer = _poll(ended, request["poll"]) if "poll" in request else _fork(ended, request)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    for pid in ended:
        if _poll(ended, pid) is None:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _poll(ended: dict[int, int | None], pid: int) -> int | None:
    if ended[pid] is None:
        done, status = os.waitpid(pid, os.WNOHANG)
        ended[pid] = os.waitstatus_to_exitcode(status) if done else None
    return ended[pid]


def _fork(ended: dict[int, int | None], request: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        ended[pid] = None
        return pid
    try:
        handle = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        os.environ.update(request["environ"])
        sys.argv = ["dflash-train", *request["words"]]
        exec(request["plant"], {})
        sys.modules["trainer.__main__"].main()
    except SystemExit as done:
        sys.stdout.flush()
        os._exit(int(done.code or 0))
    finally:
        os._exit(70)


if __name__ == "__main__":
    _serve()
