"""The `import` command: a published drafter becomes the first state of a run, to be trained on.

Called by `trainer.__main__`. Checks the drafter against the target's config (its weights are not read), and
writes `LINEAGE/{state,export}/step-00000000` below the output folder, whole or not at all; `train
--output-dir` of that folder goes on from there. Files of code beside the weights are never run. Must not hold
the format, nor train.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainer.checkpoint.export import ExportedDrafter, read_export, write_export
from trainer.checkpoint.imported import imported_state
from trainer.checkpoint.state import write_state
from trainer.checkpoint.store import CheckpointStore, new_lineage
from trainer.data.pretrained import load_config
from trainer.data.staging import sync_path
from trainer.drafter.exported import published_config
from trainer.drafter.model import DrafterConfig
from trainer.errors import EXIT_FINISHED, CheckpointError, ConfigError, TrainerError
from trainer.eval.export_command import refuse_state
from trainer.lifecycle.runfolder import hold_output
from trainer.target.identity import export_identity, target_fingerprint
from trainer.target.loader import rope_settings

_BUILDING = ".import.partial"


def run_import(args: argparse.Namespace) -> int:
    """Run the `import` command; says where the state lies and how to go on.

    Raises:
        CheckpointError: the drafter does not verify, or the disk refuses.
        ConfigError: drafter and target do not belong together, or the output folder is in use.
    """
    refuse_state(args.drafter)
    exported = read_export(args.drafter)
    config = published_config(exported, args.drafter)
    settings = load_config(args.target_model).get_text_config()
    _check_pair(config, settings, args.drafter, args.target_model)
    with hold_output(args.output, leaves_nothing_on=TrainerError):
        state = _write(exported, args)
    sys.stdout.write(_describe(config, settings, state, args))
    return EXIT_FINISHED


def _check_pair(config: DrafterConfig, settings: Any, drafter: Path, target: Path) -> None:
    pairs = {
        "hidden size": (config.hidden_size, int(settings.hidden_size)),
        "layers": (config.num_target_layers, int(settings.num_hidden_layers)),
        "vocabulary": (config.vocab_size, int(settings.vocab_size)),
    }
    wrong = [f"{name} {own} against {its}" for name, (own, its) in pairs.items() if own != its]
    if wrong:
        raise ConfigError(
            f"drafter {drafter} was trained for another target than {target}: {', '.join(wrong)}; "
            "name the model that its card names"
        )


def _write(exported: ExportedDrafter, args: argparse.Namespace) -> Path:
    mask = exported.fields["mask_token_id"]
    target = target_fingerprint(args.target_model, mask_token_id=mask)
    state = imported_state(
        exported.fields,
        exported.tensors,
        source=args.drafter.resolve(),
        target=target,
    )
    meta = {"imported_from": args.drafter.name} | export_identity(target)
    with _new_lineage(args.output) as store:
        store.save("export", 0, lambda folder: write_export(exported.fields, exported.tensors, meta, folder))
        store.save("state", 0, functools.partial(write_state, state))
        lineage = _publish(store, args.output)
    return CheckpointStore(lineage).path("state", 0)


@contextlib.contextmanager
def _new_lineage(output: Path) -> Iterator[CheckpointStore]:
    """Build a lineage aside: without its state it counts as a run that begins from random weights."""
    building = output / _BUILDING
    try:
        # the output is held, so whatever lies here is of an import that was killed
        shutil.rmtree(building, ignore_errors=True)
        store = CheckpointStore(building)
        store.prepare()
        yield store
    except OSError as error:
        raise CheckpointError(
            f"cannot write to --output: {output} ({error.strerror or error}); free space or name another"
        ) from error
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _publish(store: CheckpointStore, output: Path) -> Path:
    lineage = store.lineage_dir.rename(output / new_lineage(output))
    sync_path(output)
    return lineage


def _describe(config: DrafterConfig, settings: Any, state: Path, args: argparse.Namespace) -> str:
    lines = [
        f"imported {args.drafter} as {state}",
        f"shape: {config.num_hidden_layers} layers, block {config.block_size}, target layers "
        f"{','.join(map(str, config.target_layer_ids))}, mask token {config.mask_token_id}",
    ]
    theta, scaling = rope_settings(settings)
    if (config.rope_theta, config.rope_scaling) != (theta, scaling):
        lines.append(
            f"note: its rotary embedding (theta {config.rope_theta:g}, scaling {config.rope_scaling}) is not "
            f"the target's (theta {theta:g}, scaling {scaling}); it keeps its own"
        )
    lines.append(
        f"next: dflash-train train --target-model {args.target_model} --output-dir {args.output} --data-dir D"
    )
    return "\n".join(lines) + "\n"
