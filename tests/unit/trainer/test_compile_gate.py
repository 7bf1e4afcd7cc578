"""Drafter workers of one process: while one compiles, no other runs compiled code, and all get in."""

import random
import threading
import time

import pytest

from tests.unit.trainer.test_replicas import run_threads
from trainer.drafter.compiled import CompileGate
from trainer.errors import WorkerDiedError
from trainer.pipeline.workers import Board


def test_new_shape_is_inside_alone_and_known_ones_go_together():
    board = Board(stall_s=60.0)
    gate, lock = CompileGate(board), threading.Lock()
    inside, known, compiled, together = [], set(), [], [0]

    def visit(worker, shape):
        with gate.visit((worker, shape)):
            with lock:
                is_new = (worker, shape) not in known
                if is_new:
                    compiled.append((worker, shape))
                    assert not inside, "somebody else is inside"
                inside.append((worker, shape, is_new))
                assert len(inside) == 1 or not any(entry[2] for entry in inside)
                together[0] = max(together[0], len(inside))
            time.sleep(0.0005)
            with lock:
                inside.remove((worker, shape, is_new))
                known.add((worker, shape))

    def work(worker):
        rng = random.Random(worker)
        for _ in range(60):
            visit(worker, rng.randrange(8))

    run_threads(board, [lambda worker=worker: work(worker) for worker in range(4)])

    assert len(compiled) == len(set(compiled)) == 32
    assert together[0] > 1


def test_compilation_that_fails_lets_the_next_one_in():
    board = Board(stall_s=60.0)
    gate = CompileGate(board)

    with pytest.raises(ValueError, match="planted"), gate.visit("a"):
        raise ValueError("planted")

    with gate.visit("b"):
        pass


def test_worker_that_waits_at_the_gate_leaves_when_the_run_ends():
    board = Board(stall_s=60.0)
    gate = CompileGate(board)
    is_inside, release, caught = threading.Event(), threading.Event(), []

    def compiles():
        with gate.visit("a"):
            is_inside.set()
            release.wait(120)

    def waits():
        is_inside.wait(120)
        try:
            with gate.visit("b"):
                caught.append("entered")
        except WorkerDiedError as error:
            caught.append(error)

    threads = [threading.Thread(target=work, daemon=True) for work in (compiles, waits)]
    for thread in threads:
        thread.start()
    is_inside.wait(120)
    board.fail("target-gpu0", ValueError("broken"))
    threads[1].join(120)
    release.set()
    threads[0].join(120)

    assert isinstance(caught[0], WorkerDiedError)
