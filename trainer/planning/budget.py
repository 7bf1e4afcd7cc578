"""What a configuration needs, term by term: of each GPU, of the host, of the disk.

Pure: shapes, settings and limits come in, sizes in bytes go out; dry runs on the meta device give what moves.
Called by `trainer.plan`, by `planning.fit` (again and again, with other settings) and by the check before
training loads. Must not read data or touch a device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from trainer.config import TrainConfig
from trainer.drafter.model import Drafter, DrafterConfig
from trainer.drafter.objective import Objective
from trainer.pipeline.devices import pick_attention, pick_dtype
from trainer.pipeline.transfer import DEVICE_SLOTS, HOST_COPIES
from trainer.planning.outline import DrafterLoad, Needs, drafter_needs, target_needs
from trainer.planning.packs import PackFacts
from trainer.target.capture import Target

CONTEXT_BYTES = 768 << 20
"""CUDA context, kernels and the workspace of its matrix library: outside of torch's allocator."""
SLACK_RATIO = 0.05
"""Of what moves: memory that the allocator holds but cannot use for the next tensor."""
PROCESS_BYTES = 1 << 30
"""The interpreter with its libraries."""

CONTEXT = "CUDA context and libraries"
SLACK = "allocator slack"
HOST = "host"
DISK = "disk of --output-dir"


@dataclass(frozen=True, slots=True)
class Term:
    """One reason for memory."""

    name: str
    nbytes: int
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The terms of one memory, and its size (None: not known)."""

    name: str
    terms: tuple[Term, ...]
    limit: int | None
    knobs: tuple[str, ...] = ()
    """settings that make it smaller"""
    notes: tuple[str, ...] = field(default=())

    @property
    def total(self) -> int:
        """Bytes of all terms."""
        return sum(term.nbytes for term in self.terms)

    @property
    def allocated(self) -> int:
        """Bytes of torch's own tensors: what `torch.cuda.max_memory_allocated` will say."""
        return sum(term.nbytes for term in self.terms if term.name not in (CONTEXT, SLACK))

    @property
    def fixed(self) -> int:
        """Bytes that no batch size changes: weights, optimizer, context."""
        moving = ("activations", "workspace", SLACK, "device slots")
        return sum(term.nbytes for term in self.terms if not term.name.startswith(moving))

    @property
    def certain(self) -> int:
        """Bytes that are taken whatever the packs are like: all but what moves."""
        moving = ("activations", "workspace", SLACK)
        return sum(term.nbytes for term in self.terms if not term.name.startswith(moving))

    @property
    def largest(self) -> Term:
        """The term that counts most."""
        return max(self.terms, key=lambda term: term.nbytes)

    @property
    def verdict(self) -> str:
        """`fits`, `too large` or `unknown`."""
        if self.limit is None:
            return "unknown"
        return "fits" if self.total <= self.limit else "too large"


def drafter_config_terms(config: DrafterConfig, *, dtype: torch.dtype) -> list[Term]:
    """Return what a drafter and its optimizer keep on their device, whatever the batch."""
    parameters = count_parameters(config)
    size, is_fp32 = dtype.itemsize, dtype == torch.float32
    ends = 2 * config.vocab_size * config.hidden_size * size
    return [
        Term("weights", parameters * size, f"{parameters:,} parameters"),
        Term("fp32 masters", 0 if is_fp32 else 4 * parameters, "the weights themselves" if is_fp32 else ""),
        Term("AdamW moments", 8 * parameters),
        Term("gradient sums", 4 * parameters),
        Term("embedding and head", ends, "frozen, of the target"),
    ]


def count_parameters(config: DrafterConfig) -> int:
    """Return the number of weights of a drafter."""
    return sum(_parameter_sizes(config))


def largest_tensor(config: DrafterConfig) -> int:
    """Return the weights of the drafter's largest tensor."""
    return max(_parameter_sizes(config))


def _parameter_sizes(config: DrafterConfig) -> list[int]:
    with torch.device("meta"):
        drafter = Drafter(config)
    return [parameter.numel() for parameter in drafter.parameters()]


def slots_term(config: TrainConfig, drafter: DrafterConfig, *, dtype: torch.dtype) -> Term:
    """Return the preallocated buffers that hidden states are copied through (CUDA only)."""
    vectors = len(drafter.target_layer_ids) + config.loss.uses_soft_labels
    slot = config.data.token_budget * vectors * drafter.hidden_size * dtype.itemsize
    return Term("device slots", DEVICE_SLOTS * slot, f"{DEVICE_SLOTS} of --token-budget tokens")


