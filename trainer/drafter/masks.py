"""Which key each block position may see: one predicate, in the forms the attention kernels want.

Built once per micro-batch by `loss.microbatch_sums` (or a test) from CPU tokens, consumed by
`attention.attend`. Three forms of the same rule: a dense boolean grid (the reference), per-document
segments for sdpa, and a mask_mod
for FlexAttention. Must not look at hidden states and must not wait for a GPU.

The rule: a position of block b sees the context of its own document strictly before its anchor (the target
has not processed the anchor yet when the block is drafted) and its own block. Sliding layers also require a
distance below the window and look only backwards inside the block. Positions of a padding block see only
themselves, since a row without any key is NaN in softmax kernels.

Dimension suffixes: T context tokens, A anchors, Q block rows (A times block size), S keys (T + Q).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from trainer.drafter.anchors import Anchors
from trainer.drafter.tiles import TILE, Stretches, find_tiles, ordered
from trainer.errors import ConfigError
from trainer.pipeline.messages import PackedTokens

Implementation = Literal["dense", "sdpa", "flex"]
IMPLEMENTATIONS: tuple[Implementation, ...] = ("dense", "sdpa", "flex")
FULL = "full_attention"
SLIDING = "sliding_attention"

SEGMENT_ROWS = 256
"""Block rows that one sdpa call takes; more would spend most of its scores on other blocks' keys."""

FLEX_MULTIPLE = TILE
"""FlexAttention's tile: query and context lengths are padded to a multiple of it."""

