"""The `export` command: check an exported drafter, or write it again in the full format.

Called by `trainer.__main__`. Training publishes an export beside each state by itself; this command is for
looking at one before it is served, and for drafters that others published. The format is
`checkpoint.export`'s, the checks are `eval.export_check`'s; nothing of them may be repeated here.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

import torch

from trainer.checkpoint.export import copy_export
from trainer.errors import EXIT_FINISHED, CheckpointError, ConfigError
from trainer.eval.export_check import inspect_export, render_checks
from trainer.target.loader import load_target

_LOG = logging.getLogger(__name__)


def run_export(args: argparse.Namespace) -> int:
    """Run the `export` command; its table or line goes to standard output.

    Raises:
        ConfigError: neither or both of `--check DIR` and `--drafter DIR --output DIR`, or no usable target.
        CheckpointError: the drafter does not verify.
    """
    is_copy = args.drafter is not None and args.output is not None
    if (args.check is None) != is_copy or (args.check is not None and (args.drafter or args.output)):
        raise ConfigError("export needs either --check DIR or --drafter DIR --output DIR")
    refuse_state(args.check or args.drafter)
    if args.check is not None:
        return _check(args.check, args.target_model)
    report = copy_export(args.drafter, args.output, overwrite=args.overwrite)
    sys.stdout.write(report.to_text() + "\n")
    return EXIT_FINISHED


def refuse_state(directory: Path) -> None:
    """Answer a training state with the export that lies beside it.

    Raises:
        CheckpointError: the folder is a training state.
    """
    beside = directory.parent.parent / "export" / directory.name
    if directory.parent.name == "state" and beside.is_dir():
        raise CheckpointError(f"not an export but a training state: {directory}; use {beside}")


def _check(directory: Path, target_model: Path | None) -> int:
    if not directory.is_dir():
        raise CheckpointError(f"no such folder: {directory}; name an export/step-* folder")
    target = None
    if target_model is not None:
        target = load_target(target_model, device="cpu", dtype=torch.float32)
    _LOG.info("export: checking every file of %s, then one draft step", directory)
    checks = inspect_export(directory, target)
    sys.stdout.write(render_checks(checks))
    failed = [check.name for check in checks if not check.is_passed]
    if failed:
        raise CheckpointError(
            f"{directory}: {len(failed)} of {len(checks)} checks failed: {', '.join(failed)}; "
            "see the table, and export again or use another checkpoint"
        )
    return EXIT_FINISHED
