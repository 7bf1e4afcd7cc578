"""A place where threads wait for each other, hand something over, and all leave with the same answer.

Used by `optim.replicas` at the boundaries of an optimizer step. The first member draws the conclusion while
the others wait; every wait is short and looks at the board again, so a dead or stalled thread ends the
meeting instead of holding it up. Must not import torch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from trainer.pipeline.workers import WAIT_S, Board

ShareT = TypeVar("ShareT")
ResultT = TypeVar("ResultT")


class Meeting:
    """Joins a fixed number of threads again and again.

    Args:
        members: how many take part; they are numbered from 0 and each comes once per meeting.
    """

    def __init__(self, board: Board, members: int) -> None:
        self._board = board
        self._members = members
        self._changed = threading.Condition()
        self._shares: dict[int, Any] = {}
        self._result: Any = None
        self._held = 0

    def hold(self, member: int, share: ShareT, conclude: Callable[[list[ShareT]], ResultT]) -> ResultT:
        """Bring a share, wait for all, and return what `conclude` makes of the shares in member order.

        `conclude` runs once, on the thread of member 0; all members must mean the same one.

        Raises:
            WorkerDiedError, StalledError: from the board, while waiting.
        """
        if self._members == 1:
            return conclude([share])
        with self._changed:
            meeting = self._held
            self._shares[member] = share
            self._changed.notify_all()
            if member:
                self._wait_until(lambda: self._held > meeting)
                # the next meeting cannot end before this member has come to it, so the result is still ours
                result: ResultT = self._result
                return result
            self._wait_until(lambda: len(self._shares) == self._members)
            shares = [self._shares[place] for place in range(self._members)]
        result = conclude(shares)
        with self._changed:
            self._shares.clear()
            self._result = result
            self._held += 1
            self._changed.notify_all()
        return result

    def _wait_until(self, is_true: Callable[[], bool]) -> None:
        while not is_true():
            self._board.check()
            self._changed.wait(WAIT_S)
