"""All budgets of one configuration, from facts that do not change with its settings.

Built by `trainer.plan` (and by the check before training loads) from the target's folder, the lengths of the
samples and the sizes of the memories; `budgets` is then called with as many variations of the configuration
as a question needs.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from trainer.config import TrainConfig
from trainer.data.corpus import Corpus
from trainer.drafter.model import DrafterConfig
from trainer.drafter.shape import drafter_config
from trainer.pipeline.devices import available_bytes, pick_dtype
from trainer.planning.budget import (
    DISK,
    HOST,
    Budget,
    disk_budget,
    drafter_budget,
    host_budget,
    target_budget,
)
from trainer.planning.fit import GIB
from trainer.planning.packs import PackFacts, pack_facts
from trainer.target.capture import Target
from trainer.target.identity import read_vocab_size
from trainer.target.loader import outline_target

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What stays the same while settings vary.

    `limits` maps device names, `HOST` and `DISK` to bytes; what is missing there is not known.
    """

    target: Target
    """on the meta device"""
    lengths: Sequence[int]
    limits: Mapping[str, int] = field(default_factory=dict)
    _dealt: dict[object, PackFacts] = field(default_factory=dict, repr=False, compare=False)
    """packs by the settings they depend on"""

    def drafter(self, config: TrainConfig) -> DrafterConfig:
        """Return the drafter's shape."""
        return drafter_config(
            self.target.info, config.drafter, target_layer_ids=config.target.target_layer_ids
        )

    def packs(self, config: TrainConfig) -> PackFacts:
        """Deal the samples; lengths are cut as loading does it."""
        key = (config.data, config.optim, config.devices)
        if key not in self._dealt:
            cut = [min(length, config.data.max_seq_len) for length in self.lengths]
            self._dealt[key] = pack_facts(config, cut)
        return self._dealt[key]

    def device_budgets(self, config: TrainConfig, *, only: str | None = None) -> list[Budget]:
        """Return one budget per device; workers that share a GPU share its budget.

        Args:
            config: of the run.
            only: leave out the workers of all other devices.
        """
        found = [
            *self._workers(config, config.devices.targets(), self._target_budget, only=only),
            *self._workers(config, config.devices.drafters(), self._drafter_budget, only=only),
        ]
        return _joined(found)

    def budgets(self, config: TrainConfig) -> list[Budget]:
        """Return the budgets of all GPUs, of the host and of the disk."""
        workers = self.device_budgets(config)
        gpus = [budget for budget in workers if not budget.name.endswith(" on cpu")]
        return [*gpus, self._host_budget(config, workers), self._disk_budget(config)]

    def budget_like(self, config: TrainConfig, budget: Budget) -> Budget:
        """Return the budget of the same memory under another configuration, and compute no other."""
        if budget.name == DISK:
            return self._disk_budget(config)
        if budget.name == HOST:
            return self._host_budget(config, self.device_budgets(config, only="cpu"))
        return self.device_budgets(config, only=budget.name.rpartition(" on ")[2])[0]

    def _workers(
        self,
        config: TrainConfig,
        devices: Sequence[str],
        build: Callable[[TrainConfig, str], Budget],
        *,
        only: str | None,
    ) -> Iterator[Budget]:
        """Plan each worker; those behind the second are like it (the first may sum gradients)."""
        second: Budget | None = None
        for place, device in enumerate(devices):
            if only not in (None, device):
                continue
            if place < 2 or second is None:
                budget = build(config, device)
                second = budget if place else None
            else:
                kind = second.name.partition(" on ")[0]
                budget = replace(second, name=f"{kind} on {device}", limit=self.limits.get(device))
            yield budget

    def _target_budget(self, config: TrainConfig, device: str) -> Budget:
        return target_budget(
            config,
            self.target,
            self.drafter(config),
            self.packs(config),
            device=device,
            limit=self.limits.get(device),
        )

    def _drafter_budget(self, config: TrainConfig, device: str) -> Budget:
        return drafter_budget(
            config, self.drafter(config), self.packs(config), device=device, limit=self.limits.get(device)
        )

    def _host_budget(self, config: TrainConfig, workers: Sequence[Budget]) -> Budget:
        on_cpu = [budget for budget in workers if budget.name.endswith(" on cpu")]
        return host_budget(
            config, self.drafter(config), self.packs(config), on_cpu=on_cpu, limit=self.limits.get(HOST)
        )

    def _disk_budget(self, config: TrainConfig) -> Budget:
        return disk_budget(config, self.drafter(config), limit=self.limits.get(DISK))


