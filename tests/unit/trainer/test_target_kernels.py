"""What is said at the start about kernels that a target could use."""

from __future__ import annotations

import json

import pytest

from tests.support.families import save_family
from tests.support.tiny import tiny_target, write_tiny_corpus
from tests.support.trainer_runs import read_status, run_here, settings_for
from trainer.errors import DependencyError
from trainer.flags import resolve
from trainer.target.kernels import find_kernels
from trainer.telemetry.capabilities import require


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    return save_family("qwen3_5", tmp_path_factory.mktemp("hybrid"))


def find(model, tmp_path, *, here=(), **changes):
    settings = settings_for(model, write_tiny_corpus(tmp_path / "data"), tmp_path / "out", **changes)
    config = resolve({}, overrides=settings, environ={}).config
    return {entry.name: entry for entry in find_kernels(config, is_importable=lambda name: name in here)}


def four_bits(model):
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (model / "config.json").write_text(json.dumps(config))
    return model


ON_GPUS = {"devices__target_gpus": '"0"', "devices__drafter_gpus": '"1"'}


def test_linear_attention_without_its_kernels_is_reported_with_a_remedy(hybrid, tmp_path) -> None:
    found = find(hybrid, tmp_path, **ON_GPUS)

    for name in ("flash_linear_attention", "causal_conv1d"):
        assert (found[name].level, found[name].is_on) == ("wanted", False)
        assert "plain torch" in found[name].reason
        assert f"install {name.replace('_', '-')}" in found[name].remedy
    assert found["target_attention"].is_on


def test_installed_kernels_are_on(hybrid, tmp_path) -> None:
    found = find(hybrid, tmp_path, here=("fla", "causal_conv1d"), **ON_GPUS)

    assert all(entry.is_on for entry in found.values())


def test_required_kernels_that_are_missing_end_the_start(hybrid, tmp_path) -> None:
    found = find(hybrid, tmp_path, target__fast_kernels="required", **ON_GPUS)

    with pytest.raises(DependencyError, match=r"flash_linear_attention .*install flash-linear-attention"):
        require(list(found.values()))


def test_on_the_cpu_they_are_off_without_being_a_fault(hybrid, tmp_path) -> None:
    found = find(hybrid, tmp_path, here=("fla", "causal_conv1d"), target__fast_kernels="required")

    assert {entry.level for entry in found.values()} == {"off"}
    assert "CPU devices chosen" in found["flash_linear_attention"].reason


def test_targets_without_linear_attention_are_not_asked_for_its_kernels(tmp_path) -> None:
    assert set(find(tiny_target(tmp_path), tmp_path, **ON_GPUS)) == {"target_attention"}


def test_a_family_without_sdpa_and_four_bit_weights_are_reported(tmp_path) -> None:
    model = four_bits(save_family("gpt_oss", tmp_path))

    found = find(model, tmp_path, **ON_GPUS)

    assert "square of the length" in found["target_attention"].reason
    assert (found["target_attention"].is_on, found["target_attention"].level) == (False, "wanted")
    assert "four times their size" in found["mxfp4"].reason


def test_a_run_writes_them_into_its_start_up_report_and_status(tmp_path) -> None:
    model, data = four_bits(save_family("gpt_oss", tmp_path)), write_tiny_corpus(tmp_path / "data")
    settings = settings_for(
        model, data, tmp_path / "out", target__mask_token_id=96, optim__max_steps=1, data__max_seq_len=32
    )

    assert run_here(settings) == 0

    report = json.loads((tmp_path / "out" / "run" / "startup.json").read_text())["capabilities"]
    assert {"target_attention", "mxfp4"} <= {entry["name"] for entry in report}
    assert "mxfp4" in json.dumps(read_status(tmp_path / "out" / "run")["degraded"])
