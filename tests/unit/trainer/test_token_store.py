"""Tokens in memory and in the mapped file read the same, and cost no memory beyond the limit."""

from __future__ import annotations

import json
import tempfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.tiny import VOCAB, write_tiny_corpus
from trainer.data import corpus as corpus_module
from trainer.data import token_store as store_module
from trainer.data.corpus import Corpus
from trainer.data.digests import DIGEST_BYTES, DigestSet
from trainer.data.token_store import TokenStore


def filled(samples, **limits):
    store = TokenStore(**limits)
    for ids in samples:
        store.append(np.asarray(ids, dtype=np.int32), np.asarray(ids, dtype=np.int32) % 2 == 0)
    store.seal()
    return store


@given(
    st.lists(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=9), max_size=30),
    st.integers(9, 40),
    st.integers(0, 60),
)
def test_every_sample_comes_back_wherever_it_lies(samples, chunk, memory):
    store = filled(samples, chunk_tokens=chunk, memory_tokens=memory)

    start = 0
    for ids in samples:
        read, mask = store.read(start, start + len(ids))
        assert read.tolist() == ids
        assert mask.tolist() == [token % 2 == 0 for token in ids]
        start += len(ids)
    assert store.tokens == start
    assert store.mapped_tokens >= start - memory - chunk
    assert [token for ids in store.iter_ids() for token in ids] == [token for ids in samples for token in ids]


def test_mapped_samples_cannot_be_written_to_and_leave_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    store = filled([[1, 2, 3]] * 10, chunk_tokens=6, memory_tokens=0)

    assert store.mapped_tokens == 30
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="read-only"):
        store.read(0, 3)[0][0] = 5


def test_without_room_for_the_file_tokens_stay_in_memory_and_the_log_says_so(monkeypatch, caplog):
    def full(**_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)

    store = filled([[1, 2, 3]] * 10, chunk_tokens=6, memory_tokens=0)

    assert store.read(27, 30)[0].tolist() == [1, 2, 3]
    assert store.mapped_tokens == 0
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "No space left on device" in caplog.text
    assert "TMPDIR" in caplog.text


def test_a_file_takes_one_descriptor_for_any_number_of_chunks():
    before = len(list(Path("/proc/self/fd").iterdir()))

    store = filled([[1, 2, 3]] * 200, chunk_tokens=3, memory_tokens=0)

    assert store.mapped_tokens == 600
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 2


def test_a_corpus_has_the_same_digest_and_samples_in_memory_and_mapped(tmp_path, monkeypatch):
    write_tiny_corpus(tmp_path)
    held = Corpus.open(tmp_path, max_seq_len=64, vocab_size=VOCAB)
    monkeypatch.setattr(corpus_module, "TokenStore", lambda: TokenStore(memory_tokens=64, chunk_tokens=64))
    mapped = Corpus.open(tmp_path, max_seq_len=64, vocab_size=VOCAB)

    assert mapped._store.mapped_tokens > 100
    assert mapped.digest() == held.digest()
    assert mapped.lengths.tolist() == held.lengths.tolist()
    for left, right in zip(held, mapped, strict=True):
        assert left.input_ids_T.tolist() == right.input_ids_T.tolist()
        assert left.loss_mask_T.tolist() == right.loss_mask_T.tolist()
        assert left.domain == right.domain


def test_memory_of_a_corpus_does_not_grow_with_its_tokens(tmp_path, monkeypatch):
    monkeypatch.setattr(store_module, "CHUNK_TOKENS", 4096)
    monkeypatch.setattr(corpus_module, "TokenStore", lambda: TokenStore(memory_tokens=0, chunk_tokens=4096))
    row = json.dumps({"input_ids": [7] * 200, "prompt_len": 3}) + "\n"
    peaks = []
    for count in (200, 4200):
        path = tmp_path / f"{count}.jsonl"
        path.write_text(row * count)
        tracemalloc.start()
        corpus = Corpus.open(path, max_seq_len=64_000, vocab_size=VOCAB)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert len(corpus) == count

    # 4,000 samples more: 4 MB of tokens and masks; kept are 10 bytes a sample and 200 small chunk records.
    assert peaks[1] - peaks[0] < 400_000, peaks


digests = st.binary(min_size=DIGEST_BYTES, max_size=DIGEST_BYTES).filter(any)


@given(st.lists(digests, max_size=300), st.lists(st.integers(0, 299), max_size=50))
def test_a_digest_is_new_exactly_once(members, repeats):
    table, reference = DigestSet(capacity=4), set()
    members += [members[index] for index in repeats if index < len(members)]

    for member in members:
        assert table.add(member) == (member not in reference)
        reference.add(member)

    assert len(table) == len(reference)


def test_digests_that_collide_are_told_apart():
    table = DigestSet(capacity=4)
    members = [bytes(8) + number.to_bytes(8, "big") for number in range(1, 200)]

    assert all(table.add(member) for member in members)
    assert not any(table.add(member) for member in members)


def test_a_digest_takes_at_most_43_bytes():
    table = DigestSet()
    for number in range(1, 5001):
        table.add(number.to_bytes(DIGEST_BYTES, "little"))
    assert table.size_bytes / len(table) <= 43


@pytest.mark.parametrize("wrong", [bytes(DIGEST_BYTES), b"short", bytes(17)])
def test_what_is_no_digest_is_refused(wrong):
    with pytest.raises(ValueError, match="not a digest of 16 bytes"):
        DigestSet().add(wrong)
