"""Reading the tokenized set: good rows survive unchanged, each bad one is counted under its reason."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.tiny import VOCAB, tiny_samples, write_tiny_corpus
from trainer.data import corpus as corpus_module
from trainer.data.corpus import SKIP_REASONS, Corpus, Sample, parse_row
from trainer.errors import DataError

GOOD = {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1], "domain": "qa"}


def open_rows(folder, rows, *, max_seq_len=64):
    (folder / "a.jsonl").write_text(
        "".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows)
    )
    return Corpus.open(folder, max_seq_len=max_seq_len, vocab_size=VOCAB)


def as_rows(corpus):
    return [
        {
            "input_ids": s.input_ids_T.tolist(),
            "loss_mask": s.loss_mask_T.astype(int).tolist(),
            "domain": s.domain,
        }
        for s in corpus
    ]


def write_parquet(folder, rows):
    pq.write_table(pa.Table.from_pylist(rows), folder / "x.parquet")


def write_arrow_stream(folder, rows):
    table = pa.Table.from_pylist(rows)
    with pa.OSFile(str(folder / "x.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)


def write_arrow_file(folder, rows):
    table = pa.Table.from_pylist(rows)
    with pa.OSFile(str(folder / "x.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)


def write_jsonl(folder, rows):
    write_tiny_corpus(folder, rows)


@pytest.mark.parametrize(
    "write",
    [write_parquet, write_arrow_stream, write_arrow_file, write_jsonl],
    ids=lambda write: write.__name__,
)
def test_every_format_gives_the_same_samples(tmp_path, write):
    rows = tiny_samples()
    write(tmp_path, rows)

    corpus = Corpus.open(tmp_path, max_seq_len=64, vocab_size=VOCAB)

    assert as_rows(corpus) == rows
    assert corpus.lengths.tolist() == [len(row["input_ids"]) for row in rows]
    assert corpus.report.kept == corpus.report.rows == len(rows)
    assert corpus.report.supervised_tokens == sum(sum(row["loss_mask"]) for row in rows)


def test_files_are_read_in_the_order_of_their_names_and_sub_folders_are_not_entered(tmp_path):
    for name, token in (("b.jsonl", 11), ("a.jsonl", 10), ("held_out/c.jsonl", 12)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(GOOD | {"input_ids": [token] * 4}) + "\n")

    corpus = Corpus.open(tmp_path, max_seq_len=64, vocab_size=VOCAB)

    assert [sample.input_ids_T[0] for sample in corpus] == [10, 11]


def test_one_file_can_be_named(tmp_path):
    write_tiny_corpus(tmp_path)

    assert len(Corpus.open(tmp_path / "train.jsonl", max_seq_len=64, vocab_size=VOCAB)) == 24


def test_prompt_len_stands_for_a_mask(tmp_path):
    corpus = open_rows(tmp_path, [{"input_ids": [5, 6, 7, 8], "prompt_len": 1}])

    assert corpus[0].loss_mask_T.tolist() == [False, True, True, True]


BAD_ROWS = {
    "bad_json": ["{not json", "{} {}", "{'a': 1}"],
    "not_an_object": [[1, 2], "3", "null"],
    "duplicate_key": ['{"input_ids": [5], "input_ids": [5, 6, 7, 8], "prompt_len": 1}'],
    "too_deep": ["[" * 100_000],
    "missing_input_ids": [{"loss_mask": [1]}],
    "missing_mask": [{"input_ids": [5, 6, 7]}],
    "wrong_type": [
        GOOD | {"input_ids": "text"},
        GOOD | {"input_ids": [1.5, 2.5, 3.0, 4.0]},
        GOOD | {"input_ids": [[5], [6], [7], [8]]},
        GOOD | {"input_ids": [5, None, 7, 8]},
        GOOD | {"input_ids": [5, [6], 7, 8]},
        GOOD | {"loss_mask": ["0", "0", "1", "1"]},
        GOOD | {"input_ids": [5, 2**70, 7, 8]},
        GOOD | {"input_ids": [5, True, 7, 8]},
        GOOD | {"input_ids": [False] * 4},
        GOOD | {"input_ids": [5.0, 6, 7, 8]},
        GOOD | {"loss_mask": [0.0, 0, 1, 1]},
    ],
    "empty": [GOOD | {"input_ids": [], "loss_mask": []}],
    "wrong_length": [GOOD | {"loss_mask": [0, 1, 1]}],
    "bad_mask": [GOOD | {"loss_mask": [0, 2, 1, 1]}],
    "bad_prompt_len": [{"input_ids": [5, 6], "prompt_len": value} for value in (-1, 3, True, "1", 1.0)],
    "token_out_of_vocabulary": [GOOD | {"input_ids": [5, 6, 7, VOCAB]}, GOOD | {"input_ids": [-1, 6, 7, 8]}],
    "no_supervised_token": [GOOD | {"loss_mask": [0, 0, 0, 0]}],
    "no_anchor": [GOOD | {"loss_mask": [0, 1, 0, 1]}, GOOD | {"input_ids": [5, 6], "loss_mask": [1, 1]}],
}


@pytest.mark.parametrize("reason", BAD_ROWS)
def test_a_bad_row_is_skipped_and_counted(tmp_path, reason):
    corpus = open_rows(tmp_path, [*BAD_ROWS[reason], GOOD])

    assert as_rows(corpus) == [GOOD]
    assert dict(corpus.report.skipped) == {reason: len(BAD_ROWS[reason])}
    assert corpus.report.examples[reason][0] == "a.jsonl:1"


def test_a_huge_row_is_skipped(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_module, "HUGE_TOKENS", 3)

    with pytest.raises(DataError, match="huge 1"):
        open_rows(tmp_path, [GOOD])


def test_every_reason_is_explained_and_tried():
    # bad_encoding and line_too_long are lines that are not written as JSON: see test_bad_rows.py
    assert set(BAD_ROWS) | {"huge", "bad_encoding", "line_too_long"} == set(SKIP_REASONS)


def test_a_long_row_is_cut_and_counted(tmp_path):
    corpus = open_rows(tmp_path, [GOOD | {"input_ids": [5] * 9, "loss_mask": [0] + [1] * 8}], max_seq_len=6)

    assert corpus.lengths.tolist() == [6]
    assert corpus.report.truncated == 1


def test_a_row_whose_answer_is_cut_away_entirely_is_skipped(tmp_path):
    cut = {"input_ids": [5] * 9, "prompt_len": 6}

    assert dict(open_rows(tmp_path, [cut, GOOD], max_seq_len=6).report.skipped) == {"no_supervised_token": 1}


def test_a_set_without_one_good_row_is_an_error_that_counts_reasons(tmp_path):
    with pytest.raises(DataError, match=r"no usable sample in .*0 of 2 rows kept.*bad_json 1.*empty 1"):
        open_rows(tmp_path, ["{", GOOD | {"input_ids": []}])


def test_missing_and_empty_folders_and_unknown_files_are_errors(tmp_path):
    with pytest.raises(DataError, match="data directory does not exist"):
        Corpus.open(tmp_path / "none", max_seq_len=8, vocab_size=VOCAB)
    with pytest.raises(DataError, match=r"no \.parquet, \.arrow, \.jsonl file directly in"):
        Corpus.open(tmp_path, max_seq_len=8, vocab_size=VOCAB)
    (tmp_path / "a.csv").write_text("1")
    with pytest.raises(DataError, match="data file must end in"):
        Corpus.open(tmp_path / "a.csv", max_seq_len=8, vocab_size=VOCAB)


@pytest.mark.parametrize("name", ["x.parquet", "x.arrow"])
def test_a_damaged_columnar_file_is_an_error_that_names_it(tmp_path, name):
    (tmp_path / name).write_bytes(b"PAR1 this is no table")

    with pytest.raises(DataError, match=rf"cannot read data file: .*{name}"):
        Corpus.open(tmp_path, max_seq_len=8, vocab_size=VOCAB)


@pytest.mark.parametrize("write", [write_parquet, write_arrow_stream], ids=lambda write: write.__name__)
def test_columns_with_gaps_or_foreign_types_are_counted_row_by_row(tmp_path, write):
    rows = [
        GOOD,
        GOOD | {"input_ids": None},
        GOOD | {"input_ids": [5, None, 7, 8]},
        GOOD | {"loss_mask": None},
    ]
    write(tmp_path, rows)

    report = Corpus.open(tmp_path, max_seq_len=64, vocab_size=VOCAB).report

    assert report.kept == 1
    assert dict(report.skipped) == {"missing_input_ids": 1, "wrong_type": 1, "missing_mask": 1}


def test_boolean_masks_and_text_columns_are_read_or_refused_by_type(tmp_path):
    write_parquet(tmp_path, [GOOD | {"loss_mask": [False, False, True, True]}])
    assert as_rows(Corpus.open(tmp_path, max_seq_len=64, vocab_size=VOCAB)) == [GOOD]

    write_parquet(tmp_path, [GOOD | {"input_ids": ["a", "b", "c", "d"]}])
    with pytest.raises(DataError, match="wrong_type 1"):
        Corpus.open(tmp_path, max_seq_len=64, vocab_size=VOCAB)


def test_a_slice_of_a_table_keeps_its_rows_apart(tmp_path):
    rows = tiny_samples()
    table = pa.Table.from_pylist(rows).slice(5, 7)
    with pa.OSFile(str(tmp_path / "x.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)

    assert as_rows(Corpus.open(tmp_path, max_seq_len=64, vocab_size=VOCAB)) == rows[5:12]


def test_the_digest_is_that_of_the_first_release(tmp_path):
    write_tiny_corpus(tmp_path)

    # Checkpoints hold it: a resume on the same data must not take them for other data.
    assert Corpus.open(tmp_path, max_seq_len=64, vocab_size=VOCAB).digest() == (
        "1346e63591d44d2fb503290c080649c1db9323af18ce8710f745ad821a8e287a"
    )


def test_samples_cannot_be_written_to(tmp_path):
    corpus = open_rows(tmp_path, [GOOD])

    with pytest.raises(ValueError, match="read-only"):
        corpus[0].input_ids_T[0] = 1


def test_slices_and_negative_indices_work_as_for_a_list(tmp_path):
    write_tiny_corpus(tmp_path)
    corpus = Corpus.open(tmp_path, max_seq_len=64, vocab_size=VOCAB)

    assert np.array_equal(corpus[-1].input_ids_T, corpus[len(corpus) - 1].input_ids_T)
    assert len(corpus[2:5]) == 3
    with pytest.raises(IndexError):
        corpus[len(corpus)]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text("ab1", max_size=5),
    lambda inner: (
        st.lists(inner, max_size=5) | st.dictionaries(st.text("ab1", max_size=5), inner, max_size=3)
    ),
    max_leaves=10,
)


@given(
    st.fixed_dictionaries(
        {}, optional={"input_ids": json_values, "loss_mask": json_values, "prompt_len": json_values}
    )
)
def test_no_json_row_breaks_the_reader(row):
    outcome = parse_row(row, max_seq_len=16, vocab_size=VOCAB)

    if isinstance(outcome, Sample):
        assert len(outcome.input_ids_T) == len(outcome.loss_mask_T) <= 16
    else:
        assert outcome in SKIP_REASONS
