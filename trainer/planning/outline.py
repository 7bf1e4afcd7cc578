"""Dry runs of the real code on the meta device: what a micro-batch and a prefill will need, without memory.

Called by `planning.budget`. Sizes are exact where the real run does the same operations; attention stands for
a fused kernel that keeps queries, keys, values, output and one number per row. Must not load weights or touch
a device.

Dimension suffixes: as in `drafter.loss`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from trainer.data.collate import made_up_documents
from trainer.drafter.anchors import block_labels, select_anchors
from trainer.drafter.loss import FrozenEnds, microbatch_sums
from trainer.drafter.model import Drafter, DrafterConfig
from trainer.drafter.objective import Objective
from trainer.pipeline.messages import FeaturePack, HiddenStates
from trainer.planning.meter import PeakMeter, Phase
from trainer.target.capture import Target

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Bytes that one unit of work takes on top of weights and buffers.

    `kept` is live when the workspace is largest; their sum is the peak.
    """

    kept: int
    workspace: int
    where: str
    """the part of the work with the peak"""

    @property
    def peak(self) -> int:
        """Most bytes at one time."""
        return self.kept + self.workspace


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterLoad:
    """One micro-batch as a drafter gets it.

    `lengths` are the tokens of the pack's documents; every token behind the first is taken as supervised,
    so that as many anchors are drawn as can be.
    """

    lengths: tuple[int, ...]
    max_anchors: int
    head_chunk_rows: int
    attention: str
    has_noise: bool
    on_cuda: bool = False
    """decides which attention kernels there are"""
    objective: Objective = field(default_factory=Objective)


def drafter_needs(config: DrafterConfig, load: DrafterLoad, *, dtype: torch.dtype) -> Needs:
    """Dry-run forward, loss and backward of one micro-batch, and the adding up of its gradients."""
    with torch.device("meta"):
        drafter = Drafter(config).to(dtype)
        ends = FrozenEnds(
            embed_weight_VD=torch.empty(config.vocab_size, config.hidden_size, dtype=dtype),
            head_weight_VD=torch.empty(config.vocab_size, config.hidden_size, dtype=dtype),
            embed_scale=config.embed_scale,
            logit_softcap=config.logit_softcap,
        )
    return Needs(**_largest(measure_microbatch(drafter, ends, load, feature_dtype=dtype)))


def measure_microbatch(
    drafter: Drafter, ends: FrozenEnds, load: DrafterLoad, *, feature_dtype: torch.dtype
) -> list[Phase]:
    """Run one micro-batch on the drafter's device (`meta` for a dry run) and return what its phases took."""
    config, device = drafter.config, drafter.device
    tokens = made_up_documents(load.lengths)
    rows, layers = sum(load.lengths), len(config.target_layer_ids)
    features_TLD = torch.zeros(rows, layers, config.hidden_size, dtype=feature_dtype, device=device)
    last_TD: Tensor | None = None
    if load.objective.soft_label_share:
        last_TD = torch.zeros(rows, config.hidden_size, dtype=feature_dtype, device=device)
    anchors = select_anchors(
        tokens, load.max_anchors, block_size=config.block_size, rng=np.random.default_rng(0)
    )
    labels = block_labels(tokens, anchors, block_size=config.block_size, gamma=7.0)
    pack = FeaturePack.unplanned(tokens, HiddenStates(features=features_TLD, last_hidden=last_TD))
    meter = PeakMeter(device.type)
    meter.ignore(features_TLD, ends.embed_weight_VD, ends.head_weight_VD, *drafter.parameters())
    if last_TD is not None:
        meter.ignore(last_TD)
    with FusedAttention(on_cuda=load.on_cuda), meter:
        sums = microbatch_sums(
            drafter,
            ends,
            pack,
            anchors,
            labels,
            noise_sigma=0.01 if load.has_noise else 0.0,
            noise_seed=0,
            head_chunk_rows=load.head_chunk_rows,
            attention=load.attention,
            objective=load.objective,
            stage=meter.phase,
        )
        with meter.phase("backward"):
            sums.numerator.backward()  # type: ignore[no-untyped-call]
        with meter.phase("gradients"):
            # as `MasterAdamW.accumulate` does: all gradients at once in fp32
            wide = [p.grad.float() for p in drafter.parameters() if p.grad is not None]
            del wide
    for parameter in drafter.parameters():
        parameter.grad = None
    return meter.phases


