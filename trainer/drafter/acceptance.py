"""Expected acceptance length from training batches, counted on the device and read one interval later.

`loss.microbatch_sums` fills `BlockCounts`, the drafter worker adds them up per log interval, telemetry
reads the result when it has long been copied. Must not wait for a GPU except in `DeferredCounts.read`.

Expected acceptance length = 1 + sum over k of the share of complete blocks whose first k drafts are all
right: a mean of products, not a product of means. Blocks cut short (document end, unsupervised token)
cannot be accepted whole and are left out.

Dimension suffixes: A blocks, K block positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCounts:
    """Integer counts of some blocks; addition merges two sets."""

    correct_K: Tensor
    """int64 [K]: supervised positions predicted right, per offset"""
    supervised_K: Tensor
    """int64 [K]: supervised positions per offset"""
    prefix_correct_K: Tensor
    """int64 [K]: complete blocks whose offsets 1..k are all right"""
    complete_blocks: Tensor
    """int64, 0-dim"""

    def __add__(self, other: BlockCounts) -> BlockCounts:
        return BlockCounts(
            correct_K=self.correct_K + other.correct_K,
            supervised_K=self.supervised_K + other.supervised_K,
            prefix_correct_K=self.prefix_correct_K + other.prefix_correct_K,
            complete_blocks=self.complete_blocks + other.complete_blocks,
        )

    @staticmethod
    def zeros(block_size: int, device: torch.device | str) -> BlockCounts:
        """Start an interval."""
        per_offset = torch.zeros(block_size, dtype=torch.int64, device=device)
        return BlockCounts(
            correct_K=per_offset,
            supervised_K=per_offset.clone(),
            prefix_correct_K=per_offset.clone(),
            complete_blocks=torch.zeros((), dtype=torch.int64, device=device),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceReading:
    """Plain numbers of one interval; a share of nothing is None, never 0."""

    expected_acceptance_length: float | None
    prefix_acceptance: tuple[float | None, ...]
    """share of complete blocks right up to offset k, for k = 1, 2, ..."""
    accuracy: tuple[float | None, ...]
    """share of supervised positions predicted right at offset k, for k = 1, 2, ..."""
    complete_blocks: int


def count_blocks(correct_AK: Tensor, mask_AK: Tensor, complete_A: Tensor) -> BlockCounts:
    """Count right predictions; all arguments are bool on one device, offset 0 is ignored."""
    right_AK = correct_AK & mask_AK
    prefix_AK = correct_AK.clone()
    prefix_AK[:, 0] = True
    prefix_AK = prefix_AK.to(torch.int32).cumprod(dim=1).bool() & complete_A[:, None]
    return BlockCounts(
        correct_K=right_AK.sum(dim=0),
        supervised_K=mask_AK.sum(dim=0),
        prefix_correct_K=prefix_AK.sum(dim=0),
        complete_blocks=complete_A.sum(),
    )


def summarize(counts: BlockCounts) -> AcceptanceReading:
    """Turn counts that are on the CPU into numbers."""
    blocks = int(counts.complete_blocks)
    prefix = [_share(value, blocks) for value in counts.prefix_correct_K.tolist()[1:]]
    pairs = zip(counts.correct_K.tolist()[1:], counts.supervised_K.tolist()[1:], strict=True)
    return AcceptanceReading(
        expected_acceptance_length=1.0 + sum(value or 0.0 for value in prefix) if blocks else None,
        prefix_acceptance=tuple(prefix),
        accuracy=tuple(_share(right, total) for right, total in pairs),
        complete_blocks=blocks,
    )


class DeferredCounts:
    """Counts on their way to the CPU: started without waiting, read when they have arrived."""

    def __init__(self, counts: BlockCounts) -> None:
        packed = torch.cat(
            [counts.correct_K, counts.supervised_K, counts.prefix_correct_K, counts.complete_blocks[None]]
        )
        self._size = counts.correct_K.numel()
        self._event: torch.cuda.Event | None = None
        if packed.device.type == "cuda":
            self._host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            self._host.copy_(packed, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(packed.device))
        else:
            self._host = packed.clone()

    def is_ready(self) -> bool:
        """Say whether `read` would return at once."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def read(self) -> AcceptanceReading:
        """Return the numbers; waits only when called before the copy has finished."""
        if self._event is not None:
            self._event.synchronize()  # host sync: one interval after the copy started, so it is long done
        correct, supervised, prefix, blocks = torch.split(self._host, [self._size, self._size, self._size, 1])
        return summarize(
            BlockCounts(
                correct_K=correct, supervised_K=supervised, prefix_correct_K=prefix, complete_blocks=blocks[0]
            )
        )


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
