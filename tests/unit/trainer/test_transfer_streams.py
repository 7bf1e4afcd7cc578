"""The hand-over between devices under random delays, on stand-in streams; the GPU twin is in `tests/gpu`."""

import random
import threading

import pytest
import torch

from tests.support import fake_streams
from trainer.pipeline.messages import FeaturePack, HiddenStates, PackedTokens
from trainer.pipeline.queues import HiddenStatesQueue
from trainer.pipeline.transfer import CudaReceiver, CudaSender, PinnedPool, QueuedPack
from trainer.pipeline.workers import Board

SHAPE = (12, 3, 4)
"""Rows of the largest pack, two layers and the last hidden state, width."""


def tokens(length):
    return PackedTokens(
        input_ids_T=torch.zeros(length, dtype=torch.int64),
        loss_mask_T=torch.ones(length, dtype=torch.bool),
        doc_id_T=torch.zeros(length, dtype=torch.int32),
        position_T=torch.arange(length),
    )


def checksum(states):
    parts = (states.features, states.last_hidden)
    return sum(
        int(part.contiguous().view(torch.int32).sum(dtype=torch.int64)) * k
        for k, part in zip((1, 3), parts, strict=True)
    )


class Line:
    """Senders and receivers around one queue, as the trainer builds them."""

    def __init__(self, *, senders=1, receivers=1, depth=6, stall_s=60.0):
        self.board = Board(stall_s=stall_s)
        self.queue = HiddenStatesQueue(
            self.board,
            buckets=1,
            min_ready=1,
            max_depth=depth,
            max_bytes=1 << 30,
            producers=senders,
            consumers=receivers,
            seed=0,
        )
        pool = PinnedPool()
        common = {"board": self.board, "pool": pool, "device": "cpu", "shape": SHAPE, "dtype": torch.float32}
        self.senders = [CudaSender(**common) for _ in range(senders)]
        self.receivers = [CudaReceiver(self.queue, **common, consumer=n) for n in range(receivers)]
        self.sent, self.received, self.early = {}, {}, []

    def produce(self, place, packs):
        rng, noise = random.Random(place), torch.Generator().manual_seed(place)
        for number in packs:
            rows = rng.randrange(1, SHAPE[0] + 1)
            body = torch.randint(-(2**20), 2**20, (1, SHAPE[0], *SHAPE[1:]), generator=noise).float()
            states = HiddenStates(features=body[..., :2, :], last_hidden=body[..., 2, :].contiguous())
            index = torch.randperm(SHAPE[0], generator=noise)[:rows]
            self.sent[number] = checksum(
                HiddenStates(features=states.features[0, index], last_hidden=states.last_hidden[0, index])
            )
            self.senders[place].send(states, index, lambda s, pinned, n=number: self._deliver(n, s, pinned))
        self.senders[place].finish()
        self.queue.producer_done()

    def consume(self, place, device):
        receiver = self.receivers[place]
        while (pack := receiver.next(stop_empties=False)) is not None:
            device.current_stream().put(lambda pack=pack: self._read(pack))
            receiver.done(pack)

    def _deliver(self, number, states, pinned):
        # the item is visible from here on, so its bytes must be complete
        if checksum(states) != self.sent[number]:
            self.early.append(number)
        self.put(number, states, pinned)

    def put(self, number, states, pinned):
        pack = FeaturePack(
            epoch=0,
            pack_id=number,
            bucket=0,
            tokens=tokens(states.features.shape[0]),
            features_TLD=states.features,
            last_hidden_TD=states.last_hidden,
            nbytes=states.nbytes,
        )
        self.board.beat("test")  # a stall is then a line in which nothing moves, not a slow machine
        self.queue.put(QueuedPack(pack=pack, pinned=pinned))

    def _read(self, pack):
        assert pack.pack_id not in self.received
        self.received[pack.pack_id] = checksum(pack.states)


def run_line(line, device, packs):
    senders, receivers = len(line.senders), len(line.receivers)
    works = [lambda n=n: line.produce(n, range(n, packs, senders)) for n in range(senders)]
    works += [lambda n=n: line.consume(n, device) for n in range(receivers)]
    threads = [threading.Thread(target=work, daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    assert not any(thread.is_alive() for thread in threads)
    device.end()
    assert line.board.failure is None


def test_golden_39_ten_thousand_packs_arrive_unchanged_under_random_delays(monkeypatch):
    device = fake_streams.install(monkeypatch)
    line = Line(senders=2, receivers=2)

    run_line(line, device, 10_000)

    assert line.early == []
    assert len(line.received) == 10_000
    assert line.received == line.sent


def test_golden_39_the_check_itself_notices_a_wait_that_is_left_out(monkeypatch):
    device = fake_streams.install(monkeypatch, delay_chance=0.5, obeys=False)
    line = Line()

    run_line(line, device, 300)

    assert line.early or line.received != line.sent


@pytest.mark.parametrize("thread", ["copies-cpu", "prefetch-cpu"])
def test_t6_dead_copy_thread_ends_the_run_with_its_traceback(monkeypatch, caplog, thread):
    device = fake_streams.install(monkeypatch)
    line = Line()

    def broken(*_args, **_options):
        raise ValueError("planted")

    monkeypatch.setattr(
        *((line, "_deliver") if thread == "copies-cpu" else (line.receivers[0], "_copy")), broken
    )
    caught = []

    def guarded(work):
        with line.board.guarding("worker"):
            work()
        caught.append(threading.current_thread().name)

    works = [lambda: line.produce(0, range(50)), lambda: line.consume(0, device)]
    threads = [threading.Thread(target=guarded, args=(work,), daemon=True) for work in works]
    for started in threads:
        started.start()
    for started in threads:
        started.join(120)
    device.end()

    assert len(caught) == 2, "a worker waits for a thread that is dead"
    assert line.board.failure.thread == thread
    assert f"{thread} died" in caplog.text
    assert "planted" in caplog.text


def test_drafter_that_a_stop_sends_home_takes_one_that_is_mid_step_along(monkeypatch):
    device = fake_streams.install(monkeypatch)
    line = Line(receivers=2, depth=30, stall_s=60.0)
    busy, starved = line.receivers
    place_pack(line, 0)
    busy.done(busy.next(stop_empties=True))

    line.board.stop.set()
    assert starved.next(stop_empties=True) is None
    for number in range(1, 20):  # what the targets still had under way
        place_pack(line, number)
    line.queue.producer_done()
    taken = 1
    while (pack := busy.next(stop_empties=False)) is not None:
        busy.done(pack)
        taken += 1
    line.queue.close()
    device.end()

    assert taken < 8, "the step was to be cut short, for the other drafter brings nothing to it"
    assert line.board.failure is None


def place_pack(line, number):
    line.put(number, HiddenStates(features=torch.zeros(4, 2, 4), last_hidden=torch.zeros(4, 4)), None)
