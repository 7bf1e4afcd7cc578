"""The `export` command: copies, and a check that finds every kind of broken export."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.families import save_family
from tests.support.tiny import LETTERS, SPECIALS, tiny_target
from tests.support.tiny_drafter import make_drafter
from trainer.__main__ import main
from trainer.arguments import add_export_arguments
from trainer.checkpoint import export as export_module
from trainer.checkpoint.export import check_export, export_drafter
from trainer.checkpoint.replacing import remove_export
from trainer.checkpoint.store import CheckpointStore
from trainer.drafter.masks import FULL, SLIDING
from trainer.drafter.model import Drafter
from trainer.errors import CheckpointError, ConfigError
from trainer.eval.export_check import inspect_export
from trainer.eval.export_command import run_export
from trainer.target.loader import load_target

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
SLIDES = {"layer_types": (SLIDING, FULL), "sliding_window": 7}


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    return export_drafter(make_drafter(), None, tmp_path / "run" / "export" / "step-00000003")


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"))


def _run(*words: str | Path) -> int:
    parser = argparse.ArgumentParser()
    add_export_arguments(parser)
    return run_export(parser.parse_args([str(word) for word in words]))


SHAPES = {
    "plain": {},
    "mixed": SLIDES,
    "sliding": {"layer_types": (SLIDING, SLIDING), "sliding_window": 5},
    "yarn": {"rope_scaling": YARN, "rope_theta": 1e6},
    "bias": {"attention_bias": True},
    "scaled": {"embed_scale": 8.0, "logit_softcap": 30.0, "eos_token_id": (3, 4)},
    "large block": {"block_size": 16},
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_check_passes_every_export_of_ours_and_prints_each_verdict(tmp_path, capsys, shape: dict) -> None:
    store = CheckpointStore(tmp_path / "lineage-0000")
    store.prepare()
    path = store.save("export", 7, lambda folder: export_drafter(make_drafter(**shape), None, folder))

    assert _run("--check", path) == 0

    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 15
    assert all(line.startswith("pass  ") for line in lines)
    for name in (
        "manifest",
        "rotary spellings",
        "block sizes",
        "tensor names and shapes",
        "reload",
        "draft step",
    ):
        assert any(line[6:].startswith(name) for line in lines), name
    assert "inference equals training" in lines[-1]


@pytest.mark.parametrize("shard_bytes", [1, 20_000, 60_000])
def test_large_weights_are_split_and_come_back_bit_equal(tmp_path, monkeypatch, shard_bytes: int) -> None:
    monkeypatch.setattr(export_module, "SHARD_BYTES", shard_bytes)
    drafter = make_drafter(dtype=torch.bfloat16)

    path = export_drafter(drafter, None, tmp_path / "export")

    shards = sorted(path.glob("model-*.safetensors"))
    assert len(shards) > 1
    assert not (path / "model.safetensors").exists()
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(drafter.state_dict())
    assert set(index["weight_map"].values()) == {shard.name for shard in shards}
    assert [check.name for check in inspect_export(path) if not check.is_passed] == []


def test_check_compares_with_the_target(exported: Path, target_dir: Path, capsys, caplog) -> None:
    fits = {"eos_token_id": 3, "pad_token_id": 0}
    good = export_drafter(make_drafter(**fits), None, exported.parent / "good")

    with caplog.at_level("INFO"):
        assert _run("--check", good, "--target-model", target_dir) == 0

    loading, checking = caplog.messages
    assert loading.startswith(f"loading the target onto cpu: {target_dir}, ")
    assert checking == f"export: checking every file of {good}, then one draft step"

    out = capsys.readouterr().out
    assert "pass  copied from the target" in out
    assert "pass  mask token in the target" in out
    assert "on states of the target" in out


def edit(change: Callable[[dict], object]) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        path = directory / "config.json"
        config = json.loads(path.read_text())
        change(config)
        path.write_text(json.dumps(config))

    return apply


def weights(change: Callable[[dict], object]) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        tensors = load_file(directory / "model.safetensors")
        change(tensors)
        save_file(tensors, directory / "model.safetensors")

    return apply


def put(table: str, **values: object) -> Callable[[Path], None]:
    return edit(lambda c: (c[table] if table else c).update(values))


def drop(table: str, key: str) -> Callable[[Path], None]:
    return edit(lambda c: (c[table] if table else c).pop(key))


def split(change_index: Callable[[dict], object]) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        tensors = load_file(directory / "model.safetensors")
        (directory / "model.safetensors").unlink()
        names = sorted(tensors)
        parts = {"a.safetensors": names[:10], "b.safetensors": names[10:]}
        for file, part in parts.items():
            save_file({name: tensors[name] for name in part}, directory / file)
        places = {name: file for file, part in parts.items() for name in part}
        change_index(places)
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))

    return apply


def cut(name: str, share: float) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        content = (directory / name).read_bytes()
        (directory / name).write_bytes(content[: int(len(content) * share)])

    return apply


def nan(tensors: dict) -> None:
    tensors["norm.weight"][3] = float("nan")


NAMES = "tensor names and shapes"
NEW = "rope_parameters"
INNER = "dflash_config"
BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "newer rope schema lost": (drop("", NEW), "rotary spellings"),
    "older rope theta lost": (drop("", "rope_theta"), "rotary spellings"),
    "theta differs in the newer": (put(NEW, rope_theta=1e6), "rotary spellings"),
    "theta differs in the older": (put("", rope_theta=1e6), "rotary spellings"),
    "scaling in the older alone": (put("", rope_scaling=YARN), "rotary spellings"),
    "scaling in the newer alone": (put(NEW, **YARN), "rotary spellings"),
    "rope type without name": (drop(NEW, "rope_type"), "rotary spellings"),
    "partial rotary copied": (put(NEW, partial_rotary_factor=0.25), "rotary spellings"),
    "unknown rope type": (
        edit(lambda c: (c.update(rope_scaling={"rope_type": "new"}), c[NEW].update(rope_type="new"))),
        "reload",
    ),
    "inner block size lost": (drop(INNER, "block_size"), "config keys"),
    "inner block size differs": (put(INNER, block_size=8), "block sizes"),
    "outer block size differs": (put("", block_size=8), "block sizes"),
    "block of one": (edit(lambda c: (c.update(block_size=1), c[INNER].update(block_size=1))), "block sizes"),
    "mask token lost": (drop(INNER, "mask_token_id"), "config keys"),
    "mask token outside": (put(INNER, mask_token_id=97), "mask token"),
    "mask token ends texts": (put(INNER, mask_token_id=3), "mask token"),
    "target layers lost": (drop(INNER, "target_layer_ids"), "config keys"),
    "last target layer": (put(INNER, target_layer_ids=[1, 7]), "target layers"),
    "target layer twice": (put(INNER, target_layer_ids=[5, 5]), "target layers"),
    "negative target layer": (put(INNER, target_layer_ids=[-1, 5]), "target layers"),
    "too few target layers": (put("", num_target_layers=6), "target layers"),
    "one captured layer less": (put(INNER, target_layer_ids=[1]), NAMES),
    "other activation": (put("", hidden_act="gelu"), "constant values"),
    "tied head": (put("", tie_word_embeddings=True), "constant values"),
    "other architecture": (put("", architectures=["Qwen3ForCausalLM"]), "constant values"),
    "other model type": (put("", model_type="llama"), "constant values"),
    "other dtype named": (put("", torch_dtype="float32"), "constant values"),
    "layer types too short": (put("", layer_types=[FULL]), "layer types"),
    "unknown layer type": (put("", layer_types=[FULL, "linear_attention"]), "layer types"),
    "sliding without window": (put("", layer_types=[SLIDING, FULL]), "layer types"),
    "window without sliding": (put("", sliding_window=64), "layer types"),
    "window switched on": (put("", use_sliding_window=True), "layer types"),
    "max_window_layers": (put("", max_window_layers=28), "layer types"),
    "causal full layers, top": (put("", is_causal=True), "layer types"),
    "causal full layers, inner": (put(INNER, causal=True), "layer types"),
    "head width": (put("", head_dim=32), NAMES),
    "layer count": (put("", num_hidden_layers=3), NAMES),
    "hidden size": (put("", hidden_size=32), NAMES),
    "key heads": (put("", num_key_value_heads=4), NAMES),
    "a key lost": (drop("", "max_position_embeddings"), "config keys"),
    "config cut off": (cut("config.json", 0.5), "config file"),
    "config missing": (lambda d: (d / "config.json").unlink(), "config file"),
    "config no object": (lambda d: (d / "config.json").write_text("[]"), "config file"),
    "tensor missing": (weights(lambda t: t.pop("fc.weight")), NAMES),
    "head exported": (
        weights(lambda t: t.update({"lm_head.weight": torch.ones(97, 64).bfloat16()})),
        NAMES,
    ),
    "names prefixed": (
        weights(lambda t: [t.update({f"model.{n}": t.pop(n)}) for n in sorted(t)]),
        NAMES,
    ),
    "tensor transposed": (
        weights(lambda t: t.update({"fc.weight": t["fc.weight"].T.contiguous()})),
        NAMES,
    ),
    "tensor in fp32": (weights(lambda t: t.update({"fc.weight": t["fc.weight"].float()})), "tensor dtype"),
    "tensor not finite": (weights(nan), "tensor values"),
    "tensor all zero": (weights(lambda t: t["fc.weight"].zero_()), "tensor values"),
    "weights cut off": (cut("model.safetensors", 0.7), "weight files"),
    "weights missing": (lambda d: (d / "model.safetensors").unlink(), "weight files"),
    "index names another shard": (split(lambda p: p.update({"fc.weight": "b.safetensors"})), "weight files"),
    "index lacks a tensor": (split(lambda p: p.pop("norm.weight")), "weight files"),
    "index names no file": (split(lambda p: p.update({"fc.weight": "c.safetensors"})), "weight files"),
}


@pytest.mark.parametrize(("damage", "name"), BROKEN.values(), ids=BROKEN)
def test_check_finds_a_broken_export(exported: Path, damage, name: str) -> None:
    damage(exported)

    checks = {check.name: check for check in inspect_export(exported)}

    assert not checks[name].is_passed, checks[name]
    assert checks[name].detail


def test_shards_without_a_fault_pass(exported: Path) -> None:
    split(lambda _places: None)(exported)

    assert all(check.is_passed for check in inspect_export(exported))


def set_theta(config: dict) -> None:
    config["rope_theta"] = config[NEW]["rope_theta"] = 1e6


LETTER_E = len(SPECIALS) + LETTERS.index("e")
OF_ANOTHER_TARGET: dict[str, tuple[Callable[[Path], object], str]] = {
    "theta wrong in both": (edit(set_theta), "copied from the target"),
    "other vocabulary": (put("", vocab_size=128), "copied from the target"),
    "other depth": (put("", num_target_layers=12), "copied from the target"),
    "scaled embeddings": (put(INNER, input_embedding_scale=8.0), "copied from the target"),
    "mask token is text": (
        put(INNER, mask_token_id=len(SPECIALS) + LETTERS.index("e")),
        "mask token in the target",
    ),
    "mask token is a stop": (put(INNER, mask_token_id=3), "mask token in the target"),
}


@pytest.mark.parametrize(("damage", "name"), OF_ANOTHER_TARGET.values(), ids=OF_ANOTHER_TARGET)
def test_check_with_the_target_finds_what_the_export_alone_cannot_show(
    exported: Path, target_dir: Path, damage, name: str
) -> None:
    target = load_target(target_dir, device="cpu", dtype=torch.float32)
    assert all(check.is_passed for check in inspect_export(exported, target))
    damage(exported)

    checks = {check.name: check for check in inspect_export(exported, target)}

    assert not checks[name].is_passed


def test_check_against_a_target_that_scales_and_caps(tmp_path) -> None:
    target = load_target(save_family("gemma2", tmp_path), device="cpu", dtype=torch.float32, mask_token_id=96)
    shape = {"embed_scale": 8.0, "logit_softcap": 30.0, "eos_token_id": 2, "bos_token_id": 1}
    good = export_drafter(make_drafter(**shape), None, tmp_path / "good")
    bad = export_drafter(make_drafter(**(shape | {"logit_softcap": None})), None, tmp_path / "bad")

    rounded = export_drafter(make_drafter(**(shape | {"embed_scale": 8.03125})), None, tmp_path / "rounded")

    for export in (good, rounded):
        assert [check.detail for check in inspect_export(export, target) if not check.is_passed] == []
    assert [check.name for check in inspect_export(bad, target) if not check.is_passed] == [
        "copied from the target"
    ]


def test_a_draft_that_differs_from_training_is_found(exported: Path, monkeypatch) -> None:
    draft = Drafter.draft
    monkeypatch.setattr(
        Drafter, "draft", lambda self, features, *rest, **named: draft(self, features.flip(1), *rest, **named)
    )

    failed = [check for check in inspect_export(exported) if not check.is_passed]

    assert [check.name for check in failed] == ["draft step"]
    assert "inference differs from training" in failed[0].detail


def test_a_manifest_that_does_not_match_is_found(exported: Path) -> None:
    (exported / "manifest.json").write_text(json.dumps({"v": 1, "step": 3, "files": {}}))

    assert [check.name for check in inspect_export(exported) if not check.is_passed] == ["manifest"]


def test_failed_checks_end_with_exit_code_four_after_the_table(exported: Path, capsys) -> None:
    put("", block_size=8)(exported)
    put("", rope_theta=1e6)(exported)

    code = main(["export", "--check", str(exported)])

    captured = capsys.readouterr()
    assert code == 4
    assert captured.out.count("FAIL") == 4
    assert "4 of 14 checks failed: block sizes, rotary spellings, reload, draft step" in captured.err


def test_output_is_a_full_copy(exported: Path, tmp_path: Path, capsys) -> None:
    assert _run("--drafter", exported, "--output", tmp_path / "copy") == 0
    assert "ok, 25 tensors" in capsys.readouterr().out

    assert check_export(tmp_path / "copy").parameters == check_export(exported).parameters
    with pytest.raises(CheckpointError, match="exists"):
        _run("--drafter", exported, "--output", tmp_path / "copy")
    assert _run("--drafter", exported, "--output", tmp_path / "copy", "--overwrite") == 0


def _copy(exported: Path, output: Path, capsys) -> tuple[int, str]:
    code = main(["export", "--drafter", str(exported), "--output", str(output), "--overwrite"])
    return code, capsys.readouterr().err


def _snapshot(folder: Path) -> dict[str, bytes | None]:
    paths = sorted(folder.rglob("*"))
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in paths}


def _add(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text("mine")


def _link_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "elsewhere")
    (folder / "model.safetensors").symlink_to(folder.parent / "elsewhere")


def _forget_keys(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"architectures": config["architectures"]}))


@pytest.mark.parametrize(
    "spoil",
    [
        _add("notes.txt"),
        _add("model.safetensors.bak"),
        lambda folder: (folder / "state").mkdir(),
        _link_weights,
        lambda folder: (folder / "model.safetensors").unlink(),
        lambda folder: (folder / "config.json").unlink(),
        _forget_keys,
        lambda folder: (folder / "config.json").write_text("[]"),
        lambda folder: [path.unlink() for path in folder.iterdir()],
    ],
    ids=["a text", "a backup", "a folder", "a link", "no weights", "no config", "a model", "a list", "empty"],
)
def test_overwriting_replaces_nothing_but_an_export(exported: Path, tmp_path: Path, spoil, capsys) -> None:
    output = export_drafter(make_drafter(seed=9), None, tmp_path / "other" / "output")
    spoil(output)
    before = _snapshot(tmp_path)

    code, said = _copy(exported, output, capsys)

    assert (code, said.count("\n")) == (2, 1)
    assert "--overwrite replaces nothing but an export" in said
    assert _snapshot(tmp_path) == before


def test_overwriting_follows_no_link_and_replaces_no_file(exported: Path, tmp_path: Path, capsys) -> None:
    real = export_drafter(make_drafter(seed=9), None, tmp_path / "other" / "real")
    (tmp_path / "link").symlink_to(real)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "file").write_text("mine")
    before = _snapshot(tmp_path)

    assert [_copy(exported, tmp_path / name, capsys)[0] for name in ("link", "dangling", "file")] == [2, 2, 2]
    assert _snapshot(tmp_path) == before


@pytest.mark.parametrize("place", [".", "inner", "..", "../..", "../../.."])
def test_output_never_overlaps_with_the_drafter(exported: Path, tmp_path: Path, place: str, capsys) -> None:
    before = _snapshot(tmp_path)

    code, said = _copy(exported, exported / place, capsys)

    assert (code, said.count("\n")) == (2, 1)
    assert "--output and --drafter must lie apart" in said
    assert _snapshot(tmp_path) == before


def test_overwriting_never_touches_a_run(exported: Path, tmp_path: Path, capsys) -> None:
    store = CheckpointStore(tmp_path / "out" / "lineage-0000")
    store.prepare()
    saved = store.save("export", 7, lambda folder: export_drafter(make_drafter(seed=3), None, folder))
    before = _snapshot(tmp_path)

    for output in (saved, saved.parent, saved.parent.parent, tmp_path / "out", Path("/")):
        assert _copy(exported, output, capsys)[0] == 2
    assert _snapshot(tmp_path) == before


def test_a_replaced_export_leaves_nothing_of_its_own_and_all_of_others(
    exported: Path, tmp_path: Path
) -> None:
    output = export_drafter(make_drafter(seed=9), None, tmp_path / "other" / "output")

    assert _run("--drafter", exported, "--output", output, "--overwrite") == 0
    assert [path.name for path in output.parent.iterdir()] == ["output"]

    (output / "late.txt").write_text("mine")
    remove_export(output)
    assert [path.name for path in output.iterdir()] == ["late.txt"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("block_size", "x"),
        ("block_size", 1.5),
        ("rope_theta", "a"),
        ("rope_theta", float("nan")),
        ("dflash_config", 5),
        ("num_hidden_layers", 10**9),
        ("num_target_layers", True),
        ("hidden_size", -4),
        ("num_attention_heads", 0),
        ("layer_types", [1]),
        ("rope_parameters", [1]),
        ("eos_token_id", "stop"),
        ("sliding_window", "wide"),
    ],
)
def test_a_value_of_a_wrong_type_or_size_is_named_by_every_command(
    exported: Path, target_dir: Path, tmp_path: Path, key: str, value, capsys
) -> None:
    put("", **{key: value})(exported)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "hello"}\n')
    target = ["--target-model", str(target_dir)]
    commands = {
        "eval": ["--drafter", str(exported), "--prompts", str(tmp_path / "prompts.jsonl"), *target],
        "import": ["--drafter", str(exported), "--output", str(tmp_path / "run-of-import"), *target],
        "export": ["--drafter", str(exported), "--output", str(tmp_path / "copy")],
    }

    for command, words in commands.items():
        code = main([command, *words])
        lines = capsys.readouterr().err.splitlines()
        [said] = [line for line in lines if " INFO " not in line]
        assert code == 4
        assert f"{exported / 'config.json'}: {key} must be" in said
        assert f": {value!r}" in said
    assert main(["export", "--check", str(exported)]) == 4
    assert f"{key} must be" in capsys.readouterr().out
    assert not (tmp_path / "copy").exists()
    assert not (tmp_path / "run-of-import").exists()


def test_checking_a_folder_that_is_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no such folder: .*nosuch; name an export"):
        _run("--check", tmp_path / "nosuch")


@pytest.mark.parametrize("words", [["--check"], ["--output", "x", "--drafter"]], ids=["check", "copy"])
def test_a_training_state_is_answered_with_the_export_beside_it(exported: Path, words) -> None:
    state = exported.parent.parent / "state" / exported.name
    state.mkdir(parents=True)

    with pytest.raises(CheckpointError, match=f"use {exported}"):
        _run(*words, state)


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--check", "a", "--output", "x"],
        ["--check", "a", "--drafter", "x"],
        ["--drafter", "x"],
        ["--output", "x"],
    ],
    ids=["nothing", "check and output", "check and drafter", "no output", "no drafter"],
)
def test_check_and_copy_exclude_each_other(words: list[str]) -> None:
    with pytest.raises(ConfigError, match="either --check DIR or --drafter DIR --output DIR"):
        _run(*words)
