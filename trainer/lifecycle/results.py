"""Files of results that a command writes where the user says: `--json`, `--markdown`, `--plot`.

Called by `eval` and `plan`. A file is looked at before the work begins, since hours may lie before it is
written, and replaced only when an earlier run of the same command wrote it. It appears whole or not at all.
Must not know what is in it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.errors import ConfigError

_DEVICES = (Path("/dev"), Path("/proc"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultFile:
    """One file that was asked for.

    Args:
        flag: by which it was named.
        path: where it goes.
        is_own: whether an earlier content of it is this command's.
    """

    flag: str
    path: Path
    is_own: Callable[[bytes], bool]


def check_results(files: Sequence[ResultFile]) -> None:
    """Refuse what could not be written later, or would replace something else.

    Raises:
        ConfigError: a folder, a file of someone else, no way to write there, or one path for two files.
    """
    places: dict[Path, str] = {}
    for file in files:
        place = file.path.resolve()
        if place in places and not _is_stream(file.path):
            raise ConfigError(f"{places[place]} and {file.flag} name the same file: {file.path}")
        places[place] = file.flag
        _check(file)


def write_result(flag: str, path: Path, write: Callable[[Path], object]) -> None:
    """Write a file whole; links are followed, streams are written as they are.

    Raises:
        ConfigError: the disk refuses.
    """
    if _is_stream(path):
        _guard(flag, path, lambda: write(path))
        return
    place = path.resolve()
    # named by the flag: its own name may be as long as names can be
    scratch = place.with_name(f".tmp-{os.getpid()}{flag}")

    def fill() -> None:
        place.parent.mkdir(parents=True, exist_ok=True)
        write(scratch)
        scratch.replace(place)

    try:
        _guard(flag, path, fill)
    finally:
        scratch.unlink(missing_ok=True)


def is_record(keys: Collection[str]) -> Callable[[bytes], bool]:
    """Return the check whether a content is a JSON object with these keys."""

    def check(content: bytes) -> bool:
        try:
            value: Any = json.loads(content)
        except ValueError:
            return False
        return isinstance(value, dict) and all(key in value for key in keys)

    return check


def _check(file: ResultFile) -> None:
    flag, path = file.flag, file.path
    if path.is_dir():
        raise ConfigError(f"{flag} names a folder: {path}; name a file")
    if _is_stream(path):
        return
    try:
        content = path.read_bytes() if path.exists() else b""
    except OSError as error:
        raise ConfigError(f"cannot write {flag} {path}: {error.strerror or error}") from error
    if content and not file.is_own(content):
        raise ConfigError(
            f"{flag} would replace a file that this command did not write: {path}; name another, or remove it"
        )
    folder = next(parent for parent in path.resolve().parents if os.path.lexists(parent))
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        reason = "not writable" if folder.is_dir() else "not a folder"
        raise ConfigError(f"cannot write {flag} {path}: {folder} is {reason}; name another place")


def _guard(flag: str, path: Path, run: Callable[[], object]) -> None:
    try:
        run()
    except OSError as error:
        raise ConfigError(
            f"cannot write {flag} {path}: {error.strerror or error}; free space or name another place"
        ) from error


def _is_stream(path: Path) -> bool:
    """Whether a path is a device or a pipe, or a way to an open file, which a rename would miss."""
    is_special = path.exists() and not path.is_file() and not path.is_dir()
    return is_special or any(folder in path.absolute().parents for folder in _DEVICES)
