"""Replicas of the drafter: one step together, the same sums and the same parameters, and no endless wait."""

import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.tiny_drafter import make_drafter, make_ends, make_pack, make_tokens
from trainer.drafter.anchors import block_labels, select_anchors
from trainer.drafter.loss import microbatch_sums
from trainer.errors import PipelineError, StalledError, WorkerDiedError
from trainer.optim.adamw import AdamWSettings, MasterAdamW
from trainer.optim.replicas import ReplicaGroup, StepShare
from trainer.pipeline.meeting import Meeting
from trainer.pipeline.workers import Board, WorkerGroup

SETTINGS = AdamWSettings(beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, grad_clip=1.0)
DOCUMENTS = ((9, 5), (31,), (12, 12, 7), (8,), (40, 3), (17,))


def run_threads(board, works):
    """Run one function per replica to its end; the first error is raised as the trainer would."""
    group = WorkerGroup(board)
    for number, work in enumerate(works):
        group.add(f"drafter-{number}", work)
    group.start()
    assert group.join(timeout_s=240.0), f"still running: {group.alive}"
    group.raise_first()


def names(count):
    return [f"drafter-{number}" for number in range(count)]


def packs_of(documents, *, without_anchor=()):
    """Packs of unequal length; the given places carry no supervised token at all."""
    return [
        make_pack(
            make_tokens(lengths, seed=place, supervised=0.0 if place in without_anchor else 0.8), seed=place
        )
        for place, lengths in enumerate(documents)
    ]


def accumulate(drafter, optimizer, ends, pack, number):
    anchors = select_anchors(pack.tokens, 6, block_size=4, rng=np.random.default_rng(number))
    labels = block_labels(pack.tokens, anchors, block_size=4, gamma=4.0)
    sums = microbatch_sums(
        drafter,
        ends,
        pack,
        anchors,
        labels,
        noise_sigma=0.02,
        noise_seed=number,
        head_chunk_rows=7,
        attention="sdpa",
    )
    optimizer.accumulate(sums.numerator, sums.denominator)


