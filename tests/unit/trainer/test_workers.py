"""Threads of the pipeline: joined, named, and the first error wins."""

import threading

import pytest

from trainer.errors import DataError, WorkerDiedError
from trainer.pipeline.workers import Board, WorkerGroup


def run_group(board, **works):
    group = WorkerGroup(board)
    for name, work in works.items():
        group.add(name, work)
    group.start()
    assert group.join(timeout_s=120.0)
    return group


def test_clean_end_raises_nothing():
    board = Board(stall_s=60.0)

    run_group(board, feeder=lambda: None).raise_first()

    assert board.failure is None


def test_first_error_is_raised_with_its_threads_name_and_cause(caplog):
    board = Board(stall_s=60.0)
    first_is_in = threading.Event()

    def first():
        try:
            raise ValueError("no such\nsample")
        finally:
            first_is_in.set()

    def second():
        assert first_is_in.wait(120)
        board.abort.wait(120)
        raise KeyError("later")

    group = run_group(board, first=first, second=second)

    with pytest.raises(WorkerDiedError, match="first died: ValueError: no such sample") as caught:
        group.raise_first()
    assert isinstance(caught.value.__cause__, ValueError)
    assert caught.value.exit_code == 7
    assert "Traceback" in caplog.text
    assert "first died" in caplog.text


def test_error_of_ours_keeps_its_exit_code_and_gains_the_threads_name():
    def work():
        raise DataError("no rows")

    group = run_group(Board(stall_s=60.0), feeder=work)

    with pytest.raises(DataError) as caught:
        group.raise_first()
    assert caught.value.exit_code == 3
    assert caught.value.__notes__ == ["in thread feeder"]


def test_other_threads_are_released_by_a_failure():
    board = Board(stall_s=60.0)

    def waits():
        while True:
            board.check()
            board.abort.wait(5)

    def fails():
        raise ValueError("x")

    group = run_group(board, waits=waits, fails=fails)

    assert group.alive == ()
    assert board.failure.thread == "fails"
