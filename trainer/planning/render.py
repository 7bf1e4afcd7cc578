"""The plan as a table for the terminal and as a JSON record.

Called by `trainer.plan`. Pure; must not compute anything that is not a sum or a unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from trainer.planning.budget import DISK, HOST, Budget
from trainer.planning.fit import GIB
from trainer.planning.packs import PackFacts
from trainer.planning.split import Rates, Split

NAME_WIDTH, NOTE_WIDTH, SIZE_WIDTH = 30, 38, 10


def render_budgets(budgets: Sequence[Budget]) -> list[str]:
    """Return one table per memory; workers that differ by their device alone share one."""
    alike: dict[tuple[object, ...], list[Budget]] = {}
    for budget in budgets:
        kind = budget.name.partition(" on ")[0]
        alike.setdefault((kind, budget.terms, budget.limit), []).append(budget)
    tables: list[str] = []
    for group in alike.values():
        devices = ", ".join(budget.name.rpartition(" on ")[2] for budget in group[1:])
        each = f", {devices}: each" if devices else ""
        tables.append(render_budget(replace(group[0], name=f"{group[0].name}{each}")))
    return tables


def render_budget(budget: Budget) -> str:
    """Return the terms of one memory, their sum, the limit and the verdict; sizes in GiB."""
    lines = [f"{budget.name:<{NAME_WIDTH + NOTE_WIDTH + 3}}{'GiB':>{SIZE_WIDTH}}"]
    lines += [_row(term.name, term.note, term.nbytes) for term in budget.terms]
    lines.append(_row("sum", "", budget.total))
    if budget.limit is None:
        hint = "another machine's" if budget.name in (HOST, DISK) else "name it with --gpu-memory-gib"
        lines.append(f"  {'limit':<{NAME_WIDTH}} not known: {hint}")
    else:
        spare = budget.limit - budget.total
        text = f"{spare / GIB:.2f} to spare" if spare >= 0 else f"{-spare / GIB:.2f} too much"
        lines.append(_row("limit", "", budget.limit))
        lines.append(f"  {'verdict':<{NAME_WIDTH}} {budget.verdict}, {text}")
    lines += [f"  {note}" for note in budget.notes]
    return "\n".join(lines)


def render_packs(packs: PackFacts, *, epochs: int) -> str:
    """Return what the data becomes."""
    samples, length = packs.worst_batch
    return "\n".join(
        [
            f"data   {packs.tokens_per_epoch:,} tokens an epoch in {packs.packs_per_epoch:,} packs of "
            f"{packs.mean_tokens:,.0f} on average",
            f"       largest batch {samples} x {length:,}, largest pack {packs.most_tokens:,} tokens",
            f"run    {epochs} epochs = {packs.total_packs:,} packs = {packs.total_steps:,} steps, "
            f"{packs.tokens_per_epoch * epochs:,} tokens",
        ]
    )


def render_split(rates: Rates, best: Split, chosen: Split, *, gpus: int, tokens: int) -> str:
    """Return rates, the recommended split and what the configured one brings."""
    if not rates.is_measured:
        share = rates.drafter / rates.target
        return "\n".join(
            [
                f"rates  not measured; by counted work one drafter keeps up with {share:.2f} targets",
                f"split  of {gpus}: {best.text}" + ("" if gpus < 2 else f" (configured: {chosen.text})"),
            ]
        )
    lines = [
        f"rates  one target {rates.target:,.0f}, one drafter {rates.drafter:,.0f} tokens/s, measured",
        f"split  of {gpus}: {best.text}, {_rate(best, tokens)}",
    ]
    if (chosen.targets, chosen.drafters) != (best.targets, best.drafters):
        lines.append(f"       configured: {chosen.text}, {_rate(chosen, tokens)}")
    return "\n".join(lines)


def render_shared_rates(rates: Rates) -> str:
    """Return the rates of workers that share one processor: there is nothing to divide."""
    if not rates.is_measured:
        return "rates  not measured"
    return (
        f"rates  target {rates.target:,.0f}, drafter {rates.drafter:,.0f} tokens/s, measured one at a time;\n"
        "       on the CPU both share the cores"
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


def _rate(split: Split, tokens: int) -> str:
    hours = tokens / split.tokens_per_s / 3600.0
    return f"{split.tokens_per_s:,.0f} tokens/s, {hours:,.2f} h for the run"


def _row(name: str, note: str, nbytes: int) -> str:
    size = f"{nbytes / GIB:.2f}" if nbytes >= GIB // 100 or not nbytes else f"{nbytes / 2**20:.2f} MiB"
    return f"  {name:<{NAME_WIDTH}} {note:<{NOTE_WIDTH}}{size:>{SIZE_WIDTH}}"
