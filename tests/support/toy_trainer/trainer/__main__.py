"""Counts steps instead of training. Everything the supervisor sees of a trainer is real here.

`python -m trainer train --output-dir DIR [--steps N] [--step-s S] [--checkpoint-every K] [--resume X] ...`
"""

import argparse
import fcntl
import importlib
import json
import os
import signal
import sys
import time

RUN_DIR = os.environ.get("DFLASH_RUN_DIR", ".")
STOP = {"signals": 0}


def write_json(path, value):
    temporary = "%s.tmp" % path
    with open(temporary, "w") as handle:
        json.dump(value, handle)
        handle.flush()
        os.fsync(handle.fileno())
    os.rename(temporary, path)


class Status:
    def __init__(self, total):
        self.record = {
            "v": 1,
            "phase": "init",
            "step": 0,
            "total_steps": total,
            "message": "",
            "last_checkpoint": None,
        }
        self.record["phase_since"] = time.time()

    def update(self, **fields):
        if fields.get("phase", self.record["phase"]) != self.record["phase"]:
            self.record["phase_since"] = time.time()
        self.record.update(fields, t=time.time(), pid=os.getpid())
        write_json(os.path.join(RUN_DIR, "status.json"), self.record)


def checkpoint(folder, step, status):
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, "step-%08d" % step)
    write_json(path, {"step": step})
    status.update(last_checkpoint={"step": step, "path": path, "saved_at": time.time()})


def newest(folder, resume):
    if resume == "scratch":
        return 0
    if resume != "latest":
        with open(resume) as handle:
            return json.load(handle)["step"]
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    names = [name for name in names if name.startswith("step-") and not name.endswith(".tmp")]
    return int(names[-1].split("-")[1]) if names else 0


def stop_request():
    path = os.path.join(RUN_DIR, "control", "stop.json")
    if os.path.exists(path):
        with open(path) as handle:
            return json.load(handle)
    return {"id": None, "save": True} if STOP["signals"] else None


def metrics(step, loss):
    line = {
        "v": 1,
        "t": time.time(),
        "step": step,
        "tokens": step * 100,
        "train": {"loss": loss, "lr": 0.001, "tok_s": 1000.0, "eal": 1.0 + step / 1000},
        "queue": {"feed": 1, "hs": 3, "min_ready": 1, "max_depth": 9, "buckets": [{"upto": 512, "depth": 3}]},
    }
    with open(os.path.join(RUN_DIR, "metrics.ndjson"), "a") as handle:
        handle.write(json.dumps(line) + "\n")


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["train"])
    parser.add_argument("--output-dir", required=True)
    parser.add_argument("--resume", default="latest")
    parser.add_argument("--steps", type=int, default=100000)
    parser.add_argument("--until", default="", help="finish once this file is there")
    parser.add_argument("--step-s", type=float, default=0.05)
    parser.add_argument("--checkpoint-every", type=int, default=10)
    parser.add_argument("--fail-at", type=int, default=0)
    parser.add_argument("--fail-once", action="store_true")
    parser.add_argument("--exit-code", type=int, default=7)
    parser.add_argument("--die-at-once", action="store_true")
    parser.add_argument("--nan-at", type=int, default=0)
    parser.add_argument("--ignore-term", action="store_true")
    parser.add_argument("--need", action="append", default=[])
    parser.add_argument("--fail-with", default="")
    parser.add_argument("--witness", default="", help="file to lock for life; FILE.second tells of two")
    parser.add_argument("--target-gpus", default="cpu")
    parser.add_argument("--drafter-gpus", default="cpu")
    return parser.parse_args()


def should_fail(args, step):
    if not args.fail_at or step < args.fail_at:
        return False
    marker = os.path.join(args.output_dir, "failed-once")
    if args.fail_once and os.path.exists(marker):
        return False
    os.makedirs(args.output_dir, exist_ok=True)
    open(marker, "a").close()
    return True


def is_bad_version(text):
    """`toylib==2.0` is true when that very version is installed: a release that is broken on purpose."""
    if not text:
        return False
    name, version = text.split("==")
    try:
        return importlib.import_module(name).__version__ == version
    except ImportError:
        return False


def bear_witness(path):
    """Leave a mark when another trainer lives beside this one; the lock goes with the process."""
    handle = open(path, "a")  # noqa: SIM115  held for life
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        open(path + ".second", "a").close()
    return handle


def main():
    args = parse()
    witness = bear_witness(args.witness) if args.witness else None
    if args.die_at_once:
        # words and end as close together as can be: one who outlives its first words has started
        os.write(2, b"toy trainer cannot start: no such data folder\n")
        os._exit(args.exit_code)
    signal.signal(
        signal.SIGTERM, lambda *_: STOP.update(signals=0 if args.ignore_term else STOP["signals"] + 1)
    )
    status = Status(args.steps)
    status.update(phase="loading")
    versions = {name: getattr(importlib.import_module(name), "__version__", "?") for name in args.need}
    step = newest(args.output_dir, args.resume)
    print(
        "toy trainer: pid %d, resume %s from step %d, %s" % (os.getpid(), args.resume, step, versions),
        flush=True,
    )
    if is_bad_version(args.fail_with):
        print("this version is broken: %s" % args.fail_with, flush=True)
        sys.exit(args.exit_code)
    status.update(phase="training", step=step)
    while step < args.steps and not (args.until and os.path.exists(args.until)):
        time.sleep(args.step_s)
        step += 1
        loss = float("nan") if args.nan_at and step >= args.nan_at else 3.0 / step
        metrics(step, loss)
        status.update(step=step, last_progress_at=time.time())
        print("step %d loss %.4f" % (step, loss), flush=True)
        if should_fail(args, step):
            print("toy failure at step %d" % step, flush=True)
            sys.exit(args.exit_code)
        if step % args.checkpoint_every == 0:
            checkpoint(args.output_dir, step, status)
        asked = None if args.ignore_term else stop_request()
        if asked is not None:
            status.update(
                phase="draining",
                stop={"id": asked.get("id"), "seen_at": time.time(), "extend_s": 0, "why": ""},
            )
            if asked.get("save", True):
                status.update(phase="checkpointing")
                checkpoint(args.output_dir, step, status)
            print("toy trainer: stopped on request at step %d" % step, flush=True)
            sys.exit(9)
    checkpoint(args.output_dir, step, status)
    status.update(phase="done")
    print("toy trainer: finished", flush=True)
    del witness


if __name__ == "__main__":
    main()
