"""Golden properties 28 to 32: speculative decoding never changes what the target says.

Number 30 covers both sampling schemes: sampled verification of the likeliest drafts, and rejection of
sampled ones.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections import Counter

import pytest
import torch

from tests.support.tiny import tiny_target
from tests.support.tiny_drafter import (
    FAMILIES,
    MASK_ID,
    drafter_config,
    family_pair,
    make_drafter,
    talkative_target,
)
from trainer.eval.batched import decode_prompts
from trainer.eval.speculative import frozen_ends, speculative_generate
from trainer.eval.verify import Chooser, Sampling, shape_probabilities
from trainer.target.loader import load_target

PROMPTS = [[5 + (7 * i + 3 * j) % 50 for j in range(1 + 3 * i)] for i in range(8)]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_target(talkative_target(tmp_path_factory.mktemp("target")), device="cpu", dtype=torch.float32)


class ScriptedDrafter:
    """Drafts the target's own continuation, or anything but it."""

    def __init__(self, target, continuation: list[int], *, is_right: bool, size: int = 4) -> None:
        self.config = drafter_config(block_size=size)
        self._head = target.head_weight_VD
        self._tokens = continuation
        self._shift = 0 if is_right else 1

    def draft(self, new_features_TF, block_embeds_KD, cache, *, start):
        tokens = [(self._tokens[start + k] + self._shift) % 97 for k in range(block_embeds_KD.shape[0])]
        hidden = self._head[torch.tensor(tokens)] * 100
        assert (hidden @ self._head.T).argmax(dim=1).tolist() == tokens
        return hidden


@pytest.mark.parametrize("family", FAMILIES)
def test_golden_28_output_equals_the_own_one_of_other_families(tmp_path, family: str) -> None:
    target, drafter = family_pair(tmp_path, family)
    prompt = PROMPTS[2]
    own = _greedy(target, prompt, 9)

    for size in (1, 2, 4, 8):
        result = speculative_generate(
            target, drafter, prompt, max_new_tokens=9, eos_ids={own[6]}, block_size=size
        )

        assert result.token_ids == own[: own.index(own[6]) + 1]
    assert len(set(own)) > 2


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("stops", ["none", "early"])
def test_golden_28_output_equals_the_targets_own(target, size: int, stops: str) -> None:
    for index, prompt in enumerate(PROMPTS):
        own = _greedy(target, prompt, 24)
        assert len(set(own)) > 8
        # A token out of the middle of the continuation makes a stop that falls inside a block.
        eos = {own[13]} if stops == "early" else set()
        expected = own[: own.index(own[13]) + 1] if eos else own
        drafter = make_drafter(seed=index, block_size=max(size, 2))

        result = speculative_generate(
            target, drafter, prompt, max_new_tokens=24, eos_ids=eos, block_size=size
        )

        assert result.token_ids == expected
        assert result.stopped == bool(eos)


def test_golden_28_output_equals_the_targets_own_with_a_good_drafter(target) -> None:
    for prompt in PROMPTS:
        own = _greedy(target, prompt, 40)
        eos = {own[10]}
        drafter = ScriptedDrafter(target, prompt + own, is_right=True)

        result = speculative_generate(target, drafter, prompt, max_new_tokens=24, eos_ids=eos)

        assert result.token_ids == own[: own.index(own[10]) + 1]


def test_golden_29_block_of_one_is_plain_decoding(target) -> None:
    result = speculative_generate(
        target, make_drafter(), PROMPTS[2], max_new_tokens=10, eos_ids=(), block_size=1
    )
    plain = speculative_generate(target, None, PROMPTS[2], max_new_tokens=10, eos_ids=())

    assert result.accept_counts == plain.accept_counts == [1] * 9
    assert result.token_ids == plain.token_ids == _greedy(target, PROMPTS[2], 10)
    assert result.draft_s == 0.0


@pytest.mark.parametrize("size", [2, 4, 8])
def test_golden_29_oracle_reaches_the_block_size_and_adversary_one(target, size: int) -> None:
    tokens = PROMPTS[3] + _greedy(target, PROMPTS[3], 60)
    oracle = ScriptedDrafter(target, tokens, is_right=True, size=size)
    adversary = ScriptedDrafter(target, tokens, is_right=False, size=size)

    best = speculative_generate(target, oracle, PROMPTS[3], max_new_tokens=33, eos_ids=())
    worst = speculative_generate(target, adversary, PROMPTS[3], max_new_tokens=33, eos_ids=())

    assert set(best.accept_counts) == {size}
    assert best.acceptance_length == size
    assert set(worst.accept_counts) == {1}
    assert worst.acceptance_length == 1.0
    assert best.token_ids == worst.token_ids == tokens[len(PROMPTS[3]) :][:33]


