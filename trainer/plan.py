"""`dflash-train plan`: what a configuration needs and brings, before it is run.

Called by `trainer.__main__` with the flags of `train`. Prints a report (and writes JSON), and refuses what
cannot fit with exit 2. Reads data and target config; loads weights only to measure. Must not write anything
but the file that was asked for.
"""

from __future__ import annotations

import json
import logging
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

from trainer.config import TrainConfig
from trainer.errors import ConfigError
from trainer.flags import resolve, set_allocator_defaults
from trainer.lifecycle.results import ResultFile, check_results, is_record, write_result
from trainer.pipeline.devices import check_devices, cpu_threads
from trainer.planning.facts import Facts, free_now, read_facts
from trainer.planning.fit import find_ways_out, refusal
from trainer.planning.measure import Measured, measure
from trainer.planning.packs import PackFacts
from trainer.planning.render import (
    budget_record,
    ladder,
    render_budgets,
    render_packs,
    render_shared_rates,
    render_split,
    render_verdict,
    split_record,
)
from trainer.planning.split import Rates, best_split, counted_rates, evaluate

_LOG = logging.getLogger(__name__)

PLAN_VERSION = 1
MOST_GPUS = 4096
"""Every split of them is looked at."""
MOST_GIB = 1_000_000
_RECORD_KEYS = ("v", "packs", "memory", "measured", "split")


def run_plan(arguments: Namespace) -> int:
    """Plan one configuration; returns 0 when it fits.

    Args:
        arguments: the flags of `train`, and those of `plan` alone.

    Raises:
        ConfigError: some memory does not suffice; the line names the term and what would fit.
    """
    given = {name: value for name, value in vars(arguments).items() if name.startswith("--")}
    config = resolve(given, toml_path=arguments.config, overrides=arguments.overrides).config
    _check_flags(arguments, config)
    set_allocator_defaults()
    torch.set_num_threads(cpu_threads(config))
    _LOG.info("plan: reading the lengths of %s", config.paths.data_dir)
    facts = read_facts(config, gpu_gib=arguments.gpu_memory_gib)
    _LOG.info("plan: predicting memory by dry runs")
    budgets, packs = facts.budgets(config), facts.packs(config)
    free = {} if arguments.gpu_memory_gib else free_now(config)
    blocks = [render_packs(packs, epochs=config.optim.epochs), *render_budgets(budgets, free)]
    _print_now(ladder(blocks) + "\n")
    too_large = next((budget for budget in budgets if budget.verdict == "too large"), None)
    record: dict[str, Any] = {
        "v": PLAN_VERSION,
        "packs": _packs_record(packs),
        "memory": [budget_record(budget) for budget in budgets],
        "measured": None,
        "split": None,
    }
    # what does not fit cannot be measured: the split is by counted work then
    arguments.no_measure |= too_large is not None
    text, throughput = _throughput(config, facts, packs, arguments)
    _print_now(f"{text}\n{render_verdict(budgets, free)}\n")
    record |= throughput
    error: ConfigError | None = None
    if too_large is not None:
        _LOG.info("plan: looking for settings that fit")
        error = refusal(too_large, find_ways_out(config, too_large, facts.budget_like))
    record["refusal"] = None if error is None else str(error)
    if arguments.json is not None:
        content = json.dumps(record, indent=1) + "\n"
        write_result("--json", arguments.json, lambda path: path.write_text(content, encoding="utf-8"))
    if error is not None:
        raise error
    return 0


def _print_now(text: str) -> None:
    """Write a part of the report at once: what follows takes long."""
    sys.stdout.write(text)
    sys.stdout.flush()


def _check_flags(arguments: Namespace, config: TrainConfig) -> None:
    """Refuse what no machine has, and a record that could not be written, before anything is planned."""
    gib: float | None = arguments.gpu_memory_gib
    if gib is not None and not 0 < gib <= MOST_GIB:
        raise ConfigError(f"--gpu-memory-gib must be above 0 and at most {MOST_GIB}: {gib}")
    if arguments.gpus is not None and arguments.gpus > MOST_GPUS:
        raise ConfigError(f"--gpus must be at most {MOST_GPUS}: {arguments.gpus}")
    if {*config.devices.targets(), *config.devices.drafters()} == {"cpu"}:
        if gib is not None:
            _LOG.warning("--gpu-memory-gib has no effect: --target-gpus and --drafter-gpus name no GPU")
        if arguments.gpus is not None:
            _LOG.warning("--gpus divides GPUs by the rates of a CPU: name GPUs by --target-gpus to plan them")
    path: Path | None = arguments.json
    if path is not None:
        if not path.absolute().parent.is_dir():
            raise ConfigError(f"--json lies in a folder that does not exist: {path}; make it first")
        check_results([ResultFile(flag="--json", path=path, is_own=is_record(_RECORD_KEYS))])


def _throughput(
    config: TrainConfig, facts: Facts, packs: PackFacts, arguments: Namespace
) -> tuple[str, dict[str, Any]]:
    """Measure (or count) both sides and recommend a split."""
    measured: Measured | None = None
    drafter = facts.drafter(config)
    if arguments.no_measure:
        rates = counted_rates(config, facts.target, drafter, packs)
    else:
        check_devices(config)
        measured = measure(config, drafter, packs)
        rates = measured.rates
    present = {*config.devices.targets(), *config.devices.drafters()}
    if present == {"cpu"} and not arguments.gpus:
        tokens = packs.tokens_per_epoch * config.optim.epochs
        return render_shared_rates(rates, tokens=tokens), {
            "measured": None if measured is None else _measured_record(measured),
            "split": None,
        }
    gpus = arguments.gpus or torch.cuda.device_count() or len(present)
    best = best_split(gpus, rates)
    chosen = evaluate(len(config.devices.targets()), len(config.devices.drafters()), rates)
    text = render_split(rates, best, chosen, gpus=gpus, tokens=packs.tokens_per_epoch * config.optim.epochs)
    return text, {
        "measured": None if measured is None else _measured_record(measured),
        "split": {
            "devices": gpus,
            "best": split_record(best, rates),
            "configured": split_record(chosen, rates),
            "drafter_over_target_rate": round(rates.drafter / rates.target, 4),
        },
    }


def _packs_record(packs: PackFacts) -> dict[str, Any]:
    samples, length = packs.worst_batch
    return {
        "packs_per_epoch": packs.packs_per_epoch,
        "tokens_per_epoch": packs.tokens_per_epoch,
        "total_packs": packs.total_packs,
        "total_steps": packs.total_steps,
        "largest_pack_tokens": packs.most_tokens,
        "largest_batch": {"samples": samples, "length": length},
    }


def _measured_record(measured: Measured) -> dict[str, Any]:
    rates: Rates = measured.rates
    return {
        "tokens": measured.tokens,
        "target_tokens_per_s": round(rates.target, 1),
        "drafter_tokens_per_s": round(rates.drafter, 1),
        "target_peak_bytes": measured.target_peak_bytes,
        "drafter_peak_bytes": measured.drafter_peak_bytes,
    }
