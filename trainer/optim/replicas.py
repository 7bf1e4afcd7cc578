"""The drafter's replicas, on all machines, as one model: they start, sum, end and drop every step together.

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
from trainer.pipeline.nodes import Nodes
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
    """Connects the replicas of one process, and through their first one those of the other machines.

    Args:
        names: of the drafter workers, in the order of their numbers.
        packs_per_step: most packs that one process brings to a step.
        nodes: link to the other machines; None for none.
    """

    def __init__(
        self, board: Board, names: Sequence[str], *, packs_per_step: int = 1, nodes: Nodes | None = None
    ) -> None:
        self.names = tuple(names)
        self._packs_per_step = packs_per_step
        self._nodes = nodes
        self._meeting = Meeting(board, len(self.names))
        self._sum = ReplicaSum(nodes.sum_tensors if nodes else None)

    @property
    def is_alone(self) -> bool:
        """True where one replica is the whole model, so that nothing has to be summed or compared."""
        return len(self.names) == 1 and self._nodes is None

    def agree_to_go_on(self, replica: int, *, wants_stop: bool) -> bool:
        """Meet before a step; True when nobody wants to stop."""
        return self._meeting.hold(replica, wants_stop, self._find_no_stop)

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

    def _find_no_stop(self, wishes: list[bool]) -> bool:
        wants_stop = any(wishes)
        if self._nodes is not None:
            wants_stop = any(row[0] for row in self._nodes.gather([wants_stop]))
        return not wants_stop

    def _conclude(self, shares: list[StepShare]) -> StepResult:
        checksums = [share.checksum for share in shares if share.checksum is not None]
        if checksums:
            self._check_equal(checksums)
        total = _join(shares)
        if self._nodes is not None:
            rows = self._nodes.gather(_to_row(total, self._packs_per_step))
            total = _join([_from_row(row, len(total.counts)) for row in rows])
        is_cut_short = total.wants_stop and total.is_short
        return StepResult(
            packs=total.packs, counts=total.counts, is_applied=bool(total.packs) and not is_cut_short
        )

    def _check_equal(self, checksums: Sequence[int]) -> None:
        names, values = list(self.names), list(checksums)
        if self._nodes is not None:
            names = [f"rank {rank} {name}" for rank in range(self._nodes.size) for name in self.names]
            values = [value for row in self._nodes.gather(checksums) for value in row]
        self._refuse_different(names, values)

    def _refuse_different(self, names: Sequence[str], checksums: Sequence[int]) -> None:
        pairs = zip(names, checksums, strict=True)
        different = [name for name, checksum in pairs if checksum != checksums[0]]
        if different:
            raise PipelineError(
                f"replicas of the drafter have come apart: {', '.join(different)} no longer equal "
                f"{names[0]}; resume from the last checkpoint, and check these devices' memory"
            )


def _join(shares: Sequence[StepShare]) -> StepShare:
    return StepShare(
        packs=tuple(pack for share in shares for pack in share.packs),
        counts=tuple(map(sum, zip(*(share.counts for share in shares), strict=True))),
        is_short=any(share.is_short for share in shares),
        wants_stop=any(share.wants_stop for share in shares),
    )


def _to_row(share: StepShare, packs: int) -> list[int]:
    """Lay a share out as whole numbers, equally many on every rank."""
    ids = [number for pack in share.packs for number in pack]
    return [
        share.is_short,
        share.wants_stop,
        *share.counts,
        len(share.packs),
        *ids,
        *[0] * (2 * packs - len(ids)),
    ]


def _from_row(row: Sequence[int], counts: int) -> StepShare:
    count, *ids = row[2 + counts :]
    pairs = list(zip(ids[0::2], ids[1::2], strict=True))[:count]
    return StepShare(
        packs=tuple(pairs),
        counts=tuple(row[2 : 2 + counts]),
        is_short=bool(row[0]),
        wants_stop=bool(row[1]),
    )
