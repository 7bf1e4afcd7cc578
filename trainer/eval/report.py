"""What an evaluation measured: from decoded prompts to one JSON record and a table.

Used by `eval.command` only. Pure: no model, no file. The headline figure is the mean over prompts of each
prompt's mean tokens per verify (accepted drafts plus the bonus token), greedy, with the last block counted
whole. A figure that could not be measured is None, never 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from trainer.eval.speculative import SpeculativeResult

FIGURE = "mean over prompts of each prompt's mean tokens per verify, greedy, last block whole"
CONTEXT_EDGES = (128, 512, 2048, 8192)
"""Upper prompt lengths (tokens) of the context-length groups; the last group is open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPrompt:
    """One prompt, decoded with the drafter and, for some prompts, without."""

    id: str
    domain: str | None
    prompt_tokens: int
    speculative: SpeculativeResult
    plain: SpeculativeResult | None


def build_report(
    measured: Sequence[MeasuredPrompt], *, block_size: int, setting: Mapping[str, Any]
) -> dict[str, Any]:
    """Sum up an evaluation.

    Args:
        measured: the decoded prompts; those that ended with their first token count as unmeasured.
        block_size: positions per block, the anchor included.
        setting: how it was measured (paths, device, limits); copied into the record.
    """
    length = acceptance_length(measured)
    counted = [item for item in measured if item.speculative.accept_counts]
    return {
        "v": 1,
        "figure": FIGURE,
        "acceptance_length": length,
        "acceptance_rate": (length - 1) / (block_size - 1) if length is not None and block_size > 1 else None,
        "per_offset": per_offset_acceptance(measured, block_size),
        "prompts": len(measured),
        "measured_prompts": len(counted),
        "verifies": sum(len(item.speculative.accept_counts) for item in measured),
        "new_tokens": sum(len(item.speculative.token_ids) for item in measured),
        "target_forwards": sum(item.speculative.target_forwards for item in measured),
        "domains": _grouped(measured, [item.domain or "none" for item in measured]),
        "context_lengths": _grouped(measured, [_context_group(item.prompt_tokens) for item in measured]),
        "speed": speed(measured),
        "setting": {"block_size": block_size} | dict(setting),
        "per_prompt": [_prompt_record(item) for item in measured],
    }


def acceptance_length(measured: Sequence[MeasuredPrompt]) -> float | None:
    """Compute the headline figure, None when nothing was verified."""
    lengths = [item.speculative.acceptance_length for item in measured]
    known = [length for length in lengths if length is not None]
    return fmean(known) if known else None


def per_offset_acceptance(measured: Sequence[MeasuredPrompt], block_size: int) -> list[float | None]:
    """Share of all verifies that accepted the drafts up to offset k; k = 1 to block_size - 1."""
    counts = [count for item in measured for count in item.speculative.accept_counts]
    offsets = range(1, block_size)
    return [sum(count > k for count in counts) / len(counts) if counts else None for k in offsets]


def speed(measured: Sequence[MeasuredPrompt]) -> dict[str, Any]:
    """Compare decoding speed on the prompts that were also decoded plainly; prefill is left out of both."""
    pairs = [(item.speculative, item.plain) for item in measured if item.plain is not None]
    fast = _seconds_per_token([speculative for speculative, _ in pairs])
    slow = _seconds_per_token([plain for _, plain in pairs])
    return {
        "compared_prompts": len(pairs),
        "identical_outputs": sum(one.token_ids == other.token_ids for one, other in pairs),
        "plain_ms_per_token": None if slow is None else slow * 1000,
        "speculative_ms_per_token": None if fast is None else fast * 1000,
        "draft_time_ratio": _draft_share([speculative for speculative, _ in pairs]),
        "speedup": slow / fast if slow is not None and fast else None,
    }


def render_table(report: Mapping[str, Any]) -> str:
    """Lay the record out for people; the headline comes first."""
    setting, timing = report["setting"], report["speed"]
    lines = [
        f"acceptance length  {_number(report['acceptance_length'])}   ({FIGURE})",
        f"acceptance rate    {_number(report['acceptance_rate'])}",
        f"drafter            {setting.get('drafter', 'none')} (block size {setting['block_size']})",
        f"target             {setting.get('target_model', 'unknown')} on {setting.get('device', 'unknown')}",
        f"prompts            {report['measured_prompts']} measured of {report['prompts']}, "
        f"{report['new_tokens']} tokens in {report['target_forwards']} target forwards",
        _speed_line(timing),
        "accepted up to     "
        + "  ".join(f"{k}: {_number(p)}" for k, p in enumerate(report["per_offset"], 1)),
        "",
        f"{'group':<28}{'prompts':>8}{'acceptance length':>19}",
    ]
    for title in ("domains", "context_lengths"):
        for name, group in report[title].items():
            lines.append(f"{name:<28}{group['prompts']:>8}{_number(group['acceptance_length']):>19}")
    return "\n".join(lines) + "\n"


def _speed_line(timing: Mapping[str, Any]) -> str:
    return (
        f"speed              {_number(timing['speedup'])} x plain decoding "
        f"({_number(timing['speculative_ms_per_token'])} against {_number(timing['plain_ms_per_token'])} "
        f"ms per token, {timing['identical_outputs']} of {timing['compared_prompts']} outputs identical)"
    )


def _grouped(measured: Sequence[MeasuredPrompt], names: Sequence[str]) -> dict[str, dict[str, Any]]:
    groups: dict[str, list[MeasuredPrompt]] = {}
    for name, item in sorted(zip(names, measured, strict=True), key=lambda pair: pair[0]):
        groups.setdefault(name, []).append(item)
    return {
        name: {"prompts": len(items), "acceptance_length": acceptance_length(items)}
        for name, items in groups.items()
    }


def _context_group(tokens: int) -> str:
    """Name a prompt-length group so that names sort by length."""
    for edge in CONTEXT_EDGES:
        if tokens <= edge:
            return f"context up to {edge:>5}"
    return f"context above {CONTEXT_EDGES[-1]:>5}"


def _prompt_record(item: MeasuredPrompt) -> dict[str, Any]:
    result = item.speculative
    return {
        "id": item.id,
        "domain": item.domain,
        "prompt_tokens": item.prompt_tokens,
        "new_tokens": len(result.token_ids),
        "stopped": result.stopped,
        "acceptance_length": result.acceptance_length,
        "accept_counts": result.accept_counts,
        "is_identical_to_plain": None if item.plain is None else item.plain.token_ids == result.token_ids,
    }


def _seconds_per_token(results: Sequence[SpeculativeResult]) -> float | None:
    tokens = sum(sum(result.accept_counts) for result in results)
    return sum(result.decode_s for result in results) / tokens if tokens else None


def _draft_share(results: Sequence[SpeculativeResult]) -> float | None:
    total = sum(result.decode_s for result in results)
    return sum(result.draft_s for result in results) / total if total else None


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2f}"
