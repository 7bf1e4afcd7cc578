"""The record of an evaluation as Markdown tables.

Called by `eval.command` for `--markdown`. Pure text from `eval.report`'s record; must not measure anything.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.eval.report import interval, number, speed_text
from trainer.eval.statistics import name_of_context

TITLE = "Acceptance length"
"""How every page begins."""


def render_markdown(report: Mapping[str, Any], *, plot: str | None = None) -> str:
    """Lay the record out as a page; `plot` is the figure's path as the page has to name it."""
    setting = report["setting"]
    blocks = report["block_sizes"]
    parts = [
        f"# {TITLE} {number(report['acceptance_length'])} at block size {report['block_size']}",
        f"{_sentence(report['figure'])}; 95 % interval {interval(report['acceptance_length_interval'])} "
        f"by bootstrap over {report['measured_prompts']} prompts. Mean over verifies: "
        f"{number(report['micro_acceptance_length'])}.",
        *([f"![Acceptance by offset and by domain]({plot})"] if plot else []),
        _table(_HEAD, [_block_row(block) for block in blocks]),
        "## Acceptance by offset\n\nShare of the drafts that were accepted, given that all before them were; "
        "in brackets the share of all verifies that came at least so far.",
        _offset_table(blocks),
        "## By domain",
        _domain_table(blocks),
        "## By context length\n\nMean over the verifies that had so many tokens before them.",
        _context_table(blocks),
        *_speed_part(blocks),
        "## Setting",
        _setting_table(setting),
    ]
    return "\n\n".join(parts) + "\n"


_HEAD = (
    "block size",
    "acceptance length",
    "95 % interval",
    "mean over verifies",
    "rate",
    "verifies",
    "speedup",
)


def _block_row(block: Mapping[str, Any]) -> list[str]:
    speedup = None if block["speed"] is None else block["speed"]["speedup"]
    return [
        str(block["block_size"]),
        number(block["acceptance_length"]),
        interval(block["acceptance_length_interval"]),
        number(block["micro_acceptance_length"]),
        number(block["acceptance_rate"]),
        str(block["verifies"]),
        "not measured" if block["speed"] is None else f"{number(speedup)} ×",
    ]


def _offset_table(blocks: Sequence[Mapping[str, Any]]) -> str:
    longest = max(len(block["offsets"]) for block in blocks)
    rows = []
    for place in range(longest):
        cells = [str(place + 1)]
        for block in blocks:
            row = block["offsets"][place] if place < len(block["offsets"]) else None
            cells.append("" if row is None else f"{number(row['conditional'])} ({number(row['prefix'])})")
        rows.append(cells)
    return _table(("offset", *_size_names(blocks)), rows)


def _domain_table(blocks: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for name, group in blocks[0]["domains"].items():
        cells = [
            f"{number(block['domains'][name]['acceptance_length'])} "
            f"{interval(block['domains'][name]['acceptance_length_interval'])}"
            for block in blocks
        ]
        rows.append([name, str(group["prompts"]), *cells])
    return _table(("domain", "prompts", *_size_names(blocks)), rows)


def _context_table(blocks: Sequence[Mapping[str, Any]]) -> str:
    found = {name_of_context(piece): piece["above"] for block in blocks for piece in block["context_lengths"]}
    rows = []
    for name in sorted(found, key=found.__getitem__):
        cells = [name]
        for block in blocks:
            piece = next((p for p in block["context_lengths"] if name_of_context(p) == name), None)
            cells.append(
                ""
                if piece is None
                else f"{number(piece['acceptance_length'])} ({piece['verifies']} verifies)"
            )
        rows.append(cells)
    return _table(("tokens before the verify", *_size_names(blocks)), rows)


def _speed_part(blocks: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = [
        f"- block size {block['block_size']}: {speed_text(block['speed'])}"
        for block in blocks
        if block["speed"] is not None
    ]
    if not lines:
        return []
    intro = (
        "## Speed\n\nGreedy, one prompt at a time, decoding only (prefill of target and drafter left out), "
        "plain and speculative decoding in turn through the same code."
    )
    return [intro, "\n".join(lines)]


def _setting_table(setting: Mapping[str, Any]) -> str:
    rows = [
        [name, _shown(value)]
        for name, value in setting.items()
        if name not in ("command", "code", "warnings")
    ]
    versions = setting.get("code", {}).get("versions", {})
    rows.append(["versions", ", ".join(f"{name} {version}" for name, version in versions.items())])
    rows.append(["command", f"`{shlex.join(['dflash-train', *map(str, setting.get('command', []))])}`"])
    rows += [["warning", text] for text in setting.get("warnings", [])]
    return _table(("", ""), rows)


def _size_names(blocks: Sequence[Mapping[str, Any]]) -> list[str]:
    return [f"block {block['block_size']}" for block in blocks]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {item}" for name, item in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "none"
    return str(value)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
