"""Continuous batching on CUDA: in graphs, the greedy tokens of plain decoding; its speed is printed.

Run with `python -m pytest --noconftest -p no:cacheprovider -s tests/gpu/test_generate_on_gpu.py`.
CPU twins: `tests/unit/trainer/test_generate_slots.py`.
"""

from __future__ import annotations

import time

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from trainer.data.decoding import Request, SlotDecoder
from trainer.data.plain_decoding import complete_batch
from trainer.data.target_decoding import measure_slots
from trainer.data.token_choice import Sampling

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.filterwarnings("ignore"),
]

SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 997,
    "max_position_embeddings": 2048,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}
SMOLLM2 = {
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}


def build(family: str, dtype: torch.dtype, fields: dict):
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **fields), dtype=dtype)
    return model.eval().requires_grad_(False).to("cuda")


def prompts_of(count: int, longest: int, vocabulary: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(3, vocabulary, (length,), generator=generator).tolist() for length in lengths]


def decode(model, prompts, *, slots, max_new_tokens, stop_ids, **options):
    found = {}
    decoder = SlotDecoder(
        model=model,
        slots=slots,
        positions=max(map(len, prompts)) + max_new_tokens,
        max_new_tokens=max_new_tokens,
        stop_ids=stop_ids,
        look_every=8,
        width_step=128,
        **options,
    )
    requests = [Request(index, prompt) for index, prompt in enumerate(prompts)]
    decoder.run(requests, lambda done: found.update({request.key: c.token_ids for request, c in done}))
    return [found[index] for index in range(len(prompts))], decoder


def assert_same_but_for_ties(model, prompts, completions, plain, *, tie: float) -> None:
    """Rounding differs with shapes: where tokens first differ, both must have been as likely.

    `tie` is the largest difference of their logits, in standard deviations of all.
    """
    different = 0
    for prompt, ours, reference in zip(prompts, completions, plain, strict=True):
        pairs = enumerate(zip(ours, reference.token_ids, strict=False))
        first = next((index for index, (mine, theirs) in pairs if mine != theirs), None)
        if first is None:
            assert ours == reference.token_ids
            continue
        different += 1
        ids = torch.tensor([[*prompt, *ours[:first]]], device="cuda")
        logits = model(input_ids=ids, use_cache=False).logits[0, -1].float()
        gap = logits.max() - logits[[ours[first], reference.token_ids[first]]].min()
        assert gap < tie * logits.std()
    print(f"{different} of {len(prompts)} completions differ at a tie")


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
def test_fp32_slots_in_graphs_say_what_plain_decoding_says(family):
    own = {"sliding_window": 64, "query_pre_attn_scalar": 32} if family == "gemma3_text" else {}
    model = build(family, torch.float32, SMALL | own)
    prompts = prompts_of(60, 200, 997)
    stops = frozenset(range(3, 20))
    plain = complete_batch(model, prompts, max_new_tokens=150, stop_ids=stops)

    completions, decoder = decode(model, prompts, slots=16, max_new_tokens=150, stop_ids=stops)

    assert decoder.has_graphs
    assert decoder._graphs.count > 1
    assert_same_but_for_ties(model, prompts, completions, plain, tie=0.001)
    assert sum(ours == theirs.token_ids for ours, theirs in zip(completions, plain, strict=True)) >= 55
    assert measure_slots(model)[0] is None


def test_bf16_slots_differ_from_plain_decoding_only_at_near_ties():
    model = build("llama", torch.bfloat16, SMALL)
    prompts = prompts_of(40, 100, 997)
    plain = complete_batch(model, prompts, max_new_tokens=60, stop_ids=frozenset())

    completions, decoder = decode(model, prompts, slots=16, max_new_tokens=60, stop_ids=frozenset())

    assert decoder.has_graphs
    assert measure_slots(model)[0] is None
    assert_same_but_for_ties(model, prompts, completions, plain, tie=0.25)


def test_plain_steps_and_graphs_say_the_same():
    model = build("llama", torch.float32, SMALL)
    prompts = prompts_of(30, 50, 997)
    options = {"slots": 8, "max_new_tokens": 40, "stop_ids": frozenset(range(3, 20))}

    graphs, with_graphs = decode(model, prompts, **options)
    steps, without = decode(model, prompts, use_graphs=False, **options)

    assert graphs == steps
    assert with_graphs.has_graphs
    assert not without.has_graphs


def test_draws_repeat_in_graphs():
    model = build("llama", torch.float32, SMALL)
    generator = torch.Generator().manual_seed(2)
    requests = [Request(n, [5, 6, 7], torch.rand(30, generator=generator).tolist()) for n in range(50)]

    def sampled(slots):
        found = {}
        decoder = SlotDecoder(
            model=model,
            slots=slots,
            positions=40,
            max_new_tokens=30,
            stop_ids=frozenset({9}),
            sampling=Sampling(temperature=1.0, top_p=0.95),
            look_every=8,
            width_step=128,
        )
        decoder.run(requests, lambda done: found.update({r.key: c.token_ids for r, c in done}))
        assert decoder.has_graphs
        return found

    assert sampled(16) == sampled(16)
    assert len({tuple(tokens) for tokens in sampled(16).values()}) > 40


def test_speed_at_the_shapes_of_a_small_target_is_printed(capsys):
    """SmolLM2-135M's shapes with random weights; the completions' lengths are spread as real ones are."""
    model = build("llama", torch.bfloat16, SMOLLM2)
    prompts = prompts_of(3072, 60, 49152)
    # Random weights say any token: as many stops as make a completion some 200 tokens long.
    stops = frozenset(range(100, 350))
    lines = []
    for slots in (256, 1024, 2048):
        completions, decoder = decode(model, prompts, slots=slots, max_new_tokens=512, stop_ids=stops)
        stats = decoder.stats
        lines.append(
            f"{slots} slots: {stats.tokens_per_s:,.0f} tokens/s, {stats.wall_s:.1f} s, "
            f"{100 * stats.slots_in_use_ratio:.0f} % in use, graphs {decoder._graphs.count}, "
            f"cache {decoder.cache_nbytes / 2**30:.1f} GiB, mean length "
            f"{sum(map(len, completions)) / len(completions):.0f}"
        )
        del decoder
        torch.cuda.empty_cache()
    started = time.monotonic()
    plain = complete_batch(model, prompts[:1024], max_new_tokens=512, stop_ids=stops)
    seconds = time.monotonic() - started
    tokens = sum(len(completion.token_ids) for completion in plain)
    lines.append(f"plain batches of 1024: {tokens / seconds:,.0f} tokens/s, {seconds:.1f} s")
    with capsys.disabled():
        print("\n" + "\n".join(lines))
    assert tokens > 0


def test_a_target_that_cannot_be_captured_decodes_in_plain_steps(caplog):
    model = build("llama", torch.float32, SMALL)
    plain = complete_batch(model, [[5, 6, 7]], max_new_tokens=10, stop_ids=frozenset())
    handle = model.lm_head.register_forward_hook(lambda _m, _i, out: out + out.sum().item() * 0)

    completions, decoder = decode(model, [[5, 6, 7]], slots=1, max_new_tokens=10, stop_ids=frozenset())
    handle.remove()

    assert not decoder.has_graphs
    assert "decoding without CUDA graphs, slower" in caplog.text
    assert completions == [plain[0].token_ids]
