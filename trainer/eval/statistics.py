"""Figures of an evaluation: acceptance length with its interval, acceptance by offset, slices.

Called by `eval.report` and `eval.online`. Pure arithmetic on counts per verify; no model, no file. A figure
that nothing was measured for is None, and a slice without data is absent: neither is ever 0.

`accept_counts` are tokens committed per verify: accepted drafts plus the bonus token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

RESAMPLES = 2000
CONTEXT_EDGES = tuple(128 << power for power in range(11))
"""Upper context lengths (tokens before the verify) of the slices; the last slice is open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """What one prompt's decoding gave, as far as figures need it."""

    prompt_tokens: int
    accept_counts: Sequence[int]

    @property
    def acceptance_length(self) -> float | None:
        """Mean tokens per verify, None when the first token already ended the sequence."""
        return fmean(self.accept_counts) if self.accept_counts else None


def mean_of_prompts(prompts: Iterable[Counted]) -> float | None:
    """Compute the headline figure: the mean over prompts of each prompt's mean tokens per verify."""
    known = _known_lengths(prompts)
    return fmean(known) if known else None


def mean_of_verifies(prompts: Iterable[Counted]) -> float | None:
    """Compute the micro-average: all tokens by all verifies, so that long outputs weigh more."""
    counts = [count for prompt in prompts for count in prompt.accept_counts]
    return fmean(counts) if counts else None


def interval_of_mean(prompts: Iterable[Counted], *, seed: int = 0) -> list[float] | None:
    """Bootstrap the headline figure over prompts: its 95 % interval, None below two measured prompts."""
    known = np.asarray(_known_lengths(prompts))
    if len(known) < 2:
        return None
    rng = np.random.default_rng(seed)
    means = known[rng.integers(len(known), size=(RESAMPLES, len(known)))].mean(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return [float(low), float(high)]


def by_offset(counts: Sequence[int], block_size: int) -> list[dict[str, Any]]:
    """Acceptance at offsets 1 to `block_size` - 1.

    Returns:
        Per offset: `verifies` that reached it (all drafts before it were accepted), `conditional` = the share
        of these that accepted it, `prefix` = the share of all verifies that accepted it and all before.
    """
    total, rows = len(counts), []
    for offset in range(1, block_size):
        reached = sum(count >= offset for count in counts)
        accepted = sum(count > offset for count in counts)
        rows.append(
            {
                "offset": offset,
                "verifies": reached,
                "conditional": accepted / reached if reached else None,
                "prefix": accepted / total if total else None,
            }
        )
    return rows


def by_group(prompts: Sequence[Counted], names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Sum up the prompts of each name (a domain, say), names in alphabetical order."""
    groups: dict[str, list[Counted]] = {}
    for name, prompt in sorted(zip(names, prompts, strict=True), key=lambda pair: pair[0]):
        groups.setdefault(name, []).append(prompt)
    return {name: _group(group) for name, group in groups.items()}


def by_context_length(prompts: Sequence[Counted]) -> list[dict[str, Any]]:
    """Sum up all verifies by the tokens that stood before each of them.

    Returns:
        Slices in ascending order: `above` (exclusive), `upto` (inclusive, None for the open one), `verifies`,
        `prompts` that have any there, and the mean tokens per verify.
    """
    counts: dict[int, list[int]] = {}
    owners: dict[int, set[int]] = {}
    for index, prompt in enumerate(prompts):
        context = prompt.prompt_tokens + 1  # the prefill's token is committed before the first verify
        for count in prompt.accept_counts:
            place = sum(context > edge for edge in CONTEXT_EDGES)
            counts.setdefault(place, []).append(count)
            owners.setdefault(place, set()).add(index)
            context += count
    edges = (0, *CONTEXT_EDGES)
    return [
        {
            "above": edges[place],
            "upto": CONTEXT_EDGES[place] if place < len(CONTEXT_EDGES) else None,
            "prompts": len(owners[place]),
            "verifies": len(counts[place]),
            "acceptance_length": fmean(counts[place]),
        }
        for place in sorted(counts)
    ]


def name_of_context(piece: Mapping[str, Any]) -> str:
    """Name a slice of `by_context_length` for people."""
    if piece["upto"] is None:
        return f"> {piece['above']}"
    return f"{piece['above'] + 1}–{piece['upto']}" if piece["above"] else f"≤ {piece['upto']}"


def _group(prompts: Sequence[Counted]) -> dict[str, Any]:
    return {
        "prompts": len(prompts),
        "measured_prompts": len(_known_lengths(prompts)),
        "acceptance_length": mean_of_prompts(prompts),
        "acceptance_length_interval": interval_of_mean(prompts),
        "micro_acceptance_length": mean_of_verifies(prompts),
    }


def _known_lengths(prompts: Iterable[Counted]) -> list[float]:
    return [length for prompt in prompts if (length := prompt.acceptance_length) is not None]
