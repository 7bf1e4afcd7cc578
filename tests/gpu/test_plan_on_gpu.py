"""Predicted memory against what CUDA's allocator measured: drafter step and prefill, within a tenth.

CPU twins: `tests/unit/trainer/test_plan.py` (the same predictions against real runs on the CPU).
"""

from __future__ import annotations

import dataclasses
import gc
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.support.trainer_runs import settings_for
from trainer.drafter.loss import FrozenEnds
from trainer.flags import resolve
from trainer.pipeline.devices import pick_attention
from trainer.planning.budget import drafter_budget, target_budget, target_weight_terms
from trainer.planning.facts import Facts
from trainer.planning.measure import drafter_step
from trainer.planning.packs import pack_facts
from trainer.target.capture import Target
from trainer.target.loader import outline_target

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    # The compiler warns about its own internals.
    pytest.mark.filterwarnings("ignore"),
]

MASK_ID = 31_999
SHAPES = {"one long document": [4096] * 4, "many short ones": [512] * 32}
TOLERANCE = 0.1


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A target of middle size, only its config: weights are made on the GPU."""
    LlamaConfig(
        hidden_size=1024,
        num_hidden_layers=12,
        intermediate_size=2816,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=64,
        vocab_size=32_000,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
    ).save_pretrained(tmp_path / "target")
    (tmp_path / "data").mkdir()
    # as loading a target does, which these tests go round
    torch.backends.cuda.enable_cudnn_sdp(enabled=False)
    gc.collect()
    torch.cuda.empty_cache()
    return tmp_path


def make_config(folder: Path, **changes: object):
    fields: dict[str, object] = {
        "devices__target_gpus": "0",
        "devices__drafter_gpus": "0",
        "drafter__num_layers": 5,
        "drafter__block_size": 8,
        "loss__max_anchors": 256,
        "data__token_budget": 4096,
        "data__max_seq_len": 4096,
        "target__mask_token_id": MASK_ID,
    }
    settings = settings_for(folder / "target", folder / "data", folder / "out", **(fields | changes))
    return resolve({}, overrides=settings, environ={}).config


def peak_of(work, before: int) -> int:
    """Most bytes allocated above `before` in the third run of `work`."""
    work(), work()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("lengths", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("attention", ["flex", "sdpa"])
def test_predicted_drafter_memory_is_what_the_allocator_measures(folder, attention, lengths) -> None:
    config = make_config(folder, loss__attention=attention)
    facts = Facts(
        target=outline_target(folder / "target", dtype=torch.bfloat16, mask_token_id=MASK_ID), lengths=lengths
    )
    shape, packs = facts.drafter(config), pack_facts(config, lengths)
    before = torch.cuda.memory_allocated()
    ends = FrozenEnds(
        embed_weight_VD=torch.randn(32_000, 1024, device="cuda").bfloat16(),
        head_weight_VD=torch.randn(32_000, 1024, device="cuda").bfloat16() * 0.02,
    )

    measured = peak_of(drafter_step(config, shape, ends, packs), before)

    budget = drafter_budget(config, shape, packs, device="cuda:0", limit=None)
    slots = sum(term.nbytes for term in budget.terms if term.name == "device slots")
    features = packs.most_tokens * len(shape.target_layer_ids) * shape.hidden_size * 2
    predicted = budget.allocated - slots + features  # the step keeps one pack, not the two slots
    print(f"drafter {attention} {len(lengths)}: predicted {predicted:,} measured {measured:,}")
    assert predicted == pytest.approx(measured, rel=TOLERANCE)


def test_auto_attention_is_planned_as_flex_on_cuda(folder) -> None:
    config = make_config(folder)

    assert pick_attention(config.loss.attention, "cuda:0", may_compile=config.loss.compile) == "flex"


@pytest.mark.parametrize(("samples", "length"), [(4, 4096), (32, 512)])
def test_predicted_target_memory_is_what_the_allocator_measures(folder, samples, length) -> None:
    config = make_config(folder, data__token_budget=samples * length)
    outline = outline_target(folder / "target", dtype=torch.bfloat16, mask_token_id=MASK_ID)
    facts = Facts(target=outline, lengths=[length] * samples)
    shape, packs = facts.drafter(config), pack_facts(config, facts.lengths)
    before = torch.cuda.memory_allocated()
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(
            LlamaConfig.from_pretrained(folder / "target"), dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    target = Target(model.requires_grad_(False).eval(), dataclasses.replace(outline.info), None)
    weights = torch.cuda.memory_allocated() - before
    ids_BS = torch.zeros(samples, length, dtype=torch.int64, device="cuda")

    measured = peak_of(lambda: target.hidden_states(ids_BS, None, shape.target_layer_ids), before)

    budget = target_budget(config, outline, shape, packs, device="cuda:0", limit=None)
    slots = sum(term.nbytes for term in budget.terms if term.name == "device slots")
    predicted = budget.allocated - slots
    planned_weights = sum(
        term.nbytes
        for term in target_weight_terms(outline, last_layer=max(shape.target_layer_ids), runs_all=False)
    )
    print(f"target {samples} x {length}: predicted {predicted:,} measured {measured:,}")
    assert budget.notes == ()
    assert planned_weights == pytest.approx(weights, rel=0.01)
    assert predicted == pytest.approx(measured, rel=TOLERANCE)
    assert predicted - planned_weights == pytest.approx(measured - weights, rel=0.15)
