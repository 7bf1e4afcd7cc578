"""`dflash-train prepare`: chats in JSONL, Parquet or Arrow to tokenized, loss-masked Parquet for training.

Called by `trainer.__main__`. Reads row by row in constant memory, drops exact duplicates, keeps a share apart
by a hash of the question and counts every dropped or altered row by reason. Writes `train-NNNNN.parquet` and
`report.json` into the output folder and, with a held-out ratio, `held_out/held_out-NNNNN.parquet` and
`held_out/prompts.jsonl`, apart from the training files because those are read from the folder itself. Must
not load model weights.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError

from trainer.data.chat import ChatEncoder, ChatSample, EncodedChat, Turn
from trainer.data.conversations import Conversation, parse_conversation, split_key
from trainer.data.encoded_prompts import check_thinking
from trainer.data.output_folder import refuse_inside
from trainer.data.prepare_report import DROP_REASONS, PrepareReport
from trainer.data.pretrained import TOKENIZER_FILES, get_tokenizer, stop_token_ids
from trainer.data.sources import SourceRow, list_data_files, read_rows, unchanging
from trainer.data.staging import PreparedSample, Staging, locked_output
from trainer.errors import ConfigError, DataError

log = logging.getLogger(__name__)

CHAT_COLUMNS = (
    "id",
    "domain",
    "messages",
    "conversations",
    "prompt",
    "completion",
    "system",
    "tools",
    "thinking",
    "finish_reason",
    "completion_ids",
)
"""What is read of a row; other columns of a table are not even loaded."""
COMMIT_TOKENS = 16_777_216
COMMIT_SECONDS = 60.0
PROGRESS_SECONDS = 10.0
FORMAT = 2
"""Of the work in progress; work of another format is begun anew."""

__all__ = ["DROP_REASONS", "ChatPreparer", "is_held_out", "run_prepare"]


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """The samples of one chat that is kept."""

    conversation: Conversation
    samples: tuple[ChatSample, ...]
    altered: tuple[str, ...]
    lost_turns: Counter[str]
    lost_samples: Counter[str]
    is_recorded: bool
    """taken from recorded completion tokens"""


class ChatPreparer:
    """Turns rows into tokenized samples; pure apart from the tokenizer."""

    def __init__(self, encoder: ChatEncoder, *, max_seq_len: int) -> None:
        self._encoder = encoder
        self._max_seq_len = max_seq_len

    def prepare(self, row: dict[str, Any], chat: Conversation) -> PreparedChat | str:
        """Tokenize one chat, or say by a key of `DROP_REASONS` why it gives no sample."""
        last = chat.last_answer
        if last is None:
            return "no_assistant_turn"
        if _is_blank(chat.messages[last]):
            return "empty_completion"
        try:
            recorded = self._join(row, chat)
            encoded = EncodedChat([recorded]) if recorded else self._encode(row, chat, last)
        except RecursionError:
            return "too_deep"
        except (TemplateError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError):
            return "template_error"
        if not encoded.samples:
            return next(iter(encoded.lost))
        return self._fit(chat, encoded, last, is_recorded=recorded is not None)

    def _join(self, row: dict[str, Any], chat: Conversation) -> ChatSample | None:
        return self._encoder.join_completion(
            chat.messages, row.get("completion_ids"), tools=chat.tools, thinking=chat.thinking
        )

    def _encode(self, row: dict[str, Any], chat: Conversation, last: int) -> EncodedChat:
        return self._encoder.encode(
            chat.messages[: last + 1],
            tools=chat.tools,
            thinking=chat.thinking,
            is_cut_off=row.get("finish_reason") == "length",
            enough_tokens=self._max_seq_len,
        )

    def _fit(
        self, chat: Conversation, encoded: EncodedChat, last: int, *, is_recorded: bool
    ) -> PreparedChat | str:
        altered = {
            "split": len(encoded.samples) > 1,
            "turns_unsupervised": bool(encoded.lost),
            "respelled": encoded.respelled > 0,
            "trailing_messages": last + 1 < len(chat.messages),
        }
        kept: list[ChatSample] = []
        lost: Counter[str] = Counter()
        for sample in encoded.samples:
            fitted, change = fit_sample(sample, self._max_seq_len)
            if fitted is None:
                lost[change] += 1
                continue
            kept.append(fitted)
            if change:
                altered[change] = True
        if not kept:
            return next(iter(lost))
        altered["samples_lost"] = bool(lost)
        return PreparedChat(
            chat,
            tuple(kept),
            tuple(name for name, happened in altered.items() if happened),
            encoded.lost,
            lost,
            is_recorded,
        )


def fit_sample(sample: ChatSample, max_seq_len: int) -> tuple[ChatSample | None, str]:
    """Cut a sample at the border of a turn, or inside its first answer where not even that is whole.

    Returns:
        The sample and what was altered (a key of `ALTER_REASONS`, or nothing); None and a key of
        `DROP_REASONS` when nothing is left to learn from.
    """
    change = ""
    if len(sample.input_ids) > max_seq_len:
        whole = [turn for turn in sample.turns if turn.end <= max_seq_len]
        if whole:
            sample, change = ChatSample(sample.input_ids[: whole[-1].end], tuple(whole)), "later_turns_cut"
        else:
            first = sample.turns[0]
            if first.start + 2 > max_seq_len:
                return None, "too_long"
            cut = Turn(first.message, first.start, max_seq_len)
            sample, change = ChatSample(sample.input_ids[:max_seq_len], (cut,)), "answer_cut"
    # An anchor needs a supervised successor and at least one token of context before it.
    if not any(turn.end - max(turn.start, 1) >= 2 for turn in sample.turns):
        return None, "no_anchor"
    return sample, change


def is_held_out(messages: Sequence[dict[str, Any]], ratio: float) -> bool:
    """Whether a chat is held out: by a hash of its first question, so answers do not move it."""
    digest = hashlib.sha256(split_key(list(messages))).digest()
    return int.from_bytes(digest[:8], "big") < ratio * 2**64


def run_prepare(args: argparse.Namespace) -> int:
    """Carry out `prepare`; returns the exit code.

    Raises:
        ConfigError: flags, tokenizer, or an output folder with data files of someone else or in use.
        DataError: the input is unreadable or holds no usable chat.
        DependencyError: pyarrow is missing.
    """
    if args.max_seq_len < 3:
        raise ConfigError(f"--max-seq-len must be at least 3: {args.max_seq_len}")
    if not 0.0 <= args.held_out_ratio < 1.0:
        raise ConfigError(f"--held-out-ratio must be from 0 to below 1: {args.held_out_ratio}")
    tokenizer = get_tokenizer(args.target_model, needs_chat_template=True)
    check_thinking(tokenizer, args.thinking)
    encoder = ChatEncoder(
        tokenizer, stop_ids=stop_token_ids(args.target_model, tokenizer), thinking=_thinking(args)
    )
    files = _input_files(args.input)
    refuse_inside(files, args.output)
    with locked_output(args.output):
        staging = Staging(args.output, _identity(args, files))
        was_interrupted, summary = staging.finish_interrupted()
        if was_interrupted:
            log.info("put the files of an earlier run in place that was cut off there")
        if summary is None:
            try:
                summary = _prepare_all(staging, files, encoder, args)
            except BaseException:
                staging.abandon()
                raise
    short = {
        name: {reason: entry["count"] for reason, entry in value.items()}
        if name in ("dropped", "altered")
        else value
        for name, value in summary.items()
    }
    sys.stdout.write(json.dumps(short) + "\n")
    return 0


def _prepare_all(
    staging: Staging, files: Sequence[Path], encoder: ChatEncoder, args: argparse.Namespace
) -> Mapping[str, Any]:
    """Read everything that is left, put the result in place, and return the report."""
    if staging.open():
        log.info("going on behind row %d of %s", staging.progress.row, files[staging.progress.file].name)
    with unchanging("--input", lambda: _input_files(args.input)):
        report = _read_all(staging, files, ChatPreparer(encoder, max_seq_len=args.max_seq_len), args)
    if not report.train:
        staging.discard()
        raise DataError(
            f"no usable chat for training in {args.input}: {report.render()}, "
            f"held out {report.held_out}; first rows: {_first_places(report)}"
        )
    summary = {
        "source": args.input.name,
        "files": len(files),
        "max_seq_len": args.max_seq_len,
        "held_out_ratio": args.held_out_ratio,
        "thinking": args.thinking,
        **report.as_dict(),
    }
    staging.publish(summary)
    return summary


def _read_all(
    staging: Staging, files: Sequence[Path], preparer: ChatPreparer, args: argparse.Namespace
) -> PrepareReport:
    report, progress = staging.report, staging.progress
    pace = _Pace(report)
    for row in _rows_from(staging, files):
        report.rows += 1
        outcome = row.fault or _prepare_row(staging, preparer, row)
        if isinstance(outcome, str):
            report.drop(outcome, row)
        else:
            _keep(staging, row, outcome, args.held_out_ratio)
        progress.row = row.number
        if pace.is_commit_due():
            staging.commit()
        pace.tell(files[progress.file].name)
    staging.commit()
    log.info("%s; %d samples for training, %d held out", report.render(), report.train, report.held_out)
    return report


def _rows_from(staging: Staging, files: Sequence[Path]) -> Iterator[SourceRow]:
    progress = staging.progress
    for index in range(progress.file, len(files)):
        if index != progress.file:
            progress.file, progress.row = index, 0
        yield from read_rows(files[index], skip=progress.row, columns=CHAT_COLUMNS)


def _prepare_row(staging: Staging, preparer: ChatPreparer, row: SourceRow) -> PreparedChat | str:
    try:
        chat = parse_conversation(row.value)
    except RecursionError:
        return "too_deep"
    if isinstance(chat, str):
        return chat
    if not staging.add_digest(chat.digest):
        return "duplicate"
    return preparer.prepare(row.value, chat)


def _keep(staging: Staging, row: SourceRow, kept: PreparedChat, ratio: float) -> None:
    report, chat = staging.report, kept.conversation
    report.kept += 1
    report.from_completion_ids += kept.is_recorded
    report.lost_turns.update(kept.lost_turns)
    report.lost_samples.update(kept.lost_samples)
    report.count_domain(chat.domain)
    for reason in kept.altered:
        report.alter(reason, row)
    held_out = is_held_out(chat.messages, ratio)
    for number, sample in enumerate(kept.samples, start=1):
        mask = np.asarray(sample.loss_mask, dtype=np.int8)
        name = chat.id if len(kept.samples) == 1 else f"{chat.id}#{number}"
        prepared = PreparedSample(name, chat.domain, np.asarray(sample.input_ids, dtype=np.int32), mask)
        staging.write(prepared, is_held_out=held_out)
        report.tokens += len(mask)
        report.supervised_tokens += int(mask.sum())
    if held_out:
        report.held_out += len(kept.samples)
        staging.write_prompt(_as_prompt(chat, kept.samples[-1].turns[-1].message))
    else:
        report.train += len(kept.samples)


def _as_prompt(chat: Conversation, answer: int) -> dict[str, Any]:
    entry: dict[str, Any] = {"id": chat.id, "domain": chat.domain, "messages": chat.messages[:answer]}
    if chat.tools:
        entry["tools"] = chat.tools
    if chat.thinking is not None:
        entry["thinking"] = chat.thinking
    return entry


class _Pace:
    """When to make progress durable and when to speak of it."""

    def __init__(self, report: PrepareReport) -> None:
        self._report = report
        self._first_rows = report.rows
        self._started = self._committed = self._told = time.monotonic()
        self._committed_tokens = report.tokens

    def is_commit_due(self) -> bool:
        now = time.monotonic()
        is_due = (
            self._report.tokens - self._committed_tokens >= COMMIT_TOKENS
            or now - self._committed >= COMMIT_SECONDS
        )
        if is_due:
            self._committed, self._committed_tokens = now, self._report.tokens
        return is_due

    def tell(self, name: str) -> None:
        now = time.monotonic()
        if now - self._told < PROGRESS_SECONDS:
            return
        self._told = now
        rate = (self._report.rows - self._first_rows) / (now - self._started)
        log.info("in %s, %.0f rows/s: %s", name, rate, self._report.render())


def _input_files(path: Path) -> list[Path]:
    if not path.exists():
        raise DataError(f"cannot read: {path}: No such file or directory")
    files = list_data_files(path) if path.is_dir() else [path]
    special = [file for file in files if not file.is_file()]
    if special:
        raise DataError(f"--input is neither a file nor a folder: {special[0]}; it is read more than once")
    return files


def _thinking(args: argparse.Namespace) -> bool | None:
    return None if args.thinking == "template" else args.thinking == "on"


def _identity(args: argparse.Namespace, files: Sequence[Path]) -> dict[str, Any]:
    """What must be the same for a run to go on where another one was killed."""
    digest = hashlib.sha256()
    for name in (*TOKENIZER_FILES, "chat_template.jinja", "generation_config.json", "config.json"):
        path = args.target_model / name
        digest.update(name.encode() + (path.read_bytes() if path.is_file() else b""))
    return {
        "format": FORMAT,
        "max_seq_len": args.max_seq_len,
        "held_out_ratio": args.held_out_ratio,
        "thinking": args.thinking,
        "tokenizer": digest.hexdigest(),
        "files": [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files],
    }


def _is_blank(message: dict[str, Any]) -> bool:
    return not message["content"].strip() and not message.get("tool_calls")


def _first_places(report: PrepareReport) -> str:
    places = [
        f"{shown[0]['file']}:{shown[0]['row']} {reason}"
        for reason, shown in report.examples.items()
        if reason in report.dropped
    ]
    return ", ".join(places[:5]) or "none"
