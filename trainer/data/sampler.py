"""The order of packs over all epochs, and the feeder thread that hands them out.

Built by `trainer.train`. A plan is a function of seed and epoch, so a resumed run makes the same one and only
leaves out what completed steps have consumed. Knows lengths and ids, never tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from trainer.data.buckets import build_epoch_plan
from trainer.pipeline.messages import BatchPlanItem
from trainer.pipeline.queues import FeedQueue
from trainer.pipeline.workers import Board


@dataclass(frozen=True, slots=True, kw_only=True)
class PackSampler:
    """All epochs of a run as packs."""

    lengths: Sequence[int]
    edges: tuple[int, ...]
    epochs: int
    seed: int
    token_budget: int
    max_batch_size: int

    def plan(self, epoch: int) -> list[BatchPlanItem]:
        """Return the packs of one epoch in plan order."""
        return build_epoch_plan(
            self.lengths,
            seed=self.seed,
            epoch=epoch,
            token_budget=self.token_budget,
            max_batch_size=self.max_batch_size,
            edges=self.edges,
        )

    def largest_per_bucket(self) -> list[BatchPlanItem]:
        """Return of each used bucket the pack with the most tokens, the largest bucket first."""
        best: dict[int, BatchPlanItem] = {}
        for item in self.plan(0):
            if item.bucket not in best or self._tokens(item) > self._tokens(best[item.bucket]):
                best[item.bucket] = item
        return [best[bucket] for bucket in sorted(best, reverse=True)]

    def _tokens(self, item: BatchPlanItem) -> int:
        return sum(self.lengths[sample] for sample in item.sample_ids)

    def remaining(self, is_consumed: Callable[[int, int], bool]) -> Iterator[list[BatchPlanItem]]:
        """Yield, epoch by epoch, what is left to do; finished epochs are left out."""
        for epoch in range(self.epochs):
            left = [item for item in self.plan(epoch) if not is_consumed(epoch, item.pack_id)]
            if left:
                yield left


def take_share(
    epochs: Iterator[list[BatchPlanItem]], *, rank: int, ranks: int
) -> Iterator[list[BatchPlanItem]]:
    """Yield what one of several machines does of each epoch.

    Packs are dealt in turns through all epochs, so that over the whole run no machine has more than one pack
    more than another, and no pack belongs to two.
    """
    dealt = 0
    for items in epochs:
        first = (rank - dealt) % ranks
        dealt += len(items)
        if items[first::ranks]:
            yield items[first::ranks]


def bucket_counts(items: Sequence[BatchPlanItem], buckets: int) -> list[int]:
    """Return how many of the packs lie in each bucket."""
    counts = [0] * buckets
    for item in items:
        counts[item.bucket] += 1
    return counts


class Feeder:
    """Feeds plan items to the target workers until all epochs are dealt or the run stops.

    Args:
        is_consumed: what the run had consumed when it started; must not change while it runs, or machines
            would deal differently.
        rank: of this machine.
        ranks: machines that share the plan.
    """

    def __init__(
        self,
        sampler: PackSampler,
        feed: FeedQueue[BatchPlanItem],
        *,
        is_consumed: Callable[[int, int], bool],
        open_epoch: Callable[[Sequence[int]], None],
        board: Board,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        self._epochs = take_share(sampler.remaining(is_consumed), rank=rank, ranks=ranks)
        self._buckets = len(sampler.edges)
        self._feed = feed
        self._open_epoch = open_epoch
        self._board = board

    def run(self) -> None:
        """Deal packs; the feed queue is closed on a clean end only."""
        for items in self._epochs:
            self._open_epoch(bucket_counts(items, self._buckets))
            for item in items:
                if self._board.stop.is_set() or not self._feed.put(item):
                    self._feed.close()
                    return
        self._feed.close()
