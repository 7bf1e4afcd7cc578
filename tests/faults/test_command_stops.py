"""Ctrl-C and SIGTERM to the commands beside `train`: one line, exit 9, files that one can go on from."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.tiny import tiny_target
from tests.support.tiny_drafter import make_drafter, talkative_target
from trainer.__main__ import main
from trainer.checkpoint.export import export_drafter
from trainer.errors import EXIT_STOPPED

LIMIT_S = 240.0

HELD = """
import sys, time
from trainer.__main__ import main
from trainer.data.completions import RowFile

real, written = RowFile.write, []

def write(self, rows):
    real(self, rows)
    written.extend(rows)
    while len(written) >= 3:
        time.sleep(0.01)

RowFile.write = write
main()
"""
"""Runs a command that never comes further than three rows: a stop is never too late for it."""


def _start(*words: object, plant: str = "") -> subprocess.Popen[str]:
    program = ["-c", plant] if plant else ["-m", "trainer"]
    command = [sys.executable, *program, *map(str, words)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def _stop_when(process: subprocess.Popen[str], number: signal.Signals, is_time: Callable[[], bool]) -> str:
    """Send the signal at a moment; returns what the process said on stderr."""
    end = time.monotonic() + LIMIT_S
    while not is_time():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < end
        time.sleep(0.01)
    process.send_signal(number)
    _, said = process.communicate(timeout=LIMIT_S)
    return said


def _count_lines(output: Path) -> int:
    return output.read_bytes().count(b"\n") if output.exists() else 0


def _ids(output: Path) -> list[str]:
    lines = output.read_text().splitlines() if output.exists() else []
    return [json.loads(line)["id"] for line in lines]


def test_generate_is_stopped_twice_and_ends_without_duplicates(tmp_path: Path) -> None:
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "chats.jsonl"
    rows = [{"id": str(n), "prompt": f"question {n}"} for n in range(48)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ("generate", "--target-model", tiny_target(tmp_path / "model"), "--prompts", prompts)
    command = (*command, "--output", output, "--max-new-tokens", 48, "--batch-size", 2)
    before = 0
    moments = (
        (signal.SIGINT, lambda: (tmp_path / "chats.jsonl.settings.json").exists()),
        (signal.SIGTERM, lambda: _count_lines(output) > before),
    )

    for number, is_time in moments:
        before = _count_lines(output)
        process = _start(*command, plant=HELD)
        said = _stop_when(process, number, is_time)
        assert process.returncode == EXIT_STOPPED, said
        assert f"stopped by {number.name}; the same command goes on where it stopped" in said
        assert "Traceback" not in said
        assert not list(tmp_path.glob("*.tmp"))
    written = len(_ids(output))

    assert written < 48
    assert main([str(word) for word in command]) == 0
    assert sorted(_ids(output), key=int) == [str(n) for n in range(48)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_eval_is_stopped_with_one_line_and_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    drafter = export_drafter(make_drafter(), None, tmp_path / "drafter")
    prompts, results = tmp_path / "prompts.jsonl", tmp_path / "results"
    prompts.write_text("".join(json.dumps({"prompt": f"say it {n} times"}) + "\n" for n in range(3000)))
    process = _start(
        *("eval", "--target-model", talkative_target(tmp_path), "--drafter", drafter, "--prompts", prompts),
        *("--json", results / "eval.json", "--max-new-tokens", 64, "--batch-size", 1),
    )
    maps = Path(f"/proc/{process.pid}/maps")

    said = _stop_when(process, number, lambda: "libtorch_cpu" in maps.read_text())

    assert process.returncode == EXIT_STOPPED, said
    told = [line for line in said.splitlines() if " INFO " not in line]
    assert len(told) == 1, said
    assert said.rstrip().endswith(f"stopped by {number.name}")
    assert not results.exists()
