"""What a run is put together from: data, models, optimizer, queues, workers.

Called by `trainer.train`, which owns the phases and says when each part is built. Each function builds from a
configuration and returns; nothing here starts a thread, writes a file or looks at a stop. Must not hold
training logic: that is the workers'.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint.lineage import total_steps_after
from trainer.checkpoint.state import ConsumedPacks
from trainer.config import TrainConfig, config_hash
from trainer.data.buckets import bucket_edges
from trainer.data.corpus import Corpus, Sample
from trainer.data.encoded_prompts import encode_some
from trainer.data.prompts import read_prompts
from trainer.data.sampler import PackSampler
from trainer.drafter.compiled import CompileGate
from trainer.drafter.loss import FrozenEnds
from trainer.drafter.model import Drafter, build_drafter
from trainer.drafter.objective import Objective
from trainer.drafter.shape import drafter_config, imported_config
from trainer.drafter.worker import DrafterWorker, StepHooks, StepPlan
from trainer.errors import ConfigError
from trainer.eval.online import OnlineEvaluation, Surroundings
from trainer.optim.adamw import AdamWSettings, MasterAdamW
from trainer.optim.replicas import ReplicaGroup
from trainer.pipeline.devices import (
    available_bytes,
    cpu_threads,
    dtype_name,
    pick_attention,
    pick_dtype,
    worker_names,
)
from trainer.pipeline.messages import BatchPlanItem
from trainer.pipeline.nodes import Nodes
from trainer.pipeline.queues import FeedQueue, HiddenStatesQueue
from trainer.pipeline.transfer import PinnedPool, QueuedPack, open_receiver, open_sender
from trainer.pipeline.workers import Board
from trainer.target.batching import check_batching
from trainer.target.cache import SampleCache
from trainer.target.capture import Target
from trainer.target.identity import read_vocab_size, target_fingerprint
from trainer.target.loader import load_target
from trainer.target.worker import TargetWorker

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One copy of the drafter with what it trains against, all on one device."""

    drafter: Drafter
    ends: FrozenEnds
    optimizer: MasterAdamW


@dataclass(slots=True)
class Parts:
    """What the loading phases build, in the order in which they build it."""

    corpus: Corpus
    sampler: PackSampler
    targets: tuple[Target, ...]
    """one replica per target worker"""
    replicas: tuple[Replica, ...]
    """one per drafter worker; equal to the last bit at every step"""
    consumed: ConsumedPacks
    plan: StepPlan
    attention: str
    target_lock: threading.Lock = field(default_factory=threading.Lock)
    """held by whoever runs the first target: its worker, or an evaluation"""

    @property
    def target(self) -> Target:
        """The first replica: the one that evaluations use, and whose facts hold for all."""
        return self.targets[0]

    @property
    def drafter(self) -> Drafter:
        """The first replica: the one that is saved, exported and evaluated."""
        return self.replicas[0].drafter

    @property
    def optimizer(self) -> MasterAdamW:
        """The first replica's."""
        return self.replicas[0].optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """What connects the workers: queues, pinned buffers, and the largest pack.

    `slot_shape` is tokens, vectors per token (captured layers, and one more where the last hidden state
    travels along for soft labels), width.
    """

    feed: FeedQueue[BatchPlanItem]
    hidden_states: HiddenStatesQueue[QueuedPack]
    pool: PinnedPool
    slot_shape: tuple[int, int, int]
    with_last_hidden: bool


