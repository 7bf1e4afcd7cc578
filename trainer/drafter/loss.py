"""Loss of one micro-batch: the drafter's forward, the target's frozen head in chunks, weighted losses.

Called by the drafter worker for every pack. Returns sums, not means: the caller divides by the weight of
the whole optimizer step, so that splitting a step differently changes nothing. Never waits for a GPU: index
lists come from CPU tokens, results stay on the device. What is minimised is `objective.Objective`'s to say;
the head's work is `head.head_losses`.

Dimension suffixes: T context tokens, A anchors, K block positions, Q block rows (A times K), R rows with
weight, D hidden, V vocabulary.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, pad

from trainer.data.cpu_products import Product
from trainer.drafter.acceptance import BlockCounts, count_blocks
from trainer.drafter.anchors import Anchors, BlockLabels, pad_anchors, trim_blocks
from trainer.drafter.head import RowLosses, SoftLabels, head_losses
from trainer.drafter.masks import FLEX_MULTIPLE, build_layout, build_masks, to_device
from trainer.drafter.model import Drafter
from trainer.drafter.noise import add_noise
from trainer.drafter.objective import DPACE, Objective, dpace_weights
from trainer.errors import ConfigError, PipelineError
from trainer.pipeline.messages import FeaturePack, PackedTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenEnds:
    """The target's embedding and head, borrowed by the drafter; they never get a gradient."""

    embed_weight_VD: Tensor
    head_weight_VD: Tensor
    embed_scale: float | None = None
    logit_softcap: float | None = None
    head_product: Product | None = None
    """the target's own way to multiply with its head; None multiplies plainly"""

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embed tokens as the target does."""
        embeds = embedding(token_ids, self.embed_weight_VD)
        return embeds if self.embed_scale is None else embeds * self.embed_scale

    def logits(self, hidden: Tensor) -> Tensor:
        """Turn final hidden states into fp32 logits as the target does."""
        rows = hidden.to(self.head_weight_VD.dtype)
        product = self.head_product or functools.partial(linear, weight=self.head_weight_VD)
        logits = product(rows).float()
        cap = self.logit_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSums:
    """What one micro-batch adds to the optimizer step; every tensor stays on the drafter's device."""

    numerator: Tensor
    """0-dim fp32, sum of weight times loss; carries the graph"""
    denominator: Tensor
    """0-dim fp32, sum of weights; with D-PACE the number of blocks with any weight"""
    counts: BlockCounts
    """right predictions, for the expected acceptance length"""
    rows: int
    """block positions that carried weight (known on the CPU)"""
    blocks: int
    """blocks with any weight"""


_CROSS_ENTROPY = Objective()


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
    flex_min_tokens: int = 0,
    objective: Objective = _CROSS_ENTROPY,
    stage: Callable[[str], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
) -> StepSums:
    """Run the drafter on one pack and sum its weighted loss.

    Args:
        drafter: on its device.
        ends: the target's frozen tensors, on the same device.
        pack: hidden states on that device or the CPU (with the last one for soft labels); tokens on the CPU.
        anchors: the blocks of this visit.
        labels: their labels and weights.
        noise_sigma: amplitude of the noise on the hidden states, 0 for none.
        noise_seed: seed of this visit's noise.
        head_chunk_rows: rows per head product; bounds the logits' memory (rows x vocabulary x 4 bytes).
        attention: `dense`, `sdpa` or `flex`.
        flex_min_tokens: with `flex`, shorter packs are padded to this length, so that fewer shapes compile.
        objective: loss and weights of each position; cross-entropy with static decay by default.
        stage: entered around `forward` and around `loss`, to time them.

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
    with stage("forward"):
        hidden_QD = block_hidden(
            drafter,
            ends,
            pack,
            anchors,
            noise_sigma=noise_sigma,
            noise_seed=noise_seed,
            attention=attention,
            flex_min_tokens=flex_min_tokens,
        )
    device, size = hidden_QD.device, drafter.config.block_size
    rows_R = labels.mask_AK.flatten().nonzero().flatten()  # on the CPU: no sync
    index_R = to_device(rows_R, device)
    with stage("loss"):
        result = head_losses(
            hidden_QD.index_select(0, index_R),
            ends.head_weight_VD,
            to_device(labels.labels_AK.flatten()[rows_R], device),
            chunk_rows=head_chunk_rows,
            softcap=ends.logit_softcap,
            soft=_soft_labels(pack, objective, target_rows(anchors, size).flatten()[rows_R], device),
        )
    mask_AK = to_device(labels.mask_AK, device)
    weights_R, denominator = _weigh(objective, labels, result, mask_AK, index_R)
    correct_AK = _spread(result.correct_R, index_R, mask_AK)
    return StepSums(
        numerator=(result.loss_R * weights_R).sum(),
        denominator=denominator,
        counts=count_blocks(correct_AK, mask_AK, to_device(labels.complete_A, device)),
        rows=rows_R.numel(),
        blocks=_block_count(labels),
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
    flex_min_tokens: int = 0,
) -> Tensor:
    """Run the drafter over all blocks of a pack: final hidden states [Q, D] of the given anchors' rows."""
    config, device = drafter.config, drafter.device
    size, wanted_rows = config.block_size, len(anchors) * config.block_size
    tokens, features_TF = pack.tokens, pack.features_TLD.to(device, non_blocking=True).flatten(1)
    features_TF = add_noise(features_TF, sigma=noise_sigma, seed=noise_seed)
    if attention == "flex":
        tokens, features_TF, anchors = _pad_for_flex(tokens, features_TF, anchors, size, flex_min_tokens)
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


