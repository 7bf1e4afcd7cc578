"""Golden properties 33 to 35 and 40: the exported format, strict loading, both rotary spellings."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.tiny_drafter import drafter_config, make_drafter
from trainer.checkpoint.drafter_format import expected_shapes, render_config
from trainer.checkpoint.export import check_export, copy_export, export_drafter
from trainer.drafter.exported import load_drafter
from trainer.drafter.masks import FULL, SLIDING
from trainer.drafter.model import Drafter
from trainer.errors import CheckpointError

YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 16.0,
}
PUBLISHED_KEYS = {
    "architectures",
    "model_type",
    "block_size",
    "dflash_config",
    "num_target_layers",
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "attention_bias",
    "attention_dropout",
    "initializer_range",
    "layer_types",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "max_position_embeddings",
    "vocab_size",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "tie_word_embeddings",
    "dtype",
    "torch_dtype",
    "use_cache",
    "transformers_version",
}
"""What the format asks for at the top of `config.json`, written out: the program's own list may be wrong."""
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param({}, id="plain"),
        pytest.param({"layer_types": (SLIDING, FULL), "sliding_window": 7}, id="sliding"),
        pytest.param({"rope_scaling": YARN, "rope_theta": 1e7}, id="yarn"),
        pytest.param({"attention_bias": True}, id="bias"),
        pytest.param(
            {"embed_scale": 8.0, "logit_softcap": 30.0, "eos_token_id": (3, 4), "num_hidden_layers": 3},
            id="scaled",
        ),
    ],
)
def test_golden_33_export_and_reload_are_bit_equal(tmp_path, shape: dict) -> None:
    drafter = make_drafter(dtype=torch.bfloat16, **shape)

    export_drafter(drafter, {"model_type": "llama"}, tmp_path / "export")
    loaded = load_drafter(tmp_path / "export")

    assert loaded.config == drafter.config
    assert loaded.state_dict().keys() == drafter.state_dict().keys()
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name]), name
    assert torch.equal(loaded.rope.inv_freq, drafter.rope.inv_freq)
    assert check_export(tmp_path / "export").tensors == len(drafter.state_dict())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["export"]


@pytest.mark.parametrize("layers", [1, 2, 5])
def test_golden_33_tensor_names_are_the_published_ones(tmp_path, layers: int) -> None:
    export_drafter(make_drafter(num_hidden_layers=layers), None, tmp_path / "export")

    stored = load_file(tmp_path / "export" / "model.safetensors")

    per_layer = [
        *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
        *(f"self_attn.{name}_norm.weight" for name in "qk"),
        *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
    ]
    names = {"fc.weight", "hidden_norm.weight", "norm.weight"}
    names |= {f"layers.{index}.{name}" for index in range(layers) for name in per_layer}
    assert set(stored) == names
    assert len(stored) == 3 + 11 * layers
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}


@pytest.mark.parametrize("scaling", [None, YARN, LLAMA3, {"rope_type": "linear", "factor": 2.0}])
def test_golden_33_config_has_every_key_and_copies_agree(tmp_path, scaling: dict | None) -> None:
    drafter = make_drafter(rope_scaling=scaling, rope_theta=5e5)
    export_drafter(drafter, None, tmp_path / "export")

    config = json.loads((tmp_path / "export" / "config.json").read_text())

    assert set(config) == PUBLISHED_KEYS
    assert set(config["dflash_config"]) == {"block_size", "mask_token_id", "target_layer_ids"}
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["model_type"] == "qwen3"
    assert config["block_size"] == config["dflash_config"]["block_size"] == 4
    assert config["dflash_config"]["target_layer_ids"] == [1, 5]
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 5e5
    new_style = {key: value for key, value in config["rope_parameters"].items() if key != "rope_theta"}
    assert new_style == (config["rope_scaling"] or {"rope_type": "default"})
    assert config["tie_word_embeddings"] is False
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    assert config["head_dim"] == 16
    assert config["use_sliding_window"] is False
    assert config["sliding_window"] is None


@pytest.mark.parametrize(
    ("types", "causal"),
    [((FULL, FULL), None), ((SLIDING, SLIDING), True), ((SLIDING, FULL), None)],
)
def test_golden_33_causal_is_stated_only_where_all_layers_agree(types: tuple, causal: bool | None) -> None:
    config = drafter_config(layer_types=types, sliding_window=2048)
    fields = {name: getattr(config, name) for name in config.__dataclass_fields__}

    rendered = render_config(fields)

    assert rendered["dflash_config"].get("causal") is causal
    assert "is_causal" not in rendered
    assert rendered["layer_types"] == list(types)
    assert rendered["sliding_window"] == (2048 if SLIDING in types else None)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda t: t.pop("fc.weight"), "missing: fc.weight"),
        (lambda t: t.update({"lm_head.weight": torch.zeros(97, 64)}), "unexpected: lm_head.weight"),
        (lambda t: t.update({"model.norm.weight": t.pop("norm.weight")}), "unexpected: model.norm.weight"),
        (lambda t: t.update({"fc.weight": torch.zeros(64, 64)}), "wrong shape: fc.weight"),
    ],
    ids=["missing", "extra", "misnamed", "misshapen"],
)
def test_golden_34_wrong_tensors_are_refused(tmp_path, damage, words: str) -> None:
    export_drafter(make_drafter(), None, tmp_path / "export")
    weights = tmp_path / "export" / "model.safetensors"
    tensors = load_file(weights)
    damage(tensors)
    save_file(tensors, weights)

    with pytest.raises(CheckpointError, match=words):
        load_drafter(tmp_path / "export")
    with pytest.raises(CheckpointError, match=words):
        check_export(tmp_path / "export")


