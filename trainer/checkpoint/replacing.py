"""Replacing an exported drafter by a newer one, and nothing else: what `--overwrite` may remove.

Called by `checkpoint.export`. Holds against other commands that write the same export. A folder is only
replaced when all that lies in it is an export as this trainer writes them; its files are then removed one by
one, by name, so that whatever joins them meanwhile stays. Must never remove a tree.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from trainer.checkpoint.drafter_format import ARCHITECTURE, CONFIG_KEYS
from trainer.errors import CheckpointError, ConfigError

_LOG = logging.getLogger(__name__)

CONFIG = "config.json"
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
_OTHERS = (CONFIG, "model.safetensors.index.json", "manifest.json")
_LINEAGE = re.compile(r"lineage-\d{4,}")
_STANDS = (errno.ENOTEMPTY, errno.EEXIST)
_MOST_TRIES = 100
"""Each one more is another command that put its export there in the meantime."""


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
        raise ConfigError(_refusal(output, reason))


def put_in_place(scratch: Path, directory: Path, *, overwrite: bool) -> None:
    """Rename a finished export into place; what killed commands left beside it is removed then.

    Several commands may do so at once: without `overwrite` the first one wins, with it the last.

    Raises:
        CheckpointError: an export appeared there meanwhile, and overwriting was not asked for.
        ConfigError: something else did.
        OSError: the disk refuses; an export that was to be replaced stands where it was.
    """
    for _ in range(_MOST_TRIES):
        aside = _move_aside(directory) if overwrite else None
        try:
            scratch.rename(directory)
        except OSError as error:
            has_come = error.errno in _STANDS
            if aside is not None and not has_come:
                aside.rename(directory)
            elif aside is not None:
                remove_export(aside)
            if not has_come:
                raise
            if not overwrite:
                check_output(directory)
            # else it is looked at once it is moved aside: where it stands, others may be moving it
            continue
        if aside is not None:
            remove_export(aside)
        _sweep(directory)
        return
    raise CheckpointError(f"other commands keep writing the export {directory}; name another folder")


@contextlib.contextmanager
def in_use(scratch: Path) -> Iterator[None]:
    """Mark a folder of unfinished work as that of a living process, under whatever name it ends."""
    descriptor = os.open(scratch, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            _LOG.warning("if this command is killed, %s stays: no locks there (%s)", scratch, error.strerror)
        yield
    finally:
        os.close(descriptor)


def remove_export(folder: Path) -> None:
    """Remove an export's files, then the folder unless something else lies in it by now."""
    try:
        for path in list(folder.iterdir()):
            if _is_own_name(path.name):
                path.unlink()
        folder.rmdir()
    except OSError as error:
        _LOG.warning("the replaced export is left in %s (%s)", folder, error.strerror or error)


def _refusal(output: Path, reason: str) -> str:
    return f"--overwrite replaces nothing but an export: {output} {reason}; name another folder"


def _move_aside(directory: Path) -> Path | None:
    """Give an export another name, as a full folder cannot be replaced; None when none stands there."""
    aside = directory.with_name(f".{directory.name}.old-{os.getpid()}")
    if aside.is_dir():
        remove_export(aside)
    try:
        directory.rename(aside)
    except FileNotFoundError:
        return None
    # what came there since the command began is looked at now, where nobody else can change it
    reason = _why_not(aside)
    if reason:
        aside.rename(directory)
        raise ConfigError(_refusal(directory, reason))
    return aside


def _sweep(directory: Path) -> None:
    """Remove what killed commands left unfinished; an export set aside may be another's to put back."""
    leftover = re.compile(rf"\.{re.escape(directory.name)}\.tmp-\d+")
    for path in list(directory.parent.iterdir()):
        if leftover.fullmatch(path.name) and path.is_dir() and not path.is_symlink() and _is_abandoned(path):
            _LOG.info("removed an unfinished export: %s", path)
            remove_export(path)


def _is_abandoned(folder: Path) -> bool:
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(descriptor)
    except (BlockingIOError, FileNotFoundError):  # a living command has it, or another removed it just now
        return False
    except OSError as error:
        _LOG.warning("what a killed export may have left stays: %s (%s)", folder, error.strerror or error)
        return False
    return True


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
