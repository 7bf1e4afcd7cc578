"""Golden property 37: a drafter that has seen one continuation often enough drafts it whole."""

from __future__ import annotations

import torch

from tests.support.tiny_drafter import MASK_ID, drafter_config, make_pack, talkative_target
from trainer.drafter.acceptance import summarize
from trainer.drafter.anchors import anchor_candidates, block_labels, pad_anchors, select_anchors
from trainer.drafter.loss import microbatch_sums
from trainer.drafter.model import build_drafter
from trainer.eval.speculative import frozen_ends, speculative_generate
from trainer.pipeline.messages import PackedTokens
from trainer.target.loader import load_target

STEPS = 400


def test_golden_37_overfit_reaches_the_block_size(tmp_path) -> None:
    target = load_target(talkative_target(tmp_path), device="cpu", dtype=torch.float32, mask_token_id=MASK_ID)
    prompt = [5, 17, 29, 41, 8, 20, 33, 45]
    answer = speculative_generate(target, None, prompt, max_new_tokens=41, eos_ids=()).token_ids
    drafter = build_drafter(drafter_config(), seed=0, dtype=torch.float32)
    untrained = speculative_generate(target, drafter, prompt, max_new_tokens=37, eos_ids=())
    ends = frozen_ends(target, drafter.config)
    tokens = _one_document(prompt + answer, supervised_from=len(prompt))
    features, _ = target.hidden_states(tokens.input_ids_T[None], None, drafter.config.target_layer_ids)
    pack = make_pack(tokens, features=features[0])
    count = len(anchor_candidates(tokens))
    anchors = select_anchors(tokens, count, block_size=4, rng=torch.Generator())
    labels = block_labels(tokens, pad_anchors(anchors, count), block_size=4, gamma=4.0)

    optimizer = torch.optim.AdamW(drafter.parameters(), lr=2e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for _ in range(STEPS):
        sums = microbatch_sums(
            drafter,
            ends,
            pack,
            anchors,
            labels,
            noise_sigma=0.0,
            noise_seed=0,
            head_chunk_rows=4096,
            attention="sdpa",
        )
        optimizer.zero_grad()
        (sums.numerator / sums.denominator).backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        schedule.step()

    reading = summarize(sums.counts)
    result = speculative_generate(target, drafter, prompt, max_new_tokens=37, eos_ids=())
    assert len(set(answer)) > 20
    assert untrained.acceptance_length < 1.5
    assert reading.complete_blocks == count - 2
    assert reading.expected_acceptance_length == 4.0
    assert result.acceptance_length == 4.0
    assert result.token_ids == answer[:37]


def _one_document(ids: list[int], *, supervised_from: int) -> PackedTokens:
    length = len(ids)
    return PackedTokens(
        input_ids_T=torch.tensor(ids),
        loss_mask_T=torch.arange(length) >= supervised_from,
        doc_id_T=torch.zeros(length, dtype=torch.int32),
        position_T=torch.arange(length),
    )
