"""The target worker: one thread per target device, from batch plans to finished hidden states.

Started by `trainer.train` through `pipeline.workers`. Takes plan items, runs the frozen target on the
right-padded batch, and puts the valid rows into the hidden-states queue once their copy is complete. Must
not know the drafter, and never changes the target.

Dimension suffixes: B batch, S padded length, T packed tokens, L captured layers, D hidden size.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.data.collate import TargetBatch, collate, pack_tokens
from trainer.data.corpus import Corpus, Sample
from trainer.pipeline.messages import BatchPlanItem, FeaturePack, HiddenStates, PackedTokens
from trainer.pipeline.queues import FeedQueue, HiddenStatesQueue
from trainer.pipeline.timers import WorkerStats
from trainer.pipeline.transfer import Deliver, QueuedPack, Sender, pick_rows
from trainer.pipeline.workers import Board
from trainer.target.cache import SampleCache
from trainer.target.capture import Target


class TargetWorker:
    """Runs one replica of the target.

    Args:
        lock: held during each forward; the evaluation takes it to use the same replica.
        cache: reuse of hidden states over epochs; None for none.
        with_last_hidden: ship the last hidden state too (soft labels); all layers run then.
    """

    def __init__(
        self,
        *,
        name: str,
        target: Target,
        corpus: Corpus,
        layer_ids: Sequence[int],
        feed: FeedQueue[BatchPlanItem],
        sender: Sender,
        hidden_states: HiddenStatesQueue[QueuedPack],
        board: Board,
        lock: threading.Lock,
        cache: SampleCache | None = None,
        with_last_hidden: bool = False,
    ) -> None:
        self.name = name
        self.stats = WorkerStats(name)
        self.timers = sender.timers
        self.padded_tokens = 0
        self.valid_tokens = 0
        self.sequences = 0
        self.bucket_batches: dict[int, int] = {}
        self.is_cached = False
        """the latest pack needed no forward, so this worker's cores are free"""
        self._target = target
        self._corpus = corpus
        self._layer_ids = tuple(layer_ids)
        self._feed = feed
        self._sender = sender
        self._hidden_states = hidden_states
        self._board = board
        self._lock = lock
        self._cache = cache
        self._with_last_hidden = with_last_hidden
        info = target.info
        self._pad_id = info.pad_token_id if info.pad_token_id is not None else 0

    def run(self) -> None:
        """Work until the feeder is done and every copy is delivered."""
        if self._target.device.type == "cuda":
            torch.cuda.set_device(self._target.device)
        while not self._hidden_states.is_closed:
            with self.timers.wait("wait_input"):
                item = self._feed.get()
            if item is None:
                break
            with self.stats.working():
                self._process(item)
            self._board.beat(self.name)
        self._sender.finish()
        # only on a clean end: after an error the consumers must see the error, not a drained queue
        self._hidden_states.producer_done()

    def compute(self, item: BatchPlanItem) -> FeaturePack:
        """Run one batch and wait for its result on the CPU (for warming up, outside of the pipeline)."""
        batch = collate([self._corpus[sample] for sample in item.sample_ids], pad_id=self._pad_id)
        with self._lock:
            states = self._hidden_states_of(batch)
        packed = pick_rows(states, batch.valid_rows_T.to(states.features.device))
        last = packed.last_hidden
        # host sync: before the pipeline starts, nothing is lost by waiting
        on_host = HiddenStates(
            features=packed.features.cpu(), last_hidden=None if last is None else last.cpu()
        )
        return make_pack(item, batch.tokens, on_host)

    def _process(self, item: BatchPlanItem) -> None:
        samples: list[Sample] = [self._corpus[sample] for sample in item.sample_ids]
        self._count(item, samples)
        cached = None if self._cache is None else self._cache.find_pack(item.sample_ids)
        self.is_cached = cached is not None
        if cached is not None:
            self._deliver(item, pack_tokens(samples), cached, None)
            return
        batch = collate(samples, pad_id=self._pad_id)

        def deliver(states: HiddenStates, pinned: Tensor | None) -> None:
            if self._cache is not None:
                self._cache.add_pack(item.sample_ids, [len(s.input_ids_T) for s in samples], states)
            self._deliver(item, batch.tokens, states, pinned)

        self._forward(batch, deliver)

    def _forward(self, batch: TargetBatch, deliver: Deliver) -> None:
        # the lock ends before the hand-over: that one may wait for a drafter, which may wait for the lock
        with self._lock, self.timers.stage("forward"):
            states = self._hidden_states_of(batch)
        self._sender.send(states, batch.valid_rows_T, deliver)

    def _hidden_states_of(self, batch: TargetBatch) -> HiddenStates:
        features_BSLD, last_BSD = self._target.hidden_states(
            batch.input_ids_BS,
            batch.attention_mask_BS,
            self._layer_ids,
            with_last_hidden=self._with_last_hidden,
        )
        return HiddenStates(features=features_BSLD, last_hidden=last_BSD)

    def _deliver(
        self, item: BatchPlanItem, tokens: PackedTokens, states: HiddenStates, pinned: Tensor | None
    ) -> None:
        self.stats.add(states.features.shape[0])
        pack = make_pack(item, tokens, states)
        with self.timers.wait("put"), self.stats.waiting():
            self._hidden_states.put(QueuedPack(pack=pack, pinned=pinned))

    def _count(self, item: BatchPlanItem, samples: Sequence[Sample]) -> None:
        self.sequences += len(samples)
        self.valid_tokens += sum(len(sample.input_ids_T) for sample in samples)
        self.padded_tokens += len(samples) * max(len(sample.input_ids_T) for sample in samples)
        self.bucket_batches[item.bucket] = self.bucket_batches.get(item.bucket, 0) + 1


def make_pack(item: BatchPlanItem, tokens: PackedTokens, states: HiddenStates) -> FeaturePack:
    """Put finished hidden states on the host into the message for the drafters."""
    return FeaturePack(
        epoch=item.epoch,
        pack_id=item.pack_id,
        bucket=item.bucket,
        tokens=tokens,
        features_TLD=states.features,
        last_hidden_TD=states.last_hidden,
        nbytes=states.nbytes,
    )
