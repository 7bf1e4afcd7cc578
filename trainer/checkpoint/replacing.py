"""Replacing an exported drafter by a newer one, and nothing else: what `--overwrite` may remove.

Called by `checkpoint.export`. A folder is only replaced when all that lies in it is an export as this trainer
writes them; its files are then removed one by one, by name, so that whatever joins them meanwhile stays. Must
never remove a tree.
"""

from __future__ import annotations

import json
import logging
import os
import re
import stat
from pathlib import Path

from trainer.checkpoint.drafter_format import ARCHITECTURE, CONFIG_KEYS
from trainer.errors import CheckpointError, ConfigError

_LOG = logging.getLogger(__name__)

CONFIG = "config.json"
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
_OTHERS = (CONFIG, "model.safetensors.index.json", "manifest.json")
_LINEAGE = re.compile(r"lineage-\d{4,}")


def check_output(output: Path, *, source: Path | None = None, overwrite: bool = False) -> None:
    """Refuse an output folder where writing an export would harm something.

    Args:
        output: where the export is to appear.
        source: the drafter that it is made from, if that is a folder too.
        overwrite: whether an export that stands there may be replaced.

    Raises:
        CheckpointError: it exists, and overwriting was not asked for.
        ConfigError: it is not an export of this trainer, or one that must stay.
    """
    if source is not None:
        _refuse_overlap(output, source)
    if not os.path.lexists(output):
        return
    if not overwrite:
        raise CheckpointError(f"export directory exists: {output}; choose another or allow overwriting")
    reason = _why_not(output)
    if reason:
        raise ConfigError(
            f"--overwrite replaces nothing but an export: {output} {reason}; name another folder"
        )


def remove_export(folder: Path) -> None:
    """Remove an export's files, then the folder unless something else lies in it by now."""
    try:
        for path in list(folder.iterdir()):
            if _is_own_name(path.name):
                path.unlink()
        folder.rmdir()
    except OSError as error:
        _LOG.warning("the replaced export is left in %s (%s)", folder, error.strerror or error)


def _refuse_overlap(output: Path, source: Path) -> None:
    here, there = output.resolve(), source.resolve()
    if here == there or here in there.parents or there in here.parents:
        raise ConfigError(
            f"--output and --drafter must lie apart: {output} is, holds or lies inside {source}; "
            "name another --output"
        )


def _why_not(folder: Path) -> str:
    """Say what a folder has that an export written by this trainer has not; empty when it is one."""
    if folder.is_symlink() or not folder.is_dir():
        return "is not a folder itself"
    resolved = folder.resolve()
    if _LINEAGE.fullmatch(resolved.parent.parent.name):
        return f"belongs to a run ({resolved.parent.parent})"
    try:
        entries = sorted(folder.iterdir())
        strange = [path.name for path in entries if not (_is_own_name(path.name) and _is_plain(path))]
        if strange:
            more = f" and {len(strange) - 3} more" if len(strange) > 3 else ""
            return f"also holds {', '.join(strange[:3])}{more}"
        if not any(_WEIGHTS.fullmatch(path.name) for path in entries):
            return "holds no weights"
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        is_ours = config["architectures"] == [ARCHITECTURE] and all(key in config for key in CONFIG_KEYS)
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"has no readable {CONFIG} ({type(error).__name__})"
    return "" if is_ours else f"has a {CONFIG} that this program did not write"


def _is_own_name(name: str) -> bool:
    return name in _OTHERS or _WEIGHTS.fullmatch(name) is not None


def _is_plain(path: Path) -> bool:
    return stat.S_ISREG(path.lstat().st_mode)
