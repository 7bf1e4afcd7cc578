"""The plan as a report for the terminal and as a JSON record.

Called by `trainer.plan`. Pure; must not compute anything that is not a sum or a unit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainer.planning.budget import DISK, HOST, Budget
from trainer.planning.packs import PackFacts
from trainer.planning.split import Rates, Split
from trainer.telemetry.metrics import size_text

NAME_WIDTH, SIZE_WIDTH, LABEL_WIDTH = 34, 10, 9

_EACH = ", each"
_LIMITS = {HOST: " available", DISK: " free"}
"""What the size of a memory is: of a GPU all it has, of these what is left now."""


def render_budgets(budgets: Sequence[Budget], free: Mapping[str, int] | None = None) -> list[str]:
    """Return one table per memory; workers that differ by their device alone share one.

    Args:
        budgets: of all memories.
        free: bytes that nobody uses now, by device; what is missing is not known.
    """
    return [
        "\n".join([_head(name, budget, _least_free(devices, free or {})), *_details(budget)])
        for name, budget, devices in _alike(budgets)
    ]


def render_verdict(budgets: Sequence[Budget], free: Mapping[str, int] | None = None) -> str:
    """Return whether all fits, what decides it, and what was not looked at."""
    groups = [(name.removesuffix(_EACH), budget, devices) for name, budget, devices in _alike(budgets)]
    large = [name for name, budget, _ in groups if budget.verdict == "too large"]
    if large:
        return _labelled("verdict", f"too large: {'; '.join(large)}")
    lines = []
    known = [(name, budget) for name, budget, _ in groups if budget.limit is not None]
    if known:
        name, budget = min(known, key=lambda item: _spare(item[1]) / max(1, item[1].limit or 1))
        lines.append(f"fits; tightest: {name}, {size_text(_spare(budget))} to spare")
    for name, budget, devices in groups:
        left = _least_free(devices, free or {})
        if left is not None and left < budget.total:
            lines.append(
                f"not now: {name} needs {size_text(budget.total)} and {size_text(left)} are free; "
                "end what else uses it"
            )
    unknown = [name for name, budget, _ in groups if budget.limit is None]
    if unknown:
        lines.append(f"not judged, as the size is not known: {'; '.join(unknown)}")
    return _labelled("verdict", *lines)


def render_packs(packs: PackFacts, *, epochs: int) -> str:
    """Return what the data becomes."""
    samples, length = packs.worst_batch
    return "\n".join(
        [
            _labelled(
                "data",
                f"{packs.tokens_per_epoch:,} tokens an epoch in {_count(packs.packs_per_epoch, 'pack')} of "
                f"{packs.mean_tokens:,.0f} on average",
                f"largest batch {samples} x {length:,}, largest pack {packs.most_tokens:,} tokens",
            ),
            _labelled(
                "run",
                f"{_count(epochs, 'epoch')} = {_count(packs.total_packs, 'pack')} = "
                f"{_count(packs.total_steps, 'step')}, {packs.tokens_per_epoch * epochs:,} tokens",
            ),
        ]
    )


def render_split(rates: Rates, best: Split, chosen: Split, *, gpus: int, tokens: int) -> str:
    """Return rates, the recommended split and what the configured one brings."""
    if not rates.is_measured:
        share = rates.drafter / rates.target
        rate = _labelled(
            "rates", f"not measured; by counted work one drafter keeps up with {share:.2f} targets"
        )
        return f"{rate}\n{_labelled('split', f'of {gpus}: {best.text}{_configured(best, chosen, gpus)}')}"
    rate = _labelled(
        "rates", f"one target {rates.target:,.0f}, one drafter {rates.drafter:,.0f} tokens/s, measured"
    )
    lines = [f"of {gpus}: {best.text}, {_rate(best, tokens)}"]
    if (chosen.targets, chosen.drafters) != (best.targets, best.drafters):
        lines.append(f"configured: {chosen.text}, {_rate(chosen, tokens)}")
    return f"{rate}\n{_labelled('split', *lines)}"


def render_shared_rates(rates: Rates, *, tokens: int) -> str:
    """Return the rates of workers that share one processor: there is nothing to divide."""
    if not rates.is_measured:
        return _labelled("rates", "not measured")
    slower = min(rates.target, rates.drafter)
    return _labelled(
        "rates",
        f"target {rates.target:,.0f}, drafter {rates.drafter:,.0f} tokens/s, measured one at a time",
        f"together at most {slower:,.0f} tokens/s, as both share the cores: "
        f"at least {_span(tokens / slower)} for the run",
    )


def budget_record(budget: Budget) -> dict[str, Any]:
    """Return one budget as JSON."""
    return {
        "name": budget.name,
        "terms": [{"name": t.name, "bytes": t.nbytes, "note": t.note} for t in budget.terms],
        "sum_bytes": budget.total,
        "torch_peak_bytes": budget.allocated,
        "limit_bytes": budget.limit,
        "verdict": budget.verdict,
        "notes": list(budget.notes),
    }


def split_record(split: Split, rates: Rates) -> dict[str, Any]:
    """Return a split as JSON; the throughput is null where nothing was measured."""
    return {
        "targets": split.targets,
        "drafters": split.drafters,
        "tokens_per_s": round(split.tokens_per_s, 1) if rates.is_measured else None,
    }


def ladder(rows: Sequence[str]) -> str:
    """Put blocks below each other with an empty line between."""
    return "\n\n".join(rows) + "\n"


def _alike(budgets: Sequence[Budget]) -> list[tuple[str, Budget, list[str]]]:
    """Gather what has the same terms: a name for all, one of the budgets, and the devices."""
    alike: dict[tuple[object, ...], list[Budget]] = {}
    for budget in budgets:
        kind = budget.name.partition(" on ")[0]
        alike.setdefault((kind, budget.terms, budget.limit), []).append(budget)
    return [_named(group) for group in alike.values()]


def _named(group: Sequence[Budget]) -> tuple[str, Budget, list[str]]:
    kind = group[0].name.partition(" on ")[0]
    devices = [budget.name.rpartition(" on ")[2] for budget in group]
    if len(group) == 1:
        return group[0].name, group[0], devices
    return f"{kind} on {_device_range(devices)}{_EACH}", group[0], devices


def _device_range(devices: Sequence[str]) -> str:
    """Name devices in a row by the first and the last."""
    numbers = [int(device.rpartition(":")[2]) for device in devices if ":" in device]
    if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[0] + len(devices))):
        return f"{devices[0]} to {devices[-1]}"
    return ", ".join(devices)


def _head(name: str, budget: Budget, left: int | None) -> str:
    """Return what a memory has to hold, what it has, and what that leaves."""
    row = f"{name:<{NAME_WIDTH}} {size_text(budget.total):>{SIZE_WIDTH}}"
    if budget.limit is None:
        why = "it is another machine's" if budget.name in (HOST, DISK) else "name it with --gpu-memory-gib"
        return f"{row}  size not known: {why}"
    size = f"{size_text(budget.limit)}{_LIMITS.get(budget.name, '')}"
    if left is not None:
        size += f" ({size_text(left)} free now)"
    spare = _spare(budget)
    left_over = f"too large by {size_text(-spare)}" if spare < 0 else f"{size_text(spare)} to spare"
    return f"{row}  of {size}, {left_over}"


def _details(budget: Budget) -> list[str]:
    rows = [
        f"  {term.name:<{NAME_WIDTH - 2}} {size_text(term.nbytes):>{SIZE_WIDTH}}  {term.note}".rstrip()
        for term in budget.terms
        if term.nbytes
    ]
    return [*rows, *(f"  {note}" for note in budget.notes)]


def _least_free(devices: Sequence[str], free: Mapping[str, int]) -> int | None:
    return min((free[device] for device in devices if device in free), default=None)


def _spare(budget: Budget) -> int:
    return (budget.limit or 0) - budget.total


def _configured(best: Split, chosen: Split, gpus: int) -> str:
    is_same = (chosen.targets, chosen.drafters) == (best.targets, best.drafters)
    return "" if gpus < 2 or is_same else f" (configured: {chosen.text})"


def _labelled(label: str, *lines: str) -> str:
    heads = [label, *[""] * (len(lines) - 1)]
    return "\n".join(f"{head:<{LABEL_WIDTH}} {line}" for head, line in zip(heads, lines, strict=True))


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _rate(split: Split, tokens: int) -> str:
    return f"{split.tokens_per_s:,.0f} tokens/s, {_span(tokens / split.tokens_per_s)} for the run"


def _span(seconds: float) -> str:
    """Return a duration in the unit that a person would choose."""
    for size, name in ((86_400.0, "days"), (3_600.0, "h"), (60.0, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {name}"
    return f"{seconds:,.0f} s"