@pytest.mark.parametrize("scaling", [None, YARN, LLAMA3, {"rope_type": "linear", "factor": 2.0}])
def test_golden_35_both_rotary_spellings_give_the_same_frequencies(tmp_path, scaling: dict | None) -> None:
    drafter = make_drafter(rope_scaling=scaling, rope_theta=5e5)
    loaded = []
    for drop in ({"rope_parameters"}, {"rope_theta", "rope_scaling"}):
        directory = tmp_path / "-".join(sorted(drop))
        export_drafter(drafter, None, directory)
        _edit(directory, lambda config, drop=drop: [config.pop(key) for key in drop])
        loaded.append(load_drafter(directory))

    old, new = loaded
    assert torch.equal(old.rope.inv_freq, new.rope.inv_freq)
    assert torch.equal(old.rope.inv_freq, drafter.rope.inv_freq)
    assert old.rope.attention_factor == new.rope.attention_factor == drafter.rope.attention_factor


def test_golden_35_older_type_key_is_read(tmp_path) -> None:
    drafter = make_drafter(rope_scaling=YARN)
    export_drafter(drafter, None, tmp_path / "export")

    def to_transformers_4(config: dict) -> None:
        del config["rope_parameters"]
        config["rope_scaling"]["type"] = config["rope_scaling"].pop("rope_type")

    _edit(tmp_path / "export", to_transformers_4)

    assert torch.equal(load_drafter(tmp_path / "export").rope.inv_freq, drafter.rope.inv_freq)


def test_golden_40_parameter_count_of_the_original_shape() -> None:
    config = drafter_config(
        num_hidden_layers=5,
        hidden_size=5120,
        intermediate_size=17408,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=248320,
        mask_token_id=248070,
        target_layer_ids=(1, 16, 31, 46, 61),
        num_target_layers=64,
        block_size=32,
    )
    with torch.device("meta"):
        drafter = Drafter(config)

    assert sum(parameter.numel() for parameter in drafter.parameters()) == 1_730_213_120


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda c: c["rope_parameters"].update(rope_theta=1e6), "disagree"),
        (lambda c: c.update(block_size=8), "block_size must be one number"),
        (lambda c: c["dflash_config"].pop("mask_token_id"), "mask_token_id is missing"),
        (lambda c: c.update(hidden_act="gelu"), "hidden_act must be silu"),
        (lambda c: c.update(num_target_layers=4), "cannot be captured"),
        (lambda c: c.pop("head_dim"), "head_dim is missing"),
    ],
)
def test_contradictory_config_is_refused(tmp_path, edit, words: str) -> None:
    export_drafter(make_drafter(), None, tmp_path / "export")
    _edit(tmp_path / "export", edit)

    with pytest.raises(CheckpointError, match=words):
        load_drafter(tmp_path / "export")


def test_check_names_the_keys_that_an_engine_would_miss(tmp_path) -> None:
    export_drafter(make_drafter(), None, tmp_path / "export")
    _edit(tmp_path / "export", lambda config: [config.pop("rope_parameters"), config.pop("dtype")])

    with pytest.raises(CheckpointError, match="missing keys: rope_parameters, dtype"):
        check_export(tmp_path / "export")


def test_check_refuses_weights_that_are_not_finite(tmp_path) -> None:
    drafter = make_drafter()
    with torch.no_grad():
        drafter.norm.weight[3] = float("nan")
    export_drafter(drafter, None, tmp_path / "export")

    with pytest.raises(CheckpointError, match=r"not finite: norm\.weight"):
        check_export(tmp_path / "export")


def test_existing_export_is_kept_unless_overwriting_is_asked_for(tmp_path) -> None:
    first, second = make_drafter(seed=1), make_drafter(seed=2)
    export_drafter(first, None, tmp_path / "export")

    with pytest.raises(CheckpointError, match="exists"):
        export_drafter(second, None, tmp_path / "export")
    kept = load_drafter(tmp_path / "export", dtype=torch.float32)
    export_drafter(second, None, tmp_path / "export", overwrite=True)
    replaced = load_drafter(tmp_path / "export", dtype=torch.float32)

    assert torch.equal(kept.fc.weight, first.fc.weight.bfloat16().float())
    assert torch.equal(replaced.fc.weight, second.fc.weight.bfloat16().float())
    assert [path.name for path in tmp_path.iterdir()] == ["export"]


def test_published_drafter_in_shards_and_with_fewer_keys_is_brought_to_the_full_format(tmp_path) -> None:
    drafter = make_drafter(dtype=torch.bfloat16)
    source = tmp_path / "published"
    export_drafter(drafter, None, source)
    _edit(source, lambda config: [config.pop("rope_parameters"), config["dflash_config"].pop("block_size")])
    tensors = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {"a.safetensors": names[:10], "b.safetensors": names[10:]}
    for file, part in files.items():
        save_file({name: tensors[name] for name in part}, source / file)
    index = {"weight_map": {name: file for file, part in files.items() for name in part}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))

    report = copy_export(source, tmp_path / "copy")

    assert report.tensors == 25
    assert check_export(tmp_path / "copy") == report
    assert torch.equal(load_drafter(tmp_path / "copy").fc.weight, drafter.fc.weight)


def test_missing_directory_says_which_file(tmp_path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_drafter(tmp_path / "nowhere")


def test_expected_shapes_follow_the_config() -> None:
    config = drafter_config()
    fields = {name: getattr(config, name) for name in config.__dataclass_fields__}

    shapes = expected_shapes(render_config(fields))

    assert shapes == {name: tuple(tensor.shape) for name, tensor in make_drafter().state_dict().items()}


def _edit(directory, change) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))
