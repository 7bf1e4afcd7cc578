"""The file that `generate` writes: chat JSONL that grows row by row and is continued after an interruption.

Called by `generate`, whoever makes the completions. The settings that shaped the rows stand beside them in
`<output>.settings.json`; an output of other settings is refused, and so is a second writer. A row that was
torn by a crash is dropped. Must not know how completions are made.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from trainer.config import shorten, why_unusable
from trainer.data.prompts import Prompt
from trainer.data.sources import refuse_special
from trainer.errors import ConfigError, DataError
from trainer.lifecycle.locks import MOST_TRIES, give_up, take_lock

log = logging.getLogger(__name__)

PROMPTS_SUFFIX = ".prompts.jsonl"
"""Beside the output: prompts that were drawn from the target."""
SYNC_S = 2.0
"""Rows reach the file at once; the disk is waited for at most this often."""


class RowFile:
    """A JSONL file opened for appending; `ids` are those that it held when opened."""

    def __init__(self, path: Path, stream: TextIO, ids: frozenset[str]) -> None:
        self._path = path
        self._stream = stream
        self._synced_at = time.monotonic()
        self.ids = ids

    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append rows; a kill of the process loses none of them.

        Raises:
            DataError: the disk refuses.
        """
        with _disk_errors(self._path):
            for row in rows:
                self._stream.write(json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n")
            self._stream.flush()
        if time.monotonic() - self._synced_at > SYNC_S:
            self.sync()

    def sync(self) -> None:
        """Wait until the disk has everything."""
        with _disk_errors(self._path):
            os.fsync(self._stream.fileno())
        self._synced_at = time.monotonic()


@contextmanager
def locked_output(output: Path, settings: dict[str, Any]) -> Iterator[RowFile]:
    """Open the output alone, after a check that it was made with the same settings.

    Raises:
        ConfigError: not writable, another writer, or other settings.
        DataError: the disk refuses.
    """
    record = output.with_name(output.name + ".settings.json")
    _check_place(output, record)
    made = [path for path in (output, record) if not path.exists()]
    with _held(output) as stream:
        try:
            _check_settings(output, record, settings)
            with _rows(output, stream, "id") as rows:
                yield rows
        except BaseException:
            _remove_empty(output, made)
            raise


@contextmanager
def companion_rows(path: Path, *, key: str) -> Iterator[RowFile]:
    """Open a second file of an output that is already locked."""
    with _opened(path) as stream, _rows(path, stream, key) as rows:
        yield rows


def template_inputs(prompt: Prompt, thinking: bool | None) -> dict[str, Any]:
    """What a row says beside its messages, so that the prompt is rendered again as it was."""
    entries: dict[str, Any] = {} if thinking is None else {"thinking": thinking}
    if prompt.tools:
        entries["tools"] = list(prompt.tools)
    return entries


def _check_place(output: Path, record: Path) -> None:
    refuse_special(output)
    reason = why_unusable(str(record) + ".tmp")
    if reason:
        raise ConfigError(
            f"--output leaves no room behind its name for .settings.json: {shorten(output.name)} ({reason}); "
            "name a shorter one"
        )


@contextmanager
def _held(output: Path) -> Iterator[TextIO]:
    for _ in range(MOST_TRIES):
        with _opened(output) as stream:
            try:
                has_it = take_lock(stream.fileno(), output)
            except BlockingIOError as error:
                raise ConfigError(f"another generate writes to this output: {output}") from error
            if has_it:
                yield stream
                return
    raise give_up(output)


@contextmanager
def _opened(path: Path) -> Iterator[TextIO]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = path.open("a", encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--output cannot be written: {path} ({error.strerror or error}); name a file"
        ) from error
    try:
        yield stream
    finally:
        # closing writes what is still buffered, which a full disk refuses once more
        with _disk_errors(path):
            stream.close()


@contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"cannot write to --output: {path}: {error.strerror or error}; free space, and the same command "
            "goes on where it stopped"
        ) from error


def _remove_empty(output: Path, made: Sequence[Path]) -> None:
    """Remove what a command that failed made and wrote nothing into; drawn prompts keep their settings."""
    try:
        if output in made and not output.stat().st_size and not _prompts_of(output).exists():
            for path in made:
                path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("%s was made for nothing and cannot be removed: %s", output, error)


def _prompts_of(output: Path) -> Path:
    return output.with_name(output.name + PROMPTS_SUFFIX)


@contextmanager
def _rows(path: Path, stream: TextIO, key: str) -> Iterator[RowFile]:
    _drop_torn_line(path)
    try:
        with path.open(encoding="utf-8") as written:
            ids = frozenset(str(json.loads(line)[key]) for line in written)
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} holds a line that generate did not write: choose another --output"
        ) from error
    stream.seek(0, os.SEEK_END)
    rows = RowFile(path, stream, ids)
    yield rows
    rows.sync()


def _check_settings(output: Path, record: Path, settings: dict[str, Any]) -> None:
    # a record without rows is what a start left that was killed while it loaded the target
    if record.is_file() and _has_rows(output, _prompts_of(output)):
        known = _read_settings(record)
        keys = settings.keys() | known.keys()
        different = sorted(key for key in keys if known.get(key) != settings.get(key))
        if different:
            raise ConfigError(
                f"{output} was made with other settings ({', '.join(different)}): "
                "repeat them or choose another --output"
            )
        return
    companions = [_prompts_of(output)] if "sampled_prompts" in settings else []
    for path in (output, *companions):
        if _has_rows(path):
            raise ConfigError(f"{path} exists and {record.name} does not: choose another --output")
    temporary = record.with_name(record.name + ".tmp")
    try:
        with _disk_errors(record):
            temporary.write_text(json.dumps(settings, indent=1, sort_keys=True) + "\n")
            temporary.replace(record)
    finally:
        temporary.unlink(missing_ok=True)


def _has_rows(*paths: Path) -> bool:
    return any(path.exists() and path.stat().st_size for path in paths)


def _read_settings(record: Path) -> dict[str, Any]:
    try:
        known = json.loads(record.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{record} cannot be read: choose another --output") from error
    if not isinstance(known, dict):
        raise ConfigError(f"{record} holds no settings of generate: choose another --output")
    return known


def _drop_torn_line(path: Path) -> None:
    """Cut off what a crash left behind the last whole line."""
    with path.open("r+b") as stream:
        content = stream.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            log.warning("dropping an unfinished line at the end of %s", path)
            stream.truncate(whole)
