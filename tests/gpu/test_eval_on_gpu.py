"""Evaluation on CUDA: the target's own output, one host sync per verify, times by events.

CPU twins: `test_golden_28` in test_golden_decoding.py and test_batched_decoding.py, `test_eval_command.py`.
"""

from __future__ import annotations

import pytest
import torch

from tests.support.tiny_drafter import make_drafter, talkative_target
from trainer.eval import batched, speculative
from trainer.eval.batched import decode_prompts
from trainer.eval.speculative import speculative_generate
from trainer.eval.speed import SpeedPlan, measure_speed
from trainer.eval.verify import Sampling
from trainer.target.loader import load_target

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    # torch calls its own check for synchronization a prototype
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
]

PROMPTS = [[5 + (7 * i + 3 * j) % 50 for j in range(1 + 5 * i)] for i in range(12)]
NEW_TOKENS = 40


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = talkative_target(tmp_path_factory.mktemp("target"))
    return load_target(folder, device="cuda", dtype=torch.float32)


@pytest.fixture(scope="module")
def plain(target) -> list[list[int]]:
    return [_generate(target, None, prompt).token_ids for prompt in PROMPTS]


def _generate(target, drafter, prompt, **options):
    return speculative_generate(target, drafter, prompt, max_new_tokens=NEW_TOKENS, eos_ids=(), **options)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_golden_28_output_equals_plain_decoding_one_by_one_and_together(target, plain, size: int) -> None:
    drafter = make_drafter(seed=3).to("cuda")

    alone = [_generate(target, drafter, prompt, block_size=size).token_ids for prompt in PROMPTS]
    together = decode_prompts(
        target,
        drafter,
        PROMPTS,
        max_new_tokens=NEW_TOKENS,
        eos_ids=(),
        block_size=size,
        batch_size=5,
    )

    assert alone == plain
    assert [result.token_ids for result in together] == plain


def _strictly(method):
    """Let a method fail where it makes the host wait."""

    def wrapped(*args, **options):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return method(*args, **options)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return wrapped


@pytest.mark.parametrize("sampling", [None, Sampling(temperature=0.7, top_p=0.9, scheme="rejection")])
def test_a_verify_of_many_prompts_waits_only_for_its_verdict(target, monkeypatch, sampling) -> None:
    drafter, options = make_drafter(seed=3).to("cuda"), {"max_new_tokens": 12, "eos_ids": (), "batch_size": 4}
    decode_prompts(target, drafter, PROMPTS, sampling=sampling, **options)
    monkeypatch.setattr(batched._BatchDecoder, "_verify", _strictly(batched._BatchDecoder._verify))

    results = decode_prompts(target, drafter, PROMPTS, sampling=sampling, **options)

    assert all(len(result.token_ids) == 12 for result in results)


def test_a_draft_of_one_prompt_does_not_wait(target, monkeypatch) -> None:
    drafter = make_drafter(seed=3).to("cuda")
    _generate(target, drafter, PROMPTS[3])
    monkeypatch.setattr(speculative._Decoder, "_draft", _strictly(speculative._Decoder._draft))

    assert len(_generate(target, drafter, PROMPTS[3]).token_ids) == NEW_TOKENS


@pytest.mark.parametrize("size", [1, 4])
def test_a_verify_of_one_prompt_waits_only_for_its_verdict(target, monkeypatch, size: int) -> None:
    drafter, step = make_drafter(seed=3).to("cuda"), speculative._Decoder._step
    _generate(target, drafter, PROMPTS[4], block_size=size)
    strict = _strictly(step)
    # the prefill reads its first token anyway
    monkeypatch.setattr(
        speculative._Decoder,
        "_step",
        lambda self, ids: (strict if ids.shape[1] <= size else step)(self, ids),
    )

    assert len(_generate(target, drafter, PROMPTS[4], block_size=size).token_ids) == NEW_TOKENS


def test_times_are_those_of_the_device(target) -> None:
    drafter = make_drafter(seed=3).to("cuda")
    plan = SpeedPlan(prompts=[2, 5], rounds=2, max_new_tokens=NEW_TOKENS)

    record = measure_speed(target, drafter, PROMPTS, plan, block_sizes=[4], eos_ids=())[4]

    assert record["identical_outputs"] == record["compared_prompts"] == 2
    assert record["plain_ms_per_token"] > 0
    assert 0 < record["draft_time_ratio"] < 1
    assert len(record["speedup_per_round"]) == 2
