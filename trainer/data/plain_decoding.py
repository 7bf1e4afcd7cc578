"""Batched decoding with transformers' own growing cache: any target, one batch after another.

Called by `trainer.data.target_decoding` for targets that cannot decode by slots, and by tests as the plain
reference of those that can. Greedy results do not depend on the batch size (up to rounding). Must not know
files or text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from trainer.data.decoding import Completion
from trainer.data.pretrained import cache_argument
from trainer.data.token_choice import Sampling, draw


@torch.inference_mode()
def complete_batch(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_ids: frozenset[int],
    sampling: Sampling | None = None,
    uniforms: Sequence[Any] = (),
) -> list[Completion]:
    """Continue several prompts; finished ones leave the batch, so they cost nothing further.

    Args:
        model: a causal language model of transformers.
        prompts: token ids, none empty; padded on the left here.
        max_new_tokens: most tokens per completion.
        stop_ids: ids that end a completion.
        sampling: draw tokens instead of taking the likeliest.
        uniforms: with `sampling`, `max_new_tokens` numbers in [0, 1) for each prompt.

    Returns:
        One completion per prompt, in order.
    """
    device = model.get_input_embeddings().weight.device
    ids, mask = _left_padded(prompts, device)
    cache = DynamicCache(config=model.config)
    cached = {cache_argument(model): cache, "use_cache": True}
    produced: list[list[int]] = [[] for _ in prompts]
    alive = list(range(len(prompts)))
    for step in range(max_new_tokens):
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        logits = model(
            input_ids=ids, attention_mask=mask, position_ids=positions, logits_to_keep=1, **cached
        ).logits[:, -1]
        if sampling is None:
            chosen = logits.argmax(-1)
        else:
            chosen = draw(
                logits,
                torch.tensor([float(uniforms[index][step]) for index in alive], device=device),
                sampling,
            )
        keep = []
        # host sync: every token is needed here to know which sequences have ended.
        for row, (index, token) in enumerate(zip(alive, chosen.tolist(), strict=True)):
            produced[index].append(token)
            if token not in stop_ids:
                keep.append(row)
        if not keep:
            break
        if len(keep) < len(alive):
            rows = torch.tensor(keep, device=device)
            cache.batch_select_indices(rows)
            chosen, mask, alive = chosen[rows], mask[rows], [alive[row] for row in keep]
        ids = chosen[:, None]
        mask = torch.cat([mask, mask.new_ones(len(alive), 1)], dim=1)
    return [Completion(tokens, is_cut_off=tokens[-1] not in stop_ids) for tokens in produced]


def _left_padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    width = max(len(prompt) for prompt in prompts)
    ids = torch.zeros(len(prompts), width, dtype=torch.int64)
    mask = torch.zeros(len(prompts), width, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    return ids.to(device), mask.to(device)
