"""Several machines: who is which, who gets which packs, and what they must have in common."""

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.trainer.test_replicas import names, run_threads
from trainer.config import CheckpointConfig, EvalConfig, PathsConfig, QueueConfig, TrainConfig
from trainer.data.sampler import PackSampler, take_share
from trainer.errors import ConfigError, PipelineError, StalledError
from trainer.flags import World, find_world
from trainer.machines import Machines, exchange_limit_s
from trainer.optim.replicas import ReplicaGroup, StepShare
from trainer.pipeline.nodes import Nodes
from trainer.pipeline.workers import Board


class Table:
    """Where the ranks of a test exchange rows; one thread is one rank."""

    def __init__(self, size):
        self._barrier = threading.Barrier(size, timeout=120)
        self._rows = [None] * size

    def exchange(self, rank, row):
        self._rows[rank] = row
        self._barrier.wait()
        rows = list(self._rows)
        self._barrier.wait()
        return rows


class TableNodes(Nodes):
    """A link whose collectives go over a table instead of a network."""

    def __init__(self, rank, size, table):
        self.rank, self.size, self._table = rank, size, table

    def gather(self, values):
        return [list(row) for row in self._table.exchange(self.rank, list(values))]

    def share(self, record):
        return self._table.exchange(self.rank, record)[0]


def run_ranks(work, size=2):
    """Run `work(rank, nodes)` on a thread per rank; returns results or errors by rank."""
    table, outcomes = Table(size), [None] * size

    def one(rank):
        try:
            outcomes[rank] = work(rank, TableNodes(rank, size, table))
        except (ConfigError, PipelineError) as error:
            outcomes[rank] = error

    run_threads(Board(stall_s=60.0), [lambda rank=rank: one(rank) for rank in range(size)])
    return outcomes


def torchrun(**changes):
    variables = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "host",
        "MASTER_PORT": "29500",
    }
    return {name: value for name, value in (variables | changes).items() if value is not None}


def test_world_comes_from_the_variables_of_torchrun():
    world = find_world(torchrun())

    assert (world.rank, world.size, world.meeting_point) == (1, 2, "host:29500")
    assert find_world({}) == World()
    assert find_world({"RANK": "0", "WORLD_SIZE": "1"}) == World()
    assert find_world({"RANK": "0"}) == World()
    assert find_world({"RANK": "", "WORLD_SIZE": "1", "MASTER_ADDR": ""}) == World()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"LOCAL_WORLD_SIZE": "4"}, "torchrun started 4 trainers on this machine"),
        ({"MASTER_ADDR": None}, "must all be set for several machines: no MASTER_ADDR"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT=http"),
        ({"RANK": None}, "RANK="),
        ({"RANK": "2"}, "RANK must be below WORLD_SIZE: 2 of 2"),
    ],
    ids=["several on a machine", "no address", "port", "no rank", "rank too high"],
)
def test_world_that_cannot_work_is_refused_in_one_line(changes, text):
    with pytest.raises(ConfigError, match=text) as caught:
        find_world(torchrun(**changes))

    assert "\n" not in str(caught.value)


@given(
    packs=st.lists(st.integers(1, 40), min_size=1, max_size=60),
    epochs=st.integers(1, 4),
    ranks=st.integers(1, 4),
    consumed=st.sets(st.tuples(st.integers(0, 3), st.integers(0, 20))),
)
@settings(max_examples=60, deadline=None)
def test_golden_38_machines_share_every_epoch_without_overlap(packs, epochs, ranks, consumed):
    sampler = PackSampler(
        lengths=packs, edges=(8, 40), epochs=epochs, seed=3, token_budget=80, max_batch_size=4
    )

    def left():
        return sampler.remaining(lambda epoch, pack: (epoch, pack) in consumed)

    everything = [(item.epoch, item.pack_id) for items in left() for item in items]
    shares = [
        [(item.epoch, item.pack_id) for items in take_share(left(), rank=rank, ranks=ranks) for item in items]
        for rank in range(ranks)
    ]

    assert sorted(pack for share in shares for pack in share) == sorted(everything)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert all([epoch for epoch, _ in share] == sorted(epoch for epoch, _ in share) for share in shares)