def read_facts(config: TrainConfig, *, gpu_gib: float | None = None) -> Facts:
    """Read the lengths of the data, outline the target, and look at the memories there are.

    Args:
        config: of the run.
        gpu_gib: memory of each GPU in GiB; None asks the present ones.
    """
    corpus = Corpus.open(
        config.paths.data_dir,
        max_seq_len=config.data.max_seq_len,
        vocab_size=read_vocab_size(Path(config.paths.target_model)),
    )
    return outline_facts(config, lengths=corpus.lengths.tolist(), gpu_gib=gpu_gib)


def free_now(config: TrainConfig) -> dict[str, int]:
    """Ask every present GPU of the configuration for the bytes that no process uses."""
    devices = {*config.devices.targets(), *config.devices.drafters()} - {"cpu"}
    free: dict[str, int] = {}
    for device in sorted(devices):
        if int(device[5:]) < torch.cuda.device_count():
            try:
                free[device] = int(torch.cuda.mem_get_info(device)[0])
            except RuntimeError as error:
                reason = str(error).partition("\n")[0]
                _LOG.warning("what is free on %s is not known: %s", device, reason)
    return free


def outline_facts(config: TrainConfig, *, lengths: Sequence[int], gpu_gib: float | None = None) -> Facts:
    """Do the same with the lengths of the samples given."""
    target = outline_target(
        config.paths.target_model,
        dtype=pick_dtype(config.devices.target_dtype, config.devices.targets()[0]),
        attn=config.target.attention,
        mask_token_id=config.target.mask_token_id,
    )
    return Facts(target=target, lengths=lengths, limits=_limits(config, gpu_gib))


def _limits(config: TrainConfig, gpu_gib: float | None) -> dict[str, int]:
    """Find the sizes of the memories; where GPUs are absent, host and disk are another machine's too."""
    devices = {*config.devices.targets(), *config.devices.drafters()} - {"cpu"}
    present = {device for device in devices if int(device[5:]) < torch.cuda.device_count()}
    if gpu_gib is not None:
        limits = dict.fromkeys(devices, int(gpu_gib * GIB))
    else:
        limits = {device: int(torch.cuda.get_device_properties(device).total_memory) for device in present}
    if devices == present:
        limits |= {HOST: available_bytes(), DISK: _free_disk(Path(config.paths.output_dir))}
    return limits


def _free_disk(folder: Path) -> int:
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(existing).free


def _joined(budgets: Sequence[Budget]) -> list[Budget]:
    """Put the workers of one GPU into one budget: a GPU may have a target and a drafter."""
    by_device: dict[str, Budget] = {}
    joined: list[Budget] = []
    for budget in budgets:
        device = budget.name.rpartition(" on ")[2]
        if device == "cpu" or device not in by_device:
            by_device[device] = budget
            joined.append(budget)
            continue
        first = by_device[device]
        kinds = [entry.name.partition(" on ")[0] for entry in (first, budget)]
        both = Budget(
            name=f"{' and '.join(kinds)} on {device}",
            terms=(*first.terms, *budget.terms),
            limit=first.limit,
            knobs=tuple(dict.fromkeys((*first.knobs, *budget.knobs))),
            notes=(*first.notes, *budget.notes),
        )
        joined[joined.index(first)] = by_device[device] = both
    return joined
