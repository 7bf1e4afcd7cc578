"""Runs the agent beside a real GPU under load and compares its samples with `nvidia-smi`.

Run by hand on a machine with an NVIDIA GPU: `python -m benchmarks.agent_beside_gpu [SECONDS]`. Needs only the
standard library here; the load uses torch and the agent's reader `pynvml`. The result table belongs in
docs/results.md.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
QUERY = "index,uuid,utilization.gpu,memory.used,memory.total,power.draw,temperature.gpu,clocks.sm"
LOAD = (
    "import time, torch\n"
    "a = torch.randn(8192, 8192, device='cuda', dtype=torch.bfloat16)\n"
    "end = time.time() + {seconds}\n"
    "while time.time() < end:\n"
    "    for _ in range(20):\n"
    "        a @ a\n"
    "    torch.cuda.synchronize()\n"
)
FIELDS = ("util_ratio", "mem_used_bytes", "mem_total_bytes", "power_w", "temp_c", "sm_clock_mhz")


def nvidia_smi() -> list[dict[str, Any]]:
    """One reading of every GPU in the agent's units."""
    listing = subprocess.run(
        ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    rows = []
    for line in listing.strip().splitlines():
        index, uuid, *numbers = [word.strip() for word in line.split(",")]
        util, used, total, power, temperature, clock = map(float, numbers)
        values = (util / 100, used * 2**20, total * 2**20, power, temperature, clock)
        rows.append({"index": int(index), "uuid": uuid, **dict(zip(FIELDS, values, strict=True))})
    return rows


def agent_samples(seconds: float) -> list[dict[str, Any]]:
    """What the agent sends in so many seconds, read through its own protocol."""
    sys.path.insert(0, str(REPOSITORY))
    from supervisor.transport.bundle import build_shim

    with tempfile.TemporaryDirectory() as folder:
        shim = Path(folder) / "shim.pyz"
        shim.write_bytes(build_shim().data)
        agent = subprocess.Popen(
            [sys.executable, str(shim), "serve", "--root", folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        watch = {
            "id": 1,
            "op": "watch",
            "attempt_ids": [],
            "gpu": {"python": sys.executable, "interval_s": 1.0},
        }
        assert agent.stdin is not None
        assert agent.stdout is not None
        agent.stdin.write(json.dumps({**watch, "log": False}) + "\n")
        agent.stdin.flush()
        samples = []
        end = time.time() + seconds
        for line in agent.stdout:
            frame = json.loads(line) if line.startswith("{") else {}
            if frame.get("ev") == "gpu":
                samples.append({**frame["sample"], "smi": nvidia_smi()})
            if time.time() > end:
                break
        agent.stdin.close()
        agent.wait(timeout=10)
    return samples


def main() -> None:
    """Idle, then under load; medians of both sides and their ratio."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 20.0
    for name in ("idle", "load"):
        load = None
        if name == "load":
            load = subprocess.Popen([sys.executable, "-c", LOAD.format(seconds=seconds + 8)])
            time.sleep(8)
        samples = agent_samples(seconds)
        if load is not None:
            load.wait(timeout=60)
        print(f"{name}: {len(samples)} samples, reasons {sorted({str(s['reason']) for s in samples})}")
        for gpu in samples[-1]["gpus"]:
            index = gpu["index"]
            match = next(row for row in samples[-1]["smi"] if row["index"] == index)
            print(f"  gpu {index} {gpu['name']} uuid equal: {gpu['uuid'] == match['uuid']}")
            for field in FIELDS:
                ours = statistics.median(s["gpus"][index][field] for s in samples)
                theirs = statistics.median(s["smi"][index][field] for s in samples)
                ratio = f"{ours / theirs:.3f}" if theirs else "-"
                print(f"    {field:<16} agent {ours:>18,.2f}  nvidia-smi {theirs:>18,.2f}  ratio {ratio}")


if __name__ == "__main__":
    main()