def target_needs(
    target: Target, layer_ids: Sequence[int], *, samples: int, length: int, with_last_hidden: bool
) -> Needs:
    """Dry-run one prefill of a target on the meta device.

    Args:
        target: on the meta device.
        layer_ids: tapped layers.
        samples: sequences of the batch.
        length: padded length.
        with_last_hidden: all layers run, and the last hidden state is handed over too.
    """
    ids_BS = torch.zeros(samples, length, dtype=torch.int64, device=target.device)
    meter = PeakMeter(target.device.type)
    meter.ignore(ids_BS, *target.tensors().values())
    with FusedAttention(), meter, meter.phase("prefill"):
        states = target.hidden_states(ids_BS, None, layer_ids, with_last_hidden=with_last_hidden)
        del states
    return Needs(**_largest(meter.phases))


class FusedAttention(TorchFunctionMode):
    """On the meta device, puts a kernel with the memory of fused attention in the place of sdpa.

    CUDA has no fused kernel for a mask together with grouped heads (cuDNN's is switched off when a target is
    loaded): `drafter.attention` repeats the heads there, and so does this.

    A question about values there (`if tensor.all()`) is answered with yes: transformers asks whether
    positions are those of plain documents, and they are.
    """

    def __init__(self, *, on_cuda: bool = False) -> None:
        super().__init__()
        self._on_cuda = on_cuda

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace two functions, and leave all others."""
        if func in _REPLACED and args[0].device.type == "meta":
            if func is torch.Tensor.__bool__:
                return True
            mask = (kwargs or {}).get("attn_mask")
            q_BHQE, k_BGSE, v_BGSE = args
            groups = q_BHQE.shape[1] // k_BGSE.shape[1]
            if self._on_cuda and mask is not None and groups > 1:
                k_BGSE, v_BGSE = (x.repeat_interleave(groups, dim=1) for x in (k_BGSE, v_BGSE))
            # kernels take a mask of yes and no as numbers to add
            bias = None if mask is None else torch.empty_like(mask, dtype=q_BHQE.dtype)
            return _Fused.apply(q_BHQE, k_BGSE, v_BGSE, bias)  # type: ignore[no-untyped-call]
        return func(*args, **(kwargs or {}))


_REPLACED = (torch.nn.functional.scaled_dot_product_attention, torch.Tensor.__bool__)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_BHQE: Tensor, k_BGSE: Tensor, v_BGSE: Tensor, bias: Tensor | None) -> Tensor:
        out_BHQE = torch.empty_like(q_BHQE.contiguous())
        row_sums = torch.empty(q_BHQE.shape[:3], dtype=torch.float32, device=q_BHQE.device)
        ctx.save_for_backward(q_BHQE, k_BGSE, v_BGSE, out_BHQE, row_sums, bias)
        return out_BHQE

    @staticmethod
    def backward(ctx: Any, grad_BHQE: Tensor) -> tuple[Tensor | None, ...]:
        q_BHQE, k_BGSE, v_BGSE, _out, row_sums, _bias = ctx.saved_tensors
        delta = torch.empty_like(row_sums)
        grads = (torch.empty_like(q_BHQE), torch.empty_like(k_BGSE), torch.empty_like(v_BGSE))
        del delta, grad_BHQE
        return *grads, None


def _largest(phases: Sequence[Phase]) -> dict[str, Any]:
    """Split the highest peak into what was live before its phase began and what the phase added."""
    top = max(phases, key=lambda phase: phase.peak)
    kept = min(top.begin, top.peak)
    return {"kept": kept, "workspace": top.peak - kept, "where": top.name}
