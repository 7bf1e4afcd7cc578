"""Runs `prepare` in child processes that are killed before their n-th change of the file system.

`python -m tests.support.killed_prepare MODEL INPUT FOLDER`: for n = 1, 2, … a child works on `FOLDER/n` until
SIGKILL meets it, up to the first child that finishes; prints how many were killed. One process imports torch
once, and forks. Must only be used by tests.
"""

from __future__ import annotations

import os
import signal
import sys
from argparse import ArgumentParser
from pathlib import Path

from trainer.arguments import add_prepare_arguments
from trainer.data import prepare

CHANGES = ("replace", "unlink", "mkdir", "rmdir", "fsync")
COMMIT_TOKENS = 300


def arguments(model: Path, source: Path, output: Path):
    """What both the killed runs and the ones that go on are called with."""
    parser = ArgumentParser()
    add_prepare_arguments(parser)
    places = ["--target-model", str(model), "--input", str(source), "--output", str(output)]
    return parser.parse_args([*places, "--held-out-ratio", "0.3", "--max-seq-len", "128"])


def load_once(model: Path) -> None:
    """Keep the tokenizer: reading it again costs more than everything else here."""
    tokenizer = prepare.get_tokenizer(model, needs_chat_template=True)
    stops = prepare.stop_token_ids(model, tokenizer)
    prepare.get_tokenizer = lambda *_, **__: tokenizer
    prepare.stop_token_ids = lambda *_: stops


def kill_before(change: int) -> None:
    """Wrap the calls that change files; the given one is not carried out any more."""
    count = 0

    def wrap(name: str):
        original = getattr(os, name)

        def call(*args, **kwargs):
            nonlocal count
            count += 1
            if count == change:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        return call

    for name in CHANGES:
        setattr(os, name, wrap(name))


def main(model: Path, source: Path, folder: Path) -> int:
    """Kill children at later and later points; the number of killed ones."""
    prepare.COMMIT_TOKENS = COMMIT_TOKENS
    load_once(model)
    change = 0
    while True:
        change += 1
        child = os.fork()
        if child == 0:
            kill_before(change)
            os._exit(prepare.run_prepare(arguments(model, source, folder / str(change))))
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            return change - 1


if __name__ == "__main__":
    killed = main(*(Path(word) for word in sys.argv[1:]))
    sys.stdout.write(f"killed {killed}\n")
