"""Commands run in this process as the console script runs them, and a reconciler that plays along."""

from __future__ import annotations

import io
import json
import sys
import threading
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass

import pytest

from supervisor import cli
from supervisor.store.operations import finish_operation
from supervisor.store.queries import list_open_operations


@dataclass
class Result:
    code: int
    out: str
    err: str

    def json(self):
        return json.loads(self.out)


def ctl(*words, stdin=""):
    """Run a command in this process as the console script does."""

    class Out(io.TextIOWrapper):
        def __init__(self):
            super().__init__(io.BytesIO(), encoding="utf-8", write_through=True)

        def text(self):
            return self.buffer.getvalue().decode()

    out, err = Out(), Out()
    given, sys.stdin = sys.stdin, io.TextIOWrapper(io.BytesIO(stdin.encode()), encoding="utf-8")
    try:
        with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as end:
            cli.main([str(word) for word in words])
    finally:
        sys.stdin = given
    return Result(end.value.code or 0, out.text(), err.text())


@contextmanager
def settle(live, *, status="done", result=None, error=None, first=None):
    """End every operation that comes up, until the block ends; `first` runs once before."""
    stop = threading.Event()
    store = live.api.state.store

    def end_all(session):
        for operation in list_open_operations(session):
            operation.progress = {"step": "working", "message": "on it"}
            finish_operation(session, operation, status=status, result=result, error=error)

    def loop():
        waiting = [first] if first is not None else []
        while not stop.wait(0.05):
            if waiting:
                if not store.read_sync(list_open_operations):
                    continue
                waiting.pop()()
            store.write_sync(end_all)

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(60)
