"""Every family of targets: features, padding, early stop, stepping, decoding, on tiny random models."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from tests.support.families import ALL, FAMILIES, MASK_ID, MULTIMODAL, VOCAB, save_family
from tests.support.tiny_drafter import make_drafter
from trainer.drafter.loss import FrozenEnds
from trainer.errors import ConfigError
from trainer.eval.speculative import speculative_generate
from trainer.target.decode_cache import REPLAY_TOKENS
from trainer.target.loader import load_target

LAYER_IDS = (1, 5)
SLIDING_OR_LINEAR = set(ALL) - {"llama", "qwen3", "qwen3_moe"}


@pytest.fixture(scope="module", params=ALL)
def family(request, tmp_path_factory):
    directory = save_family(request.param, tmp_path_factory.mktemp("family"))
    return (
        request.param,
        directory,
        load_target(directory, device="cpu", dtype=torch.float32, mask_token_id=MASK_ID),
    )


@pytest.fixture
def target(family):
    return family[2]


def random_ids(length: int, seed: int) -> torch.Tensor:
    return torch.randint(3, VOCAB - 1, (1, length), generator=torch.Generator().manual_seed(seed))


def hf_states(target, ids):
    with torch.no_grad():
        return target._model(input_ids=ids, output_hidden_states=True, use_cache=False)


def test_golden_03_feature_is_what_the_layer_put_out(target) -> None:
    ids, hooked = random_ids(18, seed=1), {}
    handles = [
        layer.register_forward_hook(lambda _m, _i, output, index=index: hooked.setdefault(index, output))
        for index, layer in enumerate(target._body.layers)
    ]
    reference = hf_states(target, ids)
    for handle in handles:
        handle.remove()

    features, last = target.hidden_states(ids, None, LAYER_IDS, with_last_hidden=True)

    for index, layer in enumerate(LAYER_IDS):
        output = hooked[layer][0] if isinstance(hooked[layer], tuple) else hooked[layer]
        assert torch.equal(features[:, :, index], output)
        assert torch.equal(features[:, :, index], reference.hidden_states[layer + 1])
    # the entry behind the last layer is the one after the final norm
    assert torch.equal(last, reference.hidden_states[-1])


def test_golden_12_rows_of_a_padded_batch_equal_single_sequences(target) -> None:
    long, short = random_ids(20, seed=2), random_ids(13, seed=3)
    mask = torch.ones(2, 20, dtype=torch.bool)
    mask[1, 13:] = False
    alone = [target.hidden_states(ids, None, LAYER_IDS, with_last_hidden=True) for ids in (long, short)]

    batches = []
    for padding in (0, 50):
        batch = torch.cat([long, torch.nn.functional.pad(short, (0, 7), value=padding)])
        batches.append(target.hidden_states(batch, mask, LAYER_IDS, with_last_hidden=True))

    for kind in (0, 1):
        first, second = batches[0][kind], batches[1][kind]
        scale = alone[0][kind].abs().max()
        assert torch.equal(first[1, :13], second[1, :13]), "what stands in the padding changes valid rows"
        torch.testing.assert_close(first[0] / scale, alone[0][kind][0] / scale, atol=1e-5, rtol=0)
        torch.testing.assert_close(first[1, :13] / scale, alone[1][kind][0] / scale, atol=1e-5, rtol=0)


def test_no_layer_behind_the_last_tapped_one_runs_and_never_the_head(target, monkeypatch) -> None:
    ran: list[object] = []
    for index, layer in enumerate(target._body.layers):
        monkeypatch.setattr(layer, "forward", _counting(layer.forward, index, ran))
    head = target._model.get_output_embeddings()
    monkeypatch.setattr(head, "forward", _counting(head.forward, "head", ran))

    target.hidden_states(random_ids(7, seed=4), None, (4, 1))
    ran_to_the_tap = list(ran)
    ran.clear()
    target.hidden_states(random_ids(7, seed=4), None, (4, 1), with_last_hidden=True)

    assert ran_to_the_tap == [0, 1, 2, 3, 4]
    assert ran == list(range(8))


def _counting(forward, name, ran):
    def counted(*args, **kwargs):
        ran.append(name)
        return forward(*args, **kwargs)

    return counted


def test_rejected_tokens_leave_no_trace_in_later_steps(target) -> None:
    ids, wrong = random_ids(22, seed=5), random_ids(9, seed=6)
    expected = hf_states(target, ids)
    cache = target.new_cache()

    target.step(ids[:, :8], cache, ())
    target.step(wrong[:, :5], cache, ())
    cache.crop(8)
    target.step(torch.cat([ids[:, 8:11], wrong[:, :2]], dim=1), cache, ())
    cache.crop(11)
    target.step(wrong[:, :3], cache, ())
    cache.crop(11)
    cache.crop(6)
    target.step(ids[:, 6:11], cache, ())
    logits, features = target.step(ids[:, 11:], cache, LAYER_IDS)

    assert not cache.recomputes
    assert cache.length == 22
    torch.testing.assert_close(logits, expected.logits[0, 11:], atol=2e-4, rtol=1e-4)
    for index, layer in enumerate(LAYER_IDS):
        scale = expected.hidden_states[layer + 1].abs().max()
        torch.testing.assert_close(
            features[:, index] / scale, expected.hidden_states[layer + 1][0, 11:] / scale, atol=1e-4, rtol=0
        )


def test_what_is_run_again_stays_bounded_when_every_block_is_cut_short(target) -> None:
    ids = random_ids(60, seed=7)
    expected = hf_states(target, ids).logits[0]
    cache = target.new_cache()
    target.step(ids[:, :4], cache, ())
    behind = []

    for start in range(4, 58, 3):
        block = torch.cat([ids[:, start : start + 3], random_ids(4, seed=start)], dim=1)
        logits, _ = target.step(block, cache, ())
        cache.crop(start + 3)
        behind.append(len(cache.behind_T))
        torch.testing.assert_close(logits[:3], expected[start : start + 3], atol=2e-3, rtol=1e-3)

    assert max(behind) <= REPLAY_TOKENS + 3


def test_golden_28_speculative_output_equals_the_targets_own(target) -> None:
    prompt = random_ids(9, seed=10)[0].tolist()
    own = _greedy(target, prompt, 16)
    assert len(set(own)) > 1
    for size in (1, 2, 8):
        drafter = make_drafter(seed=size, block_size=max(size, 2))

        result = speculative_generate(
            target, drafter, prompt, max_new_tokens=16, eos_ids={own[12]}, block_size=size
        )

        assert result.token_ids == own[: own.index(own[12]) + 1]
        assert result.target_forwards == 1 + len(result.accept_counts)


def _greedy(target, prompt: list[int], count: int) -> list[int]:
    """The model alone, without any cache: the whole sequence again for every token."""
    out = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            out.append(
                int(target._model(input_ids=torch.tensor([out]), use_cache=False).logits[0, -1].argmax())
            )
    return out[len(prompt) :]


def test_a_drafter_gets_embeddings_and_logits_as_the_target_makes_them(target) -> None:
    ids = random_ids(11, seed=8)
    info = target.info
    ends = FrozenEnds(
        embed_weight_VD=target.embed_weight_VD,
        head_weight_VD=target.head_weight_VD,
        embed_scale=info.embed_scale,
        logit_softcap=info.logit_softcap,
    )
    _, last = target.hidden_states(ids, None, LAYER_IDS, with_last_hidden=True)

    with torch.no_grad():
        own_embeddings = target._model.get_input_embeddings()(ids)

    torch.testing.assert_close(ends.embed(ids), own_embeddings)
    torch.testing.assert_close(ends.logits(last), hf_states(target, ids).logits, atol=1e-4, rtol=1e-4)


def test_what_is_special_about_a_family_is_reported(family) -> None:
    name, _, target = family
    text_type, info = MULTIMODAL.get(name, name), target.info

    assert info.model_type == text_type
    assert info.embed_scale == (8.0 if "gemma" in name else None)
    assert info.logit_softcap == (30.0 if name == "gemma2" else None)
    assert ("linear_attention" in info.layer_types) == ("linear_num_key_heads" in FAMILIES[text_type])
    assert (info.rope_scaling or {}).get("rope_type") == ("yarn" if name == "gpt_oss" else None)
    assert info.stop_ids == {2}
    assert (info.hidden_size, info.num_layers, info.vocab_size) == (64, 8, VOCAB)
    assert target.new_cache()._is_plain == (name not in SLIDING_OR_LINEAR)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["gemma2", "gemma3_text", "gemma3"])
def test_the_embedding_scale_is_exact_whatever_the_dtype(name: str, dtype: torch.dtype, tmp_path) -> None:
    directory = save_family(name, tmp_path, hidden_size=40)

    target = load_target(directory, device="cpu", dtype=dtype, mask_token_id=MASK_ID)

    assert target.info.embed_scale == 40**0.5


@pytest.mark.parametrize("name", MULTIMODAL)
def test_text_model_of_a_multimodal_checkpoint_is_the_one_inside_it(name: str, tmp_path) -> None:
    directory = save_family(name, tmp_path)
    whole = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32)
    with safe_open(directory / "model.safetensors", framework="pt") as file:
        has_tower = [key for key in file.keys() if "visual" in key or "vision" in key]  # noqa: SIM118
    target = load_target(directory, device="cpu", dtype=torch.float32, mask_token_id=MASK_ID)
    ids = random_ids(9, seed=9)

    with torch.no_grad():
        expected = whole(input_ids=ids).logits[0]
    logits, _ = target.step(ids, target.new_cache(), ())

    assert has_tower
    assert not [key for key in target._model.state_dict() if "visual" in key or "vision" in key]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_experts_stored_in_four_bits_are_expanded_and_that_is_said(tmp_path, caplog) -> None:
    directory = save_family("gpt_oss", tmp_path)
    plain = load_file(directory / "model.safetensors")
    stored, expected = _in_four_bits(plain)
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (directory / "config.json").write_text(json.dumps(config))

    target = load_target(directory, device="cpu", dtype=torch.float32, mask_token_id=MASK_ID)

    assert "mxfp4 weights of gpt_oss are expanded" in caplog.text
    experts = {name: value for name, value in target._model.state_dict().items() if name in expected}
    assert len(experts) == 16
    for name, value in experts.items():
        assert torch.equal(value.float(), expected[name]), name
    assert {value.dtype for value in target._model.state_dict().values()} == {torch.float32}
    assert target.hidden_states(random_ids(5, seed=11), None, LAYER_IDS)[0].isfinite().all()


def _in_four_bits(tensors):
    """Replace the experts by random 4-bit blocks of 32 with a scale each; also what they stand for."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    generator, stored, expected = torch.Generator().manual_seed(0), {}, {}
    for name, tensor in tensors.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = tensor
            continue
        experts, wide, out = tensor.shape
        codes = torch.randint(0, 16, (experts, out, wide // 32, 32), generator=generator)
        scales = torch.randint(120, 124, (experts, out, wide // 32), generator=generator)
        stored[f"{name}_blocks"] = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
        stored[f"{name}_scales"] = scales.to(torch.uint8)
        rows = values[codes] * 2.0 ** (scales - 127)[..., None]
        expected[name] = rows.flatten(2).transpose(1, 2)
    return stored, expected


@pytest.mark.parametrize(
    "settings",
    [{"quant_method": "gptq", "bits": 4}, {"quant_method": "bitsandbytes", "load_in_4bit": True}],
    ids=["gptq", "bitsandbytes"],
)
def test_weights_in_a_form_that_cannot_be_loaded_here_are_refused_with_the_reason(tmp_path, settings) -> None:
    directory = save_family("llama", tmp_path)
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = settings
    (directory / "config.json").write_text(json.dumps(config))

    with pytest.raises(ConfigError, match=r"cannot load the target model: .*(?i:gptq|bitsandbytes)"):
        load_target(directory, device="cpu", dtype=torch.float32, mask_token_id=MASK_ID)
