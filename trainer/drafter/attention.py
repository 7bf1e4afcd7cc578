"""Attention kernels over context keys followed by block keys, one per form of mask.

Called by `model.DrafterAttention` only. `dense` is the reference, `sdpa` is the fast path on a CPU and works
everywhere, `flex` is the fast path on CUDA (FlexAttention has no backward on the CPU). Must not know anchors,
documents or positions: all of that is in the mask.

Dimension suffixes: B batch, H query heads, G key/value heads, Q block rows, S keys, E head dimension.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

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
    is_grouped = q_BHQE.shape[1] != k_BGSE.shape[1]
    return scaled_dot_product_attention(
        q_BHQE, k_BGSE, v_BGSE, attn_mask=visible_QS, scale=scale, enable_gqa=is_grouped
    )


def _segments(q_BHQE: Tensor, k_BGSE: Tensor, v_BGSE: Tensor, mask: SegmentMask, scale: float) -> Tensor:
    """Run one sdpa call per segment: scores across documents are never computed."""
    context_rows = k_BGSE.shape[2] - q_BHQE.shape[2]
    k_block, v_block = k_BGSE[:, :, context_rows:], v_BGSE[:, :, context_rows:]
    parts: list[Tensor] = []
    for segment in mask.segments:
        span = slice(segment.context_start, segment.context_end)
        k_seg = torch.cat([k_BGSE[:, :, span], k_block.index_select(2, segment.rows_q)], dim=2)
        v_seg = torch.cat([v_BGSE[:, :, span], v_block.index_select(2, segment.rows_q)], dim=2)
        parts.append(_sdpa(q_BHQE.index_select(2, segment.rows_q), k_seg, v_seg, segment.visible_qs, scale))
    # A row that sees only itself has one softmax weight, 1: its output is its own value.
    groups = q_BHQE.shape[1] // k_BGSE.shape[1]
    parts.append(v_block.index_select(2, mask.lonely_q).repeat_interleave(groups, dim=1))
    return torch.cat(parts, dim=2).index_select(2, mask.unpermute_Q)


def _flex(q_BHQE: Tensor, k_BGSE: Tensor, v_BGSE: Tensor, mask: FlexMask, scale: float) -> Tensor:
    is_grouped = q_BHQE.shape[1] != k_BGSE.shape[1]
    out = _compiled_flex()(
        q_BHQE, k_BGSE, v_BGSE, block_mask=mask.block_mask, scale=scale, enable_gqa=is_grouped
    )
    return cast("Tensor", out)


@functools.cache
def _compiled_flex() -> Callable[..., Any]:
    """Compile on first use: the uncompiled kernel materialises all scores."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)
