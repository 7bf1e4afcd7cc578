"""Loss of one micro-batch: the drafter's forward, the target's frozen head in chunks, weighted cross-entropy.

Called by the drafter worker for every pack. Returns sums, not means: the caller divides by the weight of
the whole optimizer step, so that splitting a step differently changes nothing. Never waits for a GPU: index
lists come from CPU tokens, results stay on the device. The head's input gradient is formed in the forward
pass, chunk by chunk, so full logits never exist and nothing is computed twice.

Dimension suffixes: T context tokens, A anchors, K block positions, Q block rows (A times K), R rows with
weight, D hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import embedding, pad

from trainer.drafter.acceptance import BlockCounts, count_blocks
from trainer.drafter.anchors import Anchors, BlockLabels, pad_anchors, trim_blocks
from trainer.drafter.masks import FLEX_MULTIPLE, build_layout, build_masks, to_device
from trainer.drafter.model import Drafter
from trainer.drafter.noise import add_noise
from trainer.errors import ConfigError
from trainer.pipeline.messages import FeaturePack, PackedTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenEnds:
    """The target's embedding and head, borrowed by the drafter; they never get a gradient."""

    embed_weight_VD: Tensor
    head_weight_VD: Tensor
    embed_scale: float | None = None
    logit_softcap: float | None = None

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embed tokens as the target does."""
        embeds = embedding(token_ids, self.embed_weight_VD)
        return embeds if self.embed_scale is None else embeds * self.embed_scale

    def logits(self, hidden: Tensor) -> Tensor:
        """Turn final hidden states into fp32 logits as the target does."""
        # The tall matrix goes first: with the few rows of a draft that is up to four times as fast on a CPU
        # (3 rows, 49,152 tokens: 8 against 33 ms on one core); elsewhere both orders are alike.
        rows_RD = hidden.flatten(0, -2).to(self.head_weight_VD.dtype)
        logits = (self.head_weight_VD @ rows_RD.T).T.float().reshape(*hidden.shape[:-1], -1)
        cap = self.logit_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSums:
    """What one micro-batch adds to the optimizer step; every tensor stays on the drafter's device."""

    numerator: Tensor
    """0-dim fp32, sum of weight times loss; carries the graph"""
    denominator: Tensor
    """0-dim fp32, sum of weights"""
    counts: BlockCounts
    """right predictions, for the expected acceptance length"""
    rows: int
    """block positions that carried weight (known on the CPU)"""
    blocks: int
    """valid blocks"""


def microbatch_sums(
    drafter: Drafter,
    ends: FrozenEnds,
    pack: FeaturePack,
    anchors: Anchors,
    labels: BlockLabels,
    *,
    noise_sigma: float,
    noise_seed: int,
    head_chunk_rows: int,
    attention: str,
) -> StepSums:
    """Run the drafter on one pack and sum its weighted loss.

    Args:
        drafter: on its device.
        ends: the target's frozen tensors, on the same device.
        pack: hidden states on that device or the CPU; tokens on the CPU.
        anchors: the blocks of this visit.
        labels: their labels and weights.
        noise_sigma: amplitude of the noise on the hidden states, 0 for none.
        noise_seed: seed of this visit's noise.
        head_chunk_rows: rows per head product; bounds the logits' memory (rows x vocabulary x 4 bytes).
        attention: `dense`, `sdpa` or `flex`.

    Returns:
        Sums; `numerator.backward()` adds the gradient of the numerator. A pack without any supervised block
        gives zeros and no gradient at all.
    """
    if head_chunk_rows < 1:
        raise ConfigError(f"head_chunk_rows must be at least 1, not {head_chunk_rows}")
    if attention != "flex":
        anchors, labels = trim_blocks(anchors, labels)
    if not bool(labels.mask_AK.any()):
        return _nothing(drafter)
    hidden_QD = block_hidden(
        drafter, ends, pack, anchors, noise_sigma=noise_sigma, noise_seed=noise_seed, attention=attention
    )
    device, blocks = hidden_QD.device, len(labels.complete_A)
    rows_R = labels.mask_AK.flatten().nonzero().flatten()  # on the CPU: no sync
    index_R = to_device(rows_R, device)
    weights_R = to_device(labels.weights_AK.flatten()[rows_R], device)
    losses_R, correct_R = weighted_cross_entropy(
        hidden_QD.index_select(0, index_R),
        ends,
        to_device(labels.labels_AK.flatten()[rows_R], device),
        weights_R,
        chunk_rows=head_chunk_rows,
    )
    correct_AK = torch.zeros(labels.mask_AK.numel(), dtype=torch.bool, device=device)
    correct_AK = correct_AK.index_copy(0, index_R, correct_R).view(blocks, -1)
    return StepSums(
        numerator=losses_R.sum(),
        denominator=weights_R.sum(),
        counts=count_blocks(
            correct_AK, to_device(labels.mask_AK, device), to_device(labels.complete_A, device)
        ),
        rows=rows_R.numel(),
        blocks=blocks,
    )


