"""What an evaluation measured: from decoded prompts to one JSON record and a table for the terminal.

Used by `eval.command`; `eval.markdown` and `eval.plot` show the same record. Pure: no model, no file. The
headline figure is the mean over prompts of each prompt's mean tokens per verify (accepted drafts plus the
bonus token), with the last block counted whole. A figure that could not be measured is None, a slice without
data is absent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.eval import statistics
from trainer.eval.speculative import SpeculativeResult

REPORT_VERSION = 2
FIGURE = "mean over prompts of each prompt's mean tokens per verify, last block whole"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPrompt:
    """One prompt, decoded with the drafter."""

    id: str
    domain: str | None
    prompt_tokens: int
    speculative: SpeculativeResult


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredBlock:
    """All prompts, decoded with one block size."""

    block_size: int
    prompts: Sequence[MeasuredPrompt]
    seconds: float
    """wall time of decoding them, many at once where that is possible"""
    speed: Mapping[str, Any] | None
    """`eval.speed`'s record, None when speed was not measured"""


def build_report(
    blocks: Sequence[MeasuredBlock], *, setting: Mapping[str, Any], trained_block_size: int | None = None
) -> dict[str, Any]:
    """Sum up an evaluation.

    Args:
        blocks: what was measured, one entry per block size.
        setting: how it was measured (paths, device, limits, versions); copied into the record.
        trained_block_size: its figures are the headline where it was measured, else those of the first entry.

    Returns:
        The record: headline figures, `setting`, and all figures by block size under `block_sizes`.
    """
    records = [_block_record(block) for block in blocks]
    headline = next((one for one in records if one["block_size"] == trained_block_size), records[0])
    figure = f"{FIGURE}, {'greedy' if setting.get('sampling') is None else 'sampled'}"
    return {
        "v": REPORT_VERSION,
        "figure": figure,
        **{name: headline[name] for name in _HEADLINE},
        "setting": dict(setting),
        "block_sizes": records,
    }


_HEADLINE = (
    "block_size",
    "acceptance_length",
    "acceptance_length_interval",
    "micro_acceptance_length",
    "acceptance_rate",
    "prompts",
    "measured_prompts",
    "verifies",
    "new_tokens",
    "target_forwards",
)


def _block_record(block: MeasuredBlock) -> dict[str, Any]:
    measured, size = block.prompts, block.block_size
    counted = [_counted(item) for item in measured]
    counts = [count for item in counted for count in item.accept_counts]
    length = statistics.mean_of_prompts(counted)
    tokens = sum(len(item.speculative.token_ids) for item in measured)
    return {
        "block_size": size,
        "acceptance_length": length,
        "acceptance_length_interval": statistics.interval_of_mean(counted),
        "micro_acceptance_length": statistics.mean_of_verifies(counted),
        "acceptance_rate": (length - 1) / (size - 1) if length is not None and size > 1 else None,
        "offsets": statistics.by_offset(counts, size),
        "prompts": len(measured),
        "measured_prompts": sum(bool(item.accept_counts) for item in counted),
        "verifies": len(counts),
        "new_tokens": tokens,
        "target_forwards": sum(item.speculative.target_forwards for item in measured),
        "seconds": round(block.seconds, 3),
        "tokens_s": tokens / block.seconds if block.seconds else None,
        "domains": statistics.by_group(counted, [item.domain or "none" for item in measured]),
        "context_lengths": statistics.by_context_length(counted),
        "speed": None if block.speed is None else dict(block.speed),
        "per_prompt": [_prompt_record(item) for item in measured],
    }


def render_table(report: Mapping[str, Any]) -> str:
    """Lay the record out for the terminal; the headline comes first."""
    setting = report["setting"]
    lines = [
        f"acceptance length  {number(report['acceptance_length'])}   ({report['figure']})",
        f"95 % interval      {interval(report['acceptance_length_interval'])} (bootstrap over prompts); "
        f"mean over verifies {number(report['micro_acceptance_length'])}",
        f"drafter            {setting.get('drafter', 'none')} (block size {report['block_size']})",
        f"target             {setting.get('target_model', 'unknown')} on {setting.get('device', 'unknown')}",
        f"prompts            {report['measured_prompts']} measured of {report['prompts']}, "
        f"{report['new_tokens']} tokens in {report['target_forwards']} target forwards",
    ]
    for block in report["block_sizes"]:
        lines += ["", *_block_lines(block)]
    return "\n".join(lines) + "\n"


def _block_lines(block: Mapping[str, Any]) -> list[str]:
    lines = [
        f"block size {block['block_size']}: acceptance length {number(block['acceptance_length'])} "
        f"{interval(block['acceptance_length_interval'])}, rate {number(block['acceptance_rate'])}",
        "  accepted up to   "
        + "  ".join(f"{row['offset']}: {number(row['prefix'])}" for row in block["offsets"]),
        "  given the former "
        + "  ".join(f"{row['offset']}: {number(row['conditional'])}" for row in block["offsets"]),
    ]
    if block["speed"] is not None:
        lines.append("  " + speed_text(block["speed"]))
    lines.append(f"  {'slice':<26}{'prompts':>8}{'acceptance length':>19}")
    for name, group in block["domains"].items():
        lines.append(f"  {name:<26}{group['prompts']:>8}{number(group['acceptance_length']):>19}")
    for piece in block["context_lengths"]:
        name = f"context {statistics.name_of_context(piece)}"
        lines.append(f"  {name:<26}{piece['prompts']:>8}{number(piece['acceptance_length']):>19}")
    return lines


def speed_text(timing: Mapping[str, Any]) -> str:
    """Say in one line how fast decoding was."""
    ties = timing["diverged_at_a_tie"]
    note = f", {ties} of the others parted at a tie" if ties else ""
    return (
        f"speed {number(timing['speedup'])} x plain decoding, median {number(timing['speedup_median'])} x "
        f"({number(timing['speculative_ms_per_token'])} against {number(timing['plain_ms_per_token'])} "
        f"ms per token, {timing['identical_outputs']} of {timing['compared_prompts']} outputs identical"
        f"{note})"
    )


def number(value: float | None) -> str:
    """Show a figure, `unknown` when there is none."""
    return "unknown" if value is None else f"{value:.2f}"


def interval(limits: Sequence[float] | None) -> str:
    """Show an interval, `unknown` when there is none."""
    return "unknown" if limits is None else f"[{limits[0]:.2f}, {limits[1]:.2f}]"


def _counted(item: MeasuredPrompt) -> statistics.Counted:
    return statistics.Counted(prompt_tokens=item.prompt_tokens, accept_counts=item.speculative.accept_counts)


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
    }
