"""Figures, ratios and the tables they are printed in.

Every benchmark returns one `Table`. Figures come first, as medians with the 95th percentile beside them; what
is judged (differences, ratios, each with its bar) comes last. Nothing is measured here.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest-rank percentile: a value that was really measured, never one in between."""
    if not values:
        raise ValueError("no values to take a percentile of")
    ranked = sorted(values)
    return ranked[max(0, math.ceil(share * len(ranked)) - 1)]


@dataclass(frozen=True, slots=True)
class Figure:
    """One quantity, measured several times."""

    name: str
    unit: str
    values: Sequence[float]

    @property
    def p50(self) -> float:
        """The median."""
        return statistics.median(self.values)

    @property
    def p95(self) -> float:
        """The 95th percentile, nearest rank; of a rate the 5th: always the bad side."""
        return percentile(self.values, 0.05 if self.unit.endswith("/s") else 0.95)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """What is judged: a difference or a ratio of two figures of the same run."""

    name: str
    value: float
    unit: str = "×"
    at_most: float | None = None
    at_least: float | None = None

    @property
    def verdict(self) -> str:
        """The bar and whether it is met; empty without a bar."""
        if self.at_most is not None:
            return f"≤ {self.at_most:g}: {'met' if self.value <= self.at_most else 'NOT MET'}"
        if self.at_least is not None:
            return f"≥ {self.at_least:g}: {'met' if self.value >= self.at_least else 'NOT MET'}"
        return ""


@dataclass(slots=True)
class Table:
    """One topic."""

    title: str
    figures: list[Figure] = field(default_factory=list)
    ratios: list[Ratio] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def render(self) -> str:
        """Plain text, ratios last."""
        names = [item.name for item in self.figures] + [item.name for item in self.ratios]
        width = max(map(len, names), default=0)
        lines = [self.title, f"  {'':{width}}  {'p50':>10}  {'p95':>10}  {'unit':5}  n"]
        for item in self.figures:
            values = f"{item.p50:10.2f}  {item.p95:10.2f}  {item.unit:5}  {len(item.values)}"
            lines.append(f"  {item.name:{width}}  {values}")
        for ratio in self.ratios:
            line = f"  {ratio.name:{width}}  {ratio.value:10.2f}  {'':10}  {ratio.unit:5}  {ratio.verdict}"
            lines.append(line.rstrip())
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])
