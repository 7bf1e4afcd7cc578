"""Opening a target: facts copied right, mask token chosen for a stated reason, bad directories refused."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from tests.support.tiny import END_ID, HIDDEN, LAYERS, TOKENS, VOCAB, tiny_target, tiny_tokenizer
from trainer.errors import CheckpointError, ConfigError
from trainer.target.loader import choose_mask_token, load_target, rope_settings


def load(directory, **arguments):
    return load_target(directory, device="cpu", dtype=torch.float32, **arguments)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tiny_target(tmp_path_factory.mktemp("loader"))


def test_info_states_what_the_config_says(directory):
    info = load(directory).info

    assert (info.hidden_size, info.num_layers, info.vocab_size) == (HIDDEN, LAYERS, VOCAB)
    assert (info.num_attention_heads, info.num_key_value_heads, info.head_dim) == (4, 2, 16)
    assert (info.model_type, info.intermediate_size, info.max_position_embeddings) == ("llama", 128, 512)
    assert (info.rope_theta, info.rope_scaling) == (10000.0, None)
    assert (info.embed_scale, info.logit_softcap, info.tie_word_embeddings) == (None, None, False)
    assert (info.eos_token_id, info.pad_token_id, info.stop_ids) == (END_ID, 0, frozenset({END_ID}))


def test_attention_that_plans_anew_for_each_shape_is_off(directory):
    torch.backends.cuda.enable_cudnn_sdp(enabled=True)

    load(directory)

    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_ends_are_frozen_and_of_the_asked_dtype(directory):
    target = load_target(directory, device="cpu", dtype=torch.bfloat16)

    for weight in (target.embed_weight_VD, target.head_weight_VD):
        assert weight.shape == (VOCAB, HIDDEN)
        assert weight.dtype == torch.bfloat16
        assert not weight.requires_grad
    assert not target._model.training


def test_tied_weights_are_one_tensor(tmp_path):
    target = load(tiny_target(tmp_path, tie_word_embeddings=True))

    assert target.info.tie_word_embeddings
    assert target.embed_weight_VD.data_ptr() == target.head_weight_VD.data_ptr()


def test_first_row_behind_the_tokenizer_is_the_mask_token(directory):
    info = load(directory).info

    assert info.mask_token_id == TOKENS
    assert "behind the tokenizer" in info.mask_token_reason


def test_an_explicit_mask_token_wins(directory):
    info = load(directory, mask_token_id=7).info

    assert (info.mask_token_id, info.mask_token_reason) == (7, "given explicitly")


@pytest.mark.parametrize("mask_token_id", [-1, VOCAB])
def test_an_explicit_mask_token_outside_the_embedding_is_refused(directory, mask_token_id):
    with pytest.raises(
        ConfigError, match=rf"not a row of the target's embedding \(0\.\.96\): {mask_token_id}"
    ):
        load(directory, mask_token_id=mask_token_id)


def choose(tokenizer, *, vocab_size=VOCAB, model_type="llama", stop_ids=frozenset({END_ID})):
    return choose_mask_token(
        tokenizer, vocab_size=vocab_size, model_type=model_type, explicit=None, stop_ids=stop_ids
    )


def test_a_token_named_mask_comes_first():
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|MASK|>"]})

    assert choose(tokenizer) == (TOKENS, "the tokenizer has <|MASK|>")


@pytest.mark.parametrize(("model_type", "token"), [("qwen3", 151669), ("qwen3_5_text", 248070)])
def test_families_with_a_customary_mask_token_use_it(model_type, token):
    assert choose(None, vocab_size=250000, model_type=model_type) == (token, f"customary for {model_type}")


def test_a_full_vocabulary_gives_up_a_special_token_that_chats_do_not_use():
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<repo>", "<file>"]})

    token, reason = choose(tokenizer, vocab_size=TOKENS + 2)

    assert token == tokenizer.convert_tokens_to_ids("<file>")
    assert reason.endswith("<file>")


def test_a_full_vocabulary_without_spare_token_asks_for_an_explicit_one():
    with pytest.raises(ConfigError, match="set mask_token_id"):
        choose(tiny_tokenizer(), vocab_size=TOKENS)


def test_a_target_without_tokenizer_asks_for_an_explicit_mask_token(tmp_path):
    directory = tiny_target(tmp_path, with_tokenizer=False)

    with pytest.raises(ConfigError, match="no tokenizer to find an unused embedding row"):
        load(directory)
    assert load(directory, mask_token_id=96).tokenizer is None


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, (1e6, None)),
        ({"rope_theta": 5e5, "rope_scaling": None}, (5e5, None)),
        ({"rope_theta": 5e5, "rope_scaling": YARN}, (5e5, YARN)),
        ({"rope_parameters": YARN | {"rope_theta": 1e7}}, (1e7, YARN)),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "mrope_section": [11, 11, 10]}},
            (1e7, None),
        ),
        ({"rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25}}, (1e7, None)),
        (
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                }
            },
            (1e6, None),
        ),
    ],
    ids=["new", "old", "old-yarn", "new-yarn", "multi-axis", "partial", "per-layer-type"],
)
def test_rope_settings_are_read_in_either_spelling(fields, expected):
    assert rope_settings(SimpleNamespace(model_type="x", **fields)) == expected


def test_a_config_without_theta_is_refused():
    with pytest.raises(ConfigError, match="names no rope_theta"):
        rope_settings(SimpleNamespace(model_type="x"))


def test_several_stop_tokens_are_all_kept(directory, tmp_path):
    copy = tiny_target(tmp_path)
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [END_ID, 40]}))

    assert load(copy).info.stop_ids == frozenset({END_ID, 40})


def test_a_missing_directory_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"target model is not a directory: .*none"):
        load(tmp_path / "none")


def test_a_directory_without_config_is_refused_and_a_gguf_in_it_is_explained(tmp_path):
    with pytest.raises(ConfigError, match=r"has no config\.json: "):
        load(tmp_path)
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ConfigError, match="GGUF file alone has to be converted"):
        load(tmp_path)


def test_weights_other_than_safetensors_are_refused(tmp_path):
    directory = tiny_target(tmp_path)
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")

    with pytest.raises(ConfigError, match=r"no \*\.safetensors weights"):
        load(directory)


def test_an_unknown_model_type_is_refused(tmp_path):
    directory = tiny_target(tmp_path)
    (directory / "config.json").write_text(json.dumps({"model_type": "no_such_model"}))

    with pytest.raises(ConfigError, match="cannot read the target's config"):
        load(directory)


def test_damaged_weights_are_refused(tmp_path):
    directory = tiny_target(tmp_path)
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])

    with pytest.raises(CheckpointError, match="target weights are damaged"):
        load(directory)


@pytest.mark.parametrize("change", ["missing", "shape"])
def test_incomplete_weights_are_refused_instead_of_filled_with_noise(tmp_path, change):
    from safetensors.torch import load_file, save_file

    directory = tiny_target(tmp_path)
    tensors = load_file(directory / "model.safetensors")
    name = "model.layers.3.mlp.up_proj.weight"
    tensors[name] = tensors[name][:5].clone()
    if change == "missing":
        del tensors[name]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(CheckpointError, match=r"layers\.3\.mlp\.up_proj"):
        load(directory)


def test_a_head_with_bias_is_refused(tmp_path):
    from transformers import PhiConfig, PhiForCausalLM

    config = PhiConfig(
        hidden_size=32, num_hidden_layers=4, intermediate_size=64, num_attention_heads=2, vocab_size=VOCAB
    )
    PhiForCausalLM(config).save_pretrained(tmp_path / "phi")

    with pytest.raises(ConfigError, match="head must be a plain matrix"):
        load(tmp_path / "phi", mask_token_id=1)
