"""`demo/prompts/many.py`: the same prompts for the same seed, none worded like a held-out one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

PROMPTS = Path(__file__).parents[2] / "demo" / "prompts"


def _write(path: Path, count: int, seed: int = 0) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, str(PROMPTS / "many.py"), "--count", str(count), "--seed", str(seed)]
    return subprocess.run([*argv, "--output", str(path)], capture_output=True, text=True)


def _read(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_prompts_are_distinct_and_not_worded_like_a_held_out_one(tmp_path: Path) -> None:
    assert _write(tmp_path / "many.jsonl", 20_000).returncode == 0

    prompts = [line["prompt"] for line in _read(tmp_path / "many.jsonl")]
    held_out = {tuple(line["prompt"].casefold().split()[:3]) for line in _read(PROMPTS / "held_out.jsonl")}
    assert len(prompts) == len(set(prompts)) == 20_000
    assert len(held_out) > 30
    assert not {tuple(prompt.casefold().split()[:3]) for prompt in prompts} & held_out
    assert not [prompt for prompt in prompts if "{" in prompt or "  " in prompt or "\n" in prompt]


def test_same_seed_gives_the_same_file_and_another_seed_another(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert _write(tmp_path / name, 500, seed).returncode == 0

    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes() != (tmp_path / "c").read_bytes()


def test_a_count_out_of_range_is_refused_and_nothing_written(tmp_path: Path) -> None:
    for count in (0, -1, 2_000_000):
        done = _write(tmp_path / "many.jsonl", count)

        assert done.returncode == 1
        assert done.stderr == f"error: --count {count}: ask for 1 to 200000 prompts\n"
        assert not (tmp_path / "many.jsonl").exists()
