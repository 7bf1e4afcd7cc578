"""The `export` command: check an exported drafter, or write it again in the full format.

Called by `trainer.__main__`. Training publishes an export beside each state by itself; this command is for
looking at one before it is served, and for drafters that others published. The format is
`checkpoint.export`'s; nothing of it may be repeated here.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from trainer.checkpoint.export import check_export, copy_export
from trainer.drafter.exported import load_drafter
from trainer.errors import EXIT_FINISHED, CheckpointError, ConfigError


def run_export(args: argparse.Namespace) -> int:
    """Run the `export` command; one line per directory that passed goes to standard output.

    Raises:
        ConfigError: neither or both of `--check` and `--output`.
        CheckpointError: the drafter does not verify.
    """
    if args.check == (args.output is not None):
        raise ConfigError("export needs either --check or --output DIR")
    source: Path = args.drafter
    beside = source.parent.parent / "export" / source.name
    if source.parent.name == "state" and beside.is_dir():
        raise CheckpointError(f"not an export but a training state: {source}; use {beside}")
    if args.check:
        report = check_export(source)
        load_drafter(source)
    else:
        report = copy_export(source, args.output, overwrite=args.overwrite)
    sys.stdout.write(report.to_text() + "\n")
    return EXIT_FINISHED
