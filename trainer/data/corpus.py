"""The tokenized training set: reads Parquet, Arrow and JSONL, checks every row, keeps good ones compactly.

Called by `trainer.train` and tests. A row is `input_ids` with `loss_mask` or `prompt_len`, optionally
`domain`. A bad row is skipped and counted by reason; a file that cannot be read, or a set without one good
row, is a `DataError`. Samples live in flat arrays (5 bytes a token) shared by all readers. Must not import
torch or know models.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.errors import DataError, DependencyError

HUGE_TOKENS = 4_194_304
"""Longer rows are taken for a mistake (a whole file in one row) and skipped, not truncated."""
EXAMPLES_PER_REASON = 3
SUFFIXES = (".parquet", ".arrow", ".jsonl")
COLUMNS = ("input_ids", "loss_mask", "prompt_len", "domain")

SKIP_REASONS = {
    "bad_json": "the line is not a JSON object",
    "missing_input_ids": "the row has no input_ids",
    "missing_mask": "the row has neither loss_mask nor prompt_len",
    "wrong_type": "input_ids or loss_mask is not a flat list of whole numbers",
    "empty": "input_ids is empty",
    "huge": f"more than {HUGE_TOKENS} tokens",
    "wrong_length": "loss_mask and input_ids differ in length",
    "bad_mask": "loss_mask holds something else than 0 and 1",
    "bad_prompt_len": "prompt_len is not a whole number from 0 to the length",
    "token_out_of_vocabulary": "a token id is negative or not a row of the target's embedding",
    "no_supervised_token": "no assistant token is left (after truncation)",
    "no_anchor": "no two neighbouring assistant tokens, so no block can start (after truncation)",
}


@dataclass(frozen=True, slots=True)
class Sample:
    """One document."""

    input_ids_T: NDArray[np.int32]
    loss_mask_T: NDArray[np.bool_]
    domain: str | None


@dataclass(slots=True)
class CorpusReport:
    """What became of the rows: counts by reason, with places to look at."""

    rows: int = 0
    kept: int = 0
    truncated: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def skip(self, reason: str, place: str) -> None:
        """Count one skipped row."""
        self.skipped[reason] += 1
        places = self.examples.setdefault(reason, [])
        if len(places) < EXAMPLES_PER_REASON:
            places.append(place)

    def render(self) -> str:
        """One line for a log."""
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(self.skipped.items()))
        return (
            f"{self.kept} of {self.rows} rows kept, {self.truncated} truncated, skipped: {reasons or 'none'}"
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON reports."""
        return {
            "rows": self.rows,
            "kept": self.kept,
            "truncated": self.truncated,
            "tokens": self.tokens,
            "supervised_tokens": self.supervised_tokens,
            "skipped": dict(sorted(self.skipped.items())),
            "examples": {reason: list(places) for reason, places in sorted(self.examples.items())},
        }


