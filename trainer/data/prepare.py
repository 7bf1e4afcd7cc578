"""`dflash-train prepare`: chat JSONL or Parquet to tokenized, loss-masked Parquet that training reads.

Called by `trainer.__main__`. Writes `train.parquet` and `report.json` into the output directory and, with a
held-out ratio, `held_out/held_out.parquet` and `held_out/prompts.jsonl`, apart from the training files
because those are read from the directory itself. Every dropped row is counted by reason with examples. Files
are replaced by rename, the report last. Must not load model weights.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from trainer.data.chat import EncodedChat, encode_chat, find_message_fault, join_completion
from trainer.data.corpus import SKIP_REASONS, SUFFIXES, parse_row
from trainer.data.pretrained import get_tokenizer, stop_token_ids
from trainer.data.prompts import read_json_lines
from trainer.errors import ConfigError, DataError, DependencyError

REPORT = "report.json"
TRAIN_FILE = "train.parquet"
HELD_OUT_DIR = "held_out"
ROWS_PER_GROUP = 1024
EXAMPLES_PER_REASON = 3
EXAMPLE_CHARACTERS = 120

DROP_REASONS = {
    "bad_json": "the line is not a JSON object",
    "no_messages": "neither messages nor prompt with completion",
    "bad_message": "a message lacks a known role or a text",
    "no_assistant_turn": "nothing that the assistant said",
    "empty_completion": "the last assistant turn is blank",
    "duplicate": "the same chat came before",
    "template_error": "the chat template refuses these messages",
    "not_in_template": "no assistant turn can be found again in the rendered chat",
    "no_supervised_token": SKIP_REASONS["no_supervised_token"],
    "no_anchor": SKIP_REASONS["no_anchor"],
}


@dataclass(slots=True)
class PrepareReport:
    """Counts of one `prepare`, as they stand in `report.json`."""

    rows: int = 0
    train: int = 0
    held_out: int = 0
    truncated: int = 0
    unsupervised_turns: int = 0
    from_completion_ids: int = 0
    """rows taken from recorded tokens; the others were tokenized from their text"""
    tokens: int = 0
    supervised_tokens: int = 0
    domains: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def drop(self, reason: str, row_number: int, row: Any) -> None:
        """Count a dropped row and keep the first few to look at."""
        self.dropped[reason] += 1
        shown = self.examples.setdefault(reason, [])
        if len(shown) < EXAMPLES_PER_REASON:
            start = json.dumps(row, ensure_ascii=False, default=str)[:EXAMPLE_CHARACTERS]
            shown.append({"row": row_number, "start": start})

    def as_dict(self) -> dict[str, Any]:
        """For JSON; each reason comes with what it means."""
        return {
            "rows": self.rows,
            "train": self.train,
            "held_out": self.held_out,
            "truncated": self.truncated,
            "unsupervised_turns": self.unsupervised_turns,
            "from_completion_ids": self.from_completion_ids,
            "tokens": self.tokens,
            "supervised_tokens": self.supervised_tokens,
            "domains": dict(sorted(self.domains.items())),
            "dropped": {
                reason: {"count": count, "meaning": DROP_REASONS[reason], "examples": self.examples[reason]}
                for reason, count in sorted(self.dropped.items())
            },
        }


@dataclass(frozen=True, slots=True)
class PreparedRow:
    """One tokenized chat."""

    id: str
    domain: str | None
    input_ids: list[int]
    loss_mask: list[int]
    prompt: list[dict[str, str]]
    """messages before the last assistant turn"""
    is_truncated: bool
    unsupervised_turns: int


def run_prepare(args: argparse.Namespace) -> int:
    """Carry out `prepare`; returns the exit code.

    Raises:
        ConfigError: flags, tokenizer, or an output directory with data files of someone else.
        DataError: the input is unreadable or holds no usable chat.
        DependencyError: pyarrow is missing.
    """
    if args.max_seq_len < 3:
        raise ConfigError(f"--max-seq-len must be at least 3: {args.max_seq_len}")
    if not 0.0 <= args.held_out_ratio < 1.0:
        raise ConfigError(f"--held-out-ratio must be from 0 to below 1: {args.held_out_ratio}")
    tokenizer = get_tokenizer(args.target_model, needs_chat_template=True)
    preparer = ChatPreparer(
        tokenizer, stop_ids=stop_token_ids(args.target_model, tokenizer), max_seq_len=args.max_seq_len
    )
    _check_output(args.output)
    args.output.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        train = stack.enter_context(_RowWriter(args.output / TRAIN_FILE))
        held_out = None
        if args.held_out_ratio:
            held_out = stack.enter_context(_HeldOutWriter(args.output / HELD_OUT_DIR))
        for row in preparer.prepare_all(read_chat_rows(args.input)):
            if held_out is not None and is_held_out(row, args.held_out_ratio):
                preparer.report.held_out += 1
                held_out.write(row)
            else:
                preparer.report.train += 1
                train.write(row)
        if not preparer.report.train:
            dropped = dict(preparer.report.dropped) or "nothing, it is empty"
            raise DataError(f"no usable chat for training in {args.input}: dropped {dropped}")
    summary = {
        "source": args.input.name,
        "max_seq_len": args.max_seq_len,
        "held_out_ratio": args.held_out_ratio,
        **preparer.report.as_dict(),
    }
    _replace(args.output / REPORT, (json.dumps(summary, indent=1, ensure_ascii=False) + "\n").encode())
    sys.stdout.write(json.dumps({key: value for key, value in summary.items() if key != "dropped"}) + "\n")
    return 0


class ChatPreparer:
    """Turns chats into tokenized rows and keeps the report."""

    def __init__(self, tokenizer: Any, *, stop_ids: frozenset[int], max_seq_len: int) -> None:
        self.report = PrepareReport()
        self._tokenizer = tokenizer
        self._stop_ids = stop_ids
        self._max_seq_len = max_seq_len
        self._seen: set[bytes] = set()

    def prepare_all(self, rows: Iterator[Any]) -> Iterator[PreparedRow]:
        """Yield the usable rows, in order."""
        report = self.report
        for number, row in enumerate(rows, start=1):
            report.rows += 1
            outcome = self._prepare(row)
            if isinstance(outcome, str):
                report.drop(outcome, number, row)
                continue
            report.truncated += outcome.is_truncated
            report.unsupervised_turns += outcome.unsupervised_turns
            report.tokens += len(outcome.input_ids)
            report.supervised_tokens += sum(outcome.loss_mask)
            report.domains[outcome.domain or "(none)"] += 1
            yield outcome

    def _prepare(self, row: Any) -> PreparedRow | str:
        messages = _messages_of(row)
        if isinstance(messages, str):
            return messages
        digest = hashlib.sha256(json.dumps(messages, sort_keys=True).encode()).digest()
        if digest in self._seen:
            return "duplicate"
        self._seen.add(digest)
        last = max(index for index, message in enumerate(messages) if message["role"] == "assistant")
        try:
            chat = self._encode(row, messages)
        except (TemplateError, ValueError, KeyError, TypeError):
            return "template_error"
        if chat is None:
            return "not_in_template"
        sample = parse_row(
            {"input_ids": chat.input_ids, "loss_mask": chat.loss_mask},
            max_seq_len=self._max_seq_len,
            vocab_size=sys.maxsize,
        )
        if isinstance(sample, str):
            return sample
        domain = row.get("domain")
        return PreparedRow(
            id=str(row.get("id", digest.hex()[:16])),
            domain=domain if isinstance(domain, str) else None,
            input_ids=chat.input_ids[: self._max_seq_len],
            loss_mask=chat.loss_mask[: self._max_seq_len],
            prompt=messages[:last],
            is_truncated=len(chat.input_ids) > self._max_seq_len,
            unsupervised_turns=chat.unsupervised_turns,
        )

    def _encode(self, row: dict[str, Any], messages: list[dict[str, str]]) -> EncodedChat | None:
        recorded = join_completion(
            self._tokenizer, messages, row.get("completion_ids"), stop_ids=self._stop_ids
        )
        if recorded is not None:
            self.report.from_completion_ids += 1
            return recorded
        is_cut_off = row.get("finish_reason") == "length"
        return encode_chat(self._tokenizer, messages, stop_ids=self._stop_ids, is_cut_off=is_cut_off)


def is_held_out(row: PreparedRow, ratio: float) -> bool:
    """Whether a chat belongs to the held-out part: by a hash of what was asked, so answers do not move it."""
    digest = hashlib.sha256(json.dumps(row.prompt, sort_keys=True).encode()).digest()
    return int.from_bytes(digest[:8], "big") < ratio * 2**64


def read_chat_rows(path: Path) -> Iterator[Any]:
    """Yield rows of a JSONL or Parquet file; a broken JSONL line is None."""
    if path.suffix == ".parquet":
        return _read_parquet(path)
    return read_json_lines(path)


def _messages_of(row: Any) -> list[dict[str, str]] | str:
    if not isinstance(row, dict):
        return "bad_json"
    messages: Any = row.get("messages")
    if messages is None and isinstance(row.get("prompt"), str) and isinstance(row.get("completion"), str):
        messages = [
            {"role": "user", "content": row["prompt"]},
            {"role": "assistant", "content": row["completion"]},
        ]
    fault = find_message_fault(messages)
    if fault is not None:
        return fault
    turns = [{"role": message["role"], "content": message["content"]} for message in messages]
    spoken = [turn["content"] for turn in turns if turn["role"] == "assistant"]
    if not spoken:
        return "no_assistant_turn"
    return turns if spoken[-1].strip() else "empty_completion"


def _read_parquet(path: Path) -> Iterator[Any]:
    pa, pq = _import_pyarrow()
    try:
        for batch in pq.ParquetFile(path).iter_batches():
            yield from batch.to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"cannot read: {path}: {error}") from error


def _import_pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise DependencyError("prepare needs pyarrow: pip install 'dflash-supervisor[data]'") from error
    return pa, pq


class _RowWriter:
    """Writes rows to one Parquet file, in groups; the file appears under its name only when complete."""

    def __init__(self, path: Path) -> None:
        pa, pq = _import_pyarrow()
        self._pa = pa
        self._path = path
        self._temporary = path.with_name(path.name + ".tmp")
        self._rows: list[PreparedRow] = []
        self._schema = pa.schema(
            [
                ("id", pa.string()),
                ("domain", pa.string()),
                ("input_ids", pa.list_(pa.int32())),
                ("loss_mask", pa.list_(pa.int8())),
            ]
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        self._writer = pq.ParquetWriter(self._temporary, self._schema, compression="zstd")

    def __enter__(self) -> _RowWriter:
        return self

    def write(self, row: PreparedRow) -> None:
        """Add one row."""
        self._rows.append(row)
        if len(self._rows) >= ROWS_PER_GROUP:
            self._flush()

    def __exit__(self, kind: object, *_rest: object) -> None:
        if kind is None:
            self._flush()
        self._writer.close()
        if kind is not None:
            self._temporary.unlink()
            return
        _sync(self._temporary)
        self._temporary.replace(self._path)

    def _flush(self) -> None:
        columns = {name: [getattr(row, name) for row in self._rows] for name in self._schema.names}
        self._writer.write_table(self._pa.table(columns, schema=self._schema))
        self._rows.clear()


class _HeldOutWriter:
    """The held-out rows: tokenized, and as prompts for the evaluator."""

    def __init__(self, directory: Path) -> None:
        self._rows = _RowWriter(directory / "held_out.parquet")
        self._prompts_path = directory / "prompts.jsonl"
        self._prompts: list[str] = []

    def __enter__(self) -> _HeldOutWriter:
        return self

    def write(self, row: PreparedRow) -> None:
        """Add one row to both files."""
        self._rows.write(row)
        entry = {"id": row.id, "domain": row.domain, "messages": row.prompt}
        self._prompts.append(json.dumps(entry, ensure_ascii=False) + "\n")

    def __exit__(self, kind: object, *rest: object) -> None:
        self._rows.__exit__(kind, *rest)
        if kind is None:
            _replace(self._prompts_path, "".join(self._prompts).encode())


def _check_output(directory: Path) -> None:
    if not directory.exists():
        return
    if not directory.is_dir():
        raise ConfigError(f"--output is not a directory: {directory}")
    foreign = [
        path.name for path in directory.iterdir() if path.suffix in SUFFIXES and path.name != TRAIN_FILE
    ]
    if foreign:
        names = ", ".join(sorted(foreign)[:5])
        raise ConfigError(f"--output holds data files that training would read too: {directory}: {names}")


def _replace(path: Path, content: bytes) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(content)
    _sync(temporary)
    temporary.replace(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