def train_once(packs, replicas):
    """One step over all packs, dealt in turns.

    Returns the global gradient and loss before the update, and each replica's parameters after it.
    """
    board = Board(stall_s=60.0)
    group, ends = ReplicaGroup(board, names(replicas)), make_ends()
    results = [None] * replicas

    def work(number):
        drafter = make_drafter()
        optimizer = MasterAdamW(drafter.named_parameters(), SETTINGS)
        mine = list(enumerate(packs))[number::replicas]
        for place, pack in mine:
            accumulate(drafter, optimizer, ends, pack, place)
        share = StepShare(
            packs=tuple((0, place) for place, _ in mine),
            counts=(len(mine),),
            is_short=False,
            wants_stop=False,
        )
        decision = group.close_step(number, share)
        group.sum_tensors(number, optimizer.pending_sums())
        *gradients, numerator, denominator = [value.clone() for value in optimizer.pending_sums()]
        optimizer.step(0.01)
        results[number] = {
            "decision": decision,
            "gradients": [gradient / denominator.clamp(min=1e-12) for gradient in gradients],
            "loss": numerator / denominator,
            "parameters": {name: p.detach().clone() for name, p in drafter.named_parameters()},
            "checksum": int(optimizer.checksum()),
            "skipped": float(optimizer.skipped),
        }

    run_threads(board, [lambda number=number: work(number) for number in range(replicas)])
    return results


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_golden_20_replicas_with_unequal_packs_make_the_same_gradient_and_loss(replicas):
    packs = packs_of(DOCUMENTS)
    (reference,) = train_once(packs, 1)

    results = train_once(packs, replicas)

    for result in results:
        for mine, theirs in zip(result["gradients"], reference["gradients"], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(result["loss"], reference["loss"], rtol=1e-6, atol=1e-6)
        assert sorted(result["decision"].packs) == [(0, place) for place in range(len(packs))]
        assert result["decision"].counts == (len(packs),)
    assert max(gradient.abs().max() for gradient in reference["gradients"]) > 1e-3


@pytest.mark.parametrize("replicas", [2, 3])
def test_golden_20_replicas_stay_equal_to_the_last_bit(replicas):
    results = train_once(packs_of(DOCUMENTS), replicas)

    first = results[0]
    for other in results[1:]:
        assert other["checksum"] == first["checksum"]
        assert all(torch.equal(other["parameters"][n], value) for n, value in first["parameters"].items())


@pytest.mark.parametrize("case", ["pack without anchor", "replica without pack"])
def test_golden_21_replica_without_any_anchor_changes_nothing(case):
    documents = DOCUMENTS[:2]
    (reference,) = train_once(packs_of(documents), 1)
    if case == "pack without anchor":
        packs = packs_of([*documents, (20,)], without_anchor={2})
    else:
        packs = packs_of(documents)

    results = train_once(packs, 3)

    for result in results:
        for mine, theirs in zip(result["gradients"], reference["gradients"], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(result["loss"], reference["loss"], rtol=1e-6, atol=1e-6)


def test_golden_21_step_without_any_anchor_at_all_moves_no_parameter():
    before = {name: p.detach().clone() for name, p in make_drafter().named_parameters()}

    results = train_once(packs_of(DOCUMENTS[:3], without_anchor={0, 1, 2}), 3)

    for result in results:
        assert all(torch.equal(result["parameters"][name], value) for name, value in before.items())
        assert result["skipped"] == 0


def test_nonfinite_gradient_of_one_replica_skips_the_step_on_all():
    packs = packs_of(DOCUMENTS[:3])
    packs[1].features_TLD[3] = float("nan")
    before = {name: p.detach().clone() for name, p in make_drafter().named_parameters()}

    results = train_once(packs, 3)

    for result in results:
        assert result["skipped"] == 1
        assert all(torch.equal(result["parameters"][name], value) for name, value in before.items())


@given(
    shares=st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=4),
    accumulation=st.integers(1, 3),
)
@settings(max_examples=60, deadline=None)
def test_step_is_dropped_only_when_a_stop_cut_it_short_or_nothing_came(shares, accumulation):
    board = Board(stall_s=60.0)
    group = ReplicaGroup(board, names(len(shares)))
    results = [None] * len(shares)

    def work(number):
        count, wants_stop = shares[number]
        count = min(count, accumulation)
        share = StepShare(
            packs=tuple((number, place) for place in range(count)),
            counts=(count, 1),
            is_short=count < accumulation,
            wants_stop=wants_stop,
        )
        results[number] = group.close_step(number, share)

    run_threads(board, [lambda number=number: work(number) for number in range(len(shares))])

    counts = [min(count, accumulation) for count, _ in shares]
    is_cut = any(stop for _, stop in shares) and any(count < accumulation for count in counts)
    assert len(set(results)) == 1
    assert results[0].is_applied == (sum(counts) > 0 and not is_cut)
    assert results[0].counts == (sum(counts), len(shares))
    assert len(results[0].packs) == sum(counts)


def test_replicas_that_come_apart_are_named():
    board = Board(stall_s=60.0)
    group = ReplicaGroup(board, names(3))
    checksums = [5, 5, 6]

    with pytest.raises(PipelineError, match="have come apart: drafter-2 no longer equal drafter-0") as caught:
        run_threads(
            board,
            [lambda number=number: group.compare(number, checksums[number]) for number in range(3)],
        )

    assert caught.value.exit_code == 7


def test_checksum_follows_every_bit_and_every_place():
    drafter = make_drafter()
    optimizer = MasterAdamW(drafter.named_parameters(), SETTINGS)
    whole = int(optimizer.checksum())
    weight = drafter.get_parameter("fc.weight")

    with torch.no_grad():
        weight.view(torch.int32)[0, 0] ^= 1
    flipped = int(optimizer.checksum())
    with torch.no_grad():
        weight.view(torch.int32)[0, 0] ^= 1

    assert flipped != whole
    assert int(optimizer.checksum()) == whole
    assert 0 <= whole < 1 << 52


def test_meeting_gives_every_member_the_conclusion_of_its_own_round():
    board = Board(stall_s=60.0)
    meeting = Meeting(board, 3)
    seen = [[], [], []]

    def work(member):
        for turn in range(200):
            seen[member].append(meeting.hold(member, (turn, member), tuple))

    run_threads(board, [lambda member=member: work(member) for member in range(3)])

    expected = [tuple((turn, member) for member in range(3)) for turn in range(200)]
    assert seen == [expected] * 3


def test_member_that_dies_ends_the_meeting_for_the_others():
    board = Board(stall_s=60.0)
    meeting = Meeting(board, 3)

    def dies():
        raise ValueError("no gradient")

    with pytest.raises(WorkerDiedError, match="drafter-2 died: ValueError: no gradient"):
        run_threads(board, [lambda: meeting.hold(0, 1, sum), lambda: meeting.hold(1, 1, sum), dies])


def test_member_that_never_comes_ends_the_meeting_as_stalled():
    now = [0.0]
    board = Board(stall_s=10.0, monotonic=lambda: now[0])
    meeting = Meeting(board, 2)
    caught = []

    def waits():
        try:
            meeting.hold(1, 0, sum)
        except StalledError as error:
            caught.append(error)

    thread = threading.Thread(target=waits, daemon=True)
    thread.start()
    now[0] = 11.0
    thread.join(120)

    assert "nothing moved for 11 s" in str(caught[0])
