"""Rotary frequencies against transformers, for every scaling type that we accept."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from trainer.drafter.rope import RotaryTable, inverse_frequencies, rope_type, rotate
from trainer.errors import ConfigError

SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn-tuned": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 16,
        "beta_slow": 2,
        "mscale": 0.7,
        "mscale_all_dim": 1.0,
        "truncate": False,
    },
    "yarn-fixed-factor": {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 2048,
        "attention_factor": 1.25,
    },
}


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize(("theta", "head_dim"), [(10_000.0, 64), (5e5, 128)])
def test_frequencies_equal_those_of_transformers(name: str, theta: float, head_dim: int) -> None:
    scaling = SCALINGS[name]
    config = LlamaConfig(
        hidden_size=head_dim * 4,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=131072,
        rope_parameters=scaling | {"rope_theta": theta},
    )

    wanted, wanted_factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, torch.device("cpu"))
    found, factor = inverse_frequencies(head_dim, theta=theta, scaling=scaling)

    torch.testing.assert_close(found, wanted, atol=0, rtol=1e-6)
    assert factor == pytest.approx(wanted_factor)


def test_plain_rotation_equals_that_of_transformers() -> None:
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, head_dim=16, rope_theta=10_000.0)
    positions = torch.tensor([[0, 1, 2, 300, 4095]])
    x = torch.randn(1, 4, 5, 16, generator=torch.Generator().manual_seed(0))
    wanted, _ = apply_rotary_pos_emb(x, x, *LlamaRotaryEmbedding(config)(x, positions))

    table = RotaryTable(16, theta=10_000.0, scaling=None)
    found = rotate(x, table(positions, torch.float32))

    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=0)


def test_angles_are_computed_in_fp32_whatever_the_dtype() -> None:
    table = RotaryTable(16, theta=10_000.0, scaling=None)
    positions = torch.tensor([[40_001]])

    exact, _ = table(positions, torch.float32)
    rounded, _ = table(positions, torch.bfloat16)

    assert torch.equal(rounded, exact.to(torch.bfloat16))


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "not supported: dynamic"),
        ({"rope_type": "longrope"}, "not supported: longrope"),
        ({"rope_type": "linear"}, "linear lacks factor"),
        ({"type": "yarn", "factor": 2.0}, "yarn lacks original_max_position_embeddings"),
        ({"rope_type": "llama3", "factor": 8.0}, "llama3 lacks low_freq_factor, high_freq_factor"),
    ],
)
def test_what_would_rotate_wrongly_is_refused(scaling: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        inverse_frequencies(16, theta=1e4, scaling=scaling)


def test_both_names_of_the_type_are_understood() -> None:
    assert rope_type(None) == rope_type({}) == rope_type({"rope_theta": 1e4}) == "default"
    assert rope_type({"type": "linear"}) == rope_type({"rope_type": "linear"}) == "linear"
