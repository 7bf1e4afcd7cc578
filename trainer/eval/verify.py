"""How tokens are chosen: the target's, the drafter's, and which drafts survive a verify.

Called by both decoders (`eval.speculative` for one sequence, `eval.batched` for many). Everything is tensor
arithmetic on the device: nothing here waits for a GPU, so that a verify costs one host sync, the reading of
its verdict. Random numbers come from one seeded stream per sequence and are turned into tokens by inverting
the distribution; what a prompt yields thus depends on neither device nor batch.

Both sampling schemes leave the target's distribution untouched: `deterministic` drafts the likeliest token
and keeps it while it equals what the target samples; `rejection` samples drafts from q, keeps one with
probability min(1, p/q) and otherwise draws from the normalised positive part of p - q (Leviathan et al.
2023).

Dimension suffixes: B sequences, K block positions, k drafted positions (K - 1), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trainer.drafter.masks import to_device
from trainer.errors import ConfigError

SCHEMES = ("deterministic", "rejection")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling of the target's tokens; the drafter's are shaped by the very same values."""

    temperature: float
    top_p: float = 1.0
    """smallest set of tokens with at least this probability; 1 keeps all"""
    top_k: int = 0
    """likeliest tokens kept; 0 keeps all"""
    scheme: str = "deterministic"
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.temperature < float("inf"):
            raise ConfigError(
                f"sampling temperature must be above 0, not {self.temperature}: omit it for greedy"
            )
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p must be above 0 and at most 1, not {self.top_p}: 1 keeps every token")
        if self.top_k < 0:
            raise ConfigError(f"top_k must be at least 0, not {self.top_k}: 0 keeps every token")
        if self.scheme not in SCHEMES:
            raise ConfigError(f"unknown sampling scheme: {self.scheme}; use {' or '.join(SCHEMES)}")
        if self.seed < 0:
            raise ConfigError(f"sampling seed must be at least 0, not {self.seed}")

    def stream(self, sequence: int) -> np.random.Generator:
        """Return the random numbers of one sequence."""
        return np.random.default_rng([self.seed, sequence])


@dataclass(frozen=True, slots=True)
class Drafts:
    """Drafted tokens; `probs_BkV` is what they were sampled from, None when they were not sampled."""

    tokens_Bk: Tensor
    probs_BkV: Tensor | None = None


class Chooser:
    """Chooses tokens greedily or by sampling, for any number of sequences at once."""

    def __init__(self, sampling: Sampling | None, device: torch.device) -> None:
        self._sampling = sampling
        self._device = device

    def stream(self, sequence: int) -> np.random.Generator | None:
        """Return the random numbers of one sequence, None when greedy needs none."""
        return None if self._sampling is None else self._sampling.stream(sequence)

    def uniforms(self, streams: Sequence[np.random.Generator | None], size: int) -> Tensor | None:
        """Draw what one verify of a block of `size` needs: [B, 3, K] for drafts, verify, and the last token.

        A sequence without a stream (a free slot) gets zeros.
        """
        if self._sampling is None:
            return None
        rows = [np.zeros((3, size)) if stream is None else stream.random((3, size)) for stream in streams]
        return to_device(torch.from_numpy(np.stack(rows)), self._device)

    def first(self, logits_BV: Tensor, uniforms_B3K: Tensor | None) -> Tensor:
        """Choose the token behind a prompt [B]."""
        return self._choose(logits_BV[:, None], None if uniforms_B3K is None else uniforms_B3K[:, 1])[:, 0]

    def draft(self, logits_BkV: Tensor, uniforms_B3K: Tensor | None) -> Drafts:
        """Choose the drafter's tokens."""
        if self._sampling is None or uniforms_B3K is None or self._sampling.scheme == "deterministic":
            return Drafts(logits_BkV.argmax(dim=-1))
        probs_BkV = shape_probabilities(logits_BkV, self._sampling)
        return Drafts(draw(probs_BkV, uniforms_B3K[:, 0, :-1]), probs_BkV)

    def verify(self, drafts: Drafts, logits_BKV: Tensor, uniforms_B3K: Tensor | None) -> Tensor:
        """Judge the drafts by the target's logits at every block position.

        Returns:
            int64 [B, 1 + K]: the number of accepted drafts r, then the committed tokens, of which the first
            r + 1 count.
        """
        if drafts.probs_BkV is not None and self._sampling is not None and uniforms_B3K is not None:
            probs_BKV = shape_probabilities(logits_BKV, self._sampling)
            return _reject(drafts.tokens_Bk, drafts.probs_BkV, probs_BKV, uniforms_B3K)
        choices_BK = self._choose(logits_BKV, None if uniforms_B3K is None else uniforms_B3K[:, 1])
        equal_Bk = drafts.tokens_Bk == choices_BK[:, :-1]
        # where a draft was accepted it is what the target chose
        return torch.cat([_prefix(equal_Bk)[:, None], choices_BK], dim=1)

    def _choose(self, logits_BKV: Tensor, uniforms_BK: Tensor | None) -> Tensor:
        if self._sampling is None or uniforms_BK is None:
            return logits_BKV.argmax(dim=-1)
        return draw(shape_probabilities(logits_BKV, self._sampling), uniforms_BK)


