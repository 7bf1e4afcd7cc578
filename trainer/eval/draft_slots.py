"""Many sequences of one drafter side by side: context keys and values in slots, each at its own length.

Called by `eval.batched`; the counterpart of `target.slots`. Every step hands over the hidden states of whole
blocks, accepted rows or not: rows behind a slot's length hold rubbish that no mask shows and that the next
step overwrites. Gives what `Drafter.draft` gives for one sequence. Must not train anything.

Dimension suffixes: B slots, T tokens of a prompt, K block positions, S cached positions, G key/value heads,
E head dimension, F captured features, D hidden.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from trainer.drafter.masks import FULL, DenseMask
from trainer.drafter.model import Drafter, DrafterLayer

_GRAIN = 64


class DraftSlots:
    """A fixed number of sequences for which a drafter drafts together."""

    def __init__(self, drafter: Drafter, *, slots: int, capacity: int) -> None:
        config = drafter.config
        self._drafter = drafter
        self._capacity = -(-capacity // _GRAIN) * _GRAIN
        shape = (slots, self._capacity, config.num_key_value_heads, config.head_dim)
        # zeros, not rubbish: hidden keys get weight 0, and 0 times NaN would be NaN
        zeros = torch.zeros(shape, dtype=drafter.dtype, device=drafter.device)
        self._keys = [zeros.clone() for _ in config.layer_types]
        self._values = [zeros.clone() for _ in config.layer_types]

    @torch.no_grad()
    def prefill(self, slot: int, features_TF: Tensor) -> None:
        """Take a prompt's hidden states over as the context of a slot."""
        position_1T = torch.arange(features_TF.shape[0], device=features_TF.device)[None]
        self._append(slice(slot, slot + 1), features_TF[None], position_1T)

    @torch.no_grad()
    def draft(
        self,
        features_BKF: Tensor,
        feature_starts_B: Tensor,
        block_embeds_BKD: Tensor,
        starts_B: Tensor,
        *,
        longest: int,
    ) -> Tensor:
        """Draft a block for every slot.

        Args:
            features_BKF: hidden states of the latest verify's whole blocks.
            feature_starts_B: position of each slot's first row of them.
            block_embeds_BKD: embeddings of the newest committed token and of the mask tokens behind it.
            starts_B: position of each slot's newest committed token; rows from there on are not context.
            longest: upper bound of all starts, known on the host.

        Returns:
            Hidden states [B, K, D].
        """
        device, size = starts_B.device, block_embeds_BKD.shape[1]
        slots = slice(0, len(starts_B))
        row_K = torch.arange(features_BKF.shape[1], device=device)
        self._append(slots, features_BKF, feature_starts_B[:, None] + row_K)
        seen = min(-(-longest // _GRAIN) * _GRAIN, self._capacity)
        position_BK = starts_B[:, None] + torch.arange(size, device=device)
        masks = self._masks(starts_B, position_BK, seen)
        block_rope = self._drafter.rope(position_BK, self._drafter.dtype)
        x_BKD = block_embeds_BKD.to(self._drafter.dtype)
        for index, layer in enumerate(self._layers()):
            keys, values = (buffer[index][:, :seen].transpose(1, 2) for buffer in (self._keys, self._values))
            x_BKD = layer(x_BKD, (keys, values), block_rope, masks[layer.layer_type])
        out: Tensor = self._drafter.norm(x_BKD)
        return out

    def _append(self, slots: slice, features_BTF: Tensor, position_BT: Tensor) -> None:
        context_BTD = self._drafter.fuse(features_BTF)
        rope = self._drafter.rope(position_BT, self._drafter.dtype)
        rows_B1 = torch.arange(slots.start, slots.stop, device=position_BT.device)[:, None]
        for index, layer in enumerate(self._layers()):
            keys_BGTE, values_BGTE = layer.self_attn.keys_values(context_BTD, rope)
            self._keys[index][rows_B1, position_BT] = keys_BGTE.transpose(1, 2)
            self._values[index][rows_B1, position_BT] = values_BGTE.transpose(1, 2)

    def _masks(self, starts_B: Tensor, position_BK: Tensor, seen: int) -> dict[str, DenseMask]:
        """One mask per layer type: [B, 1, K, seen + K], the context first."""
        size = position_BK.shape[1]
        context_S = torch.arange(seen, device=starts_B.device)
        visible_BKS = (context_S[None, :] < starts_B[:, None])[:, None, :].expand(-1, size, -1)
        own_BKK = torch.ones_like(visible_BKS[..., :1]).expand(-1, -1, size)
        full_BKS = torch.cat([visible_BKS, own_BKK], dim=2)
        masks = {}
        for kind in set(self._drafter.config.layer_types):
            allowed_BKS = full_BKS
            window = self._drafter.config.sliding_window
            if kind != FULL and window is not None:
                key_BS = torch.cat([context_S[None, :].expand(len(starts_B), -1), position_BK], dim=1)
                distance_BKS = position_BK[:, :, None] - key_BS[:, None, :]
                allowed_BKS = full_BKS & (distance_BKS >= 0) & (distance_BKS < window)
            masks[kind] = DenseMask(allowed_BKS[:, None])
        return masks

    def _layers(self) -> list[DrafterLayer]:
        return [cast("DrafterLayer", layer) for layer in self._drafter.layers]
