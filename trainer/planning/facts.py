"""All budgets of one configuration, from facts that do not change with its settings.

Built by `trainer.plan` (and by the check before training loads) from the target's folder, the lengths of the
samples and the sizes of the memories; `budgets` is then called with as many variations of the configuration
as a question needs.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from trainer.config import TrainConfig
from trainer.data.corpus import Corpus
from trainer.drafter.model import DrafterConfig
from trainer.drafter.shape import drafter_config
from trainer.pipeline.devices import available_bytes, pick_dtype
from trainer.planning.budget import Budget, disk_budget, drafter_budget, host_budget, target_budget
from trainer.planning.fit import GIB
from trainer.planning.packs import PackFacts, pack_facts
from trainer.target.capture import Target
from trainer.target.identity import read_vocab_size
from trainer.target.loader import outline_target


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What stays the same while settings vary.

    `limits` maps device names, `host` and `disk` to bytes; what is missing there is not known.
    """

    target: Target
    """on the meta device"""
    lengths: Sequence[int]
    limits: Mapping[str, int] = field(default_factory=dict)

    def drafter(self, config: TrainConfig) -> DrafterConfig:
        """Return the drafter's shape."""
        return drafter_config(
            self.target.info, config.drafter, target_layer_ids=config.target.target_layer_ids
        )

    def packs(self, config: TrainConfig) -> PackFacts:
        """Deal the samples; lengths are cut as loading does it."""
        return pack_facts(config, [min(length, config.data.max_seq_len) for length in self.lengths])

    def device_budgets(self, config: TrainConfig) -> list[Budget]:
        """Return one budget per worker; of alike devices only the first differs in name."""
        packs, drafter = self.packs(config), self.drafter(config)
        found: list[Budget] = []
        for device in config.devices.targets():
            limit = self.limits.get(device)
            found.append(target_budget(config, self.target, drafter, packs, device=device, limit=limit))
        for device in config.devices.drafters():
            limit = self.limits.get(device)
            found.append(drafter_budget(config, drafter, packs, device=device, limit=limit))
        return _joined(found)

    def budgets(self, config: TrainConfig) -> list[Budget]:
        """Return the budgets of all GPUs, of the host and of the disk."""
        workers, packs, drafter = self.device_budgets(config), self.packs(config), self.drafter(config)
        on_cpu = [budget for budget in workers if budget.name.endswith(" on cpu")]
        gpus = [budget for budget in workers if budget not in on_cpu]
        host = host_budget(config, drafter, packs, on_cpu=on_cpu, limit=self.limits.get("host"))
        return [*gpus, host, disk_budget(config, drafter, limit=self.limits.get("disk"))]


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
    limits = {"host": available_bytes(), "disk": _free_disk(Path(config.paths.output_dir))}
    for device in (*config.devices.targets(), *config.devices.drafters()):
        if device == "cpu":
            continue
        if gpu_gib is not None:
            limits[device] = int(gpu_gib * GIB)
        elif int(device.rpartition(":")[2]) < torch.cuda.device_count():
            limits[device] = int(torch.cuda.get_device_properties(device).total_memory)
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