def shape_probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """Turn logits [..., V] into probabilities (fp32): temperature, then top-k, then top-p."""
    logits = logits.float() / sampling.temperature
    if sampling.top_k:
        least = logits.topk(min(sampling.top_k, logits.shape[-1]), dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    probs = logits.softmax(dim=-1)
    if sampling.top_p >= 1:
        return probs
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    # a token stays while the likelier ones have not reached top_p yet: the first always does
    dropped = ordered.cumsum(dim=-1) - ordered >= sampling.top_p
    probs = probs.masked_fill(torch.zeros_like(dropped).scatter(-1, order, dropped), 0.0)
    return probs / probs.sum(dim=-1, keepdim=True)


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Pick one index per row of `weights` [..., V] (not negative, any sum above 0) by its uniform number."""
    cumulated = weights.double().cumsum(dim=-1)
    wanted = uniforms[..., None] * cumulated[..., -1:]
    index = torch.searchsorted(cumulated, wanted.contiguous(), right=True).squeeze(-1)
    return index.clamp_(max=weights.shape[-1] - 1)


def _reject(drafts_Bk: Tensor, q_BkV: Tensor, p_BKV: Tensor, uniforms_B3K: Tensor) -> Tensor:
    index_Bk1 = drafts_Bk[..., None]
    p_Bk = p_BKV[:, :-1].gather(-1, index_Bk1).squeeze(-1)
    q_Bk = q_BkV.gather(-1, index_Bk1).squeeze(-1)
    accepted_B = _prefix(uniforms_B3K[:, 1, :-1] * q_Bk < p_Bk)
    # behind the last draft there is no q: the residual of p - 0 is p itself, the bonus token
    rows_B = torch.arange(len(drafts_Bk), device=drafts_Bk.device)
    p_BV = p_BKV[rows_B, accepted_B]
    q_BV = torch.cat([q_BkV, torch.zeros_like(p_BKV[:, :1])], dim=1)[rows_B, accepted_B]
    residual_BV = (p_BV - q_BV).clamp_(min=0)
    # all zero only where p equals q and rounding rejected the draft
    is_empty_B1 = residual_BV.sum(dim=-1, keepdim=True) <= 0
    last_B = draw(torch.where(is_empty_B1, p_BV, residual_BV), uniforms_B3K[:, 2, 0])
    tokens_BK = torch.cat([drafts_Bk, last_B[:, None]], dim=1).scatter(
        1, accepted_B[:, None], last_B[:, None]
    )
    return torch.cat([accepted_B[:, None], tokens_BK], dim=1)


def _prefix(right_Bk: Tensor) -> Tensor:
    """Count leading True values per row."""
    return right_Bk.to(torch.int64).cumprod(dim=1).sum(dim=1)
