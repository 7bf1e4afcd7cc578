"""The drafter's replicas as one model: they start, sum, end and drop every optimizer step together.

Built by `trainer.assembly`, called by each drafter worker at the boundaries of its step. Owns the rules of
a common step (who may go on, what counts as a step, what the sum is over) and the proof that all replicas
hold the same parameters. Must not know the drafter, and never reads a device value on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from trainer.errors import PipelineError
from trainer.optim.reduce import ReplicaSum, accept, offer
from trainer.pipeline.meeting import Meeting
from trainer.pipeline.workers import Board

PackId = tuple[int, int]
"""Epoch and pack id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShare:
    """What one replica brings to the end of a step.

    `counts` are whole numbers to be summed (the worker says which); `checksum` is the one that was due, of
    the parameters after an earlier step.
    """

    packs: tuple[PackId, ...]
    counts: tuple[int, ...]
    is_short: bool
    wants_stop: bool
    checksum: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What all replicas of all machines have decided.

    A step is dropped when it has no pack at all, or when a stop cut it short: its packs come again after the
    resume. One that is short because the data ends is applied.
    """

    packs: tuple[PackId, ...]
    counts: tuple[int, ...]
    is_applied: bool


class ReplicaGroup:
    """Connects the replicas of one process.

    Args:
        names: of the drafter workers, in the order of their numbers.
    """

    def __init__(self, board: Board, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self._meeting = Meeting(board, len(self.names))
        self._sum = ReplicaSum()

    @property
    def is_alone(self) -> bool:
        """True where one replica is the whole model, so that nothing has to be summed or compared."""
        return len(self.names) == 1

    def agree_to_go_on(self, replica: int, *, wants_stop: bool) -> bool:
        """Meet before a step; True when nobody wants to stop."""
        return self._meeting.hold(replica, wants_stop, lambda wishes: not any(wishes))

    def close_step(self, replica: int, share: StepShare) -> StepResult:
        """Meet when every replica has its gradients, and decide about the step.

        Raises:
            PipelineError: the replicas' parameters have come apart.
        """
        return self._meeting.hold(replica, share, self._conclude)

    def sum_tensors(self, replica: int, tensors: Sequence[Tensor]) -> None:
        """Replace the tensors of every replica by their sum; shapes must agree, devices may differ."""
        if self.is_alone:
            return
        done = self._meeting.hold(replica, offer(tensors), self._sum.add)
        accept(tensors[0].device, done)

    def compare(self, replica: int, checksum: int) -> None:
        """Meet to compare parameters (before a checkpoint).

        Raises:
            PipelineError: names the replicas that differ from the first.
        """
        self._meeting.hold(replica, checksum, self._check_equal)

    def _conclude(self, shares: list[StepShare]) -> StepResult:
        checksums = [share.checksum for share in shares if share.checksum is not None]
        if len(checksums) == len(shares):
            self._check_equal(checksums)
        packs = tuple(pack for share in shares for pack in share.packs)
        is_cut_short = any(s.wants_stop for s in shares) and any(s.is_short for s in shares)
        return StepResult(
            packs=packs,
            counts=tuple(map(sum, zip(*(share.counts for share in shares), strict=True))),
            is_applied=bool(packs) and not is_cut_short,
        )

    def _check_equal(self, checksums: Sequence[int]) -> None:
        pairs = zip(self.names, checksums, strict=True)
        different = [name for name, checksum in pairs if checksum != checksums[0]]
        if different:
            raise PipelineError(
                f"replicas of the drafter have come apart: {', '.join(different)} no longer equal "
                f"{self.names[0]}; resume from the last checkpoint, and check these devices' memory"
            )
