"""The tokenized training set: reads Parquet, Arrow and JSONL, checks every row, keeps good ones compactly.

Called by `trainer.train` and tests. A row is `input_ids` with `loss_mask` or `prompt_len`, optionally
`domain`. A bad row is skipped and counted by reason; a file that cannot be read, or a set without one good
row, is a `DataError`. Reading holds a few hundred rows at a time; of a sample 10 bytes stay in memory, of its
tokens 5 bytes each up to a limit, then they lie in a mapped file (see `token_store`). Must not import torch
or know models.
"""

from __future__ import annotations

import hashlib
import logging
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.data.sources import (
    READ_REASONS,
    import_pyarrow,
    list_data_files,
    read_rows,
    table_batches,
    unchanging,
)
from trainer.data.staging import find_interrupted, has_unfinished_work
from trainer.data.token_store import CHUNK_TOKENS, TokenStore
from trainer.errors import DataError

log = logging.getLogger(__name__)

HUGE_TOKENS = CHUNK_TOKENS
"""Longer rows are taken for a mistake (a whole file in one row) and skipped, not truncated."""
EXAMPLES_PER_REASON = 5
COLUMNS = ("input_ids", "loss_mask", "prompt_len", "domain")
MOST_DOMAINS = 65_000
ROWS_PER_BATCH = 1024

