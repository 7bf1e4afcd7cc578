"""The file that `generate` writes: chat JSONL that grows row by row and is continued after an interruption.

Called by `generate`, whoever makes the completions. The settings that shaped the rows stand beside them in
`<output>.settings.json`; an output of other settings is refused, and so is a second writer. A row that was
torn by a crash is dropped. Must not know how completions are made.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from trainer.data.prompts import Prompt
from trainer.errors import ConfigError

log = logging.getLogger(__name__)

SYNC_S = 2.0
"""Rows reach the file at once; the disk is waited for at most this often."""


class RowFile:
    """A JSONL file opened for appending; `ids` are those that it held when opened."""

    def __init__(self, stream: TextIO, ids: frozenset[str]) -> None:
        self._stream = stream
        self._synced_at = time.monotonic()
        self.ids = ids

    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append rows; a kill of the process loses none of them."""
        for row in rows:
            self._stream.write(json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n")
        self._stream.flush()
        if time.monotonic() - self._synced_at > SYNC_S:
            self.sync()

    def sync(self) -> None:
        """Wait until the disk has everything."""
        os.fsync(self._stream.fileno())
        self._synced_at = time.monotonic()


@contextmanager
def locked_output(output: Path, settings: dict[str, Any]) -> Iterator[RowFile]:
    """Open the output alone, after a check that it was made with the same settings.

    Raises:
        ConfigError: not writable, another writer, or other settings.
    """
    with _opened(output) as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(f"another generate writes to this output: {output}") from error
        _check_settings(output, output.with_name(output.name + ".settings.json"), settings)
        with _rows(output, stream, "id") as rows:
            yield rows


@contextmanager
def companion_rows(path: Path, *, key: str) -> Iterator[RowFile]:
    """Open a second file of an output that is already locked."""
    with _opened(path) as stream, _rows(path, stream, key) as rows:
        yield rows


def thinking_of(args: argparse.Namespace, prompt: Prompt) -> bool | None:
    """A prompt's own wish comes before the flag, as in `prepare`."""
    if prompt.thinking is not None or args.thinking == "template":
        return prompt.thinking
    return bool(args.thinking == "on")


def template_inputs(prompt: Prompt, thinking: bool | None) -> dict[str, Any]:
    """What a row says beside its messages, so that the prompt is rendered again as it was."""
    entries: dict[str, Any] = {} if thinking is None else {"thinking": thinking}
    if prompt.tools:
        entries["tools"] = list(prompt.tools)
    return entries


def _opened(path: Path) -> TextIO:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("a", encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--output cannot be written: {path} ({error.strerror or error}); name a file"
        ) from error


@contextmanager
def _rows(path: Path, stream: TextIO, key: str) -> Iterator[RowFile]:
    _drop_torn_line(path)
    with path.open(encoding="utf-8") as written:
        ids = frozenset(str(json.loads(line)[key]) for line in written)
    stream.seek(0, os.SEEK_END)
    rows = RowFile(stream, ids)
    try:
        yield rows
    finally:
        rows.sync()


def _check_settings(output: Path, record: Path, settings: dict[str, Any]) -> None:
    if record.is_file():
        known = json.loads(record.read_text())
        keys = settings.keys() | known.keys()
        different = sorted(key for key in keys if known.get(key) != settings.get(key))
        if different:
            raise ConfigError(
                f"{output} was made with other settings ({', '.join(different)}): "
                "repeat them or choose another --output"
            )
        return
    if output.stat().st_size:
        raise ConfigError(f"{output} exists and {record.name} does not: choose another --output")
    temporary = record.with_name(record.name + ".tmp")
    temporary.write_text(json.dumps(settings, indent=1, sort_keys=True) + "\n")
    temporary.replace(record)


def _drop_torn_line(path: Path) -> None:
    """Cut off what a crash left behind the last whole line."""
    with path.open("r+b") as stream:
        content = stream.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            log.warning("dropping an unfinished line at the end of %s", path)
            stream.truncate(whole)
