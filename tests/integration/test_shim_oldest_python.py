"""The zipapp under the oldest Python it promises to run on: launch, watch, stop, probe."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.shim_bench import SHORT_STOP, ShimBench


def oldest_python() -> str:
    """Python 3.9 from PATH or pyenv; the tests' own where this machine has none."""
    pyenv = sorted(str(path) for path in Path.home().glob(".pyenv/versions/3.9.*/bin/python3.9"))
    for candidate in [shutil.which("python3.9"), *pyenv]:
        if candidate is None:
            continue
        question = "import sys; print(sys.version_info[:2] == (3, 9))"
        done = subprocess.run([candidate, "-c", question], capture_output=True, timeout=60, check=False)
        if done.stdout.strip() == b"True":
            return candidate
    return sys.executable


def test_everything_works_under_the_oldest_python_here(tmp_path: Path) -> None:
    bench = ShimBench(tmp_path, python=oldest_python())
    try:
        bench.start("a1", "--children", "1", "--children-ignore-term", "--ignore-term", stop=SHORT_STOP)
        bench.wait_training("a1")
        agent = bench.agent()
        agent.result("watch", attempt_ids=["a1"], gpu={"python": bench.python, "interval_s": 1}, log=True)
        for kind in ("state", "status", "metrics", "log", "gpu", "env"):
            agent.wait_event(lambda event, kind=kind: event["ev"] == kind)
        for op in ("list", "status", "tail", "tail_lines", "stacks", "probe", "fingerprint", "processes"):
            agent.result(op, attempt_id="a1")

        agent.result("stop", attempt_id="a1", stop_id="s1", reason="r", actor="me", save=True)

        record = bench.wait_exit("a1")
        assert record["killed"] is True
        assert record["survivors"] == []
        assert (bench.folder("a1") / "shim.log").read_bytes() == b""
    finally:
        bench.close()
