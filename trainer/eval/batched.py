"""Speculative decoding of many prompts at once, each accepting what its own drafts deserve.

Called by `eval.measure` for acceptance; speed is measured one sequence at a time by `eval.speculative`. Per
prompt the outcome is the same as there, apart from rounding: matrix products of other shapes differ in the
last bits. A slot whose sequence has ended takes the next prompt at once. One host sync per verify of all
slots.

Dimension suffixes: B slots, K block positions, X verdict (1 + K).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trainer.drafter.masks import to_device
from trainer.drafter.model import Drafter
from trainer.eval.draft_slots import DraftSlots
from trainer.eval.speculative import (
    SpeculativeResult,
    check_decodable,
    cut,
    effective_block_size,
    frozen_ends,
    speculative_generate,
)
from trainer.eval.verify import Chooser, Drafts, Sampling
from trainer.target.capture import Target
from trainer.target.slots import TargetSlots


def decode_prompts(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    eos_ids: Collection[int],
    block_size: int | None = None,
    sampling: Sampling | None = None,
    batch_size: int = 1,
    on_done: Callable[[int, SpeculativeResult], None] = lambda _index, _result: None,
) -> list[SpeculativeResult]:
    """Decode prompts with a drafter, several side by side.

    Args:
        target: decides every token.
        drafter: proposes blocks.
        prompts: token ids; each at least one.
        max_new_tokens: length limit per prompt.
        eos_ids: tokens that end a sequence.
        block_size: positions per block; None takes the drafter's own.
        sampling: None is greedy.
        batch_size: sequences at once; 1, or a target without a plain cache, decodes them one by one.
        on_done: called with index and result as each prompt ends, in no fixed order.

    Returns:
        The results in the order of the prompts. Times are only known for prompts decoded one by one.

    Raises:
        ConfigError: an empty prompt, or a limit or block size below 1.
    """
    size = effective_block_size(drafter, block_size)
    for prompt in prompts:
        check_decodable(prompt, max_new_tokens)
    if batch_size > 1 and prompts and target.has_plain_cache:
        decoder = _BatchDecoder(
            target, drafter, prompts, size=size, sampling=sampling, max_new_tokens=max_new_tokens
        )
        return decoder.run(min(batch_size, len(prompts)), frozenset(eos_ids), on_done)
    results = []
    for index, prompt in enumerate(prompts):
        result = speculative_generate(
            target,
            drafter,
            prompt,
            max_new_tokens=max_new_tokens,
            eos_ids=eos_ids,
            block_size=size,
            sampling=sampling,
            sequence=index,
        )
        results.append(result)
        on_done(index, result)
    return results


@dataclass(slots=True)
class _Slot:
    """What the host knows of one slot; `prompt` is None while it is free."""

    prompt: int | None = None
    tokens: list[int] | None = None
    """new tokens so far"""
    anchor: int = 0
    start: int = 0
    feature_start: int = 0
    stream: np.random.Generator | None = None


class _BatchDecoder:
    """All prompts of one measurement, and the slots that they pass through."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        prompts: Sequence[Sequence[int]],
        *,
        size: int,
        sampling: Sampling | None,
        max_new_tokens: int,
    ) -> None:
        self._target, self._prompts = target, prompts
        self._drafter = drafter if size > 1 else None
        self._size, self._limit = size, max_new_tokens
        self._ends = frozen_ends(target, drafter.config)
        self._mask_id = drafter.config.mask_token_id
        self._layer_ids = drafter.config.target_layer_ids if size > 1 else ()
        self._chooser = Chooser(sampling, target.device)
        self._results = [SpeculativeResult() for _ in prompts]

    @torch.no_grad()
    def run(
        self, slots: int, eos_ids: frozenset[int], on_done: Callable[[int, SpeculativeResult], None]
    ) -> list[SpeculativeResult]:
        self._eos_ids, self._on_done = eos_ids, on_done
        self._open(slots)
        waiting = iter(range(len(self._prompts)))
        while True:
            for number, slot in enumerate(self._slots):
                while slot.prompt is None and (index := next(waiting, None)) is not None:
                    self._start(number, slot, index)
            if all(slot.prompt is None for slot in self._slots):
                return self._results
            # host sync: the one of a verify, for all slots together
            for slot, verdict in zip(self._slots, self._verify().tolist(), strict=True):
                if slot.prompt is not None:
                    self._commit(slot, verdict)

    def _open(self, slots: int) -> None:
        longest = max(len(prompt) for prompt in self._prompts)
        # the last block may run over the limit by a block, and a draft writes one block further
        capacity = longest + self._limit + 2 * self._size + 1
        device = self._target.device
        self._slots = [_Slot() for _ in range(slots)]
        self._cache = TargetSlots(self._target, slots=slots, capacity=capacity, layer_ids=self._layer_ids)
        self._block_BK = torch.full((slots, self._size), self._mask_id, dtype=torch.int64, device=device)
        if self._drafter is not None:
            self._drafts = DraftSlots(self._drafter, slots=slots, capacity=capacity)
            width = len(self._layer_ids) * self._drafter.config.hidden_size
            self._features = torch.zeros((slots, self._size, width), dtype=self._target.dtype, device=device)

    def _start(self, number: int, slot: _Slot, index: int) -> None:
        prompt, result = self._prompts[index], self._results[index]
        slot.stream = self._chooser.stream(index)
        logits_V, hidden_TLD = self._cache.prefill(number, prompt)
        result.target_forwards = 1
        if self._drafter is not None:
            self._drafts.prefill(number, hidden_TLD.flatten(1))
        first_B = self._chooser.first(logits_V[None], self._chooser.uniforms([slot.stream], 1))
        slot.anchor = int(first_B[0])  # host sync: once a prompt, its first token may end it
        # the slot's rows of the latest verify belong to another prompt: they are written where nobody looks
        slot.prompt, slot.tokens = index, [slot.anchor]
        slot.start = slot.feature_start = len(prompt)
        self._end_if_complete(slot, is_stopped=slot.anchor in self._eos_ids)

    def _verify(self) -> Tensor:
        """Draft and verify one block of every slot; returns the verdicts [B, X], still on the device."""
        state_3B = torch.tensor(
            [[getattr(slot, name) for slot in self._slots] for name in ("anchor", "start", "feature_start")]
        )
        anchors_B, starts_B, feature_starts_B = to_device(state_3B, self._target.device)
        longest = max(slot.start for slot in self._slots)
        uniforms = self._chooser.uniforms([slot.stream for slot in self._slots], self._size)
        self._block_BK[:, 0] = anchors_B
        drafts = Drafts(self._block_BK[:, 1:])
        if self._drafter is not None:
            hidden_BKD = self._drafts.draft(
                self._features,
                feature_starts_B,
                self._ends.embed(self._block_BK),
                starts_B,
                longest=longest,
            )
            drafts = self._chooser.draft(self._ends.logits(hidden_BKD[:, 1:]), uniforms)
        ids_BK = torch.cat([self._block_BK[:, :1], drafts.tokens_Bk], dim=1)
        logits_BKV, hidden_BKLD = self._cache.step(ids_BK, starts_B, longest=longest)
        if self._drafter is not None:
            self._features = hidden_BKLD.flatten(2)
        return self._chooser.verify(drafts, logits_BKV, uniforms)

    def _commit(self, slot: _Slot, verdict: list[int]) -> None:
        assert slot.prompt is not None
        assert slot.tokens is not None
        committed = verdict[1 : verdict[0] + 2]
        result = self._results[slot.prompt]
        result.target_forwards += 1
        result.accept_counts.append(len(committed))
        slot.tokens += committed
        slot.feature_start = slot.start
        slot.start += len(committed)
        slot.anchor = committed[-1]
        self._end_if_complete(slot, is_stopped=not self._eos_ids.isdisjoint(committed))

    def _end_if_complete(self, slot: _Slot, *, is_stopped: bool) -> None:
        assert slot.prompt is not None
        assert slot.tokens is not None
        if not is_stopped and len(slot.tokens) < self._limit:
            return
        result = self._results[slot.prompt]
        result.token_ids = cut(slot.tokens, self._limit, self._eos_ids)
        result.stopped = result.token_ids[-1] in self._eos_ids
        index, slot.prompt = slot.prompt, None
        # a free slot goes on computing, at a place where it disturbs nobody
        slot.start = slot.feature_start = 0
        self._on_done(index, result)
