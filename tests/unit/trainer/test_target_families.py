"""Other families of targets: features, padding and stepping hold for hybrid, sliding and scaled models."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.tiny import VOCAB
from trainer.target.loader import load_target

LAYER_IDS = (1, 5)
SHAPE = {
    "hidden_size": 64,
    "num_hidden_layers": 8,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
FAMILIES = {"qwen3": {}, "gemma3_text": {}, "mistral": {}, "qwen3_5_text": LINEAR}


@pytest.fixture(scope="module", params=FAMILIES, ids=str)
def target(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("family")
    torch.manual_seed(0)
    config = AutoConfig.for_model(request.param, **SHAPE, **FAMILIES[request.param])
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return load_target(directory, device="cpu", dtype=torch.float32, mask_token_id=VOCAB - 1)


def random_ids(length: int, seed: int) -> torch.Tensor:
    return torch.randint(2, VOCAB, (1, length), generator=torch.Generator().manual_seed(seed))


def test_features_of_a_padded_row_equal_the_models_own_hidden_states(target):
    ids = random_ids(14, seed=1)
    batch = torch.cat([random_ids(20, seed=2), torch.nn.functional.pad(ids, (0, 6))])
    mask = torch.ones(2, 20, dtype=torch.bool)
    mask[1, 14:] = False
    with torch.no_grad():
        expected = target._model(input_ids=ids, output_hidden_states=True, use_cache=False)

    features, last = target.hidden_states(batch, mask, LAYER_IDS, with_last_hidden=True)

    for index, layer in enumerate(LAYER_IDS):
        torch.testing.assert_close(
            features[1, :14, index], expected.hidden_states[layer + 1][0], atol=1e-5, rtol=1e-5
        )
    torch.testing.assert_close(last[1, :14], expected.hidden_states[-1][0], atol=1e-5, rtol=1e-5)


def test_rejected_tokens_leave_no_trace_in_later_steps(target):
    ids = random_ids(14, seed=3)
    with torch.no_grad():
        expected = target._model(input_ids=ids, use_cache=False).logits[0]
    cache = target.new_cache()

    target.step(ids[:, :8], cache, ())
    target.step(random_ids(4, seed=4), cache, ())
    cache.crop(8)
    logits, _ = target.step(ids[:, 8:], cache, LAYER_IDS)

    torch.testing.assert_close(logits, expected[8:], atol=1e-5, rtol=1e-5)


def test_only_plain_attention_is_cropped_in_place(target):
    is_plain = target.info.model_type == "qwen3"

    assert target.new_cache().recomputes != is_plain


def test_scaled_embeddings_are_reported(target):
    is_scaled = target.info.model_type == "gemma3_text"

    assert target.info.embed_scale == (8.0 if is_scaled else None)
