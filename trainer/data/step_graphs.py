"""One decode step as a CUDA graph per shape, so that a small target is not bound by kernel launches.

Called by `trainer.data.decoding`. A graph is captured when its shape is first needed; graphs run one after
another on one stream and share their memory. When a target cannot be captured (it reads device values on the
host, or allocates in its forward), that is logged once and steps run as they are. Must not be used off CUDA.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)


class StepGraphs:
    """Captures and replays `step(rows, width)`.

    Args:
        step: only device work, on tensors that stay where they are.
        state: what a step changes; put back after the warm-up that a capture needs.
    """

    def __init__(self, step: Callable[[int, int], None], state: Sequence[Tensor]) -> None:
        self._step = step
        self._state = state
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._pool: Any = None
        self.is_usable = True

    @property
    def count(self) -> int:
        """Captured shapes."""
        return len(self._graphs)

    def step(self, rows: int, width: int) -> None:
        """Run one step, as a graph where that is possible."""
        graph = self._graphs.get((rows, width))
        if graph is None and self.is_usable:
            graph = self._capture(rows, width)
        if graph is None:
            self._step(rows, width)
        else:
            graph.replay()

    def _capture(self, rows: int, width: int) -> torch.cuda.CUDAGraph | None:
        before = [tensor.clone() for tensor in self._state]
        stream = torch.cuda.current_stream()
        try:
            graph = self._record(rows, width)
        except (RuntimeError, ValueError, NotImplementedError) as error:
            # What a forward does wrong under capture surfaces as any of these; the plain step still works.
            self.is_usable = False
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            log.warning("decoding without CUDA graphs, slower: capture failed: %s", first)
            return None
        finally:
            # A capture that fails leaves its own stream as the current one.
            torch.cuda.set_stream(stream)
            torch.cuda.synchronize()
            for tensor, value in zip(self._state, before, strict=True):
                tensor.copy_(value)
        self._graphs[rows, width] = graph
        self._pool = graph.pool()
        return graph

    def _record(self, rows: int, width: int) -> torch.cuda.CUDAGraph:
        self._warm_up(rows, width)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            self._step(rows, width)
        return graph

    def _warm_up(self, rows: int, width: int) -> None:
        """Run the step on a side stream first: libraries set themselves up, which a capture forbids."""
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._step(rows, width)
        torch.cuda.current_stream().wait_stream(side)
