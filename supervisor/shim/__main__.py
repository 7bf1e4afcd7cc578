"""Command line of the shim inside the node: start, tombstone, serve, and the internal adopt and child modes.

Run as `python3 dflash-shim.pyz COMMAND --root ROOT ...`. Each command prints JSON lines on stdout and nothing
else there. Only the module that a command needs is loaded, because a zipapp compiles its source at each start
and a launch is measured in milliseconds; argparse alone would cost a fifth of one.
"""

from __future__ import annotations

import importlib
import os
import sys

COMMANDS = {
    "start": ("launch", "run_start", ["--root"], []),
    "tombstone": ("launch", "run_tombstone", ["--root", "--attempt"], []),
    "adopt": ("supervise", "run_adopt", ["--root", "--attempt"], []),
    "serve": ("agent", "run_serve", ["--root"], ["--marker"]),
}
CHILD_MODES = ("nvml", "fingerprint", "modules", "sites")


def main() -> int:
    """Run one command; the exit code is 0 when it did what it was asked, 2 for a wrong call."""
    words = sys.argv[1:]
    if words and words[0] in CHILD_MODES:
        return int(_load("children", "run_child")(words[0], words[2:], int(words[1])))
    if not words or words[0] not in COMMANDS:
        return _usage("unknown command: %r" % " ".join(words[:1]))
    module, function, required, optional = COMMANDS[words[0]]
    if len(words) % 2 == 0:
        return _usage("%s: %s needs a value" % (words[0], words[-1]))
    options = {words[at]: words[at + 1] for at in range(1, len(words), 2)}
    unknown = [name for name in options if name not in required + optional]
    missing = [name for name in required if name not in options]
    if unknown or missing:
        return _usage("%s: unknown %s, missing %s" % (words[0], unknown, missing))
    options["--root"] = os.path.abspath(options["--root"])
    values = [options.get(name) for name in required + optional]
    return int(_load(module, function)(*values))


def _load(module: str, function: str):  # type: ignore[no-untyped-def]
    return getattr(importlib.import_module("." + module, __package__), function)


def _usage(problem: str) -> int:
    sys.stderr.write("dflash-shim: %s\nusage: dflash-shim %s\n" % (problem, " | ".join(COMMANDS)))
    return 2


if __name__ == "__main__":
    sys.exit(main())
