"""Rows of JSONL, Parquet and Arrow files, one at a time: what `prepare`, `prompts` and `corpus` read from.

A file or a folder of files, each read once from front to back in constant memory (a line, or a few hundred
rows of a table). A row that cannot be read comes out as a `SourceRow` with a reason, so that its reader
counts it; a file that cannot be read is a `DataError`. Must not know what rows mean.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.errors import ConfigError, DataError, DependencyError

SUFFIXES = (".parquet", ".arrow", ".jsonl")
LINE_LIMIT_BYTES = 33_554_432
ROWS_AT_ONCE = 256
"""Rows of a table that are in memory as Python objects at a time."""
EXCERPT_CHARACTERS = 120

READ_REASONS = {
    "bad_json": "the line is not JSON",
    "not_an_object": "the line is JSON, but no object",
    "bad_encoding": "the line or a text is not UTF-8",
    "duplicate_key": "the same key twice in one object",
    "too_deep": "nested too deeply to be read",
    "line_too_long": f"a line of more than {LINE_LIMIT_BYTES:,} bytes",
}
"""Why a row cannot be read, and what that means."""


@dataclass(frozen=True, slots=True)
class SourceRow:
    """One row; `value` is a dict unless `fault` says why there is none."""

    file: str
    number: int
    """1-based: the line of a JSONL file, the row of a table"""
    value: Any
    fault: str | None = None
    raw: bytes = b""
    """the line's beginning, for JSONL"""

    @property
    def place(self) -> str:
        """File and row, to look at."""
        return f"{self.file}:{self.number}"

    def excerpt(self) -> str:
        """The row's beginning as a short text without half characters."""
        if self.raw:
            return self.raw[: 4 * EXCERPT_CHARACTERS].decode("utf-8", "replace").strip()[:EXCERPT_CHARACTERS]
        try:
            text = json.dumps(self.value, ensure_ascii=False, default=str)
        except (ValueError, RecursionError):
            return "(cannot be shown)"
        return text[:EXCERPT_CHARACTERS].encode("utf-8", "replace").decode()


def list_data_files(path: Path) -> list[Path]:
    """The data files behind `path`, sorted by name.

    Sub-folders are not entered (held-out sets live there). A folder saved by a data set library lists its
    files in `state.json`; then exactly those are taken, because its caches lie beside them.

    Raises:
        DataError: nothing there, or nothing of a known kind.
    """
    if path.is_file():
        if path.suffix not in SUFFIXES:
            raise DataError(f"data file must end in {', '.join(SUFFIXES)}: {path}")
        return [path]
    if not path.is_dir():
        raise DataError(f"data directory does not exist: {path}")
    files = _saved_files(path) or sorted(
        file
        for file in path.iterdir()
        if file.suffix in SUFFIXES and file.is_file() and not file.name.startswith(".")
    )
    if not files:
        raise DataError(f"no {', '.join(SUFFIXES)} file directly in the data directory: {path}{_hint(path)}")
    return files


@contextmanager
def unchanging(what: str, list_files: Callable[[], Sequence[Path]]) -> Iterator[Sequence[Path]]:
    """Hand out files to be read, and see to it that nobody wrote, replaced, added or removed one meanwhile.

    Raises:
        DataError: names the first one that changed; what was read may be parts of two data sets.
    """
    files = list_files()
    before = _states(files)
    yield files
    try:
        after = _states(list_files())
    except DataError:  # they are gone altogether
        after = {}
    changed = sorted(
        str(path) for path in before.keys() | after.keys() if before.get(path) != after.get(path)
    )
    if changed:
        raise DataError(
            f"{what} changed while it was read: {changed[0]}; run this again when nothing writes there"
        )


def _states(files: Sequence[Path]) -> dict[Path, tuple[int, int] | None]:
    states: dict[Path, tuple[int, int] | None] = {}
    for file in files:
        try:
            found = file.stat()
        except OSError:
            states[file] = None
        else:
            # not the inode: some network file systems give a file a new one now and then
            states[file] = found.st_size, found.st_mtime_ns
    return states


def refuse_special(path: Path) -> None:
    """Refuse what is no file but gives or takes bytes: it may never end, or wait for ever.

    A pipe that a shell has opened for us (`<(...)`, `/dev/stdin`) is none of these.

    Raises:
        ConfigError: a device, a socket, or a pipe with a name.
    """
    if not path.exists() or path.is_file() or path.is_dir():
        return
    if path.is_fifo() and path.absolute().parts[1:2] in (("dev",), ("proc",)):
        return
    raise ConfigError(f"a device, socket or pipe is no place for rows: {path}; name a file")


def read_rows(file: Path, *, skip: int = 0, columns: Sequence[str] | None = None) -> Iterator[SourceRow]:
    """Yield the rows of one file; blank lines are none.

    Args:
        file: `.parquet`, `.arrow`, else JSONL.
        skip: leave out the rows numbered up to this one, without parsing them.
        columns: of a table, read only these where they exist.

    Raises:
        DataError: the file is unreadable or damaged.
        DependencyError: a table, and no pyarrow.
    """
    if file.suffix in (".parquet", ".arrow"):
        return _read_table(file, skip, columns)
    return _read_lines(file, skip)