def block_hidden(
    drafter: Drafter,
    ends: FrozenEnds,
    pack: FeaturePack,
    anchors: Anchors,
    *,
    noise_sigma: float = 0.0,
    noise_seed: int = 0,
    attention: str = "sdpa",
) -> Tensor:
    """Run the drafter over all blocks of a pack: final hidden states [Q, D] of the given anchors' rows."""
    config, device = drafter.config, drafter.device
    size, wanted_rows = config.block_size, len(anchors) * config.block_size
    tokens, features_TF = pack.tokens, pack.features_TLD.to(device, non_blocking=True).flatten(1)
    features_TF = add_noise(features_TF, sigma=noise_sigma, seed=noise_seed)
    if attention == "flex":
        tokens, features_TF, anchors = _pad_for_flex(tokens, features_TF, anchors, size)
    layout = build_layout(tokens, anchors, block_size=size)
    masks = build_masks(
        layout,
        config.layer_types,
        sliding_window=config.sliding_window,
        implementation=attention,
        device=device,
    )
    hidden_1QD = drafter(
        features_TF[None],
        ends.embed(to_device(block_token_ids(tokens, anchors, size, config.mask_token_id), device))[None],
        context_positions_BT=to_device(tokens.position_T[None], device),
        block_positions_BQ=to_device(layout.block_positions[None], device),
        attention_mask=masks,
    )
    hidden_QD: Tensor = hidden_1QD[0, :wanted_rows]
    return hidden_QD


def block_token_ids(tokens: PackedTokens, anchors: Anchors, block_size: int, mask_token_id: int) -> Tensor:
    """Input tokens of every block row (int64 [Q], CPU): the anchor's own token, then mask tokens."""
    ids_AK = torch.full((len(anchors), block_size), mask_token_id, dtype=torch.int64)
    ids_AK[:, 0] = tokens.input_ids_T[anchors.position_A]
    return ids_AK.flatten()


def weighted_cross_entropy(
    hidden_RD: Tensor, ends: FrozenEnds, labels_R: Tensor, weights_R: Tensor, *, chunk_rows: int
) -> tuple[Tensor, Tensor]:
    """Weigh the cross-entropy of each row.

    Returns:
        Weighted losses [R] (fp32, differentiable with respect to the hidden states; the gradient must reach
        them as one number for all rows, as a plain sum does) and whether each row's best token is its label
        (bool [R]).
    """
    losses_R, correct_R = _ChunkedHead.apply(  # type: ignore[no-untyped-call]
        hidden_RD, ends.head_weight_VD, labels_R, weights_R, chunk_rows, ends.logit_softcap
    )
    return losses_R, correct_R