def load_parts(
    config: TrainConfig,
    *,
    enter: Callable[[str], None],
    ranks: int = 1,
    imported: Mapping[str, Any] | None = None,
) -> Parts:
    """Read data and target, and build a fresh drafter.

    Args:
        config: of the run.
        enter: called with the name of what is loaded next; may raise to leave.
        ranks: machines that train together.
        imported: config fields of the published drafter that the run began with; None = shape by `config`.
    """
    enter("data")
    _LOG.info("data: reading %s", config.paths.data_dir)
    torch.set_num_threads(cpu_threads(config))
    corpus = Corpus.open(
        config.paths.data_dir,
        max_seq_len=config.data.max_seq_len,
        vocab_size=read_vocab_size(Path(config.paths.target_model)),
    )
    _LOG.info("data: %s", corpus.report.render())
    targets = []
    for place, device in enumerate(config.devices.targets(), start=1):
        enter("target" if place == 1 else f"target, replica {place}")
        targets.append(_load_target(config, device))
    enter("drafter")
    places = config.devices.drafters()
    replicas = tuple(_build_replica(config, targets[0], place, imported) for place in places)
    objective = Objective.from_config(config.loss).describe(decay_gamma=config.loss.decay_gamma)
    _LOG.info("objective: %s", objective)
    enter("target: batch against single sequences")
    _LOG.info("target: comparing a batch with single sequences")
    check = check_batching(targets[0], corpus, replicas[0].drafter.config.target_layer_ids)
    _LOG.info("target: a batch differs from single sequences by %.1e of the states' size", check.worst[1])
    sampler, plan = _plan_packs(config, corpus, ranks)
    return Parts(
        corpus=corpus,
        sampler=sampler,
        targets=tuple(targets),
        replicas=replicas,
        consumed=ConsumedPacks(plan.packs_per_epoch, config.optim.epochs),
        plan=plan,
        attention=pick_attention(
            config.loss.attention, str(replicas[0].drafter.device), may_compile=config.loss.compile
        ),
    )


def _load_target(config: TrainConfig, device: str) -> Target:
    target = load_target(
        config.paths.target_model,
        device=device,
        dtype=pick_dtype(config.devices.target_dtype, device),
        attn=config.target.attention,
        mask_token_id=config.target.mask_token_id,
    )
    if device == "cpu" and config.eval.every:
        target.pack(only_head=True)
    _LOG.info(
        "target on %s: %s, %d layers, hidden %d, mask token %d (%s)",
        device,
        target.info.model_type,
        target.info.num_layers,
        target.info.hidden_size,
        target.info.mask_token_id,
        target.info.mask_token_reason,
    )
    return target


def _build_replica(
    config: TrainConfig, target: Target, device: str, imported: Mapping[str, Any] | None
) -> Replica:
    drafter = _build_drafter(config, target, device, imported)
    return Replica(
        drafter=drafter,
        ends=FrozenEnds(
            embed_weight_VD=target.embed_weight_VD.detach().to(drafter.device, drafter.dtype),
            head_weight_VD=target.head_weight_VD.detach().to(drafter.device, drafter.dtype),
            embed_scale=target.info.embed_scale,
            logit_softcap=target.info.logit_softcap,
        ),
        optimizer=MasterAdamW(drafter.named_parameters(), AdamWSettings.from_config(config.optim)),
    )


def _build_drafter(
    config: TrainConfig, target: Target, device: str, imported: Mapping[str, Any] | None
) -> Drafter:
    layer_ids = config.target.target_layer_ids
    shape = (
        drafter_config(target.info, config.drafter, target_layer_ids=layer_ids)
        if imported is None
        else imported_config(target.info, imported)
    )
    dtype = pick_dtype(config.devices.drafter_dtype, device)
    split_fc = config.drafter.split_fc_layers
    drafter = build_drafter(shape, seed=config.optim.seed, dtype=dtype, split_fc=split_fc).to(device)
    _LOG.info(
        "drafter: %d layers, block %d, target layers %s, %s parameters, %s on %s",
        shape.num_hidden_layers,
        shape.block_size,
        list(shape.target_layer_ids),
        f"{sum(p.numel() for p in drafter.parameters()):,}",
        dtype_name(dtype),
        device,
    )
    for shared in config.devices.shared():
        _LOG.info("%s runs a target worker and a drafter worker: they take turns on it", shared)
    return drafter


def _plan_packs(config: TrainConfig, corpus: Corpus, ranks: int) -> tuple[PackSampler, StepPlan]:
    """Deal the samples into packs; the number of steps follows, it is the same in every epoch."""
    optim = config.optim
    sampler = PackSampler(
        lengths=corpus.lengths.tolist(),
        edges=config.data.bucket_edges or bucket_edges(config.data.max_seq_len),
        epochs=optim.epochs,
        seed=optim.seed,
        token_budget=config.data.token_budget,
        max_batch_size=config.data.max_batch_size,
    )
    packs = len(sampler.plan(0))
    total_packs = packs * optim.epochs
    fresh = StepPlan(first_step=0, total_steps=0, total_packs=total_packs, packs_per_epoch=packs, tokens=0)
    return sampler, plan_steps(config, fresh, ranks=ranks, step=0, packs_done=0, tokens=0)