def parse_json_line(line: bytes) -> tuple[Any, str | None]:
    """The object that a line holds, or a key of `READ_REASONS`."""
    try:
        value = json.loads(line.decode("utf-8-sig"), object_pairs_hook=_unique)
    except UnicodeDecodeError:
        return None, "bad_encoding"
    except _DuplicateKeyError:
        return None, "duplicate_key"
    except RecursionError:
        return None, "too_deep"
    except ValueError:
        return None, "bad_json"
    return (value, None) if isinstance(value, dict) else (None, "not_an_object")


def table_batches(file: Path, *, rows: int = ROWS_AT_ONCE) -> Iterator[Any]:
    """Record batches of at most `rows` rows of a Parquet or Arrow file, of which Arrow is memory-mapped.

    Raises:
        DataError: the file is unreadable or damaged.
        DependencyError: no pyarrow.
    """
    pa, pq = import_pyarrow(f"reading {file.name}")
    try:
        if file.suffix == ".parquet":
            with pq.ParquetFile(file, memory_map=True) as table:
                yield from table.iter_batches(batch_size=rows)
        else:
            for batch in _arrow_batches(pa, file):
                for start in range(0, batch.num_rows, rows):
                    yield batch.slice(start, rows)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"cannot read data file: {file}: {error}") from error


def import_pyarrow(purpose: str) -> tuple[Any, Any]:
    """The packages `pyarrow` and `pyarrow.parquet`; their absence is a `DependencyError` with the remedy."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise DependencyError(
            f"{purpose} needs pyarrow: pip install 'dflash-supervisor[data]', or use JSONL"
        ) from error
    return pa, pq


class _DuplicateKeyError(ValueError):
    """An object names a key twice, so it is unclear which of the values is meant."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise _DuplicateKeyError
    return value


def _read_lines(file: Path, skip: int) -> Iterator[SourceRow]:
    try:
        with file.open("rb") as stream:
            number = 0
            while line := stream.readline(LINE_LIMIT_BYTES + 1):
                number += 1
                is_long = len(line) > LINE_LIMIT_BYTES
                start = line[: 4 * EXCERPT_CHARACTERS]
                while len(line) > LINE_LIMIT_BYTES and not line.endswith(b"\n"):
                    line = stream.readline(LINE_LIMIT_BYTES + 1)
                if number <= skip:
                    continue
                if is_long:
                    yield SourceRow(file.name, number, None, "line_too_long", start)
                elif line.strip():
                    value, fault = parse_json_line(line)
                    yield SourceRow(file.name, number, value, fault, start)
    except OSError as error:
        raise DataError(f"cannot read: {file}: {error.strerror or error}") from error


def _read_table(file: Path, skip: int, columns: Sequence[str] | None) -> Iterator[SourceRow]:
    number = 0
    for batch in table_batches(file):
        if number + batch.num_rows <= skip:
            number += batch.num_rows
            continue
        if columns is not None:
            batch = batch.select([name for name in columns if name in batch.schema.names])
        for value, fault in _python_rows(batch):
            number += 1
            if number > skip:
                yield SourceRow(file.name, number, value, fault)


def _python_rows(batch: Any) -> Iterator[tuple[Any, str | None]]:
    try:
        rows = batch.to_pylist()
    except UnicodeDecodeError:
        # One text of the batch is not UTF-8: find out which row it is.
        for index in range(batch.num_rows):
            try:
                yield _without_nulls(batch.slice(index, 1).to_pylist()[0]), None
            except UnicodeDecodeError:
                yield None, "bad_encoding"
        return
    for row in rows:
        yield _without_nulls(row), None


def _without_nulls(value: Any) -> Any:
    """Tables fill fields that a row does not have; as JSON they would not be there."""
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def _arrow_batches(pa: Any, file: Path) -> Iterator[Any]:
    # The stream format is what data set libraries write; the random-access format has a magic at its start.
    with pa.memory_map(str(file)) as source:
        if source.read(6) == b"ARROW1":
            reader = pa.ipc.open_file(source)
            yield from (reader.get_batch(index) for index in range(reader.num_record_batches))
        else:
            source.seek(0)
            yield from pa.ipc.open_stream(source)


def _saved_files(directory: Path) -> list[Path]:
    try:
        listed = json.loads((directory / "state.json").read_text())["_data_files"]
        files = [directory / entry["filename"] for entry in listed]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise DataError(f"state.json names files that are not there: {directory}: {', '.join(missing[:5])}")
    return files


def _hint(directory: Path) -> str:
    inner = sorted(
        entry.name
        for entry in directory.iterdir()
        if entry.is_dir() and any(file.suffix in SUFFIXES for file in entry.iterdir() if file.is_file())
    )
    return f"; choose one of its folders: {', '.join(inner[:5])}" if inner else ""
