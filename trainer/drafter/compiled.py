"""Compiling a kernel once per shape, and never falling back to its slow form unnoticed.

Used by `masks` and `attention` for FlexAttention. Each micro-batch length, layer type and dtype is a shape of
its own; past a limit the compiler would silently run the uncompiled function, which materialises all scores.
`CompileGate` keeps the drafter workers of a process out of each other's way while one of them compiles.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch

from trainer.pipeline.workers import WAIT_S, Board

MAX_SHAPES = 2048
"""More than `loss.coarse_length`, the layer types and eight devices can produce."""


def compile_per_shape(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile for fixed shapes; raises at the limit of shapes instead of running uncompiled.

    The limits are settings of the process. torch's default of 8 is fewer than one run has shapes; it is
    suspected, not measured, to be why steps took minutes on an H200 (torch 2.11) before it was raised.
    """
    # torch loads this package on first access; that takes seconds, and only CUDA runs need it.
    dynamo = torch._dynamo.config
    dynamo.recompile_limit = max(dynamo.recompile_limit, MAX_SHAPES)
    dynamo.accumulated_recompile_limit = max(dynamo.accumulated_recompile_limit, 4 * MAX_SHAPES)
    dynamo.fail_on_recompile_limit_hit = True
    return torch.compile(function, dynamic=False)


class CompileGate:
    """Lets one thread compile while no other runs compiled code; all others pass together.

    torch traces under a flag of the whole process: a compiled function that another thread calls meanwhile
    takes itself for part of the trace and raises. Compiling happens at the first visit of a shape, in the
    forward or the backward pass, so a visit is let in alone until its shape has been through once.
    """

    def __init__(self, board: Board) -> None:
        self._board = board
        self._changed = threading.Condition()
        self._known: set[Hashable] = set()
        self._inside = 0
        self._is_closed = False

    @contextlib.contextmanager
    def visit(self, shape: Hashable) -> Iterator[None]:
        """Be inside with a shape; alone when it is new.

        Raises:
            WorkerDiedError, StalledError: from the board, while waiting.
        """
        with self._changed:
            is_new = shape not in self._known
            self._wait_while(lambda: self._is_closed)
            if is_new:
                # closed first, so that those who know their shapes cannot keep a new one out for ever
                self._is_closed = True
                try:
                    self._wait_while(lambda: self._inside > 0)
                except BaseException:
                    self._is_closed = False
                    raise
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                if is_new:
                    self._known.add(shape)
                    self._is_closed = False
                self._changed.notify_all()

    def _wait_while(self, is_true: Callable[[], bool]) -> None:
        while is_true():
            self._board.check()
            self._changed.wait(WAIT_S)