def drafter_budget(
    config: TrainConfig, drafter: DrafterConfig, packs: PackFacts, *, device: str, limit: int | None
) -> Budget:
    """Return what one drafter worker needs on its device."""
    dtype = pick_dtype(config.devices.drafter_dtype, device)
    load = DrafterLoad(
        lengths=packs.worst_lengths,
        max_anchors=config.loss.max_anchors,
        head_chunk_rows=config.loss.head_chunk_rows,
        attention=pick_attention(config.loss.attention, device, may_compile=config.loss.compile),
        has_noise=config.loss.noise_start > 0,
        on_cuda=device != "cpu",
        objective=Objective.from_config(config.loss),
    )
    needs = drafter_needs(drafter, load, dtype=dtype)
    terms = drafter_config_terms(drafter, dtype=dtype)
    if device != "cpu":
        terms.append(slots_term(config, drafter, dtype=_target_dtype(config)))
    if len(config.devices.drafters()) > 1 and device == config.devices.drafters()[0]:
        terms.append(Term("sum over drafters", 4 * largest_tensor(drafter), "room for one tensor in fp32"))
    terms += _moving_terms(needs, f"pack of {sum(load.lengths):,} tokens, {load.max_anchors} anchors")
    return Budget(
        name=f"drafter on {device}",
        terms=(*terms, *_device_terms(needs, device)),
        limit=limit,
        knobs=("data.token_budget", "loss.max_anchors", "loss.head_chunk_rows"),
    )


def target_budget(
    config: TrainConfig,
    target: Target,
    drafter: DrafterConfig,
    packs: PackFacts,
    *,
    device: str,
    limit: int | None,
) -> Budget:
    """Return what one target worker needs on its device."""
    layers, notes = drafter.target_layer_ids, tuple[str, ...]()
    samples, length = packs.worst_batch
    try:
        needs = target_needs(
            target, layers, samples=samples, length=length, with_last_hidden=config.loss.uses_soft_labels
        )
    except Exception as error:  # noqa: BLE001 - a model whose code looks at values cannot run dry
        needs = _counted_target_needs(target, len(layers), samples * length, config.loss.uses_soft_labels)
        text = " ".join(str(error).split())[:120]
        notes = (f"activations by formula, this model cannot run dry: {type(error).__name__}: {text}",)
    terms = target_weight_terms(target, last_layer=max(layers), runs_all=config.loss.uses_soft_labels)
    if device != "cpu":
        terms.append(slots_term(config, drafter, dtype=_target_dtype(config)))
    if config.eval.every and device == config.devices.targets()[0]:
        copy = count_parameters(drafter) * target.dtype.itemsize
        terms.append(Term("drafter of the evaluation", copy, "a copy, as it would be exported"))
    terms += _moving_terms(needs, f"batch of {samples} x {length:,} tokens")
    return Budget(
        name=f"target on {device}",
        terms=(*terms, *_device_terms(needs, device)),
        limit=limit,
        knobs=("data.token_budget",),
        notes=notes,
    )


def target_weight_terms(target: Target, *, last_layer: int, runs_all: bool) -> list[Term]:
    """Split a target's tensors into layers that run, layers that are loaded all the same, and the rest."""
    run, idle, ends = 0, 0, 0
    for name, tensor in target.tensors().items():
        layer = _layer_of(name)
        if layer is None:
            ends += tensor.nbytes
        elif layer <= last_layer or runs_all:
            run += tensor.nbytes
        else:
            idle += tensor.nbytes
    return [
        Term("weights of the layers run", run, "all" if runs_all else f"0 to {last_layer}"),
        Term("weights of further layers", idle, "loaded, used by evaluation"),
        Term("embedding, head, norm", ends),
    ]


