"""Command line of the shim inside the node: start, tombstone, serve, and the internal adopt and child modes.

Run as `python3 dflash-shim.pyz COMMAND --root ROOT`. Each command prints JSON lines on stdout and nothing
else there. This module only picks the command; it must stay importable on Python 3.9 without any package.
"""

from __future__ import annotations

import argparse
import json
import os
import sys

from . import agent, children, launch, spawn, supervise
from .records import AttemptFiles, RefusedError, dumps
from .request import MAX_REQUEST_BYTES


def main() -> int:
    """Run one command; the exit code is 0 when it did what it was asked."""
    parser = argparse.ArgumentParser(prog="dflash-shim", description="launches and watches trainers")
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("start", "tombstone", "serve", "adopt"):
        command = commands.add_parser(name)
        command.add_argument("--root", required=True)
        if name in ("tombstone", "adopt"):
            command.add_argument("--attempt", required=True)
        if name == "serve":
            command.add_argument("--marker", default=None)
    for name in ("nvml", "fingerprint", "modules", "sites"):
        command = commands.add_parser(name)
        command.add_argument("--parent", type=int, required=True)
        command.add_argument("arguments", nargs="*")
    options = parser.parse_args()
    if options.command in ("nvml", "fingerprint", "modules", "sites"):
        return children.run_child(options.command, options.arguments, options.parent)
    root = os.path.abspath(options.root)
    if options.command == "start":
        return launch.run_start(root)
    if options.command == "tombstone":
        return _tombstone(root, options.attempt)
    if options.command == "adopt":
        return _adopt(root, options.attempt)
    return agent.serve(root, marker=options.marker)


def _tombstone(root: str, attempt_id: str) -> int:
    try:
        reply = launch.tombstone(root, attempt_id)
    except RefusedError as failure:
        reply = {"v": 1, "ok": False, "error": failure.to_json()}
    except OSError as error:
        refusal = RefusedError("SystemError", "attempt folder under %s: %s" % (root, error), error.errno)
        reply = {"v": 1, "ok": False, "error": refusal.to_json()}
    sys.stdout.write(dumps(reply) + "\n")
    return 0 if reply["ok"] else 1


def _adopt(root: str, attempt_id: str) -> int:
    stop = json.loads(sys.stdin.buffer.read(MAX_REQUEST_BYTES))
    if os.fork():
        return 0
    os.setsid()
    if os.fork():
        os._exit(0)
    spawn.detach(keep=[])
    launch.redirect_stderr(AttemptFiles(root, attempt_id))
    return 0 if supervise.adopt(root, attempt_id, stop) else 1


if __name__ == "__main__":
    sys.exit(main())