def plan_steps(
    config: TrainConfig, plan: StepPlan, *, ranks: int, step: int, packs_done: int, tokens: int
) -> StepPlan:
    """Return the plan from a step on, whatever number of drafters made the steps before it.

    Args:
        config: of this run.
        plan: any plan of the same packs.
        ranks: machines that train together, each with the drafters of `config`.
        step: optimizer steps done.
        packs_done: packs that went into them.
        tokens: tokens that went into them.
    """
    packs_per_step = ranks * _own_packs_per_step(config)
    return dataclasses.replace(
        plan,
        first_step=step,
        total_steps=total_steps_after(
            step,
            consumed=packs_done,
            total_packs=plan.total_packs,
            packs_per_step=packs_per_step,
            max_steps=config.optim.max_steps,
        ),
        tokens=tokens,
        first_packs=packs_done,
        schedule_shift=packs_done // packs_per_step - step,
    )


def _own_packs_per_step(config: TrainConfig) -> int:
    return config.optim.grad_accum * len(config.devices.drafters())


def run_identity(
    config: TrainConfig, parts: Parts, code: Mapping[str, Any], *, ranks: int = 1
) -> dict[str, Any]:
    """Return what a stored state is compared by; `code` is `runfolder.describe_code`'s record."""
    return {
        "config": config.as_dict(),
        "config_hash": config_hash(config),
        "data": {
            "samples": len(parts.corpus),
            "tokens": parts.corpus.report.tokens,
            "sha256": parts.corpus.digest(),
        },
        "target": target_fingerprint(parts.target.info.path, mask_token_id=parts.target.info.mask_token_id),
        "world": {
            "targets": list(config.devices.targets()),
            "drafters": list(config.devices.drafters()),
            "machines": ranks,
        },
        "dtypes": {
            "targets": _dtype_names(config.devices.target_dtype, config.devices.targets()),
            "drafters": _dtype_names(config.devices.drafter_dtype, config.devices.drafters()),
        },
        "plan": {"total_steps": parts.plan.total_steps},
        "seeds": {"run": config.optim.seed},
        "versions": {"torch": code["versions"]["torch"]},
        "code": {"git_sha": code["git_sha"], "source_sha256": code["source_sha256"]},
    }


def _dtype_names(choice: str, devices: Sequence[str]) -> list[str]:
    return sorted({dtype_name(pick_dtype(choice, device)) for device in devices})


def open_lines(config: TrainConfig, parts: Parts, board: Board) -> Lines:
    """Build the queues between the workers."""
    return Lines(
        feed=FeedQueue(config.queue.feed_depth, board),
        hidden_states=HiddenStatesQueue(
            board,
            buckets=len(parts.sampler.edges),
            min_ready=config.queue.hs_min_ready,
            max_depth=config.queue.hs_max_depth,
            max_bytes=config.queue.hs_max_bytes or available_bytes() * 2 // 5,
            producers=len(config.devices.targets()),
            consumers=len(config.devices.drafters()),
            seed=config.optim.seed,
            ordered=config.queue.ordered,
        ),
        pool=PinnedPool(),
        with_last_hidden=config.loss.uses_soft_labels,
        slot_shape=(
            config.data.token_budget,
            len(parts.drafter.config.target_layer_ids) + config.loss.uses_soft_labels,
            parts.target.info.hidden_size,
        ),
    )


def build_target_workers(
    config: TrainConfig, parts: Parts, lines: Lines, board: Board
) -> tuple[TargetWorker, ...]:
    """Build each target thread's work; they share the feed queue and the cache of hidden states."""
    cache_bytes = config.target.cache_features_bytes
    cache = SampleCache(cache_bytes) if cache_bytes else None
    names = worker_names("target", config.devices.targets())
    return tuple(
        _build_target_worker(
            parts,
            lines,
            board,
            name=name,
            target=target,
            cache=cache,
            lock=parts.target_lock if target is parts.target else threading.Lock(),
        )
        for name, target in zip(names, parts.targets, strict=True)
    )


