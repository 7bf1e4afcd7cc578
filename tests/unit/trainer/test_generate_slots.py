"""Continuous batching: each completion equals decoding its prompt alone, whoever shared the slots.

GPU twin: `tests/gpu/test_generate_on_gpu.py`.
"""

from __future__ import annotations

import logging

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from trainer.data import target_decoding
from trainer.data.decoding import Request, SlotDecoder
from trainer.data.plain_decoding import complete_batch
from trainer.data.slot_cache import find_obstacle
from trainer.data.step_graphs import StepGraphs
from trainer.data.target_decoding import DecodingLimits, Target, measure_slots
from trainer.data.token_choice import Sampling, draw
from trainer.errors import OutOfMemoryError

VOCAB = 61
COMMON = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "initializer_range": 0.4,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FAMILIES = {
    "llama": {},
    "qwen3": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    # A window shorter than most prompts, so that sliding layers see less than full ones.
    "gemma3_text": {"sliding_window": 6, "query_pre_attn_scalar": 8},
}
HYBRID = {
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}


def build(family: str, **fields):
    config = AutoConfig.for_model(family, **{**COMMON, **FAMILIES.get(family, {}), **fields})
    torch.manual_seed(5)
    return AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)


@pytest.fixture(scope="module", params=list(FAMILIES))
def model(request):
    return build(request.param)


@pytest.fixture(scope="module")
def llama():
    return build("llama")


def prompts_of(count: int, longest: int = 40) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in [1, *lengths[1:]]]


def decode(model, prompts, *, slots, max_new_tokens=20, stop_ids=frozenset(), **options):
    decoder = SlotDecoder(
        model=model,
        slots=slots,
        positions=max(map(len, prompts)) + max_new_tokens,
        max_new_tokens=max_new_tokens,
        stop_ids=stop_ids,
        **options,
    )
    found: dict[int, object] = {}

    def deliver(finished):
        for request, completion in finished:
            assert request.key not in found
            found[request.key] = completion

    decoder.run([Request(index, prompt) for index, prompt in enumerate(prompts)], deliver)
    return [found[index] for index in range(len(prompts))], decoder


def alone(model, prompts, *, max_new_tokens=20, stop_ids=frozenset()):
    limits = {"max_new_tokens": max_new_tokens, "stop_ids": stop_ids}
    return [complete_batch(model, [prompt], **limits)[0] for prompt in prompts]


def stops_within(completions) -> frozenset[int]:
    """Tokens that some completions pass early and others late or never."""
    return frozenset({completions[0].token_ids[3], completions[2].token_ids[9], completions[4].token_ids[0]})


@pytest.mark.parametrize("look_every", [1, 4])
def test_slots_give_what_each_prompt_gives_alone(model, look_every):
    prompts = prompts_of(13)
    stops = stops_within(alone(model, prompts))
    expected = alone(model, prompts, stop_ids=stops)

    completions, decoder = decode(model, prompts, slots=4, stop_ids=stops, look_every=look_every)

    assert completions == expected
    assert len({len(completion.token_ids) for completion in expected}) > 3
    assert decoder.stats.tokens == sum(len(completion.token_ids) for completion in expected)


def test_plain_generation_of_the_library_says_the_same(llama):
    prompts = prompts_of(5)

    completions, _ = decode(llama, prompts, slots=3, max_new_tokens=9)

    for prompt, completion in zip(prompts, completions, strict=True):
        whole = llama.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=9,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert whole[0, len(prompt) :].tolist() == completion.token_ids


def test_freed_slots_are_reused_and_idle_ones_not_computed(llama):
    prompts = prompts_of(12)
    stops = stops_within(alone(llama, prompts))

    _, decoder = decode(llama, prompts, slots=3, stop_ids=stops)

    # one look per step: no row is computed after its stop, and rows leave when nothing is left to seat
    assert decoder.stats.slots_in_use_ratio == 1.0


