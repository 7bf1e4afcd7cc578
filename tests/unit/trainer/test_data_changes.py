"""Data that somebody writes while it is read: never parts of two sets, always one clear error."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support import killed_prepare
from tests.support.tiny import VOCAB, tiny_samples, tiny_target, write_tiny_corpus
from trainer.data import corpus as corpus_module
from trainer.data import prepare as prepare_module
from trainer.data.corpus import Corpus
from trainer.data.prepare import run_prepare
from trainer.data.staging import PARTIAL_DIR, Staging
from trainer.errors import DataError


def write_set(folder: Path, seed: int) -> None:
    """Two shards, as a prepare puts them in place: each by rename."""
    folder.mkdir(exist_ok=True)
    for number in range(2):
        rows = tiny_samples(8, seed=seed + number)
        scratch = folder / "scratch"
        pq.write_table(pa.Table.from_pylist(rows), scratch)
        scratch.replace(folder / f"train-{number:05d}.parquet")


def meddle_after_first_row(monkeypatch: pytest.MonkeyPatch, meddle) -> None:
    """Let `meddle` run once, when the corpus has read its first row."""
    original, waiting = corpus_module.parse_row, [meddle]

    def parse(row, **limits):
        if waiting:
            waiting.pop()()
        return original(row, **limits)

    monkeypatch.setattr(corpus_module, "parse_row", parse)


@pytest.mark.parametrize(
    ("meddle", "named"),
    [
        (lambda folder: write_set(folder, 50), "train-00000"),
        (lambda folder: (folder / "train-00001.parquet").unlink(), "train-00001"),
        (lambda folder: write_tiny_corpus(folder), "train.jsonl"),
        (lambda folder: os.utime(folder / "train-00000.parquet", ns=(1, 1)), "train-00000"),
    ],
    ids=["replaced", "removed", "added", "written"],
)
def test_a_set_that_changes_while_it_is_read_is_refused(tmp_path, monkeypatch, meddle, named) -> None:
    write_set(tmp_path / "data", 0)
    meddle_after_first_row(monkeypatch, lambda: meddle(tmp_path / "data"))

    with pytest.raises(DataError, match=named):
        Corpus.open(tmp_path / "data", max_seq_len=64, vocab_size=VOCAB)

    assert len(Corpus.open(tmp_path / "data", max_seq_len=64, vocab_size=VOCAB)) >= 8


def test_a_set_is_read_while_a_prepare_in_the_same_folder_has_not_come_to_its_end(
    tmp_path, monkeypatch
) -> None:
    write_set(tmp_path / "data", 0)
    meddle_after_first_row(monkeypatch, lambda: Staging(tmp_path / "data", {"seed": 1}).open())

    assert len(Corpus.open(tmp_path / "data", max_seq_len=64, vocab_size=VOCAB)) == 16


def test_unfinished_work_for_a_set_is_told_when_the_set_is_read(tmp_path, caplog) -> None:
    write_set(tmp_path / "data", 0)
    Corpus.open(tmp_path / "data", max_seq_len=64, vocab_size=VOCAB)
    assert "has not come to its end" not in caplog.text

    staging = Staging(tmp_path / "data", {"seed": 1})
    staging.open()
    staging.commit()
    Corpus.open(tmp_path / "data", max_seq_len=64, vocab_size=VOCAB)

    assert caplog.text.count("has not come to its end: the set that stands there is read") == 1


def test_held_out_samples_of_a_half_moved_set_are_refused(tmp_path) -> None:
    held_out = tmp_path / "data" / "held_out"
    write_tiny_corpus(held_out)
    (tmp_path / "data" / PARTIAL_DIR).mkdir()
    (tmp_path / "data" / PARTIAL_DIR / "state.json").write_text('{"phase": "moving"}')

    with pytest.raises(DataError, match="not whole"):
        Corpus.open(held_out, max_seq_len=64, vocab_size=VOCAB)


def test_input_that_grows_while_prepare_reads_it_is_refused_and_the_next_run_has_all_of_it(
    tmp_path, monkeypatch, capsys
) -> None:
    source, output = tmp_path / "chats.jsonl", tmp_path / "out"

    def append(first: int) -> None:
        with source.open("a") as stream:
            for number in range(first, first + 6):
                turns = [{"role": "user", "content": f"q {number}"}, {"role": "assistant", "content": "yes"}]
                stream.write(json.dumps({"id": f"r{number}", "messages": turns}) + "\n")

    append(0)
    args = killed_prepare.arguments(tiny_target(tmp_path), source, output)
    args.held_out_ratio = 0.0
    original, waiting = prepare_module.parse_conversation, [6]

    def parse(value):
        if waiting:
            append(waiting.pop())
        return original(value)

    monkeypatch.setattr(prepare_module, "parse_conversation", parse)

    with pytest.raises(DataError, match="--input changed while it was read"):
        run_prepare(args)
    assert not list(output.glob("*.parquet"))

    run_prepare(args)
    assert json.loads(capsys.readouterr().out)["kept"] == 12
    assert not (output / PARTIAL_DIR).exists()
