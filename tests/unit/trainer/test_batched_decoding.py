"""Decoding many prompts at once gives each prompt what it would get alone."""

from __future__ import annotations

import pytest
import torch

from tests.support.tiny_drafter import HIDDEN, family_pair, make_drafter, talkative_target
from trainer.drafter.cache import DraftCache
from trainer.drafter.masks import FULL, SLIDING
from trainer.errors import ConfigError
from trainer.eval.batched import decode_prompts
from trainer.eval.draft_slots import DraftSlots
from trainer.eval.speculative import speculative_generate
from trainer.eval.verify import Sampling
from trainer.target.loader import load_target
from trainer.target.slots import TargetSlots

PROMPTS = [[5 + (7 * i + 3 * j) % 50 for j in range(1 + 5 * i)] for i in range(6)]
NEW_TOKENS = 14


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_target(talkative_target(tmp_path_factory.mktemp("target")), device="cpu", dtype=torch.float32)


@pytest.fixture(scope="module")
def plain(target):
    """Every prompt decoded alone, and the stop tokens that cut some of them short."""
    free = [_alone(target, None, index).token_ids for index in range(len(PROMPTS))]
    eos = {free[3][6], free[5][0]}
    return eos, [_alone(target, None, index, eos) for index in range(len(PROMPTS))]


def _alone(target, drafter, index: int, eos=(), **options):
    return speculative_generate(
        target, drafter, PROMPTS[index], max_new_tokens=NEW_TOKENS, eos_ids=eos, sequence=index, **options
    )


@pytest.mark.parametrize(("size", "slots"), [(1, 4), (2, 2), (4, 4), (4, 16), (7, 3)])
def test_golden_28_many_prompts_at_once_equal_plain_decoding(target, plain, size: int, slots: int) -> None:
    eos, expected = plain
    ended: list[int] = []

    results = decode_prompts(
        target,
        make_drafter(seed=3),
        PROMPTS,
        max_new_tokens=NEW_TOKENS,
        eos_ids=eos,
        block_size=size,
        batch_size=slots,
        on_done=lambda index, _: ended.append(index),
    )

    assert [result.token_ids for result in results] == [result.token_ids for result in expected]
    assert [result.stopped for result in results] == [result.stopped for result in expected]
    assert sorted(ended) == list(range(len(PROMPTS)))
    assert any(result.stopped for result in results)


def test_golden_31_many_prompts_at_once_are_accounted_for_one_by_one(target) -> None:
    drafter = make_drafter(seed=1)
    alone = [_alone(target, drafter, index) for index in range(len(PROMPTS))]

    together = decode_prompts(target, drafter, PROMPTS, max_new_tokens=NEW_TOKENS, eos_ids=(), batch_size=4)

    assert [result.accept_counts for result in together] == [result.accept_counts for result in alone]
    assert [result.target_forwards for result in together] == [result.target_forwards for result in alone]
    assert [result.emitted for result in together] == [result.emitted for result in alone]


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param({}, id="full"),
        pytest.param({"layer_types": (SLIDING, FULL), "sliding_window": 6}, id="mixed"),
        pytest.param({"layer_types": (SLIDING, SLIDING), "sliding_window": 3}, id="sliding"),
    ],
)
def test_drafts_of_slots_are_those_of_one_sequence(shape: dict) -> None:
    """Slots of different length that keep a different part of each block, against one cache each."""
    drafter, size = make_drafter(seed=1, **shape), 4
    slots = DraftSlots(drafter, slots=3, capacity=60)
    caches = [DraftCache(2) for _ in range(3)]
    generator = torch.Generator().manual_seed(0)
    starts, kept = [5, 70 % 31, 17], [0, 3, 1]
    context = [torch.randn(start, 2 * HIDDEN, generator=generator) for start in starts]
    for number, rows in enumerate(context):
        slots.prefill(number, rows)
    pending, origins = torch.zeros(3, size, 2 * HIDDEN), list(starts)

    for _ in range(4):
        embeds = torch.randn(3, size, HIDDEN, generator=generator)
        drafted = slots.draft(
            pending, torch.tensor(origins), embeds, torch.tensor(starts), longest=max(starts)
        )
        for number, cache in enumerate(caches):
            alone = drafter.draft(context[number], embeds[number], cache, start=starts[number])
            torch.testing.assert_close(drafted[number], alone, atol=1e-5, rtol=1e-5)
        pending = torch.randn(3, size, 2 * HIDDEN, generator=generator)
        origins = list(starts)
        context = [rows[: keep + 1] for rows, keep in zip(pending, kept, strict=True)]
        starts = [start + keep + 1 for start, keep in zip(starts, kept, strict=True)]


@pytest.mark.parametrize("scheme", ["deterministic", "rejection"])
def test_what_a_prompt_samples_does_not_depend_on_its_neighbours(target, scheme: str) -> None:
    drafter = make_drafter(seed=1)
    sampling = Sampling(temperature=0.5, top_p=0.9, top_k=20, scheme=scheme, seed=5)
    alone = [_alone(target, drafter, index, sampling=sampling) for index in range(len(PROMPTS))]

    together = decode_prompts(
        target,
        drafter,
        PROMPTS,
        max_new_tokens=NEW_TOKENS,
        eos_ids=(),
        sampling=sampling,
        batch_size=4,
    )

    assert [result.token_ids for result in together] == [result.token_ids for result in alone]
    assert len({tuple(result.token_ids) for result in together}) == len(PROMPTS)


def test_nothing_to_decode_is_refused_and_no_prompt_is_no_result(target) -> None:
    drafter, options = make_drafter(), {"eos_ids": (), "batch_size": 4}

    with pytest.raises(ConfigError, match="prompt of 0 tokens"):
        decode_prompts(target, drafter, [[5], []], max_new_tokens=4, **options)
    with pytest.raises(ConfigError, match="max_new_tokens 0"):
        decode_prompts(target, drafter, [[5]], max_new_tokens=0, **options)
    assert decode_prompts(target, drafter, [], max_new_tokens=4, **options) == []


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_other_attention_and_another_family_decode_together_too(tmp_path, attention: str) -> None:
    target, drafter = family_pair(tmp_path, "qwen3", attention=attention)
    own = [_alone(target, None, index).token_ids for index in range(3)]

    results = decode_prompts(
        target, drafter, PROMPTS[:3], max_new_tokens=NEW_TOKENS, eos_ids=(), batch_size=3
    )

    assert [result.token_ids for result in results] == own


def test_a_target_that_cannot_be_cut_back_is_decoded_one_by_one(tmp_path) -> None:
    target, drafter = family_pair(tmp_path, "gemma3_text")
    own = [_alone(target, None, index).token_ids for index in range(2)]

    results = decode_prompts(
        target, drafter, PROMPTS[:2], max_new_tokens=NEW_TOKENS, eos_ids=(), batch_size=4
    )

    assert [result.token_ids for result in results] == own
    with pytest.raises(ConfigError, match="one prompt at a time"):
        TargetSlots(target, slots=2, capacity=40, layer_ids=(1,))