@pytest.mark.parametrize("is_packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_drafters_logits_are_the_targets_head_and_soft_cap(tmp_path, family: str, is_packed) -> None:
    target, drafter = family_pair(tmp_path, family)
    if is_packed:
        target.pack()
    hidden_BKD = torch.randn(2, 5, target.head_weight_VD.shape[1])
    logits = hidden_BKD @ target.head_weight_VD.T
    cap = target.info.logit_softcap
    expected = logits if cap is None else cap * torch.tanh(logits / cap)

    ends = frozen_ends(target, drafter.config)

    torch.testing.assert_close(ends.logits(hidden_BKD[:, 1:]), expected[:, 1:], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(ends.logits(hidden_BKD[0]), expected[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("is_packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_golden_29_and_31_hold_for_other_families(tmp_path, family: str, is_packed) -> None:
    target, _ = family_pair(tmp_path, family)
    if is_packed:
        target.pack()
    prompt = PROMPTS[2]
    tokens = prompt + _greedy(target, prompt, 24)

    for is_right, counts in ((True, [4] * 3), (False, [1] * 12)):
        drafter = ScriptedDrafter(target, tokens, is_right=is_right)
        result = speculative_generate(target, drafter, prompt, max_new_tokens=13, eos_ids=())

        assert result.accept_counts == counts
        assert result.target_forwards == 1 + len(counts)
        assert result.token_ids == tokens[len(prompt) :][:13]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.35, scheme="deterministic", seed=11),
        Sampling(temperature=0.6, top_p=0.8, top_k=12, scheme="rejection", seed=11),
    ],
    ids=["deterministic", "rejection"],
)
def test_golden_30_sampled_output_follows_the_target(tmp_path, sampling: Sampling) -> None:
    target = load_target(tiny_target(tmp_path), device="cpu", dtype=torch.float32)
    exact, draws = _two_token_distribution(target, PROMPTS[1], sampling), 300

    # every draw is a prompt of its own, so each has its own random numbers
    results = decode_prompts(
        target,
        make_drafter(seed=4, block_size=4),
        [PROMPTS[1]] * draws,
        max_new_tokens=2,
        eos_ids=(),
        block_size=3,
        sampling=sampling,
        batch_size=100,
    )

    seen = Counter(tuple(result.token_ids) for result in results)
    statistic, freedom = _chi_square(seen, exact, draws)
    assert freedom >= 4
    assert statistic < _limit(freedom)


@pytest.mark.parametrize("scheme", ["deterministic", "rejection"])
def test_golden_30_all_pairs_of_a_tiny_vocabulary(scheme: str) -> None:
    """A Markov chain for a target, so that all is known in closed form; a block of three, many times."""
    draws, size, vocabulary = 20_000, 3, 5
    generator = torch.Generator().manual_seed(3)
    first_V = torch.randn(vocabulary, generator=generator)
    then_VV = torch.randn(vocabulary, vocabulary, generator=generator) * 1.5
    guess_kV = torch.randn(size - 1, vocabulary, generator=generator)
    sampling = Sampling(temperature=0.9, top_p=0.97, scheme=scheme, seed=1)
    chooser = Chooser(sampling, torch.device("cpu"))
    streams = [sampling.stream(index) for index in range(draws)]

    def verify(first_BV: torch.Tensor) -> list[list[int]]:
        uniforms = chooser.uniforms(streams, size)
        drafts = chooser.draft(guess_kV.expand(draws, -1, -1), uniforms)
        return chooser.verify(
            drafts, torch.cat([first_BV[:, None], then_VV[drafts.tokens_Bk]], dim=1), uniforms
        ).tolist()

    verdicts = verify(first_V.expand(draws, -1))
    again = verify(then_VV[torch.tensor([tokens[1] for tokens in verdicts])])

    # who accepted nothing has one token so far, and gets its second from the next verify
    pairs = Counter(
        (tokens[1], tokens[2] if tokens[0] else more[1]) for tokens, more in zip(verdicts, again, strict=True)
    )
    start = shape_probabilities(first_V, sampling).double().tolist()
    chain = shape_probabilities(then_VV, sampling).double().tolist()
    exact = {(i, j): start[i] * chain[i][j] for i in range(vocabulary) for j in range(vocabulary)}
    statistic, freedom = _chi_square(pairs, exact, draws)
    assert freedom >= 15
    assert statistic < _limit(freedom)
    assert {tokens[0] for tokens in verdicts} == {0, 1, 2}


def _chi_square(seen: Counter, exact: dict, draws: int) -> tuple[float, int]:
    """Outcomes expected five times or more get a cell each, the rest share one."""
    common = {outcome: p for outcome, p in exact.items() if p * draws >= 5}
    rest = max(0.0, 1.0 - sum(common.values()))
    cells = [(seen[outcome], p * draws) for outcome, p in common.items()]
    if rest * draws >= 1:
        cells.append((draws - sum(count for count, _ in cells), rest * draws))
    return sum((count - expected) ** 2 / expected for count, expected in cells), len(cells) - 1


def _limit(freedom: int) -> float:
    """The value that a true hypothesis exceeds once in about ten thousand (Wilson and Hilferty)."""
    return freedom * (1 - 2 / (9 * freedom) + 3.7 * math.sqrt(2 / (9 * freedom))) ** 3


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_golden_31_forwards_and_tokens_are_accounted_for(target, size: int) -> None:
    for prompt in PROMPTS[:4]:
        tokens = prompt + _greedy(target, prompt, 60)
        drafter = ScriptedDrafter(target, tokens, is_right=True, size=size)

        result = speculative_generate(target, drafter, prompt, max_new_tokens=21, eos_ids=())

        assert result.target_forwards == 1 + len(result.accept_counts)
        assert result.emitted == 1 + sum(result.accept_counts)
        assert result.emitted - size < len(result.token_ids) == 21 <= result.emitted


@pytest.mark.parametrize("size", [2, 4, 8])
def test_golden_32_the_mask_rows_embedding_changes_drafts_only(tmp_path, size: int) -> None:
    changed = load_target(talkative_target(tmp_path), device="cpu", dtype=torch.float32)

    _check_mask_row(changed, make_drafter(seed=2, block_size=size), PROMPTS[4])


@pytest.mark.parametrize("family", FAMILIES)
def test_golden_32_holds_for_other_families(tmp_path, family: str) -> None:
    target, drafter = family_pair(tmp_path, family)
    # random weights may say any token, the mask token too, and what was said may change what follows
    prompt = next(prompt for prompt in PROMPTS[1:] if MASK_ID not in _greedy(target, prompt, 16))

    _check_mask_row(target, drafter, prompt)


def _check_mask_row(target, drafter, prompt) -> None:
    before, drafts_before = _with_drafts(target, drafter, prompt)
    with torch.no_grad():
        target.embed_weight_VD[MASK_ID] += 3.0
    after, drafts_after = _with_drafts(target, drafter, prompt)

    assert drafts_before[0] != drafts_after[0]
    assert before.token_ids == after.token_ids


def _with_drafts(target, drafter, prompt):
    """Decode, and note which tokens were drafted: a block's drafts are all but its first input token."""
    drafts: list[list[int]] = []
    step = target.step

    @functools.wraps(step)
    def spy(input_ids_1T, cache, layer_ids):
        drafts.append(input_ids_1T[0, 1:].tolist())
        return step(input_ids_1T, cache, layer_ids)

    target.step = spy
    try:
        result = speculative_generate(target, drafter, prompt, max_new_tokens=16, eos_ids=())
    finally:
        target.step = step
    return result, drafts[1:]


_KNOWN: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def _greedy(target, prompt: list[int], count: int) -> list[int]:
    """The target alone, without any cache: the whole sequence again for every token, once for all tests."""
    out = _KNOWN.setdefault(target, {}).setdefault(tuple(prompt), list(prompt))
    while len(out) < len(prompt) + count:
        logits, _ = target.step(torch.tensor([out]), target.new_cache(), ())
        out.append(int(logits[-1].argmax()))
    return out[len(prompt) : len(prompt) + count]


def _two_token_distribution(target, prompt: list[int], sampling: Sampling) -> dict[tuple[int, int], float]:
    def next_token(ids: list[int]) -> list[float]:
        logits, _ = target.step(torch.tensor([ids]), target.new_cache(), ())
        return shape_probabilities(logits[-1], sampling).double().tolist()

    exact: dict[tuple[int, int], float] = {}
    for first, p in enumerate(next_token(prompt)):
        if p > 1e-4:
            exact |= {
                (first, second): p * q for second, q in enumerate(next_token([*prompt, first])) if p * q > 0
            }
    return exact
