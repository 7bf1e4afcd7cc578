"""z-lab's own package as the judge of our exports: it loads them, says the same, and accepts as much."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.families import save_family
from tests.support.tiny import write_tiny_corpus
from tests.support.tiny_drafter import MASK_ID, make_drafter, talkative_target
from tests.support.trainer_runs import run_here, settings_for
from tests.support.zlab_oracle import ALLOWED_DIFFERENCE, PACKAGE, Case, Comparison, compare, install_package
from trainer.__main__ import main
from trainer.checkpoint.export import export_drafter
from trainer.drafter.masks import FULL, SLIDING
from trainer.eval.speculative import speculative_generate
from trainer.target.loader import load_target

NEW_TOKENS = 40


@pytest.fixture(scope="session")
def package() -> Path:
    return install_package()


def random_prompts(count: int, *, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(4, 55) for _ in range(draw.randrange(6, 20))] for _ in range(count)]


def assert_same(found: Comparison) -> None:
    assert found.oracle["missing"] == found.oracle["unexpected"] == found.oracle["mismatched"] == []
    assert found.different_texts == []
    assert found.our_cut_length == pytest.approx(found.oracle_length, abs=1e-9)


SHAPES = {
    "sliding and full": ("llama", {"layer_types": (SLIDING, FULL), "sliding_window": 9}),
    "all sliding": ("qwen3", {"layer_types": (SLIDING, SLIDING), "sliding_window": 6}),
    "yarn": (
        "qwen3",
        {
            "rope_theta": 1e6,
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        },
    ),
    "large block, bias": ("qwen3", {"block_size": 12, "attention_bias": True, "num_hidden_layers": 3}),
    "scaled and capped": ("gemma2", {"embed_scale": 8.0, "logit_softcap": 30.0}),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, Path, list[list[int]]]:
    """A target, a drafter trained on its completions, and prompts that it was trained on."""
    folder = tmp_path_factory.mktemp("trained")
    directory = talkative_target(folder)
    target = load_target(directory, device="cpu", dtype=torch.float32, mask_token_id=MASK_ID)
    prompts = random_prompts(6)
    rows = []
    for prompt in prompts:
        answer = speculative_generate(target, None, prompt, max_new_tokens=60, eos_ids=()).token_ids
        rows.append(
            {"input_ids": prompt + answer, "loss_mask": [0] * len(prompt) + [1] * len(answer), "domain": "a"}
        )
    data = write_tiny_corpus(folder / "data", rows)
    learning = {"optim__epochs": 80, "optim__lr": 4e-3, "loss__noise_start": 0, "loss__noise_end": 0}
    sizes = {"data__max_seq_len": 96, "data__token_budget": 480, "loss__max_anchors": 360}
    one_step = {"queue__hs_min_ready": 1, "target__cache_features_bytes": 1 << 24}
    assert run_here(settings_for(directory, data, folder / "out", **learning, **sizes, **one_step)) == 0
    return directory, max((folder / "out").glob("lineage-0000/export/step-*")), prompts


@pytest.fixture(scope="module")
def comparisons(trained, package, tmp_path_factory) -> dict[str, Comparison]:
    """Every case decoded by both; one subprocess for all, since it spends most of its time on importing."""
    directory, drafter, prompts = trained
    cases = {
        "trained": Case(
            target_dir=directory,
            drafter_dir=drafter,
            prompts=[*prompts[:2], *random_prompts(2, seed=7)],
            max_new_tokens=NEW_TOKENS,
            stop_ids=(),
        )
    }
    for name, (family, shape) in SHAPES.items():
        folder = tmp_path_factory.mktemp("shape")
        cases[name] = Case(
            target_dir=save_family(family, folder),
            drafter_dir=export_drafter(make_drafter(seed=5, **shape), None, folder / "export"),
            prompts=random_prompts(2, seed=1),
            max_new_tokens=24,
            stop_ids=(),
            mask_token_id=MASK_ID,
        )
    return dict(zip(cases, compare(list(cases.values()), package=package), strict=True))


def test_a_trained_drafter_reaches_the_same_acceptance_length_in_the_oracle(comparisons) -> None:
    found = comparisons["trained"]

    assert_same(found)
    assert found.oracle["tensors"] == 25
    assert 1.5 < found.oracle_length < 4.0
    assert (found.oracle["block_size"], found.oracle["target_layer_ids"]) == (4, [1, 5])


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_of_export_drafts_the_same_in_the_oracle(comparisons, name: str) -> None:
    assert_same(comparisons[name])


def test_the_eval_command_says_what_the_oracle_says(trained, package, tmp_path) -> None:
    directory, drafter, _ = trained
    texts = ["what is the capital?", "count to ten", "say it again: a, b, c"]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    common = ("--drafter", str(drafter), "--prompts", str(prompts), "--max-new-tokens", "120")

    code = main(["eval", "--target-model", str(directory), *common, "--json", str(tmp_path / "eval.json")])
    said = subprocess.run(
        [sys.executable, "-m", "tests.support.zlab_oracle", "--target", str(directory), *common],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    assert code == 0
    assert said.returncode == 0, said.stdout + said.stderr
    length = float(said.stdout.splitlines()[-1].removesuffix(" oracle"))
    ours = json.loads((tmp_path / "eval.json").read_text())["acceptance_length"]
    assert f"{PACKAGE}, 25 tensors loaded, none missing" in said.stdout
    assert abs(ours - length) <= ALLOWED_DIFFERENCE


def test_an_index_that_cannot_be_reached_is_said(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))

    with pytest.raises(RuntimeError, match="is the package index reachable"):
        install_package(tmp_path / "package")

    assert not (tmp_path / "package").exists()