class _ChunkedHead(torch.autograd.Function):
    """Head product, cross-entropy and input gradient per chunk of rows; the head itself gets no gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_RD: Tensor,
        head_VD: Tensor,
        labels_R: Tensor,
        weights_R: Tensor,
        chunk_rows: int,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor]:
        is_training = ctx.needs_input_grad[0]
        losses, correct = torch.empty_like(weights_R), torch.empty_like(labels_R, dtype=torch.bool)
        grad_RD = torch.empty_like(hidden_RD) if is_training else None
        for start in range(0, hidden_RD.shape[0], chunk_rows):
            part = slice(start, start + chunk_rows)
            hidden_rd = hidden_RD[part].to(head_VD.dtype)
            grad_logits_rv, losses[part], correct[part] = _chunk_loss(
                (hidden_rd @ head_VD.T).float(), labels_R[part], weights_R[part], softcap
            )
            if grad_RD is not None:
                grad_RD[part] = (grad_logits_rv.to(head_VD.dtype) @ head_VD).to(hidden_RD.dtype)
        if grad_RD is not None:
            ctx.save_for_backward(grad_RD)
        ctx.mark_non_differentiable(correct)
        return losses, correct

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_losses_R: Tensor, _grad_correct: Tensor | None) -> tuple[Tensor | None, ...]:
        (grad_RD,) = ctx.saved_tensors
        return grad_RD * grad_losses_R[:, None].to(grad_RD.dtype), None, None, None, None, None


def _chunk_loss(
    logits_rv: Tensor, labels_r: Tensor, weights_r: Tensor, softcap: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Turn fp32 logits, in place, into the gradient of the weighted loss; return it, the losses, and hits."""
    slope_rv: Tensor | None = None
    if softcap is not None:
        capped_rv = logits_rv.div_(softcap).tanh_()
        slope_rv = 1.0 - capped_rv.square()
        logits_rv = capped_rv.mul_(softcap)
    label_r1 = labels_r[:, None]
    best_token_r1 = logits_rv.argmax(dim=1, keepdim=True)
    logits_rv.sub_(logits_rv.gather(1, best_token_r1))
    label_logit_r1 = logits_rv.gather(1, label_r1)
    total_r1 = logits_rv.exp_().sum(dim=1, keepdim=True)
    losses_r = (total_r1.log() - label_logit_r1).flatten() * weights_r
    weight_r1 = weights_r[:, None]
    grad_rv = logits_rv.mul_(weight_r1 / total_r1)
    grad_rv.scatter_add_(1, label_r1, -weight_r1)
    if slope_rv is not None:
        grad_rv.mul_(slope_rv)
    return grad_rv, losses_r, (best_token_r1 == label_r1).flatten()


def _pad_for_flex(
    tokens: PackedTokens, features_TF: Tensor, anchors: Anchors, block_size: int
) -> tuple[PackedTokens, Tensor, Anchors]:
    """Pad to few distinct lengths: each new shape costs a compilation of 15 s and more."""
    length = tokens.input_ids_T.numel()
    extra = _coarse_length(length) - length
    slots = len(anchors)
    while slots * block_size % FLEX_MULTIPLE:
        slots += 1
    padded = PackedTokens(
        input_ids_T=pad(tokens.input_ids_T, (0, extra)),
        loss_mask_T=pad(tokens.loss_mask_T, (0, extra)),
        doc_id_T=pad(tokens.doc_id_T, (0, extra), value=-1),
        position_T=pad(tokens.position_T, (0, extra)),
    )
    return padded, pad(features_TF, (0, 0, 0, extra)), pad_anchors(anchors, slots)


def _coarse_length(length: int) -> int:
    """Round up to a quarter of the next power of two (at most a quarter is padding), in whole tiles."""
    step = max(FLEX_MULTIPLE, (1 << max(length - 1, 1).bit_length()) // 8)
    return -(-length // step) * step


def _nothing(drafter: Drafter) -> StepSums:
    """Contribute zero; the leaf lets the caller run `backward` as always without touching any parameter."""
    device = drafter.device
    return StepSums(
        numerator=torch.zeros((), device=device, requires_grad=True),
        denominator=torch.zeros((), device=device),
        counts=BlockCounts.zeros(drafter.config.block_size, device),
        rows=0,
        blocks=0,
    )
