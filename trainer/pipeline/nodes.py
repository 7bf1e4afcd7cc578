"""The trainers of one run on several machines: how they meet, sum, agree, and notice that one is lost.

Built by `trainer.train` where `torchrun` (or its variables) started more than one. Owns the process group of
`torch.distributed` (gloo between CPUs, NCCL between CUDA devices) and translates its errors. Every exchange
is a collective: all ranks must call the same ones in the same order. Nothing is pickled. Must not know what
is trained.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from trainer.errors import ConfigError, PipelineError
from trainer.flags import World
from trainer.pipeline.devices import dtype_name
from trainer.pipeline.pulse import Pulse, StopNote
from trainer.pipeline.workers import Board

_LOG = logging.getLogger(__name__)

LIMIT_KEYS = "queue.stall_s and the longest of the phases that another machine may be in"
MEET_S = 600.0
"""How long a rank waits for the others to come at all."""
ASK_EVERY_S = 1.0
LINK_MARGIN_S = 60.0
"""The link's own limit comes so much after the stall limit, which shows where the threads stand."""


class Nodes:
    """One rank's link to the others.

    Args:
        uses_cuda: the tensors to be summed live on a CUDA device.
        limit_s: longest wait for the others in one exchange. A rank that is gone is noticed by its pulse;
            this finds ranks that all live and all wait.

    Raises:
        PipelineError: the others did not come, or the meeting point does not answer.
    """

    def __init__(self, world: World, board: Board, *, uses_cuda: bool, limit_s: float) -> None:
        self.rank, self.size = world.rank, world.size
        self._board = board
        self._limit_s = limit_s
        backend = "cpu:gloo,cuda:nccl" if uses_cuda else "gloo"
        try:
            _await_name(world)
            store, _, _ = next(
                rendezvous("env://", world.rank, world.size, timeout=timedelta(seconds=MEET_S))
            )
            dist.init_process_group(
                backend,
                store=store,
                rank=world.rank,
                world_size=world.size,
                timeout=timedelta(seconds=limit_s + LINK_MARGIN_S),
            )
        except (RuntimeError, ValueError, OSError) as error:
            raise PipelineError(
                f"rank {world.rank} could not meet the other {world.size - 1} at {world.meeting_point}: "
                f"{_first_line(error)}; start one trainer on every machine, with the same MASTER_ADDR and "
                "MASTER_PORT"
            ) from error
        self._pulse = Pulse(world, board)
        self._pulse.start()
        _LOG.info("rank %d of %d, met at %s", world.rank, world.size, world.meeting_point)

    # -- exchanges ----------------------------------------------------------------------------------------

    def gather(self, values: Sequence[int]) -> list[list[int]]:
        """Return every rank's whole numbers, by rank; all ranks bring equally many."""
        mine = torch.tensor(list(values), dtype=torch.int64)
        theirs = [torch.empty_like(mine) for _ in range(self.size)]
        with self._guarded():
            dist.all_gather(theirs, mine)
        return [row.tolist() for row in theirs]

    def sum_tensors(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by their sum over the ranks, in place; on CUDA this is only queued."""
        with self._guarded():
            for tensor in tensors:
                dist.all_reduce(tensor)

    def share(self, record: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return what rank 0 brings, as plain JSON values; the others bring None."""
        text = json.dumps(record).encode() if self.rank == 0 else b""
        size = torch.tensor([len(text)], dtype=torch.int64)
        with self._guarded():
            dist.broadcast(size, src=0)
            body = torch.tensor(list(text), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)
            body = body if self.rank == 0 else torch.empty(int(size), dtype=torch.uint8)
            dist.broadcast(body, src=0)
        shared: dict[str, Any] = json.loads(bytes(body.tolist()))
        return shared

    def share_tensors(self, tensors: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
        """Return rank 0's tensors (on the CPU); the others bring None."""
        mine = dict(tensors or {})
        header = self.share(
            {name: [dtype_name(t.dtype), list(t.shape)] for name, t in mine.items()}
            if self.rank == 0
            else None
        )
        with self._guarded():
            for name, (dtype, shape) in header.items():
                if self.rank:
                    mine[name] = torch.empty(shape, dtype=getattr(torch, dtype))
                dist.broadcast(mine[name], src=0)
        return mine

    def require_same(self, facts: Mapping[str, object]) -> None:
        """Refuse to train together where the ranks were given different things.

        Raises:
            ConfigError: names each fact that differs from rank 0's.
        """
        theirs = self.share({name: str(value) for name, value in facts.items()} if self.rank == 0 else None)
        different = [
            f"{name} is {theirs.get(name)} on rank 0 and {value} on rank {self.rank}"
            for name, value in facts.items()
            if theirs.get(name) != str(value)
        ]
        refusals = [row[0] for row in self.gather([len(different)])]
        if different:
            raise ConfigError(
                f"ranks differ: {'; '.join(different)}; give all of them the same data and settings"
            )
        if any(refusals):
            bad = [str(rank) for rank, count in enumerate(refusals) if count]
            raise ConfigError(
                f"rank {', '.join(bad)} has other data or settings than rank 0: its log says which"
            )

    # -- stop and end -------------------------------------------------------------------------------------

    def announce_stop(self, *, save: bool) -> None:
        """Tell the other ranks that this one was asked to stop; they see it within a second or two."""
        self._pulse.announce_stop(save=save)

    def find_stop(self) -> StopNote | None:
        """Return the stop request of any rank, as far as it is known here."""
        return self._pulse.stop

    def look_for_stop(self) -> StopNote | None:
        """Ask the meeting point itself, after a common decision to stop."""
        return self._pulse.look_for_stop()

    def fail(self, reason: str) -> None:
        """Tell the others why this rank ends; they end too, naming it."""
        self._pulse.close(reason)

    def close(self) -> None:
        """Part in good order, after the last collective."""
        self._pulse.close("")
        try:
            dist.destroy_process_group()
        except RuntimeError as error:
            _LOG.warning("the link to the other machines did not close in order: %s", _first_line(error))

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Wait for the other machines under its own limit, and say who is missing when the link breaks."""
        try:
            with self._board.quiet("the other machines", limit_s=self._limit_s, key=LIMIT_KEYS):
                yield
        except RuntimeError as error:
            raise PipelineError(self._pulse.explain_loss(_first_line(error))) from error


def _await_name(world: World) -> None:
    """Wait until the meeting point's name means an address: torch itself asks without a limit.

    Raises:
        OSError: it never did.
        UnicodeError: it cannot be a name.
    """
    deadline_s = time.monotonic() + MEET_S
    is_told = False
    while True:
        try:
            socket.getaddrinfo(world.address, world.port, type=socket.SOCK_STREAM)
            return
        except OSError as error:
            if time.monotonic() >= deadline_s:
                raise
            if not is_told:
                _LOG.warning(
                    "MASTER_ADDR is no name that this machine knows: %s (%s); asking again for %.0f s",
                    world.address,
                    error.strerror,
                    MEET_S,
                )
                is_told = True
        time.sleep(ASK_EVERY_S)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
