"""Attention kernels over context keys followed by block keys, one per form of mask.

Called by `model.DrafterAttention` only. `dense` is the reference, `sdpa` is the fast path on a CPU and works
everywhere, `flex` is the fast path on CUDA (FlexAttention has no backward on the CPU). Must not know anchors,
documents or positions: all of that is in the mask.

Dimension suffixes: B batch, H query heads, G key/value heads, Q block rows, S keys, E head dimension.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention

from trainer.drafter.compiled import compile_per_shape
from trainer.drafter.masks import DenseMask, FlexMask, LayerMask, SegmentMask


def attend(q_BHQE: Tensor, k_BGSE: Tensor, v_BGSE: Tensor, mask: LayerMask | None, *, scale: float) -> Tensor:
    """Attend from block rows to the keys their mask allows; `None` means every key is visible.

    Query heads are grouped: H is a multiple of G. Returns [B, H, Q, E].
    """
    if mask is None:
        return _sdpa(q_BHQE, k_BGSE, v_BGSE, None, scale)
    if isinstance(mask, DenseMask):
        return _dense(q_BHQE, k_BGSE, v_BGSE, mask.visible_QS, scale)
    if isinstance(mask, SegmentMask):
        return _segments(q_BHQE, k_BGSE, v_BGSE, mask, scale)
    return _flex(q_BHQE, k_BGSE, v_BGSE, mask, scale)


def _dense(q_BHQE: Tensor, k_BGSE: Tensor, v_BGSE: Tensor, visible_QS: Tensor, scale: float) -> Tensor:
    """Spell softmax attention out, in fp32: slow, and obviously right."""
    groups = q_BHQE.shape[1] // k_BGSE.shape[1]
    k_BHSE = k_BGSE.repeat_interleave(groups, dim=1)
    v_BHSE = v_BGSE.repeat_interleave(groups, dim=1)
    scores = (q_BHQE @ k_BHSE.transpose(-1, -2)).float() * scale
    scores = scores.masked_fill(~visible_QS, float("-inf"))
    return scores.softmax(dim=-1).to(v_BHSE.dtype) @ v_BHSE


def _sdpa(q_BHQE: Tensor, k_BGSE: Tensor, v_BGSE: Tensor, visible_QS: Tensor | None, scale: float) -> Tensor:
    groups = q_BHQE.shape[1] // k_BGSE.shape[1]
    if groups > 1 and visible_QS is not None and q_BHQE.device.type == "cuda":
        # with a mask, no fused kernel of torch groups heads: it would spell all scores out
        k_BGSE, v_BGSE = (x.repeat_interleave(groups, dim=1) for x in (k_BGSE, v_BGSE))
        groups = 1
    return scaled_dot_product_attention(
        q_BHQE, k_BGSE, v_BGSE, attn_mask=visible_QS, scale=scale, enable_gqa=groups > 1
    )


def _segments(q_BHQE: Tensor, k_BGSE: Tensor, v_BGSE: Tensor, mask: SegmentMask, scale: float) -> Tensor:
    """Run one sdpa call per segment: scores across documents are never computed."""
    q_parts = _cut(_ordered(q_BHQE, mask.order_Q), mask)
    k_context, k_parts = _context_and_parts(k_BGSE, q_BHQE.shape[2], mask)
    v_context, v_parts = _context_and_parts(v_BGSE, q_BHQE.shape[2], mask)
    outputs: list[Tensor] = []
    for index, segment in enumerate(mask.segments):
        seen = slice(0, segment.context_rows)
        k_seg = torch.cat([k_context[segment.piece][:, :, seen], k_parts[index]], dim=2)
        v_seg = torch.cat([v_context[segment.piece][:, :, seen], v_parts[index]], dim=2)
        outputs.append(_sdpa(q_parts[index], k_seg, v_seg, segment.visible_qs, scale))
    # A row that sees only itself has one softmax weight, 1: its output is its own value.
    groups = q_BHQE.shape[1] // k_BGSE.shape[1]
    outputs.append(v_parts[-1].repeat_interleave(groups, dim=1))
    return _ordered(torch.cat(outputs, dim=2), mask.unorder_Q)


def _context_and_parts(
    x_BGSE: Tensor, block_rows: int, mask: SegmentMask
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Cut keys or values into the context's stretches and the segments' own rows."""
    *context, block = torch.split(x_BGSE, [*mask.context_splits, block_rows], dim=2)
    return context, _cut(_ordered(block, mask.order_Q), mask)


def _cut(rows: Tensor, mask: SegmentMask) -> Sequence[Tensor]:
    return torch.split(rows, [*(segment.rows for segment in mask.segments), mask.lonely_rows], dim=2)


def _ordered(rows: Tensor, order_Q: Tensor | None) -> Tensor:
    return rows if order_Q is None else rows.index_select(2, order_Q)


def _flex(q_BHQE: Tensor, k_BGSE: Tensor, v_BGSE: Tensor, mask: FlexMask, scale: float) -> Tensor:
    if q_BHQE.device.type == "meta":  # a dry run of `planning`: any fused kernel allocates alike
        return _sdpa(q_BHQE, k_BGSE, v_BGSE, None, scale)
    is_grouped = q_BHQE.shape[1] != k_BGSE.shape[1]
    out = _compiled_flex()(
        q_BHQE, k_BGSE, v_BGSE, block_mask=mask.block_mask, scale=scale, enable_gqa=is_grouped
    )
    return cast("Tensor", out)


@functools.cache
def _compiled_flex() -> Callable[..., Any]:
    """Compile on first use: the uncompiled kernel materialises all scores."""
    return compile_per_shape(flex_attention)
