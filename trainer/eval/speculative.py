"""Speculative decoding of one sequence against the real target: draft a block, verify it, keep what is right.

Called by `eval.measure` and, during training, by `eval.online`; `eval.batched` does the same for many prompts
at once. The output is always the target's own: a drafter only changes how many target forwards it takes.
`drafter=None` or a block of 1 is plain decoding through the same code, which is the baseline for speedups.
Must not train anything.

Dimension suffixes: T tokens, K block positions, L captured layers, D hidden, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from trainer.drafter.cache import DraftCache
from trainer.drafter.loss import FrozenEnds
from trainer.drafter.model import DrafterConfig
from trainer.errors import ConfigError
from trainer.eval.verify import Chooser, Drafts, Sampling
from trainer.target.decode_cache import TargetCache


class TargetLike(Protocol):
    """What decoding needs of a target; `trainer.target.capture.Target` is one."""

    @property
    def device(self) -> torch.device:
        """Where the weights live."""

    @property
    def embed_weight_VD(self) -> Tensor:  # noqa: N802 (dimension suffix)
        """Embedding rows."""

    @property
    def head_weight_VD(self) -> Tensor:  # noqa: N802 (dimension suffix)
        """Output head."""

    def head_product(self, hidden: Tensor) -> Tensor:
        """Multiply rows with the output head."""

    def new_cache(self) -> TargetCache:
        """Start a sequence."""

    def step(
        self, input_ids_1T: Tensor, cache: TargetCache, layer_ids: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Run tokens behind the cache; `(logits_TV, hidden_TLD)`."""


class DrafterLike(Protocol):
    """What decoding needs of a drafter; tests put oracles and adversaries here."""

    @property
    def config(self) -> DrafterConfig:
        """Shape, mask token and captured layers."""

    def draft(
        self, new_features_TF: Tensor, block_embeds_KD: Tensor, cache: DraftCache, *, start: int
    ) -> Tensor:
        """Hidden states of a block's positions."""


@dataclass(slots=True, kw_only=True)
class SpeculativeResult:
    """One decoded sequence and what it took."""

    token_ids: list[int] = field(default_factory=list)
    """new tokens, cut behind the first stop token or at the length limit"""
    accept_counts: list[int] = field(default_factory=list)
    """tokens committed per verify: accepted drafts plus the bonus token; the last block counts whole"""
    target_forwards: int = 0
    """prefill plus one per verify"""
    stopped: bool = False
    """a stop token ended the sequence, not the length limit"""
    prefill_s: float = 0.0
    """the target's prefill, and the first draft, which prefills the drafter"""
    decode_s: float = 0.0
    """everything after that"""
    draft_s: float = 0.0
    """the drafter's share of `decode_s`"""

    @property
    def emitted(self) -> int:
        """Tokens committed before truncation: the prefill's one plus every verify's."""
        return 1 + sum(self.accept_counts)

    @property
    def acceptance_length(self) -> float | None:
        """Mean tokens per verify, None when the first token already ended the sequence."""
        return sum(self.accept_counts) / len(self.accept_counts) if self.accept_counts else None


@torch.no_grad()
def speculative_generate(
    target: TargetLike,
    drafter: DrafterLike | None,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    eos_ids: Collection[int],
    block_size: int | None = None,
    sampling: Sampling | None = None,
    sequence: int = 0,
) -> SpeculativeResult:
    """Decode one prompt.

    Args:
        target: decides every token.
        drafter: proposes blocks; None decodes plainly.
        prompt_ids: at least one token.
        max_new_tokens: length limit; the last block may run over it and is cut (its count is kept whole).
        eos_ids: tokens that end the sequence; the first one is kept.
        block_size: positions per block, the anchor included; None takes the drafter's own.
        sampling: None is greedy.
        sequence: number of this prompt; with the sampling's seed it selects the random numbers.

    Raises:
        ConfigError: an empty prompt, or a limit or block size below 1.
    """
    size = effective_block_size(drafter, block_size)
    check_decodable(prompt_ids, max_new_tokens)
    decoder = _Decoder(target, drafter if size > 1 else None, size, sampling, sequence)
    return decoder.run(list(prompt_ids), max_new_tokens, frozenset(eos_ids))


def check_decodable(prompt_ids: Sequence[int], max_new_tokens: int) -> None:
    """Refuse an empty prompt, and a limit that leaves nothing to decode."""
    if not prompt_ids or max_new_tokens < 1:
        raise ConfigError(
            f"nothing to decode: prompt of {len(prompt_ids)} tokens, max_new_tokens {max_new_tokens}; "
            "both must be at least 1"
        )


def frozen_ends(target: TargetLike, config: DrafterConfig) -> FrozenEnds:
    """Borrow the target's embedding and head for a drafter."""
    if tuple(target.embed_weight_VD.shape) != (config.vocab_size, config.hidden_size):
        raise ConfigError(
            f"drafter is for a target of {config.vocab_size} x {config.hidden_size} embeddings, "
            f"this one has {' x '.join(map(str, target.embed_weight_VD.shape))}: use its own target"
        )
    return FrozenEnds(
        embed_weight_VD=target.embed_weight_VD,
        head_weight_VD=target.head_weight_VD,
        embed_scale=config.embed_scale,
        logit_softcap=config.logit_softcap,
        head_product=target.head_product,
    )


