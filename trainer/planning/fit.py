"""Says what would fit where a configuration does not: the largest value of each setting that helps.

Called by `trainer.plan` and by the check before training loads. Each setting is varied alone, by bisection
over whole dry plans.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from trainer.config import TrainConfig
from trainer.errors import ConfigError
from trainer.flags import FLAGS
from trainer.planning.budget import DISK, HOST, Budget

GIB = 1 << 30

_STEPS: Mapping[str, tuple[int, int]] = {
    "data.token_budget": (1, 256),
    "loss.max_anchors": (1, 16),
    "loss.head_chunk_rows": (1, 64),
    "queue.hs_max_depth": (1, 1),
    "checkpoint.keep": (1, 1),
}
"""Smallest value that makes sense, and the grain of the search."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WayOut:
    """A setting and its largest value with which the memory suffices."""

    key: str
    value: int

    @property
    def text(self) -> str:
        """The setting as it is typed."""
        flag = next((flag.name for flag in FLAGS if flag.key == self.key), None)
        return f"{flag} {self.value}" if flag else f"{self.key} = {self.value}"


def find_ways_out(
    config: TrainConfig, budget: Budget, budget_like: Callable[[TrainConfig, Budget], Budget]
) -> list[WayOut]:
    """Search, for every setting that makes `budget` smaller, the largest value that fits.

    Args:
        config: the configuration that is too large.
        budget: the memory that does not suffice.
        budget_like: plans the same memory under another configuration.
    """

    def fits(key: str, value: int) -> bool:
        try:
            changed = with_value(config, key, value)
        except ConfigError:
            return False
        return budget_like(changed, budget).verdict == "fits"

    found: list[WayOut] = []
    for key in budget.knobs:
        table, name = key.split(".")
        least, grain = _STEPS[key]
        if key == "data.token_budget":
            least = config.data.max_seq_len
        value = _largest(least, getattr(getattr(config, table), name), grain, functools.partial(fits, key))
        if value is not None:
            found.append(WayOut(key=key, value=value))
    return found


def with_value(config: TrainConfig, key: str, value: int) -> TrainConfig:
    """Return the configuration with one key changed.

    Raises:
        ConfigError: the value cannot go with the others.
    """
    table, name = key.split(".")
    section = dataclasses.replace(getattr(config, table), **{name: value})
    return dataclasses.replace(config, **{table: section})


def refusal(budget: Budget, ways: Sequence[WayOut]) -> ConfigError:
    """Make the error that names the memory, its largest term and the ways out."""
    assert budget.limit is not None
    term = budget.largest
    if ways:
        advice = "it fits with " + ", or ".join(way.text for way in ways)
    elif budget.name in (HOST, DISK):
        advice = "no single setting is enough: give it more"
    elif budget.fixed > budget.limit:
        advice = (
            f"no setting changes {budget.fixed / GIB:.2f} GiB of it: take a larger device or smaller models"
        )
    else:
        advice = "no single setting is enough: lower --token-budget and --max-anchors together"
    return ConfigError(
        f"{budget.name} needs {budget.total / GIB:.2f} GiB of {budget.limit / GIB:.2f} GiB; "
        f"largest term: {term.name} {term.nbytes / GIB:.2f} GiB ({term.nbytes} bytes); {advice}"
    )


def _largest(least: int, present: int, grain: int, fits: Callable[[int], bool]) -> int | None:
    """Bisect for the largest value from `least` to below `present` that fits; None when none does."""
    if least >= present or not fits(least):
        return None
    low, high = least, present
    while high - low > grain:
        middle = low + (high - low) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return max(least, low // grain * grain)
