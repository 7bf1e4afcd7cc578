"""Writes the demo's drafter as it is before its first step: what "acceptance length before" is measured on.

Run as `python demo/untrained.py --config demo/train.toml --target-model DIR --output DIR`, by `dflashctl
demo` or by hand. Shape, seed and dtype come from the same configuration as the run's, so it is the very
drafter that the run starts from. Must not train.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from trainer.checkpoint.export import export_drafter
from trainer.drafter.model import build_drafter
from trainer.drafter.shape import drafter_config
from trainer.errors import TrainerError
from trainer.flags import resolve
from trainer.pipeline.devices import pick_dtype
from trainer.target.loader import load_target


def write_untrained(config_file: Path, target_model: Path, output: Path) -> Path:
    """Export the drafter of a configuration with its initial weights; an existing export is replaced."""
    # No data is read here, but the configuration wants a folder that exists.
    flags = {
        "--target-model": str(target_model),
        "--data-dir": str(target_model),
        "--output-dir": str(output),
    }
    config = resolve(flags, toml_path=str(config_file), environ={}).config
    device = config.devices.drafters()[0]
    target = load_target(
        target_model,
        device="cpu",
        dtype=pick_dtype(config.devices.target_dtype, "cpu"),
        mask_token_id=config.target.mask_token_id,
    )
    shape = drafter_config(target.info, config.drafter, target_layer_ids=config.target.target_layer_ids)
    dtype = pick_dtype(config.devices.drafter_dtype, device)
    drafter = build_drafter(shape, seed=config.optim.seed, dtype=dtype)
    return export_drafter(drafter, {"state": "untrained"}, output, overwrite=True)


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code of the trainer's error tree."""
    parser = argparse.ArgumentParser(description="export the drafter before its first step")
    parser.add_argument("--config", type=Path, required=True, metavar="FILE")
    parser.add_argument("--target-model", type=Path, required=True, metavar="DIR")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    given = parser.parse_args(arguments)
    try:
        print(write_untrained(given.config, given.target_model, given.output))
    except TrainerError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