def test_step_of_several_machines_counts_everybodys_packs_and_stops():
    def work(rank, nodes):
        group = ReplicaGroup(Board(stall_s=60.0), names(1), packs_per_step=3, nodes=nodes)
        packs = ((0, 7), (0, 9)) if rank else ((1, 2),)
        first = group.close_step(
            0, StepShare(packs=packs, counts=(10 * rank, 1), is_short=True, wants_stop=False)
        )
        second = group.close_step(
            0, StepShare(packs=packs, counts=(10 * rank, 1), is_short=not rank, wants_stop=bool(rank))
        )
        return (
            first,
            second,
            group.agree_to_go_on(0, wants_stop=False),
            group.agree_to_go_on(0, wants_stop=not rank),
        )

    results = run_ranks(work)

    assert results[0] == results[1]
    first, second, goes_on, stops = results[0]
    assert first.packs == ((1, 2), (0, 7), (0, 9))
    assert first.counts == (10, 2)
    assert first.is_applied
    assert not second.is_applied, "one machine wants to stop and another one's step is short"
    assert goes_on
    assert not stops


def test_parameters_that_differ_between_machines_are_named_by_rank():
    def work(rank, nodes):
        ReplicaGroup(Board(stall_s=60.0), names(1), nodes=nodes).compare(0, 5 + rank)

    for error in run_ranks(work):
        assert "rank 1 drafter-0 no longer equal rank 0 drafter-0" in str(error)


def test_machine_with_other_data_is_refused_by_all_and_says_which():
    outcomes = run_ranks(
        lambda rank, nodes: nodes.require_same({"data.sha256": f"d{rank // 2}", "drafters": 2}), 3
    )

    assert [type(outcome) for outcome in outcomes] == [ConfigError] * 3
    assert "data.sha256 is d0 on rank 0 and d1 on rank 2" in str(outcomes[2])
    assert "rank 2 has other data or settings than rank 0" in str(outcomes[0])


def test_machines_with_the_same_data_go_on():
    assert run_ranks(lambda _, nodes: nodes.require_same({"data.sha256": "d", "drafters": 2})) == [None, None]


def test_single_machine_needs_no_link():
    machines = Machines(World())

    assert machines.share({"a": 1}) == {"a": 1}
    assert machines.share_state(None) is None
    assert machines.is_first
    machines.part(is_abandoned=False)
    machines.fail("nothing to tell")


@pytest.mark.parametrize(
    ("changes", "limit_s"),
    [
        ({}, 100 + 300),
        ({"checkpoint": {"stall_s": 700.0}}, 100 + 700),
        ({"eval": {"prompts": "config.json", "max_prompts": 8}}, 100 + 300),
        ({"eval": {"every": 5, "prompts": "config.json", "max_prompts": 8}}, 100 + 800),
        (
            {"eval": {"held_out_every": 5, "held_out_data": "config.json", "prompts": "config.json"}},
            100 + 900,
        ),
        ({"eval": {"held_out_every": 5, "held_out_data": "config.json"}}, 100 + 300),
    ],
    ids=["start", "save", "prompts, never asked", "prompts", "prompts and held-out", "held-out"],
)
def test_limit_of_an_exchange_covers_the_longest_phase_of_another_machine(
    tmp_path, monkeypatch, changes, limit_s
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    config = TrainConfig(
        paths=PathsConfig(**dict.fromkeys(("target_model", "data_dir", "output_dir"), str(tmp_path))),
        queue=QueueConfig(stall_s=100.0, start_stall_s=300.0),
        checkpoint=CheckpointConfig(**({"stall_s": 200.0} | changes.get("checkpoint", {}))),
        eval=EvalConfig(**changes.get("eval", {})),
    )

    assert exchange_limit_s(config) == limit_s


def test_ranks_that_all_live_and_all_wait_are_found_by_the_limit_of_the_exchange():
    now_s = [0.0]
    board = Board(stall_s=10.0, monotonic=lambda: now_s[0])
    nodes = TableNodes(0, 2, Table(2))
    nodes._board, nodes._limit_s = board, 40.0

    with nodes._guarded():
        now_s[0] = 39.0
        board.check()
        now_s[0] = 41.0
        with pytest.raises(StalledError, match=r"41 s .*the other machines"):
            board.check()