class Corpus(Sequence[Sample]):
    """An immutable list of samples; index = sample id, stable for the same files and settings."""

    def __init__(self, samples: Sequence[Sample], report: CorpusReport) -> None:
        lengths = [len(sample.input_ids_T) for sample in samples]
        self.offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)
        self._tokens = _flat([sample.input_ids_T for sample in samples], np.int32)
        self._mask = _flat([sample.loss_mask_T for sample in samples], np.bool_)
        self._domains = [sample.domain for sample in samples]
        self.report = report

    @classmethod
    def open(cls, path: Path | str, *, max_seq_len: int, vocab_size: int) -> Corpus:
        """Read a file, or every data file that lies directly in a directory (sorted by name).

        Args:
            path: `.parquet`, `.arrow` or `.jsonl` file, or a directory of them.
            max_seq_len: longer rows are cut behind this many tokens, and counted.
            vocab_size: rows of the target's embedding.

        Raises:
            DataError: nothing to read, an unreadable file, or no usable row at all.
            DependencyError: Parquet or Arrow files, and no pyarrow.
        """
        report = CorpusReport()
        samples: list[Sample] = []
        for file in list_data_files(Path(path)):
            for place, row in _read_rows(file):
                report.rows += 1
                outcome = parse_row(row, max_seq_len=max_seq_len, vocab_size=vocab_size)
                if isinstance(outcome, str):
                    report.skip(outcome, place)
                    continue
                report.truncated += len(outcome.input_ids_T) < len(row["input_ids"])
                report.tokens += len(outcome.input_ids_T)
                report.supervised_tokens += int(outcome.loss_mask_T.sum())
                samples.append(outcome)
        report.kept = len(samples)
        if not samples:
            raise DataError(f"no usable sample in {path}: {report.render()}; first places: {report.examples}")
        return cls(samples, report)

    def __len__(self) -> int:
        return len(self._domains)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        position = range(len(self))[index]
        start, end = self.offsets[position], self.offsets[position + 1]
        return Sample(self._tokens[start:end], self._mask[start:end], self._domains[position])

    def digest(self) -> str:
        """Identify the content: SHA-256 over lengths, tokens and masks, independent of file names."""
        digest = hashlib.sha256(self.offsets.tobytes())
        digest.update(self._tokens.tobytes())
        digest.update(self._mask.tobytes())
        return digest.hexdigest()

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens per sample."""
        return np.diff(self.offsets)


def list_data_files(path: Path) -> list[Path]:
    """The data files behind `path`; sub-folders are not entered (held-out sets live there)."""
    if path.is_file():
        if path.suffix not in SUFFIXES:
            raise DataError(f"data file must end in {', '.join(SUFFIXES)}: {path}")
        return [path]
    if not path.is_dir():
        raise DataError(f"data directory does not exist: {path}")
    files = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES and file.is_file())
    if not files:
        raise DataError(f"no {', '.join(SUFFIXES)} file directly in the data directory: {path}")
    return files


def parse_row(row: Any, *, max_seq_len: int, vocab_size: int) -> Sample | str:
    """Check one row; returns the (possibly truncated) sample, or a key of `SKIP_REASONS`."""
    if not isinstance(row, dict):
        return "bad_json"
    ids = _parse_ids(row.get("input_ids"), vocab_size)
    if isinstance(ids, str):
        return ids
    mask = _parse_mask(row, len(ids))
    if isinstance(mask, str):
        return mask
    ids, mask = ids[:max_seq_len], mask[:max_seq_len]
    if not mask.any():
        return "no_supervised_token"
    # An anchor needs a supervised successor and at least one token of context before it.
    if not (mask[1:-1] & mask[2:]).any():
        return "no_anchor"
    domain = row.get("domain")
    return Sample(ids.astype(np.int32), mask, domain if isinstance(domain, str) else None)


def _parse_ids(value: Any, vocab_size: int) -> NDArray[np.int64] | str:
    if value is None:
        return "missing_input_ids"
    ids = _as_integers(value)
    if ids is None:
        return "wrong_type"
    if ids.size == 0:
        return "empty"
    if ids.size > HUGE_TOKENS:
        return "huge"
    if ids.min() < 0 or ids.max() >= vocab_size:
        return "token_out_of_vocabulary"
    return ids


def _parse_mask(row: dict[str, Any], length: int) -> NDArray[np.bool_] | str:
    value = row.get("loss_mask")
    if value is None:
        return _mask_from_prompt_len(row.get("prompt_len"), length)
    mask = _as_integers(value)
    if mask is None:
        return "wrong_type"
    if mask.size != length:
        return "wrong_length"
    if not ((mask == 0) | (mask == 1)).all():
        return "bad_mask"
    return mask.astype(np.bool_)


def _mask_from_prompt_len(prompt_len: Any, length: int) -> NDArray[np.bool_] | str:
    if prompt_len is None:
        return "missing_mask"
    if isinstance(prompt_len, bool) or not isinstance(prompt_len, int) or not 0 <= prompt_len <= length:
        return "bad_prompt_len"
    return np.arange(length) >= prompt_len


def _as_integers(value: Any) -> NDArray[np.int64] | None:
    if not isinstance(value, list | np.ndarray):
        return None
    try:
        array = np.asarray(value)
    except ValueError:
        return None
    if array.size == 0 and array.ndim == 1:
        return np.empty(0, dtype=np.int64)
    # Booleans and integers only; a float, a string, a null or a nested list shows in kind or ndim.
    if array.ndim != 1 or array.dtype.kind not in "biu":
        return None
    return array.astype(np.int64)


def _read_rows(file: Path) -> Iterator[tuple[str, Any]]:
    return _read_jsonl(file) if file.suffix == ".jsonl" else _read_columnar(file)


def _read_jsonl(file: Path) -> Iterator[tuple[str, Any]]:
    try:
        with file.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    yield f"{file.name}:{number}", _parse_json(line)
    except OSError as error:
        raise DataError(f"cannot read data file: {file}: {error}") from error


def _parse_json(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _read_columnar(file: Path) -> Iterator[tuple[str, Any]]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise DependencyError(
            f"reading {file.name} needs pyarrow: pip install 'dflash-supervisor[data]', or use JSONL"
        ) from error
    number = 0
    try:
        batches = (
            pq.ParquetFile(file).iter_batches() if file.suffix == ".parquet" else _arrow_batches(pa, file)
        )
        for batch in batches:
            columns = {name: _cells(pa, batch.column(name)) for name in COLUMNS if name in batch.schema.names}
            for index in range(batch.num_rows):
                number += 1
                yield f"{file.name}:{number}", {name: cells[index] for name, cells in columns.items()}
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"cannot read data file: {file}: {error}") from error


def _cells(pa: Any, column: Any) -> Sequence[Any]:
    """Python values of a column; lists of whole numbers stay arrays (building lists takes minutes per GB)."""
    is_list = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
    if not is_list or column.null_count or not pa.types.is_integer(column.type.value_type):
        cells: list[Any] = column.to_pylist()
        return cells
    if column.values.null_count:
        return list(column.to_pylist())
    values = column.values.to_numpy()
    offsets = column.offsets.to_numpy()
    return [values[start:end] for start, end in pairwise(offsets.tolist())]


def _arrow_batches(pa: Any, file: Path) -> Iterator[Any]:
    # The stream format is what dataset libraries write; the random-access format has a magic at its start.
    with pa.memory_map(str(file)) as source:
        if source.read(6) == b"ARROW1":
            reader = pa.ipc.open_file(source)
            yield from (reader.get_batch(index) for index in range(reader.num_record_batches))
        else:
            source.seek(0)
            yield from pa.ipc.open_stream(source)


def _flat(parts: list[Any], dtype: Any) -> NDArray[Any]:
    flat: NDArray[Any] = np.concatenate(parts).astype(dtype) if parts else np.empty(0, dtype=dtype)
    flat.setflags(write=False)
    return flat
