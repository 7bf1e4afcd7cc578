"""The epoch plan: each sample once, never above the budget, one bucket a batch, same for the same seed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.buckets import bucket_edges, bucket_of, build_epoch_plan
from trainer.errors import ConfigError, DataError

EDGES = (4, 8, 16, 32, 48, 64)
lengths_lists = st.lists(st.integers(1, 64), max_size=80)


def plan(lengths, *, seed=0, epoch=0, token_budget=128, max_batch_size=8, edges=EDGES):
    return build_epoch_plan(
        lengths,
        seed=seed,
        epoch=epoch,
        token_budget=token_budget,
        max_batch_size=max_batch_size,
        edges=edges,
    )


@given(lengths_lists, st.integers(0, 2**31), st.integers(0, 9), st.integers(64, 512), st.integers(1, 20))
def test_plan_deals_every_sample_once_within_the_limits(lengths, seed, epoch, budget, size):
    items = plan(lengths, seed=seed, epoch=epoch, token_budget=budget, max_batch_size=size)

    assert sorted(sample for item in items for sample in item.sample_ids) == list(range(len(lengths)))
    assert [item.pack_id for item in items] == list(range(len(items)))
    for item in items:
        longest = max(lengths[sample] for sample in item.sample_ids)
        assert len(item.sample_ids) * longest <= budget
        assert 1 <= len(item.sample_ids) <= size
        assert {bucket_of(lengths[sample], EDGES) for sample in item.sample_ids} == {item.bucket}
        assert item.epoch == epoch


@given(lengths_lists, st.integers(0, 2**31), st.integers(0, 9))
def test_plan_is_a_function_of_seed_and_epoch(lengths, seed, epoch):
    assert plan(lengths, seed=seed, epoch=epoch) == plan(lengths, seed=seed, epoch=epoch)


@given(lengths_lists, st.integers(0, 2**31), st.integers(0, 9))
def test_every_epoch_has_the_same_number_of_packs(lengths, seed, epoch):
    assert len(plan(lengths, seed=seed, epoch=epoch)) == len(plan(lengths, seed=0, epoch=0))


def test_a_plan_of_an_earlier_release_comes_back():
    items = plan([3, 60, 5, 17, 3, 64, 8, 60], seed=7, epoch=2)

    # Written by the first release: a run that resumes under a newer one must find its packs again.
    assert [(item.bucket, item.sample_ids) for item in items] == [
        (1, (2, 6)),
        (0, (4, 0)),
        (3, (3,)),
        (5, (1, 7)),
        (5, (5,)),
    ]


def test_seed_and_epoch_both_change_the_order():
    lengths = [1 + n % 64 for n in range(100)]
    orders = {
        tuple(item.sample_ids for item in plan(lengths, seed=seed, epoch=epoch))
        for seed in range(3)
        for epoch in range(3)
    }

    assert len(orders) == 9


def test_batches_of_different_buckets_are_mixed():
    buckets = [item.bucket for item in plan([3, 60] * 100)]

    assert buckets != sorted(buckets)
    assert buckets != sorted(buckets, reverse=True)


def test_empty_corpus_gives_an_empty_plan():
    assert plan([]) == []


def test_default_edges_are_those_of_the_documented_lengths():
    assert bucket_edges(8192) == (512, 1024, 2048, 4096, 6144, 8192)


@given(st.integers(1, 100_000))
def test_default_edges_ascend_to_the_longest_length(longest):
    edges = bucket_edges(longest)

    assert list(edges) == sorted(set(edges))
    assert edges[0] >= 1
    assert edges[-1] == longest


@pytest.mark.parametrize(("length", "bucket"), [(1, 0), (4, 0), (5, 1), (8, 1), (64, 5)])
def test_edges_are_inclusive(length, bucket):
    assert bucket_of(length, EDGES) == bucket


@pytest.mark.parametrize("length", [0, -1, 65])
def test_a_length_outside_the_buckets_is_refused(length):
    with pytest.raises(DataError, match=f"outside the buckets .*: {length}"):
        bucket_of(length, EDGES)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_budget": 63}, r"token_budget is below the longest sample \(64 tokens\): 63"),
        ({"token_budget": 0}, "token_budget must be at least 1: 0"),
        ({"max_batch_size": 0}, "max_batch_size must be at least 1: 0"),
        ({"edges": ()}, "bucket edges must be positive and ascending"),
        ({"edges": (8, 8, 64)}, "bucket edges must be positive and ascending"),
        ({"edges": (0, 64)}, "bucket edges must be positive and ascending"),
    ],
)
def test_arguments_that_cannot_work_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        plan([64, 10], **changes)


def test_max_seq_len_below_one_is_refused():
    with pytest.raises(ConfigError, match="max_seq_len must be at least 1: 0"):
        bucket_edges(0)