def target_rows(anchors: Anchors, block_size: int) -> Tensor:
    """Say whose last hidden state predicts each block position: the token before it (int64 [A, K], CPU).

    Entries of positions without weight (the anchor itself, behind the document's end) may name any row, even
    one outside the pack.
    """
    return anchors.position_A[:, None] + torch.arange(block_size)[None, :] - 1


def _soft_labels(
    pack: FeaturePack, objective: Objective, target_R: Tensor, device: torch.device
) -> SoftLabels | None:
    if not objective.soft_label_share:
        return None
    if pack.last_hidden_TD is None:
        raise PipelineError(
            f"pack {pack.epoch}:{pack.pack_id} came without the last hidden state that soft labels need: "
            "have the target worker ship it"
        )
    return SoftLabels(
        last_hidden_TD=pack.last_hidden_TD.to(device, non_blocking=True),
        row_R=to_device(target_R, device),
        share=objective.soft_label_share,
    )


def _weigh(
    objective: Objective, labels: BlockLabels, result: RowLosses, mask_AK: Tensor, index_R: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the rows' weights and what the step's numerator will be divided by."""
    device = index_R.device
    if objective.weighting == DPACE:
        cross_entropy_AK = _spread(result.cross_entropy_R, index_R, mask_AK)
        weights_AK = dpace_weights(cross_entropy_AK, mask_AK, alpha=objective.dpace_alpha)
        blocks = torch.full((), float(_block_count(labels)), device=device)
        return weights_AK.flatten().index_select(0, index_R), blocks
    weights_R = to_device(labels.weights_AK[labels.mask_AK], device)
    return weights_R, weights_R.sum()


def _block_count(labels: BlockLabels) -> int:
    """Count the blocks with any weight, on the CPU; padding blocks that flex keeps are left out."""
    return int(labels.mask_AK.any(dim=1).sum())


def _spread(values_R: Tensor, index_R: Tensor, like_AK: Tensor) -> Tensor:
    """Put the rows' values back to their places among all block positions, zeros elsewhere."""
    spread = torch.zeros(like_AK.numel(), dtype=values_R.dtype, device=values_R.device)
    return spread.index_copy(0, index_R, values_R).view_as(like_AK)


def _pad_for_flex(
    tokens: PackedTokens, features_TF: Tensor, anchors: Anchors, block_size: int, min_tokens: int = 0
) -> tuple[PackedTokens, Tensor, Anchors]:
    """Pad to few distinct lengths: each new shape costs a compilation of 15 s and more."""
    length = tokens.input_ids_T.numel()
    extra = coarse_length(max(length, min_tokens)) - length
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


def coarse_length(length: int) -> int:
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