MaskMod = Callable[[Any, Any, Any, Any], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLayout:
    """Geometry of one pack: every mask is a function of it. All tensors int32 (bool for `valid_A`)."""

    context_doc_T: Tensor
    """document of each context token, below 0 for padding"""
    context_position_T: Tensor
    """position inside the document"""
    anchor_index_A: Tensor
    """anchor's index in the packed row"""
    anchor_doc_A: Tensor
    anchor_position_A: Tensor
    """anchor's position inside its document"""
    valid_A: Tensor
    block_size: int

    @property
    def context_rows(self) -> int:
        """Context tokens, padding included."""
        return self.context_doc_T.numel()

    @property
    def block_rows(self) -> int:
        """Rows of all blocks, padding blocks included."""
        return self.anchor_index_A.numel() * self.block_size

    @property
    def block_positions(self) -> Tensor:
        """Document-local position of every block row (int64)."""
        offset_K = torch.arange(self.block_size, device=self.anchor_position_A.device)
        return (self.anchor_position_A[:, None] + offset_K[None, :]).flatten().to(torch.int64)

    def to(self, device: torch.device) -> BlockLayout:
        """Copy to a device without waiting."""
        return BlockLayout(
            context_doc_T=to_device(self.context_doc_T, device),
            context_position_T=to_device(self.context_position_T, device),
            anchor_index_A=to_device(self.anchor_index_A, device),
            anchor_doc_A=to_device(self.anchor_doc_A, device),
            anchor_position_A=to_device(self.anchor_position_A, device),
            valid_A=to_device(self.valid_A, device),
            block_size=self.block_size,
        )


@dataclass(frozen=True, slots=True)
class DenseMask:
    """Boolean grid, True where visible."""

    visible_QS: Tensor


@dataclass(frozen=True, slots=True)
class Segment:
    """Some blocks of one document with the keys they can see: a stretch of context, then their own rows."""

    rows: int
    piece: int
    """index of the stretch of context, see `SegmentMask.context_splits`"""
    context_rows: int
    """leading rows of that stretch that matter: nothing at or behind the last anchor is visible"""
    visible_qs: Tensor


@dataclass(frozen=True, slots=True)
class SegmentMask:
    """All rows of a pack cut into segments.

    Rows are brought into segment order once and cut by size, rather than picked per segment: the backward of
    each pick would fill and add a tensor of the whole pack's size.
    """

    segments: tuple[Segment, ...]
    lonely_rows: int
    """rows of padding blocks, behind all segments: each sees only itself"""
    context_splits: tuple[int, ...]
    """lengths of the stretches of equal document in the context"""
    order_Q: Tensor | None
    """rows in segment order, None when they are already"""
    unorder_Q: Tensor | None


@dataclass(frozen=True, slots=True)
class FlexMask:
    """FlexAttention's sparse block mask."""

    block_mask: Any


LayerMask = DenseMask | SegmentMask | FlexMask
AttentionMasks = Mapping[str, LayerMask]
"""Mask per layer type."""


def build_layout(tokens: PackedTokens, anchors: Anchors, *, block_size: int) -> BlockLayout:
    """Collect a pack's geometry on the CPU."""
    doc_T = tokens.doc_id_T.to(torch.int32)
    position_T = tokens.position_T.to(torch.int32)
    return BlockLayout(
        context_doc_T=doc_T,
        context_position_T=position_T,
        anchor_index_A=anchors.position_A.to(torch.int32),
        anchor_doc_A=doc_T[anchors.position_A],
        anchor_position_A=position_T[anchors.position_A],
        valid_A=anchors.valid_A,
        block_size=block_size,
    )


def build_masks(
    layout: BlockLayout,
    layer_types: Sequence[str],
    *,
    sliding_window: int | None,
    implementation: str,
    device: torch.device | str,
) -> AttentionMasks:
    """Build one mask per distinct layer type, once per micro-batch.

    Args:
        layout: geometry of the pack, on the CPU.
        layer_types: the drafter's layer types; duplicates cost nothing.
        sliding_window: window of the sliding layers, in positions.
        implementation: `dense`, `sdpa` or `flex`.
        device: where the attention runs.

    Raises:
        ConfigError: unknown implementation, or flex without CUDA (it has no backward on the CPU).
    """
    device = torch.device(device)
    build = _BUILDERS.get(implementation)
    if build is None:
        raise ConfigError(f"unknown attention implementation: {implementation}; use dense, sdpa or flex")
    if implementation == "flex" and device.type not in ("cuda", "meta"):
        raise ConfigError(f"attention flex needs a CUDA device, not {device}: use --attention sdpa")
    return {
        kind: build(layout, window_of(kind, sliding_window), device) for kind in dict.fromkeys(layer_types)
    }


def window_of(layer_type: str, sliding_window: int | None) -> int | None:
    """Return the window of a layer type, None for full attention."""
    if layer_type == FULL:
        return None
    if layer_type != SLIDING:
        raise ConfigError(f"unknown layer type: {layer_type}; use {FULL} or {SLIDING}")
    if sliding_window is None or sliding_window < 1:
        raise ConfigError(
            f"sliding layers need a window of at least 1, not {sliding_window}: set sliding_window"
        )
    return sliding_window


def dense_mask(layout: BlockLayout, window: int | None) -> Tensor:
    """Evaluate the rule on the whole grid: bool [Q, T + Q]."""
    size = layout.block_size
    anchor = layout.anchor_index_A.repeat_interleave(size)[:, None]
    doc = layout.anchor_doc_A.repeat_interleave(size)[:, None]
    valid = layout.valid_A.repeat_interleave(size)[:, None]
    row = torch.arange(layout.block_rows, device=anchor.device)
    block, offset = row // size, row % size
    index_T = torch.arange(layout.context_rows, device=anchor.device)
    context = (index_T[None, :] < anchor) & (layout.context_doc_T[None, :] == doc) & (doc >= 0) & valid
    own = block[:, None] == block[None, :]
    if window is not None:
        position = layout.block_positions[:, None]
        context &= position - layout.context_position_T[None, :] < window
        distance = offset[:, None] - offset[None, :]
        own &= (distance >= 0) & (distance < window)
    itself = row[:, None] == row[None, :]
    return torch.cat([context, torch.where(valid, own, itself)], dim=1)


def make_mask_mod(layout: BlockLayout, window: int | None) -> MaskMod:
    """Write the rule as FlexAttention's `mask_mod(batch, head, query, key)` over the layout's tensors."""
    size, context_rows = layout.block_size, layout.context_rows
    context_doc, context_position = layout.context_doc_T, layout.context_position_T
    anchor_index, anchor_doc = layout.anchor_index_A, layout.anchor_doc_A
    anchor_position, valid = layout.anchor_position_A, layout.valid_A

    def mask_mod(batch: Any, head: Any, query: Any, key: Any) -> Tensor:  # noqa: ARG001 (the kernel's signature)
        block, offset = query // size, query % size
        # Both halves are evaluated for every pair, so indices are clamped into range and the wrong half
        # dropped.
        token = torch.clamp(key, max=context_rows - 1)
        row = torch.clamp(key - context_rows, min=0)
        seen = (token < anchor_index[block]) & (context_doc[token] == anchor_doc[block])
        seen = seen & (anchor_doc[block] >= 0) & valid[block]
        own = row // size == block
        if window is not None:
            seen = seen & (anchor_position[block] + offset - context_position[token] < window)
            distance = offset - row % size
            own = own & (distance >= 0) & (distance < window)
        in_block = torch.where(valid[block], own, row == query)
        return torch.where(key < context_rows, seen, in_block)

    return mask_mod


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to the device without waiting for earlier work there (through pinned memory)."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def _build_dense(layout: BlockLayout, window: int | None, device: torch.device) -> LayerMask:
    return DenseMask(dense_mask(layout.to(device), window))


def _build_flex(layout: BlockLayout, window: int | None, device: torch.device) -> LayerMask:
    if layout.block_rows % FLEX_MULTIPLE or layout.context_rows % FLEX_MULTIPLE:
        raise ConfigError(
            f"flex attention needs {layout.block_rows} block rows and {layout.context_rows} context rows "
            f"to be multiples of {FLEX_MULTIPLE}: pad them"
        )
    if device.type == "meta":  # a dry run of `planning`: the mask is small, the kernel does not run
        return FlexMask(None)
    return FlexMask(block_mask(layout, window, device))


def block_mask(layout: BlockLayout, window: int | None, device: torch.device) -> BlockMask:
    """Build FlexAttention's mask without a grid: its tiles follow from the anchors, on the CPU."""
    some_MN, every_MN = find_tiles(
        _stretches(layout, window), block_size=layout.block_size, context_rows=layout.context_rows
    )
    part_MN = some_MN & ~every_MN
    pairs = (ordered(part_MN), ordered(every_MN), ordered(part_MN.T), ordered(every_MN.T))
    names = ("kv", "full_kv", "q", "full_q")
    lists: dict[str, Any] = {}
    for name, (counts, numbers) in zip(names, pairs, strict=True):
        lists[f"{name}_num_blocks"] = to_device(counts, device)
        lists[f"{name}_indices"] = to_device(numbers, device)
    return BlockMask(
        seq_lengths=(layout.block_rows, layout.context_rows + layout.block_rows),
        BLOCK_SIZE=(TILE, TILE),
        mask_mod=make_mask_mod(layout.to(device), window),
        **lists,
    )


def _stretches(layout: BlockLayout, window: int | None) -> Stretches:
    end = layout.anchor_index_A.numpy().astype(np.int64)
    document = end - layout.anchor_position_A.numpy()
    start = narrow = document
    if window is not None:
        start = np.maximum(document, end - window + 1)
        narrow = np.maximum(document, end + layout.block_size - window)
    sees = layout.valid_A.numpy() & (layout.anchor_doc_A.numpy() >= 0)
    return Stretches(start_A=start, narrow_start_A=narrow, end_A=np.where(sees, end, start))


def _build_segments(layout: BlockLayout, window: int | None, device: torch.device) -> LayerMask:
    _, lengths = torch.unique_consecutive(layout.context_doc_T, return_counts=True)
    starts = lengths.cumsum(0) - lengths
    segments: list[Segment] = []
    order: list[Tensor] = []
    for blocks in _blocks_by_document(layout):
        piece = int(torch.searchsorted(starts, layout.anchor_index_A[blocks[0]], right=True)) - 1
        for group in torch.split(blocks, max(1, SEGMENT_ROWS // layout.block_size)):
            segments.append(_segment(layout, group, piece, int(starts[piece]), window, device))
            order.append(group)
    lonely = (~layout.valid_A).nonzero().flatten()
    blocks_in_order = torch.cat([*order, lonely])
    rows = _rows_of(blocks_in_order, layout.block_size)
    is_sorted = torch.equal(rows, torch.arange(rows.numel()))
    return SegmentMask(
        segments=tuple(segments),
        lonely_rows=lonely.numel() * layout.block_size,
        context_splits=tuple(lengths.tolist()),
        order_Q=None if is_sorted else to_device(rows, device),
        unorder_Q=None if is_sorted else to_device(rows.argsort(), device),
    )


def _blocks_by_document(layout: BlockLayout) -> list[Tensor]:
    """Group valid blocks by document, each group ordered by anchor so that context prefixes stay short."""
    valid = layout.valid_A.nonzero().flatten()
    order = valid[layout.anchor_index_A[valid].argsort(stable=True)]
    if not order.numel():
        return []
    _, counts = torch.unique_consecutive(layout.anchor_doc_A[order], return_counts=True)
    return list(torch.split(order, counts.tolist()))


def _segment(
    layout: BlockLayout, blocks: Tensor, piece: int, start: int, window: int | None, device: torch.device
) -> Segment:
    end = int(layout.anchor_index_A[blocks].max())
    part = BlockLayout(
        context_doc_T=layout.context_doc_T[start:end],
        context_position_T=layout.context_position_T[start:end],
        anchor_index_A=layout.anchor_index_A[blocks] - start,
        anchor_doc_A=layout.anchor_doc_A[blocks],
        anchor_position_A=layout.anchor_position_A[blocks],
        valid_A=layout.valid_A[blocks],
        block_size=layout.block_size,
    )
    return Segment(
        rows=part.block_rows,
        piece=piece,
        context_rows=end - start,
        visible_qs=to_device(dense_mask(part, window), device),
    )


def _rows_of(blocks: Tensor, size: int) -> Tensor:
    return (blocks[:, None] * size + torch.arange(size)[None, :]).flatten()


_BUILDERS: Mapping[str, Callable[[BlockLayout, int | None, torch.device], LayerMask]] = {
    "dense": _build_dense,
    "sdpa": _build_segments,
    "flex": _build_flex,
}
