"""Signs of life between ranks: who is lost, who failed, who stops; over a real store on the loopback."""

import time

import pytest
import torch.distributed as dist

from trainer.errors import PipelineError
from trainer.flags import World
from trainer.pipeline import pulse
from trainer.pipeline.pulse import Pulse, StopNote
from trainer.pipeline.workers import Board


@pytest.fixture
def pulses(monkeypatch):
    """Two ranks in this process, beating fast; the store ends with the test.

    Only a test in which a rank is lost shortens what a stalled machine could exceed.
    """
    monkeypatch.setattr(pulse, "BEAT_S", 0.02)
    monkeypatch.setattr(pulse, "EXPLAIN_S", 60.0)
    monkeypatch.setattr(pulse, "PART_S", 0.2)
    store = dist.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
    boards = [Board(stall_s=60.0) for _ in range(2)]
    made = [
        Pulse(World(rank=rank, size=2, address="127.0.0.1", port=store.port), boards[rank])
        for rank in range(2)
    ]
    yield made, boards
    for one in made:
        one.close("end of the test")


def wait_until(condition):
    for _ in range(6_000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("the awaited event did not come")


def let_look(one):
    """Wait until a rank has looked at the others once more, from beginning to end."""
    beats = one._count
    wait_until(lambda: one._count >= beats + 2)


def test_ranks_that_beat_are_left_alone_and_a_stop_reaches_the_other(pulses, monkeypatch):
    (first, second), boards = pulses
    first.start()
    second.start()

    second.announce_stop(save=False)

    wait_until(lambda: first.stop is not None)
    assert first.stop == StopNote(rank=1, save=False)
    second.close("")
    let_look(first)
    monkeypatch.setattr(pulse, "LOST_AFTER_S", -1.0)
    let_look(first)
    assert [board.failure for board in boards] == [None, None], "a rank that has parted in order is not lost"


def test_rank_that_falls_silent_is_named(pulses, monkeypatch):
    monkeypatch.setattr(pulse, "EXPLAIN_S", 0.5)
    monkeypatch.setattr(pulse, "LOST_AFTER_S", 0.6)
    (first, second), boards = pulses
    first.start()
    second.start()

    second._is_over.set()
    wait_until(lambda: boards[0].failure is not None)

    error = boards[0].failure.error
    assert isinstance(error, PipelineError)
    assert "rank 1 (" in str(error)
    assert "was lost: no sign of life" in str(error)
    assert "rank 1 (" in first.explain_loss("connection closed")


def test_rank_that_failed_hands_its_reason_over(pulses):
    (first, second), boards = pulses
    first.start()
    second.start()

    second.close("disk full")

    wait_until(lambda: boards[0].failure is not None)
    assert "ended the run: disk full" in str(boards[0].failure.error)
    assert first.explain_loss("connection closed").endswith("ended the run: disk full")


def test_broken_link_between_living_ranks_is_not_blamed_on_one(pulses):
    (first, second), _ = pulses
    first.start()
    second.start()

    assert first.explain_loss("connection reset") == "the link between the ranks broke: connection reset"