SKIP_REASONS = {
    **READ_REASONS,
    "missing_input_ids": "the row has no input_ids",
    "missing_mask": "the row has neither loss_mask nor prompt_len",
    "wrong_type": "input_ids or loss_mask is not a flat list of whole numbers",
    "empty": "input_ids is empty",
    "huge": f"more than {HUGE_TOKENS:,} tokens",
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

    def __init__(
        self, samples: Iterator[Sample], report: CorpusReport, *, store: TokenStore | None = None
    ) -> None:
        """Take all `samples`, one at a time; what `report` counts of them is filled meanwhile."""
        self._store = TokenStore() if store is None else store
        offsets, domains = array("q", [0]), array("H")
        names: dict[str | None, int] = {None: 0}
        for sample in samples:
            self._store.append(sample.input_ids_T, sample.loss_mask_T)
            offsets.append(self._store.tokens)
            name = sample.domain
            if name not in names and len(names) > MOST_DOMAINS:
                name = "(others)"
            domains.append(names.setdefault(name, len(names)))
        self._store.seal()
        self.offsets: NDArray[np.int64] = np.frombuffer(offsets, dtype=np.int64)
        self._domains = np.frombuffer(domains, dtype=np.uint16) if domains else np.empty(0, np.uint16)
        self._names = list(names)
        self.report = report

    @classmethod
    def open(cls, path: Path | str, *, max_seq_len: int, vocab_size: int) -> Corpus:
        """Read a file, or every data file that lies directly in a directory (sorted by name).

        Args:
            path: `.parquet`, `.arrow` or `.jsonl` file, or a directory of them.
            max_seq_len: longer rows are cut behind this many tokens, and counted.
            vocab_size: rows of the target's embedding.

        Raises:
            DataError: nothing to read, an unreadable file, a directory that `prepare` has half filled, files
                that change meanwhile, or no usable row at all.
            DependencyError: Parquet or Arrow files, and no pyarrow.
        """
        report = CorpusReport()
        if has_unfinished_work(Path(path)):
            log.warning("a prepare for %s has not come to its end: the set that stands there is read", path)
        with unchanging("data", lambda: _whole_set(Path(path))) as files:
            corpus = cls(_good_samples(files, report, max_seq_len, vocab_size), report)
        if not len(corpus):
            raise DataError(f"no usable sample in {path}: {report.render()}; first places: {report.examples}")
        return corpus

    def __len__(self) -> int:
        return len(self._domains)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        position = range(len(self))[index]
        ids, mask = self._store.read(int(self.offsets[position]), int(self.offsets[position + 1]))
        return Sample(ids, mask, self._names[self._domains[position]])

    def digest(self) -> str:
        """Identify the content: SHA-256 over lengths, tokens and masks, independent of file names."""
        digest = hashlib.sha256(self.offsets.tobytes())
        for ids in self._store.iter_ids():
            digest.update(ids.data)
        for mask in self._store.iter_masks():
            digest.update(mask.data)
        return digest.hexdigest()

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens per sample."""
        return np.diff(self.offsets)


def _whole_set(path: Path) -> list[Path]:
    interrupted = find_interrupted(path)
    if interrupted:
        raise DataError(f"data directory is not whole: {path}: {interrupted}")
    return list_data_files(path)


def _good_samples(
    files: Sequence[Path], report: CorpusReport, max_seq_len: int, vocab_size: int
) -> Iterator[Sample]:
    for file in files:
        for place, row, fault in _read(file):
            report.rows += 1
            outcome = fault or parse_row(row, max_seq_len=max_seq_len, vocab_size=vocab_size)
            if isinstance(outcome, str):
                report.skip(outcome, place)
                continue
            report.kept += 1
            report.truncated += len(outcome.input_ids_T) < len(row["input_ids"])
            report.tokens += len(outcome.input_ids_T)
            report.supervised_tokens += int(outcome.loss_mask_T.sum())
            yield outcome


def parse_row(row: Any, *, max_seq_len: int, vocab_size: int) -> Sample | str:
    """Check one row; returns the (possibly truncated) sample, or a key of `SKIP_REASONS`."""
    if not isinstance(row, dict):
        return "not_an_object"
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
    ids = _as_integers(value, {int})
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
    mask = _as_integers(value, {int, bool})
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


def _as_integers(value: Any, types: set[type]) -> NDArray[np.int64] | None:
    """The list as an array where every member is of one of `types` and fits; else None."""
    if isinstance(value, list):
        # numpy would take True for 1 between numbers, and 2.0 for 2 is a mistake of whoever wrote it.
        if not set(map(type, value)) <= types:
            return None
        try:
            return np.asarray(value, dtype=np.int64)
        except OverflowError:
            return None
    if not isinstance(value, np.ndarray) or value.ndim != 1:
        return None
    if value.size == 0:
        return np.empty(0, dtype=np.int64)
    is_fitting = value.dtype.kind in "iu" or (bool in types and value.dtype.kind == "b")
    return value.astype(np.int64) if is_fitting else None


def _read(file: Path) -> Iterator[tuple[str, Any, str | None]]:
    """Place, row and fault of each row of a file."""
    if file.suffix != ".jsonl":
        yield from _read_columns(file)
        return
    for row in read_rows(file):
        yield row.place, row.value, row.fault


def _read_columns(file: Path) -> Iterator[tuple[str, Any, str | None]]:
    pa, _ = import_pyarrow(f"reading {file.name}")
    number = 0
    for batch in table_batches(file, rows=ROWS_PER_BATCH):
        columns = {name: _cells(pa, batch.column(name)) for name in COLUMNS if name in batch.schema.names}
        for index in range(batch.num_rows):
            number += 1
            row = {name: cells[index] for name, cells in columns.items()}
            fault = "bad_encoding" if any(value is _NOT_UTF8 for value in row.values()) else None
            yield f"{file.name}:{number}", row, fault


_NOT_UTF8 = object()


def _cells(pa: Any, column: Any) -> Sequence[Any]:
    """Python values of a column; lists of whole numbers stay arrays (building lists takes minutes per GB)."""
    is_list = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
    is_plain = is_list and not column.null_count and pa.types.is_integer(column.type.value_type)
    if not is_plain or column.values.null_count:
        return _python_cells(column)
    values = column.values.to_numpy()
    offsets = column.offsets.to_numpy()
    return [values[start:end] for start, end in pairwise(offsets.tolist())]


def _python_cells(column: Any) -> list[Any]:
    try:
        return list(column.to_pylist())
    except UnicodeDecodeError:
        # One text is not UTF-8: find out which.
        return [_python_cell(column, index) for index in range(len(column))]


def _python_cell(column: Any, index: int) -> Any:
    try:
        return column[index].as_py()
    except UnicodeDecodeError:
        return _NOT_UTF8
