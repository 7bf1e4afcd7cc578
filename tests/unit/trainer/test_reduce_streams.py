"""The order of the replicas' sum on stand-in streams: nobody reads or overwrites too early.

The GPU twin with real peer copies is `tests/gpu/test_replicas_on_gpu.py`.
"""

import torch

from tests.support import fake_streams
from tests.unit.trainer.test_replicas import names, run_threads
from trainer.optim import reduce
from trainer.optim.replicas import ReplicaGroup
from trainer.pipeline.workers import Board

SHAPES = ((5, 3), (7,), (2, 2, 2))


def values(turn, place):
    generator = torch.Generator().manual_seed(100 * turn + place)
    return [torch.randint(-999, 999, shape, generator=generator).float() for shape in SHAPES]


def sum_on_streams(monkeypatch, *, replicas, rounds, obeys=True):
    """Return how many sums were wrong when their replica's stream came to read them."""
    device = fake_streams.install(monkeypatch, delay_chance=0.3, obeys=obeys)
    real_add = torch.Tensor.add_

    def mark(_device):
        event = fake_streams.FakeEvent()
        event.record(device.current_stream())
        return event

    def add_(self, other):
        device.current_stream().put(lambda: real_add(self, other))
        return self

    monkeypatch.setattr(reduce, "_mark", mark)
    group = ReplicaGroup(Board(stall_s=60.0), names(replicas))
    wrong = []

    def work(place):
        with device.stream(device.new_stream()):
            tensors = [torch.zeros(shape) for shape in SHAPES]
            for turn in range(rounds):
                for tensor, source in zip(tensors, values(turn, place), strict=True):
                    tensor.copy_(source, non_blocking=True)
                group.sum_tensors(place, tensors)
                device.current_stream().put(lambda turn=turn: check(tensors, turn))

    def check(tensors, turn):
        expected = [sum(column) for column in zip(*(values(turn, p) for p in range(replicas)), strict=True)]
        if not all(torch.equal(mine, theirs) for mine, theirs in zip(tensors, expected, strict=True)):
            wrong.append(turn)

    monkeypatch.setattr(torch.Tensor, "add_", add_, raising=False)
    run_threads(Board(stall_s=60.0), [lambda place=place: work(place) for place in range(replicas)])
    device.end()
    return wrong


def test_golden_20_sum_on_streams_is_right_under_random_delays(monkeypatch):
    assert sum_on_streams(monkeypatch, replicas=3, rounds=150) == []


def test_the_check_itself_notices_a_wait_that_is_left_out(monkeypatch):
    assert sum_on_streams(monkeypatch, replicas=3, rounds=40, obeys=False)