def _build_target_worker(
    parts: Parts,
    lines: Lines,
    board: Board,
    *,
    name: str,
    target: Target,
    cache: SampleCache | None,
    lock: threading.Lock,
) -> TargetWorker:
    return TargetWorker(
        name=name,
        target=target,
        corpus=parts.corpus,
        layer_ids=parts.drafter.config.target_layer_ids,
        feed=lines.feed,
        sender=open_sender(
            board=board, pool=lines.pool, device=target.device, shape=lines.slot_shape, dtype=target.dtype
        ),
        hidden_states=lines.hidden_states,
        board=board,
        lock=lock,
        cache=cache,
        with_last_hidden=lines.with_last_hidden,
    )


def build_drafter_workers(
    config: TrainConfig,
    parts: Parts,
    lines: Lines,
    board: Board,
    *,
    targets: Sequence[TargetWorker],
    hooks: StepHooks,
    nodes: Nodes | None = None,
) -> tuple[DrafterWorker, ...]:
    """Build each drafter thread's work; the first one leads and calls the hooks."""
    group = ReplicaGroup(
        board,
        worker_names("drafter", config.devices.drafters()),
        packs_per_step=_own_packs_per_step(config),
        nodes=nodes,
    )
    gate = CompileGate(board) if parts.attention == "flex" and len(parts.replicas) > 1 else None
    return tuple(
        _build_drafter_worker(
            config, parts, lines, board, group=group, gate=gate, number=number, targets=targets, hooks=hooks
        )
        for number in range(len(parts.replicas))
    )


def _build_drafter_worker(
    config: TrainConfig,
    parts: Parts,
    lines: Lines,
    board: Board,
    *,
    group: ReplicaGroup,
    gate: CompileGate | None,
    number: int,
    targets: Sequence[TargetWorker],
    hooks: StepHooks,
) -> DrafterWorker:
    replica = parts.replicas[number]

    def threads() -> int:
        # with cached hidden states the targets idle from the second epoch on
        return cpu_threads(config, is_alone=all(target.is_cached for target in targets))

    return DrafterWorker(
        name=group.names[number],
        drafter=replica.drafter,
        ends=replica.ends,
        optimizer=replica.optimizer,
        receiver=open_receiver(
            lines.hidden_states,
            board=board,
            pool=lines.pool,
            device=replica.drafter.device,
            shape=lines.slot_shape,
            dtype=parts.target.dtype,
            consumer=number,
        ),
        board=board,
        group=group,
        replica=number,
        gate=gate,
        config=config,
        plan=parts.plan,
        attention=parts.attention,
        hooks=hooks,
        # replicas must compute alike to the last bit, so none of them changes its threads on its own
        cpu_threads=threads if config.target.cache_features_bytes and group.is_alone else None,
    )


def build_evaluation(config: TrainConfig, parts: Parts, board: Board) -> OnlineEvaluation | None:
    """Read held-out prompts and samples; None when no evaluation is wanted.

    Raises:
        ConfigError: the target has no tokenizer for the prompts.
        DataError: one of the files has nothing usable.
    """
    wanted, target = config.eval, parts.target
    if not wanted.every and not wanted.held_out_every:
        return None
    prompts: list[list[int]] = []
    if wanted.every:
        if target.tokenizer is None:
            raise ConfigError("--eval-every needs the target's tokenizer, none is in --target-model")
        chosen = read_prompts(wanted.prompts).prompts[: wanted.max_prompts]
        prompts = encode_some(target.tokenizer, chosen, wanted.thinking).token_ids
    held_out: list[Sample] = []
    if wanted.held_out_data:
        corpus = Corpus.open(
            wanted.held_out_data,
            max_seq_len=config.data.max_seq_len,
            vocab_size=target.info.vocab_size,
        )
        _LOG.info("held-out data: %s", corpus.report.render())
        held_out = [corpus[index] for index in range(min(wanted.held_out_samples, len(corpus)))]
    return OnlineEvaluation(
        target,
        prompts,
        held_out,
        config=wanted,
        around=Surroundings(
            lock=parts.target_lock,
            beat=lambda: board.beat("evaluation"),
            is_stopping=board.stop.is_set,
            max_anchors=config.loss.max_anchors,
            head_chunk_rows=config.loss.head_chunk_rows,
            seed=config.optim.seed,
        ),
    )
