"""A trainer that trains nothing: obeys the file contract between the halves, and misbehaves on demand.

Run as a script by the shim's tests. Writes `status.json` through its phases and `metrics.ndjson`, answers
`control/stop.json` and SIGTERM by a fake checkpoint and exit 9, a second SIGTERM by exit 9 without one.
The flags make it die, hang, ignore signals, leave children, hide its environment, print NaN or flood its log.
"""

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

RUN_DIR = Path(os.environ.get("DFLASH_RUN_DIR", "."))
TERMS: list = []


def write_json(path, value):
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


class Status:
    """The record `status.json`."""

    def __init__(self, total_steps):
        now = time.time()
        self.value = {"v": 1, "phase": "init", "phase_since": now, "step": 0, "total_steps": total_steps}
        self.value.update(last_progress_at=None, last_checkpoint=None, message="", stop=None)

    def set(self, **fields):
        if fields.get("phase", self.value["phase"]) != self.value["phase"]:
            self.value["phase_since"] = time.time()
        self.value.update(fields)
        write_json(RUN_DIR / "status.json", self.value)


def wipe_environ():
    """Overwrite the environment as setproctitle does: /proc/self/environ then shows nothing of it."""
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    start, end = int(fields[47]), int(fields[48])
    with Path("/proc/self/mem").open("r+b", buffering=0) as memory:
        memory.seek(start)
        memory.write(b"\0" * (end - start))


def leave_child(options):
    """Start a process in a session of its own, re-parented away from us, that outlives us."""
    if os.fork():
        os.wait()
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN if options.children_ignore_term else signal.SIG_DFL)
    if options.wipe:
        wipe_environ()
    with (RUN_DIR / "children.txt").open("a") as file:
        file.write(f"{os.getpid()}\n")
    time.sleep(600)
    os._exit(0)


def stop_request():
    try:
        return json.loads((RUN_DIR / "control" / "stop.json").read_text())
    except (OSError, ValueError):
        return None


def metrics(step, nan_at):
    loss = float("nan") if nan_at and step >= nan_at else 3.0 / step
    queue = {"hs": 3, "min_ready": 1, "max_depth": 9, "buckets": [{"upto": 512, "depth": 3}]}
    line = {"v": 1, "t": time.time(), "step": step, "train": {"loss": loss, "tok_s": 100.0}, "queue": queue}
    with (RUN_DIR / "metrics.ndjson").open("a") as file:
        file.write(json.dumps(line) + "\n")


def stop(options, status, step):
    request = stop_request()
    stop_id = request["id"] if request else None
    answer = {"id": stop_id, "seen_at": time.time(), "extend_s": options.extend_s, "why": "saving"}
    status.set(phase="draining", stop=answer)
    if request is None or request["save"]:
        status.set(phase="checkpointing")
        ends = time.monotonic() + options.save_s
        while time.monotonic() < ends or (options.save_until and not Path(options.save_until).exists()):
            if len(TERMS) >= options.abandon_at:
                print("save abandoned", flush=True)
                sys.exit(9)
            time.sleep(0.02)
        folder = Path(options.output_dir or RUN_DIR) / "state" / f"step-{step:08d}"
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "manifest.json", {"step": step})
        status.set(last_checkpoint={"step": step, "path": str(folder), "saved_at": time.time()})
    print(f"stopped at step {step}", flush=True)
    sys.exit(9)


def flood(options):
    """Write `--flood` bytes in lines, or one single line with `--long-line`."""
    block = b"\xff\x00\r" + b"x" * 1020 + (b"x" if options.long_line else b"\n")
    for _ in range(options.flood // len(block)):
        sys.stdout.buffer.write(block)
    sys.stdout.buffer.write(b"\nend of flood\n")
    sys.stdout.flush()


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--step-s", type=float, default=0.05)
    parser.add_argument("--output-dir", default="")
    parser.add_argument("--die", type=int, default=None, help="exit at once with this code")
    parser.add_argument("--ignore-term", action="store_true", help="answer neither signal nor stop.json")
    parser.add_argument("--children", type=int, default=0, help="leave so many processes behind")
    parser.add_argument("--children-ignore-term", action="store_true")
    parser.add_argument("--wipe", action="store_true", help="hide the environment, also of the children")
    parser.add_argument("--silent", action="store_true", help="print nothing")
    parser.add_argument("--hang", action="store_true", help="stay in the loading phase for ever")
    parser.add_argument("--nan-at", type=int, default=0)
    parser.add_argument("--flood", type=int, default=0)
    parser.add_argument("--long-line", action="store_true")
    parser.add_argument("--save-s", type=float, default=0.0, help="how long a checkpoint takes")
    parser.add_argument("--save-until", default="", help="a checkpoint takes until this file exists")
    parser.add_argument("--abandon-at", type=int, default=2, help="so many SIGTERMs end it unsaved")
    parser.add_argument("--extend-s", type=float, default=0.0, help="extension asked for when stopped")
    return parser.parse_args()


def main():
    options = parse()
    if options.die is not None:
        print("toy trainer: cannot boot: no such data folder", flush=True)
        sys.exit(options.die)
    handler = signal.SIG_IGN if options.ignore_term else lambda *_: TERMS.append(time.time())
    signal.signal(signal.SIGTERM, handler)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    status = Status(options.steps)
    status.set(phase="loading")
    for _ in range(options.children):
        leave_child(options)
    if options.wipe:
        wipe_environ()
    if options.flood:
        flood(options)
    if not options.silent:
        print(f"toy trainer: pid {os.getpid()}", flush=True)
    while options.hang:
        time.sleep(0.1)
    status.set(phase="training")
    for step in range(1, options.steps + 1):
        time.sleep(options.step_s)
        metrics(step, options.nan_at)
        status.set(step=step, last_progress_at=time.time())
        if not options.ignore_term and (TERMS or stop_request()):
            stop(options, status, step)
    status.set(phase="done")


if __name__ == "__main__":
    main()