def host_budget(
    config: TrainConfig,
    drafter: DrafterConfig,
    packs: PackFacts,
    *,
    on_cpu: Sequence[Budget],
    limit: int | None,
) -> Budget:
    """Return what the process needs of the host's memory; `on_cpu` are the workers that live there."""
    per_token = token_bytes(config, drafter)
    has_cuda = any(d != "cpu" for d in (*config.devices.targets(), *config.devices.drafters()))
    cap = config.queue.hs_max_bytes or (limit or 0) * 2 // 5 or math.inf
    pack = math.ceil(packs.mean_tokens * per_token)
    queued = int(min(cap, config.queue.hs_max_depth * pack))
    ready = min(cap, config.queue.hs_min_ready * pack)
    copies = HOST_COPIES * len(config.devices.targets()) + len(config.devices.drafters())
    in_flight = copies * _pinned_bytes(packs.most_tokens * per_token)
    terms = [
        Term("process and libraries", PROCESS_BYTES, "estimate"),
        Term("queue of hidden states", queued, f"at --hs-max-depth {config.queue.hs_max_depth}"),
    ]
    if has_cuda:
        rounded = int(queued * (_pinned_bytes(pack) / pack - 1.0)) if pack else 0
        terms += [
            Term("rounding of pinned buffers", rounded, "to powers of two, at least 1 MiB"),
            Term("copies on their way", in_flight, f"{HOST_COPIES} per target worker, 1 per drafter"),
        ]
    cache = min(config.target.cache_features_bytes, packs.tokens_per_epoch * per_token)
    if cache:
        terms.append(Term("cache of hidden states", cache, "target.cache_features_bytes"))
    terms.append(Term("checkpoint being written", state_bytes(drafter), "masters and moments"))
    terms += [Term(budget.name, budget.total) for budget in on_cpu]
    return Budget(
        name=HOST,
        terms=tuple(terms),
        limit=limit,
        knobs=("queue.hs_max_depth", "data.token_budget"),
        notes=(f"at --hs-min-ready {config.queue.hs_min_ready} the queue holds {ready / 2**30:.2f} GiB",),
    )


def disk_budget(config: TrainConfig, drafter: DrafterConfig, *, limit: int | None) -> Budget:
    """Return what the checkpoints take: those that are kept, and the one that is written before pruning."""
    state, export = state_bytes(drafter), 2 * count_parameters(drafter)
    copies = config.checkpoint.keep + 1
    return Budget(
        name=DISK,
        terms=(
            Term("training state", copies * state, f"{state:,} bytes each, {copies} at a time"),
            Term("export", copies * export, f"{export:,} bytes each"),
        ),
        limit=limit,
        knobs=("checkpoint.keep",),
    )


def state_bytes(drafter: DrafterConfig) -> int:
    """Return the tensors of one training state: masters and both moments in fp32."""
    return 12 * count_parameters(drafter)


def token_bytes(config: TrainConfig, drafter: DrafterConfig) -> int:
    """Return the hidden states of one token on their way to a drafter."""
    vectors = len(drafter.target_layer_ids) + config.loss.uses_soft_labels
    return vectors * drafter.hidden_size * _target_dtype(config).itemsize


def _target_dtype(config: TrainConfig) -> torch.dtype:
    return pick_dtype(config.devices.target_dtype, config.devices.targets()[0])


def _moving_terms(needs: Needs, note: str) -> list[Term]:
    if not needs.kept:
        return [Term(f"activations of {needs.where}", needs.workspace, note)]
    return [Term("activations", needs.kept, note), Term(f"workspace of {needs.where}", needs.workspace)]


def _device_terms(needs: Needs, device: str) -> tuple[Term, ...]:
    if device == "cpu":
        return ()
    return (Term(SLACK, int(needs.peak * SLACK_RATIO), "estimate"), Term(CONTEXT, CONTEXT_BYTES, "estimate"))


def _counted_target_needs(target: Target, taps: int, tokens: int, has_last: bool) -> Needs:
    """Count by hand: taps twice (they are stacked), one layer's MLP and attention rows at a time."""
    info, size = target.info, target.dtype.itemsize
    row = tokens * info.hidden_size * size
    mlp = 3 * tokens * info.intermediate_size * size
    heads = tokens * info.head_dim * (2 * info.num_attention_heads + 2 * info.num_key_value_heads) * size
    return Needs(
        kept=(taps + has_last) * row, workspace=max(taps * row, mlp + heads + 3 * row), where="prefill"
    )


def _layer_of(name: str) -> int | None:
    parts = name.split(".")
    for place, part in enumerate(parts[:-1]):
        if part == "layers" and parts[place + 1].isdigit():
            return int(parts[place + 1])
    return None


def _pinned_bytes(nbytes: int) -> int:
    """Round as `PinnedPool` (to whole MiB) and torch's pinned allocator behind it (to powers of two) do."""
    return max(1 << 20, 1 << max(0, nbytes - 1).bit_length())
