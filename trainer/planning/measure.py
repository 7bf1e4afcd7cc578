"""Two short measurements on the present devices: tokens per second of a target and of a drafter.

Called by `trainer.plan`. Loads the real target, and a fresh drafter; runs each side a few times on the
largest pack of the most common bucket. Must not write anything.

Dimension suffixes: B batch, S padded length.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from trainer.config import TrainConfig
from trainer.data.collate import made_up_documents
from trainer.drafter.anchors import block_labels, select_anchors
from trainer.drafter.loss import FrozenEnds, microbatch_sums
from trainer.drafter.model import DrafterConfig, build_drafter
from trainer.drafter.objective import Objective
from trainer.optim.adamw import AdamWSettings, MasterAdamW
from trainer.pipeline.devices import on_device, pick_attention, pick_dtype
from trainer.pipeline.messages import FeaturePack, HiddenStates
from trainer.planning.packs import PackFacts
from trainer.planning.split import Rates
from trainer.target.capture import Target
from trainer.target.loader import load_target

_LOG = logging.getLogger(__name__)

WARM_UPS, REPEATS = 2, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What was measured; peaks are null on the CPU."""

    rates: Rates
    tokens: int
    """of the pack that was used"""
    target_peak_bytes: int | None
    drafter_peak_bytes: int | None


def measure(config: TrainConfig, drafter: DrafterConfig, packs: PackFacts) -> Measured:
    """Time both sides, one after the other, on the first device of each."""
    target_device, drafter_device = config.devices.targets()[0], config.devices.drafters()[0]
    target = load_target(
        Path(config.paths.target_model),
        device=target_device,
        dtype=pick_dtype(config.devices.target_dtype, target_device),
        attn=config.target.attention,
        mask_token_id=config.target.mask_token_id,
    )
    ends = FrozenEnds(
        embed_weight_VD=target.embed_weight_VD,
        head_weight_VD=target.head_weight_VD,
        embed_scale=target.info.embed_scale,
        logit_softcap=target.info.logit_softcap,
    )
    tokens = sum(packs.common_lengths)
    told = f"{WARM_UPS + REPEATS} passes of a pack of {tokens:,} tokens"
    _LOG.info("plan: measuring the target on %s, %s", target_device, told)
    with on_device(torch.device(target_device)):
        target_s, target_peak = _time(prefill(config, target, drafter, packs), target_device)
    del target  # the drafter may have the same device
    dtype = pick_dtype(config.devices.drafter_dtype, drafter_device)
    ends = FrozenEnds(
        embed_weight_VD=ends.embed_weight_VD.to(drafter_device, dtype),
        head_weight_VD=ends.head_weight_VD.to(drafter_device, dtype),
        embed_scale=ends.embed_scale,
        logit_softcap=ends.logit_softcap,
    )
    _LOG.info("plan: measuring the drafter on %s, %s", drafter_device, told)
    with on_device(torch.device(drafter_device)):
        drafter_s, drafter_peak = _time(drafter_step(config, drafter, ends, packs), drafter_device)
    return Measured(
        rates=Rates(target=tokens / target_s, drafter=tokens / drafter_s, is_measured=True),
        tokens=tokens,
        target_peak_bytes=target_peak,
        drafter_peak_bytes=drafter_peak,
    )


def prefill(
    config: TrainConfig, target: Target, drafter: DrafterConfig, packs: PackFacts
) -> Callable[[], object]:
    """Return one prefill of the common pack."""
    lengths = packs.common_lengths
    ids_BS = torch.zeros(len(lengths), lengths[0], dtype=torch.int64, device=target.device)

    def run() -> object:
        return target.hidden_states(
            ids_BS, None, drafter.target_layer_ids, with_last_hidden=config.loss.uses_soft_labels
        )

    return run


def drafter_step(
    config: TrainConfig, drafter: DrafterConfig, ends: FrozenEnds, packs: PackFacts
) -> Callable[[], object]:
    """Return one micro-batch of the common pack with its share of the optimizer step, on the ends' device."""
    model = build_drafter(drafter, seed=0, dtype=ends.head_weight_VD.dtype).to(ends.head_weight_VD.device)
    optimizer = MasterAdamW(model.named_parameters(), AdamWSettings.from_config(config.optim))
    tokens = made_up_documents(packs.common_lengths)
    features_TLD = torch.randn(
        (sum(packs.common_lengths), len(drafter.target_layer_ids), drafter.hidden_size),
        dtype=model.dtype,
        device=model.device,
    )
    last_TD = features_TLD[:, 0].contiguous() if config.loss.uses_soft_labels else None
    pack = FeaturePack.unplanned(tokens, HiddenStates(features=features_TLD, last_hidden=last_TD))
    attention = pick_attention(config.loss.attention, str(model.device), may_compile=config.loss.compile)
    done = 0

    def run() -> object:
        nonlocal done
        done += 1
        anchors = select_anchors(
            tokens, config.loss.max_anchors, block_size=drafter.block_size, rng=np.random.default_rng(done)
        )
        sums = microbatch_sums(
            model,
            ends,
            pack,
            anchors,
            block_labels(tokens, anchors, block_size=drafter.block_size, gamma=config.loss.decay_gamma),
            noise_sigma=config.loss.noise_start,
            noise_seed=done,
            head_chunk_rows=config.loss.head_chunk_rows,
            attention=attention,
            flex_min_tokens=config.loss.flex_min_tokens,
            objective=Objective.from_config(config.loss),
        )
        optimizer.accumulate(sums.numerator, sums.denominator)
        if done % config.optim.grad_accum == 0:
            optimizer.step(1e-9)
        return sums

    return run


def _time(work: Callable[[], object], device: str) -> tuple[float, int | None]:
    """Return the median seconds of a few runs after some that warm up, and the peak of allocated bytes."""
    is_cuda = device != "cpu"
    if is_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    for _ in range(WARM_UPS):
        work()
    durations: list[float] = []
    for _ in range(REPEATS):
        if is_cuda:
            torch.cuda.synchronize(device)  # host sync: nothing else runs
        started_s = time.perf_counter()
        work()
        if is_cuda:
            torch.cuda.synchronize(device)  # host sync: as above
        durations.append(time.perf_counter() - started_s)
    return statistics.median(durations), torch.cuda.max_memory_allocated(device) if is_cuda else None