def test_rows_wait_at_most_until_the_next_look(llama):
    prompts = prompts_of(12)
    stops = stops_within(alone(llama, prompts))

    completions, decoder = decode(llama, prompts, slots=3, stop_ids=stops, look_every=4)

    wasted = decoder.stats.slot_steps - decoder.stats.tokens
    assert 0 < wasted <= 3 * len(completions)


def test_the_model_attends_as_before_afterwards(llama):
    before = llama.config._attn_implementation

    decode(llama, prompts_of(3), slots=2)

    assert llama.config._attn_implementation == before


def test_a_cut_off_completion_is_told_from_a_stopped_one(llama):
    prompts = prompts_of(6)
    free = alone(llama, prompts)
    stops = frozenset({free[1].token_ids[2]})

    completions, _ = decode(llama, prompts, slots=2, stop_ids=stops)

    assert not completions[1].is_cut_off
    assert [c.is_cut_off for c in completions] == [c.token_ids[-1] not in stops for c in completions]
    assert any(c.is_cut_off for c in completions)


def test_draws_do_not_depend_on_the_slots(llama):
    prompts = prompts_of(9)
    generator = torch.Generator().manual_seed(1)
    requests = [
        Request(index, prompt, torch.rand(12, generator=generator).tolist())
        for index, prompt in enumerate(prompts)
    ]
    sampling = Sampling(temperature=0.8, top_p=0.9)

    def sampled(slots):
        found = {}
        decoder = SlotDecoder(
            model=llama,
            slots=slots,
            positions=60,
            max_new_tokens=12,
            stop_ids=frozenset({9}),
            sampling=sampling,
        )
        decoder.run(requests, lambda done: found.update({r.key: c.token_ids for r, c in done}))
        return found

    plain = complete_batch(
        llama,
        prompts,
        max_new_tokens=12,
        stop_ids=frozenset({9}),
        sampling=sampling,
        uniforms=[request.uniforms for request in requests],
    )
    assert sampled(2) == sampled(9) == {index: done.token_ids for index, done in enumerate(plain)}


def test_draws_follow_the_distribution():
    logits_RV = torch.log(torch.tensor([[0.5, 0.0, 0.2, 0.3]])).expand(1000, -1)
    uniform_R = (torch.arange(1000) + 0.5) / 1000

    drawn = draw(logits_RV, uniform_R, Sampling(temperature=1.0))
    cut = draw(logits_RV, uniform_R, Sampling(temperature=1.0, top_p=0.6))
    cold = draw(logits_RV, uniform_R, Sampling(temperature=0.01))

    assert torch.bincount(drawn, minlength=4).tolist() == [500, 0, 200, 300]
    assert torch.bincount(cut, minlength=4).tolist() == [625, 0, 0, 375]
    assert torch.bincount(cold, minlength=4).tolist() == [1000, 0, 0, 0]


def test_draws_stay_inside_at_the_very_ends():
    logits_RV = torch.tensor([[0.0, float("-inf"), 0.0, float("-inf")]]).expand(2, -1)
    ends_R = torch.tensor([0.0, 1.0 - 2**-24])

    assert draw(logits_RV, ends_R, Sampling(temperature=1.0)).tolist() == [0, 2]


