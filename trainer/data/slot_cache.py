"""A preallocated key/value cache with one row per slot, and the attention that reads it.

Called by `trainer.data.decoding`. transformers' own static cache keeps one length for all rows; here each row
has its own, so a finished row is replaced while its neighbours go on. Rows and positions beyond the present
view cost nothing. Fits targets whose layers keep plain keys and values, sliding windows included (those are
kept whole and masked); `find_obstacle` says what does not fit. Must not choose tokens.

Dimension suffixes: N slots, M slots being filled, R rows in view, T positions in view, Q query positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

ATTENTION = "trainer_slots"
"""Name under which transformers knows the attention below."""
KNOWN_LAYERS = frozenset({"full_attention", "sliding_attention"})
Masks = Tensor | None | dict[str, Tensor | None]


class SlotCache:
    """Keys and values of all slots; allocated when a layer first hands over its shapes.

    Args:
        slots: rows.
        positions: most tokens that one row can hold.
    """

    def __init__(self, *, slots: int, positions: int) -> None:
        self.slots, self.positions = slots, positions
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._filled_M: Tensor | None = None
        self._place_R: tuple[Tensor, Tensor] | None = None
        self._width = 0

    @property
    def nbytes(self) -> int:
        """Bytes held on the device."""
        return sum(part.numel() * part.element_size() for pair in self._layers.values() for part in pair)

    def fill(self, slots_M: Tensor) -> None:
        """Let the next forward write whole prompts, from position 0 on, into these slots."""
        self._filled_M, self._place_R = slots_M, None

    def step(self, position_R: Tensor, *, width: int) -> None:
        """Let the next forward write one token per row at its position and read `width` positions."""
        rows_R = torch.arange(position_R.shape[0], device=position_R.device)
        self._filled_M, self._place_R, self._width = None, (rows_R, position_R), width

    def move(self, source_M: Tensor, *, width: int) -> None:
        """Put these rows first, in this order; only their first `width` positions are kept."""
        count = source_M.shape[0]
        for pair in self._layers.values():
            for kept in pair:
                kept[:count, :, :width] = kept[:, :, :width].index_select(0, source_M)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Keep a layer's new keys and values; returns what its attention reads (transformers' name)."""
        if layer_idx not in self._layers:
            self._layers[layer_idx] = (self._allocate(key_states), self._allocate(value_states))
        keys, values = self._layers[layer_idx]
        if self._place_R is None:
            assert self._filled_M is not None
            length = key_states.shape[2]
            keys[:, :, :length].index_copy_(0, self._filled_M, key_states)
            values[:, :, :length].index_copy_(0, self._filled_M, value_states)
            return key_states, value_states
        rows_R, position_R = self._place_R
        keys[rows_R, :, position_R] = key_states[:, :, 0]
        values[rows_R, :, position_R] = value_states[:, :, 0]
        count = rows_R.shape[0]
        return keys[:count, :, : self._width], values[:count, :, : self._width]

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002 - transformers' signature
        """Answer 0: positions are always given to the model, never derived from here."""
        return 0

    def _allocate(self, like: Tensor) -> Tensor:
        return like.new_zeros(self.slots, like.shape[1], self.positions, like.shape[3])


def attend_slots(
    _module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of one prompt batch (causal) or of one token per row (masked), in transformers' form.

    Query heads that share a key/value head are put side by side as its queries, so that keys and values are
    read once and never repeated in memory.
    """
    rows, heads, length, size = query.shape
    groups = heads // key.shape[1]
    if length == 1:
        grouped = query.reshape(rows, key.shape[1], groups, size)
        with _step_kernels(query.device):
            mixed = scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scaling)
        return mixed.reshape(rows, 1, heads, value.shape[-1]), None
    # Flash kernels share heads by themselves; those that take masks or fp32 do not.
    if groups > 1 and (attention_mask is not None or query.dtype == torch.float32):
        key, value, groups = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1), 1
    mixed = scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        scale=scaling,
        is_causal=attention_mask is None,
        enable_gqa=groups > 1,
    )
    return mixed.transpose(1, 2).contiguous(), None


def _step_kernels(device: torch.device) -> AbstractContextManager[Any]:
    """On CUDA, only kernels that read a mask which is shared by heads as it is, and that can be captured."""
    if device.type != "cuda":
        return nullcontext()
    kernels: AbstractContextManager[Any] = sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
    return kernels


AttentionInterface.register(ATTENTION, attend_slots)


@contextmanager
def slot_attention(model: Any) -> Iterator[None]:
    """Let `model` attend by slots inside the block, and as before behind it."""
    before = model.config._attn_implementation  # the public name is a method that only sets
    model.set_attn_implementation(ATTENTION)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def find_obstacle(model: Any) -> str | None:
    """Why this target cannot decode by slots as far as its config tells, or None."""
    config = model.config.get_text_config()
    layers = set(getattr(config, "layer_types", None) or ())
    if layers - KNOWN_LAYERS:
        return f"layers without a plain key/value cache: {', '.join(sorted(layers - KNOWN_LAYERS))}"
    if not layers and getattr(config, "sliding_window", None):
        return "a sliding window without a list of layer types"
    for name in ("attn_logit_softcapping", "attention_chunk_size", "num_kv_shared_layers"):
        if getattr(config, name, None):
            return f"attention with {name}"
    return None


def sliding_window(model: Any) -> int | None:
    """Width of the sliding layers, None when there are none."""
    config = model.config.get_text_config()
    if "sliding_attention" not in (getattr(config, "layer_types", None) or ()):
        return None
    return int(config.sliding_window)


def prompt_masks(length: int, *, window: int | None, device: torch.device) -> Masks:
    """Masks for prompts padded on the right: None means causal; True where a query sees a key."""
    if window is None:
        return None
    age_QT = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
    seen_QT = (age_QT >= 0) & (age_QT < window)
    return {"full_attention": None, "sliding_attention": seen_QT[None, None]}


def step_masks(position_R: Tensor, *, width: int, window: int | None, dtype: torch.dtype) -> Masks:
    """Additive masks [R, 1, 1, T]: a row sees its own positions up to the present one."""
    age_RT = position_R[:, None] - torch.arange(width, device=position_R.device)
    full = _additive(age_RT >= 0, dtype)
    if window is None:
        return full
    near = _additive((age_RT >= 0) & (age_RT < window), dtype)
    return {"full_attention": full, "sliding_attention": near}


def _additive(seen_RT: Tensor, dtype: torch.dtype) -> Tensor:
    bias_RT = torch.zeros(seen_RT.shape, dtype=dtype, device=seen_RT.device)
    return bias_RT.masked_fill_(~seen_RT, float("-inf"))[:, None, None]
