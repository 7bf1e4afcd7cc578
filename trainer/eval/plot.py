"""The record of an evaluation as a figure: acceptance by offset per block size, acceptance length by domain.

Called by `eval.command` for `--plot`. The only module that imports matplotlib, which is optional: its
absence is an error with the remedy, raised before anything is measured. Must not measure anything nor open a
window.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.errors import DependencyError

CREATOR = "dflash-train eval"
"""Stands in every figure, so that a later run knows it may be replaced."""
_COLOURS = ("#1f6feb", "#d1570a", "#1a7f37", "#8250df", "#bf3989", "#57606a")
_INK, _FAINT = "#24292f", "#d0d7de"
_GIVEN = {"linestyle": "-", "marker": "o", "markersize": 4.5, "linewidth": 1.8}
_SO_FAR = {
    "linestyle": (0, (4, 2)),
    "marker": "o",
    "markersize": 4.5,
    "linewidth": 1.3,
    "markerfacecolor": "white",
}


def require_matplotlib() -> Any:
    """Return matplotlib's `Figure`, which draws to files without any window system.

    Raises:
        DependencyError: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise DependencyError(
            "--plot needs matplotlib, which is missing: pip install 'dflash-supervisor[plot]', or leave "
            "--plot away"
        ) from error
    return Figure


def is_own_figure(content: bytes) -> bool:
    """Whether a file's content is a figure that `draw_report` drew."""
    return content.startswith(b"\x89PNG") and CREATOR.encode() in content


def draw_report(report: Mapping[str, Any], path: Path) -> None:
    """Draw `eval.report`'s record as a PNG."""
    blocks = report["block_sizes"]
    domains = list(blocks[0]["domains"])
    height = max(4.6, 1.9 + len(domains) * max(0.34, 0.2 * len(blocks)))
    figure = require_matplotlib()(figsize=(12, height), dpi=130, layout="constrained", facecolor="white")
    by_offset, by_domain = figure.subplots(1, 2, width_ratios=(1.15, 1))
    for place, block in enumerate(blocks):
        _draw_offsets(by_offset, block, _COLOURS[place % len(_COLOURS)])
        _draw_domains(by_domain, block, domains, place, len(blocks))
    _finish_offsets(by_offset)
    _finish_domains(by_domain, domains)
    figure.suptitle(_title(report), x=0.01, ha="left", fontsize=13, fontweight="bold", color=_INK)
    figure.savefig(path, format="png", metadata={"Creator": CREATOR})


def _draw_offsets(axes: Any, block: Mapping[str, Any], colour: str) -> None:
    for key, style in (("conditional", _GIVEN), ("prefix", _SO_FAR)):
        points = [(row["offset"], row[key]) for row in block["offsets"] if row[key] is not None]
        if points:
            axes.plot(*zip(*points, strict=True), color=colour, markeredgecolor=colour, **style)
    length = block["acceptance_length"]
    shown = "" if length is None else f": {length:.2f} tokens per verify"
    axes.plot([], [], color=colour, linewidth=5, label=f"block {block['block_size']}{shown}")


def _finish_offsets(axes: Any) -> None:
    axes.plot([], [], color=_INK, markeredgecolor=_INK, label="accepted, given all before", **_GIVEN)
    axes.plot([], [], color=_INK, markeredgecolor=_INK, label="accepted up to here", **_SO_FAR)
    axes.set_title("Acceptance by offset in the block", loc="left", fontsize=11, color=_INK)
    axes.set_xlabel("offset (1 = first drafted token)", color=_INK)
    axes.set_ylabel("share of drafts", color=_INK)
    axes.set_ylim(0, 1.02)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=True, framealpha=0.9, edgecolor="none", fontsize=8.5, loc="upper right")
    _tidy(axes, "both")


def _draw_domains(
    axes: Any, block: Mapping[str, Any], domains: Sequence[str], place: int, count: int
) -> None:
    colour, width = _COLOURS[place % len(_COLOURS)], 0.76 / count
    for row, name in enumerate(domains):
        group = block["domains"][name]
        length, limits = group["acceptance_length"], group["acceptance_length_interval"]
        if length is None:
            continue
        y = row + (place - (count - 1) / 2) * width
        axes.barh(y, length, height=width * 0.9, color=colour, alpha=0.85)
        end = length
        if limits is not None:
            axes.plot(limits, (y, y), color=_INK, linewidth=1.2, solid_capstyle="butt")
            end = max(limits[1], length)
        axes.annotate(
            f"{length:.2f}",
            (end, y),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            color=_INK,
            bbox={"boxstyle": "square,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.85},
        )
    if block["acceptance_length"] is not None:
        axes.axvline(block["acceptance_length"], color=colour, linewidth=1.1, linestyle=":", zorder=0)


def _finish_domains(axes: Any, domains: Sequence[str]) -> None:
    axes.set_title(
        "Acceptance length by domain",
        loc="left",
        fontsize=11,
        color=_INK,
    )
    axes.set_xlabel("tokens per verify (1 = no gain)\nblack: 95 % interval, dotted: all prompts", color=_INK)
    axes.set_yticks(range(len(domains)), [_short(name) for name in domains])
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlim(1.0, max(axes.get_xlim()[1], 2.0))
    _tidy(axes, "x")


def _tidy(axes: Any, grid: str) -> None:
    axes.grid(axis=grid, color=_FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_INK, labelsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _title(report: Mapping[str, Any]) -> str:
    length = report["acceptance_length"]
    shown = "unknown" if length is None else f"{length:.2f}"
    mode = "greedy" if report["setting"].get("sampling") is None else "sampled"
    return (
        f"Acceptance length {shown} at block size {report['block_size']}, {mode}, "
        f"{report['measured_prompts']} prompts"
    )


def _short(name: str) -> str:
    return name if len(name) <= 22 else name[:21] + "…"
