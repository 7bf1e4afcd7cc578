"""The target's frozen head over many rows: losses and the gradient of the hidden states, in chunks.

Called by `loss.microbatch_sums` for the rows that carry weight. The gradient of each row's loss is formed in
the forward pass, so full logits never exist and no product is computed twice; the head gets no gradient. Each
row's loss is left unweighted: the weight only scales the row's finished gradient, so it may be computed from
the losses themselves (`objective.dpace_weights`) without another pass and whatever the chunk size. Must not
wait for a GPU and must not know blocks or anchors.

Dimension suffixes: T context tokens, R rows with weight (r: of one chunk), D hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftLabels:
    """The target's own distribution as label: KL(p_target || p_drafter) at temperature 1."""

    last_hidden_TD: Tensor
    """last hidden state after the final norm, on the drafter's device, never with noise"""
    row_R: Tensor
    """int64 [R]: whose state predicts each row's token, that is the position before it"""
    share: float
    """above 0, up to 1: part of the KL in the loss; the rest is cross-entropy"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLosses:
    """What the head says of each row."""

    loss_R: Tensor
    """fp32 [R], unweighted; carries the graph to the hidden states"""
    cross_entropy_R: Tensor
    """fp32 [R], without a graph: -log of the probability of the label, whatever the loss is"""
    correct_R: Tensor
    """bool [R]: the likeliest token is the label"""


def head_losses(
    hidden_RD: Tensor,
    head_VD: Tensor,
    labels_R: Tensor,
    *,
    chunk_rows: int,
    softcap: float | None = None,
    soft: SoftLabels | None = None,
) -> RowLosses:
    """Compute each row's loss; its gradient reaches the hidden states scaled by what arrives at that row.

    Args:
        hidden_RD: the drafter's final hidden states.
        head_VD: the target's head, on the same device.
        labels_R: int64, the token each row stands for.
        chunk_rows: rows whose fp32 logits exist at the same time. With soft labels each row has logits of
            drafter and target, so half as many rows are taken.
        softcap: cap of tanh soft-capping, applied to drafter and target alike.
        soft: mix the KL against the target in; None is pure cross-entropy.
    """
    chunk_rows = chunk_rows if soft is None else max(1, chunk_rows // 2)
    loss_R, cross_entropy_R, correct_R = _ChunkedHead.apply(  # type: ignore[no-untyped-call]
        hidden_RD, head_VD, labels_R, _Options(chunk_rows=chunk_rows, softcap=softcap, soft=soft)
    )
    return RowLosses(loss_R=loss_R, cross_entropy_R=cross_entropy_R, correct_R=correct_R)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    chunk_rows: int
    softcap: float | None
    soft: SoftLabels | None


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Result for one chunk; `grad_rv` takes the place of the logits."""

    grad_rv: Tensor
    loss_r: Tensor
    cross_entropy_r: Tensor
    correct_r: Tensor


class _ChunkedHead(torch.autograd.Function):
    """Head product, loss and input gradient per chunk of rows."""

    @staticmethod
    def forward(
        ctx: Any, hidden_RD: Tensor, head_VD: Tensor, labels_R: Tensor, options: _Options
    ) -> tuple[Tensor, Tensor, Tensor]:
        is_training = ctx.needs_input_grad[0]
        loss_R = torch.empty(labels_R.shape, dtype=torch.float32, device=labels_R.device)
        cross_entropy_R, correct_R = torch.empty_like(loss_R), torch.empty_like(labels_R, dtype=torch.bool)
        grad_RD = torch.empty_like(hidden_RD) if is_training else None
        for start in range(0, hidden_RD.shape[0], options.chunk_rows):
            part = slice(start, start + options.chunk_rows)
            chunk = _chunk(hidden_RD[part], head_VD, labels_R[part], options, part)
            loss_R[part], cross_entropy_R[part] = chunk.loss_r, chunk.cross_entropy_r
            correct_R[part] = chunk.correct_r
            if grad_RD is not None:
                grad_RD[part] = (chunk.grad_rv.to(head_VD.dtype) @ head_VD).to(hidden_RD.dtype)
        if grad_RD is not None:
            ctx.save_for_backward(grad_RD)
        ctx.mark_non_differentiable(cross_entropy_R, correct_R)
        return loss_R, cross_entropy_R, correct_R

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_loss_R: Tensor, *_unused: Tensor | None
    ) -> tuple[Tensor | None, None, None, None]:
        (grad_RD,) = ctx.saved_tensors
        # the product is formed in fp32 and rounded once, without a wide copy of the gradient
        scaled_RD = torch.mul(grad_RD, grad_loss_R[:, None], out=torch.empty_like(grad_RD))
        return scaled_RD, None, None, None