@pytest.mark.parametrize(
    ("family", "fields", "reason"),
    [
        ("qwen3_5_text", HYBRID, "layers without a plain key/value cache: linear_attention"),
        ("gemma2", {"sliding_window": 6}, "attention with attn_logit_softcapping"),
        ("mistral", {"sliding_window": 6}, "a sliding window without a list of layer types"),
        ("gpt_oss", {"num_local_experts": 2, "num_experts_per_tok": 1}, None),
    ],
    ids=["hybrid", "soft cap", "window", "sinks"],
)
def test_targets_that_do_not_fit_are_completed_batch_by_batch(family, fields, reason, monkeypatch, caplog):
    model = build(family, **fields)
    monkeypatch.setattr(target_decoding, "load_causal_lm", lambda *_, **__: model)
    prompts = prompts_of(5, longest=12)
    target = Target(None, device=torch.device("cpu"), dtype=torch.float32)
    found = {}

    with caplog.at_level(logging.WARNING):
        target.decode(
            [Request(index, prompt) for index, prompt in enumerate(prompts)],
            DecodingLimits(max_new_tokens=6, stop_ids=frozenset(), batch_size=2),
            lambda done: found.update({request.key: completion for request, completion in done}),
        )

    assert [found[index] for index in range(5)] == alone(model, prompts, max_new_tokens=6)
    assert find_obstacle(model) == reason
    assert "decoding batch after batch, slower: " + (reason or "by slots its logits deviate") in caplog.text


def test_a_target_is_measured_before_slots_are_trusted(model):
    obstacle, token_nbytes = measure_slots(model)

    assert obstacle is None
    assert token_nbytes == 4 * 2 * 2 * 8 * 4  # layers, keys and values, heads, head size, bytes


def test_a_target_with_a_cache_of_its_own_is_found_out(llama, monkeypatch):
    monkeypatch.setattr(
        llama.model.layers[1].self_attn, "forward", lambda hidden_states, **_: (hidden_states * 2, None)
    )
    real = target_decoding._probe_plain(llama)
    monkeypatch.setattr(target_decoding, "_probe_plain", lambda _: real.roll(1, -1))

    obstacle, _ = measure_slots(llama)

    assert obstacle is not None
    assert obstacle.startswith("by slots its logits deviate by ")


def test_a_target_that_refuses_the_cache_is_found_out(llama, monkeypatch):
    def forward(hidden_states, **_):
        raise TypeError("unknown cache\nsecond line")

    monkeypatch.setattr(llama.model.layers[1].self_attn, "forward", forward)

    assert measure_slots(llama) == ("it cannot run by slots (TypeError: unknown cache)", 0)


def test_graphs_that_cannot_be_captured_leave_plain_steps(caplog, monkeypatch):
    """Without CUDA a capture fails, as it does there for a target that reads device values on the host."""
    streams = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "the stream before")
    monkeypatch.setattr(torch.cuda, "set_stream", streams.append)
    state = torch.zeros(3)
    calls = []

    def step(rows, width):
        state.add_(1)
        calls.append((rows, width))

    def refuse(*_):
        state.add_(100)
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    graphs = StepGraphs(step, [state])
    monkeypatch.setattr(graphs, "_warm_up", refuse)
    with caplog.at_level(logging.WARNING):
        graphs.step(3, 128)
        graphs.step(3, 128)

    assert state.tolist() == [2, 2, 2]
    assert calls == [(3, 128)] * 2
    assert not graphs.is_usable
    assert streams == ["the stream before"]
    assert (
        caplog.text.count("decoding without CUDA graphs, slower: capture failed: operation not permitted")
        == 1
    )


@pytest.mark.parametrize(("free_gib", "slots"), [(40, 256), (8, 163), (0, None)])
def test_slots_are_as_many_as_the_device_has_room_for(monkeypatch, caplog, free_gib, slots):
    """1,024 tokens of 40 KiB each in a slot, four fifths of the free memory for all of them."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: ((free_gib << 30) - (1 << 24), 1 << 40))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 1 << 25)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 1 << 24)
    target = Target(None, device=torch.device("cuda:0"), dtype=torch.bfloat16)
    target._token_nbytes = 40 << 10

    if slots is None:
        with pytest.raises(OutOfMemoryError, match="no room on cuda:0 for one prompt of 1024 tokens"):
            target._affordable(256, 1024)
        return
    assert target._affordable(256, 1024) == slots
    assert ("decoding 163 prompts at once, not 256" in caplog.text) == (slots == 163)
