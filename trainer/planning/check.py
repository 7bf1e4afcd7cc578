"""The check before training loads anything: what cannot fit on a GPU is refused, what may not is told.

Called by `trainer.train`; does nothing for CPU devices. Weights, optimizer and buffers are certain, so they
decide. Activations depend on packs that are not known yet: the largest that the settings allow only warns.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from trainer.config import TrainConfig
from trainer.planning.budget import Budget
from trainer.planning.facts import outline_facts
from trainer.planning.fit import GIB, refusal

_LOG = logging.getLogger(__name__)


def check_memory(config: TrainConfig) -> None:
    """Hold the certain part of every GPU's memory against its size.

    Raises:
        ConfigError: weights, optimizer state and buffers alone are larger than a GPU.
    """
    if {*config.devices.targets(), *config.devices.drafters()} == {"cpu"}:
        return
    longest = config.data.max_seq_len
    samples = max(1, min(config.data.max_batch_size, config.data.token_budget // longest))
    try:
        budgets = outline_facts(config, lengths=[longest] * samples).device_budgets(config)
    except Exception as error:  # noqa: BLE001 - a prediction that fails must not keep a run from starting
        _LOG.warning(
            "memory was not planned (%s: %s); training starts all the same", type(error).__name__, error
        )
        return
    judge(budgets)


def judge(budgets: Sequence[Budget]) -> None:
    """Refuse, warn, or say what will be needed.

    Raises:
        ConfigError: see `check_memory`.
    """
    for budget in budgets:
        if budget.limit is None:
            continue
        if budget.certain > budget.limit:
            raise refusal(budget, [])
        needs = f"{budget.name} needs up to {budget.total / GIB:.2f} of {budget.limit / GIB:.2f} GiB"
        if budget.verdict == "too large":
            _LOG.warning(
                "%s with the longest samples; largest term: %s; dflash-train plan says more",
                needs,
                _term(budget),
            )
        else:
            _LOG.info("%s", needs)


def _term(budget: Budget) -> str:
    return f"{budget.largest.name} {budget.largest.nbytes / GIB:.2f} GiB"