def _chunk(hidden_rD: Tensor, head_VD: Tensor, labels_r: Tensor, options: _Options, part: slice) -> _Chunk:
    logits_rv, slope_rv = _capped(_logits(hidden_rD, head_VD), options.softcap, with_slope=True)
    soft = options.soft
    if soft is None:
        chunk = _hard(logits_rv, labels_r[:, None])
    else:
        target_rD = soft.last_hidden_TD.index_select(0, soft.row_R[part])
        target_rv, _ = _capped(_logits(target_rD, head_VD), options.softcap, with_slope=False)
        chunk = _mixed(logits_rv, target_rv, labels_r[:, None], soft.share)
    if slope_rv is not None:
        chunk.grad_rv.mul_(slope_rv)
    return chunk


def _logits(hidden_rD: Tensor, head_VD: Tensor) -> Tensor:
    return (hidden_rD.to(head_VD.dtype) @ head_VD.T).float()


def _capped(logits_rv: Tensor, softcap: float | None, *, with_slope: bool) -> tuple[Tensor, Tensor | None]:
    """Soft-cap fp32 logits in place; the slope is the cap's derivative at each logit."""
    if softcap is None:
        return logits_rv, None
    capped_rv = logits_rv.div_(softcap).tanh_()
    slope_rv = 1.0 - capped_rv.square() if with_slope else None
    return capped_rv.mul_(softcap), slope_rv


def _hard(logits_rv: Tensor, label_r1: Tensor) -> _Chunk:
    """Cross-entropy; turns the logits, in place, into its gradient."""
    best_token_r1 = logits_rv.argmax(dim=1, keepdim=True)
    logits_rv.sub_(logits_rv.gather(1, best_token_r1))
    label_logit_r1 = logits_rv.gather(1, label_r1)
    total_r1 = logits_rv.exp_().sum(dim=1, keepdim=True)
    loss_r = (total_r1.log() - label_logit_r1).flatten()
    grad_rv = logits_rv.div_(total_r1)
    grad_rv.scatter_add_(1, label_r1, torch.full_like(total_r1, -1.0))
    return _Chunk(grad_rv, loss_r, loss_r, (best_token_r1 == label_r1).flatten())


def _mixed(logits_rv: Tensor, target_rv: Tensor, label_r1: Tensor, share: float) -> _Chunk:
    """KL and cross-entropy in the given proportion; both sets of logits are used up.

    With target and drafter alike every term cancels exactly: the same operations run on both.
    """
    best_token_r1 = logits_rv.argmax(dim=1, keepdim=True)
    logits_rv.sub_(logits_rv.gather(1, best_token_r1))
    label_logit_r1 = logits_rv.gather(1, label_r1)
    target_rv.sub_(target_rv.amax(dim=1, keepdim=True))
    weight_rv = target_rv.exp()
    target_total_r1 = weight_rv.sum(dim=1, keepdim=True)
    # the mean of log p - log q as one dot product per row: neither factor is read twice, nothing is written
    gap_rv = target_rv.sub_(logits_rv)
    mean_gap_r1 = torch.bmm(weight_rv[:, None, :], gap_rv[:, :, None])[:, 0] / target_total_r1
    total_r1 = logits_rv.exp_().sum(dim=1, keepdim=True)
    divergence_r1 = mean_gap_r1 + (total_r1.log() - target_total_r1.log())
    cross_entropy_r1 = total_r1.log() - label_logit_r1
    grad_rv = logits_rv.mul_(total_r1.reciprocal()).sub_(weight_rv.mul_(share * target_total_r1.reciprocal()))
    grad_rv.scatter_add_(1, label_r1, torch.full_like(total_r1, share - 1.0))
    loss_r1 = share * divergence_r1 + (1.0 - share) * cross_entropy_r1
    correct_r = (best_token_r1 == label_r1).flatten()
    return _Chunk(grad_rv, loss_r1.flatten(), cross_entropy_r1.flatten(), correct_r)
