"""The demo's trainer settings are valid, and its untrained drafter is the one a run starts from."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from tests.support.tiny import tiny_target
from trainer.drafter.exported import load_drafter
from trainer.drafter.model import build_drafter
from trainer.flags import resolve

DEMO = Path(__file__).parents[3] / "demo"
SETTINGS = """
[target]
target_layer_ids = [2, 5]
[drafter]
num_layers = 2
block_size = 4
[optim]
seed = 3
"""


@pytest.fixture
def untrained():
    spec = importlib.util.spec_from_file_location("demo_untrained", DEMO / "untrained.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_demo_settings_are_valid(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    flags = {
        "--target-model": str(tmp_path),
        "--data-dir": str(tmp_path),
        "--output-dir": str(tmp_path / "out"),
    }

    config = resolve(flags, toml_path=str(DEMO / "train.toml"), environ={}).config

    assert config.drafter.block_size == 4
    assert config.devices.target_gpus == config.devices.drafter_gpus == "cpu"
    assert config.data.token_budget >= config.data.max_seq_len


def test_untrained_drafter_has_the_weights_that_a_run_of_these_settings_starts_from(untrained, tmp_path):
    (tmp_path / "train.toml").write_text(SETTINGS)

    code = untrained.main(
        [
            *("--config", str(tmp_path / "train.toml")),
            *("--target-model", str(tiny_target(tmp_path))),
            *("--output", str(tmp_path / "untrained")),
        ]
    )

    drafter = load_drafter(tmp_path / "untrained")
    expected = build_drafter(drafter.config, seed=3, dtype=torch.float32).to(torch.bfloat16).state_dict()
    assert code == 0
    assert (drafter.config.block_size, drafter.config.target_layer_ids) == (4, (2, 5))
    for name, value in drafter.state_dict().items():
        assert torch.equal(value.to(torch.bfloat16), expected[name]), name


def test_a_second_call_replaces_the_first_export(untrained, tmp_path):
    (tmp_path / "train.toml").write_text(SETTINGS)
    target = tiny_target(tmp_path)

    for _ in range(2):
        untrained.write_untrained(tmp_path / "train.toml", target, tmp_path / "untrained")

    assert load_drafter(tmp_path / "untrained").config.block_size == 4


def test_a_missing_target_ends_with_the_code_of_a_bad_configuration(untrained, tmp_path, capsys):
    (tmp_path / "train.toml").write_text(SETTINGS)
    words = ["--config", str(tmp_path / "train.toml"), "--target-model", str(tmp_path / "none")]

    assert untrained.main([*words, "--output", str(tmp_path / "o")]) == 2
    assert "none" in capsys.readouterr().err