class _Decoder:
    """One sequence: both caches, and the steps that the loop is made of."""

    def __init__(
        self,
        target: TargetLike,
        drafter: DrafterLike | None,
        size: int,
        sampling: Sampling | None,
        sequence: int,
    ) -> None:
        self.target, self.drafter, self.size = target, drafter, size
        self.layer_ids: tuple[int, ...] = ()
        # plain decoding has a block of its one known token, and nothing to fill
        mask = 0 if drafter is None else drafter.config.mask_token_id
        self.block_1K = torch.full((1, size), mask, dtype=torch.int64, device=target.device)
        if drafter is not None:
            self.layer_ids = drafter.config.target_layer_ids
            self.ends = frozen_ends(target, drafter.config)
            self.draft_cache = DraftCache(drafter.config.num_hidden_layers)
        self.chooser = Chooser(sampling, target.device)
        self.streams = [self.chooser.stream(sequence)]
        self.target_cache = target.new_cache()
        self.drafting = _Stopwatch(target.device)
        self.result = SpeculativeResult()

    def run(self, prompt: list[int], max_new_tokens: int, eos_ids: frozenset[int]) -> SpeculativeResult:
        out, result = prompt, self.result
        prompt_length = len(prompt)
        began_s = self._now_s()
        first, new_hidden_TLD = self._prefill(out)
        out.append(first)
        result.stopped = first in eos_ids
        while not result.stopped and len(out) - prompt_length < max_new_tokens:
            # `start` is the newest committed token: the target has not processed it yet.
            start = len(out) - 1
            self.block_1K[:, 0] = out[start]
            uniforms = self.chooser.uniforms(self.streams, self.size)
            drafts = self._draft(new_hidden_TLD, start, uniforms)
            if not result.accept_counts:
                # The first draft projects the whole prompt: that is the drafter's prefill, not decoding.
                began_s = self._end_prefill(began_s)
            committed, new_hidden_TLD = self._verify(drafts, start, uniforms)
            result.accept_counts.append(len(committed))
            out += committed
            result.stopped = not eos_ids.isdisjoint(committed)
        if result.accept_counts:
            result.decode_s = self._now_s() - began_s
            result.draft_s = self.drafting.total_s()
        else:
            self._end_prefill(began_s)
        result.token_ids = cut(out[prompt_length:], max_new_tokens, eos_ids)
        result.stopped = result.token_ids[-1] in eos_ids
        return result

    def _end_prefill(self, began_s: float) -> float:
        now_s = self._now_s()
        self.result.prefill_s = now_s - began_s
        self.drafting.reset()
        return now_s

    def _prefill(self, prompt: list[int]) -> tuple[int, Tensor]:
        ids_1T = torch.tensor([prompt], dtype=torch.int64, device=self.target.device)
        logits_TV, hidden_TLD = self._step(ids_1T)
        first_B = self.chooser.first(logits_TV[-1:], self.chooser.uniforms(self.streams, 1))
        return int(first_B[0]), hidden_TLD  # host sync: the first token may already end the sequence

    def _draft(self, new_hidden_TLD: Tensor, start: int, uniforms: Tensor | None) -> Drafts:
        if self.drafter is None:
            return Drafts(self.block_1K[:, 1:])
        with self.drafting:
            hidden_KD = self.drafter.draft(
                new_hidden_TLD.flatten(1), self.ends.embed(self.block_1K[0]), self.draft_cache, start=start
            )
            return self.chooser.draft(self.ends.logits(hidden_KD[1:])[None], uniforms)

    def _verify(self, drafts: Drafts, start: int, uniforms: Tensor | None) -> tuple[list[int], Tensor]:
        """Run the block through the target; return what is committed and its hidden states."""
        logits_KV, hidden_KLD = self._step(torch.cat([self.block_1K[:, :1], drafts.tokens_Bk], dim=1))
        verdict_1X = self.chooser.verify(drafts, logits_KV[None], uniforms)
        accepted, *tokens = verdict_1X[0].tolist()  # host sync: the one of a verify
        self.target_cache.crop(start + accepted + 1)
        return tokens[: accepted + 1], hidden_KLD[: accepted + 1]

    def _step(self, ids_1T: Tensor) -> tuple[Tensor, Tensor]:
        self.result.target_forwards += 1
        return self.target.step(ids_1T, self.target_cache, self.layer_ids)

    def _now_s(self) -> float:
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)  # host sync: thrice a sequence, times must cover work
        return time.perf_counter()


class _Stopwatch:
    """Adds up the time of repeated stretches; on CUDA by events, so that measuring does not wait."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[Any] = []

    def __enter__(self) -> None:
        self._mark()

    def __exit__(self, *exc_info: object) -> None:
        self._mark()

    def reset(self) -> None:
        """Forget what was measured."""
        self._marks.clear()

    def total_s(self) -> float:
        """Return the sum; on CUDA only after the device has been waited for."""
        pairs = zip(self._marks[::2], self._marks[1::2], strict=True)
        if self._device.type == "cuda":
            return float(sum(began.elapsed_time(ended) for began, ended in pairs)) / 1000
        return float(sum(ended - began for began, ended in pairs))

    def _mark(self) -> None:
        if self._device.type != "cuda":
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        self._marks.append(event)


def effective_block_size(drafter: DrafterLike | None, block_size: int | None) -> int:
    """Return the positions per block: 1 without a drafter, its own unless another is given."""
    if block_size is not None and block_size < 1:
        raise ConfigError(f"block_size must be at least 1, not {block_size}")
    if drafter is None:
        return 1
    return drafter.config.block_size if block_size is None else block_size


def cut(tokens: list[int], limit: int, eos_ids: Collection[int]) -> list[int]:
    """Keep tokens up to the limit and to the first stop token, that one included."""
    kept = tokens[:limit]
    for index, token in enumerate(kept):
        if token in eos_ids:
            return kept[: index + 1]
    return kept
