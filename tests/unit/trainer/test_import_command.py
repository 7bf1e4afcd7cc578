"""The `import` command: published drafters become the first state of a run that trains on from them."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.tiny import tiny_samples, tiny_target, write_tiny_corpus
from tests.support.tiny_drafter import make_drafter
from tests.support.trainer_runs import metrics_lines, run_here, settings_for
from trainer.__main__ import main
from trainer.checkpoint.export import export_drafter
from trainer.checkpoint.store import verify
from trainer.drafter.exported import load_drafter
from trainer.drafter.masks import FULL, SLIDING
from trainer.errors import CheckpointError, ConfigError
from trainer.eval.export_check import inspect_export
from trainer.lifecycle.runfolder import hold_output

ENDS = {"eos_token_id": 3, "pad_token_id": 0, "bos_token_id": 2}


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    folder = tmp_path_factory.mktemp("import")
    return tiny_target(folder), write_tiny_corpus(folder / "data", tiny_samples(16))


def published(folder: Path, **shape) -> Path:
    drafter = make_drafter(seed=3, dtype=torch.bfloat16, **(ENDS | shape))
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if name.endswith(".bias"):
                parameter.normal_(0.0, 0.1, generator=generator)
    return export_drafter(drafter, None, folder / "published")


def take(drafter: Path, model: Path, output: Path) -> int:
    words = {"--drafter": drafter, "--target-model": model, "--output": output}
    return main(["import", *(str(word) for pair in words.items() for word in pair)])


def settings(places, output: Path, *, shape=False, **changes) -> list[str]:
    """Settings of a run; without the drafter's shape unless asked for, since that is imported."""
    lines = settings_for(*places, output, **changes)
    return lines if shape else [line for line in lines if not line.startswith("drafter.")]


def edit(directory: Path, change) -> None:
    config = json.loads((directory / "config.json").read_text())
    change(config)
    (directory / "config.json").write_text(json.dumps(config))


def newest_export(output: Path) -> Path:
    return sorted(output.glob("lineage-*/export/step-*"))[-1]


SHAPES = {
    "plain": {},
    "other sizes": {
        "num_hidden_layers": 3,
        "block_size": 6,
        "intermediate_size": 48,
        "target_layer_ids": (0, 3, 6),
    },
    "sliding": {"layer_types": (SLIDING, FULL), "sliding_window": 7},
    "all sliding": {"layer_types": (SLIDING, SLIDING), "sliding_window": 9},
    "bias and own rope": {"attention_bias": True, "rope_theta": 5e5, "rms_norm_eps": 1e-5},
    "own heads": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8, "mask_token_id": 60},
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_golden_33_import_and_export_without_learning_are_bit_equal(places, tmp_path, shape: dict) -> None:
    source = published(tmp_path, **shape)
    assert take(source, places[0], tmp_path / "out") == 0
    # a step whose update is far below the last bit of any weight
    assert run_here(settings(places, tmp_path / "out", optim__lr=1e-30, optim__max_steps=2)) == 0

    again = newest_export(tmp_path / "out")
    assert again.name == "step-00000002"
    before, after = load_file(source / "model.safetensors"), load_file(again / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert json.loads((source / "config.json").read_text()) == json.loads((again / "config.json").read_text())


def test_the_first_state_and_its_export_verify(places, tmp_path, capsys) -> None:
    source = published(tmp_path)

    assert take(source, places[0], tmp_path / "out") == 0

    lineage = tmp_path / "out" / "lineage-0000"
    verify(lineage / "state" / "step-00000000")
    assert all(check.is_passed for check in inspect_export(lineage / "export" / "step-00000000"))
    out = capsys.readouterr().out
    assert "2 layers, block 4, target layers 1,5, mask token 96" in out
    assert f"--output-dir {tmp_path / 'out'}" in out


def test_fine_tuning_begins_where_the_drafter_was_and_lowers_the_loss(places, tmp_path) -> None:
    common = {"optim__lr": 3e-3, "telemetry__log_every": 1, "loss__noise_start": 0, "loss__noise_end": 0}
    first, second = tmp_path / "first", tmp_path / "second"
    assert run_here(settings(places, first, shape=True, optim__epochs=12, **common)) == 0
    assert take(newest_export(first), places[0], second) == 0

    assert run_here(settings(places, second, optim__epochs=12, **common)) == 0

    fresh, tuned = (
        [line["train"]["loss"] for line in metrics_lines(out / "run") if line["train"].get("loss")]
        for out in (first, second)
    )
    assert tuned[0] < fresh[0] - 0.2
    assert sum(tuned[-5:]) < sum(tuned[:5])
    assert sum(tuned[-5:]) < sum(fresh[-5:])


def test_the_shape_stays_with_the_lineage_when_the_run_is_resumed(places, tmp_path) -> None:
    source = published(tmp_path, num_hidden_layers=3, block_size=6, rope_theta=5e5)
    assert take(source, places[0], tmp_path / "out") == 0
    assert run_here(settings(places, tmp_path / "out", optim__max_steps=1)) == 0

    assert run_here(settings(places, tmp_path / "out", optim__max_steps=3)) == 0

    drafter = load_drafter(newest_export(tmp_path / "out"))
    assert (drafter.config.num_hidden_layers, drafter.config.block_size) == (3, 6)
    assert drafter.config.rope_theta == 5e5
    record = json.loads((tmp_path / "out" / "run" / "resume.json").read_text())
    assert record["step"] == 1


def test_a_run_elsewhere_resumes_from_the_imported_state_by_its_path(places, tmp_path) -> None:
    assert take(published(tmp_path), places[0], tmp_path / "out") == 0
    state = tmp_path / "out" / "lineage-0000" / "state" / "step-00000000"

    code = run_here(
        settings(places, tmp_path / "other", optim__max_steps=1, checkpoint__resume=json.dumps(str(state)))
    )

    assert code == 0
    assert load_drafter(newest_export(tmp_path / "other")).config.block_size == 4


@pytest.mark.parametrize(
    ("key", "value"),
    [("drafter__block_size", 8), ("drafter__num_layers", 5), ("target__target_layer_ids", (1, 3))],
)
def test_a_setting_that_contradicts_the_imported_drafter_is_refused(places, tmp_path, key, value) -> None:
    assert take(published(tmp_path), places[0], tmp_path / "out") == 0

    with pytest.raises(
        ConfigError, match=f"{key.replace('__', '.')} = .*imported drafter has .*leave the key away"
    ):
        run_here([*settings(places, tmp_path / "out"), *_one(places, tmp_path, key, value)])


def _one(places, tmp_path, key, value):
    name = key.replace("__", ".")
    return [line for line in settings_for(*places, tmp_path, **{key: value}) if line.startswith(f"{name}=")]


def test_another_target_at_training_is_refused(places, tmp_path) -> None:
    assert take(published(tmp_path), places[0], tmp_path / "out") == 0
    other = tiny_target(tmp_path, seed=5, rms_norm_eps=1e-3)

    with pytest.raises(Exception, match=r"target\.config_sha256"):
        run_here(settings((other, places[1]), tmp_path / "out"))


@pytest.mark.parametrize(
    ("shape", "words"),
    [({"embed_scale": 8.0}, "embedding scale 8.0 against 1.0"), ({"logit_softcap": 30.0}, "logit cap 30.0")],
    ids=["scale", "cap"],
)
def test_ends_that_the_target_does_not_have_are_refused_at_training(places, tmp_path, shape, words) -> None:
    assert take(published(tmp_path, **shape), places[0], tmp_path / "out") == 0

    with pytest.raises(ConfigError, match=words):
        run_here(settings(places, tmp_path / "out"))


def test_an_occupied_output_folder_is_refused(places, tmp_path, caplog) -> None:
    source = published(tmp_path)

    with hold_output(tmp_path / "out"):
        code = take(source, places[0], tmp_path / "out")

    assert code == ConfigError.exit_code
    assert not (tmp_path / "out" / "lineage-0000").exists()


def test_a_full_disk_leaves_no_output_folder(places, tmp_path, monkeypatch, capsys) -> None:
    def full(*_args, **_words):
        raise OSError(errno.ENOSPC, "No space left on device")

    source = published(tmp_path)
    monkeypatch.setattr("trainer.checkpoint.export.save_file", full)

    code = take(source, places[0], tmp_path / "out")

    said = capsys.readouterr().err
    assert (code, said.count("\n")) == (CheckpointError.exit_code, 1)
    assert "No space left on device; free space" in said
    assert not (tmp_path / "out").exists()


def old_spelling(config: dict) -> None:
    del config["rope_parameters"], config["dtype"], config["use_cache"]
    config["auto_map"] = {"AutoModel": "dflash.DFlashDraftModel"}
    del config["dflash_config"]["block_size"]


def new_spelling(config: dict) -> None:
    del config["rope_theta"], config["rope_scaling"], config["torch_dtype"]


def flat(config: dict) -> None:
    section = config.pop("dflash_config")
    config.update(section)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("spelling", [old_spelling, new_spelling, flat])
@pytest.mark.parametrize("shards", [1, 2])
def test_published_forms_are_read(places, tmp_path, dtype, spelling, shards: int) -> None:
    source = published(tmp_path)
    edit(source, spelling)
    (source / "dflash.py").write_text("raise RuntimeError('never run')\n")
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(source / "model.safetensors").items()}
    (source / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = [names[place::shards] for place in range(shards)]
    files = {
        f"model-{place}.safetensors" if shards > 1 else "model.safetensors": p
        for place, p in enumerate(parts)
    }
    for file, part in files.items():
        save_file({name: tensors[name] for name in part}, source / file)
    if shards > 1:
        index = {"weight_map": {name: file for file, part in files.items() for name in part}}
        (source / "model.safetensors.index.json").write_text(json.dumps(index))

    assert take(source, places[0], tmp_path / "out") == 0

    state = load_file(tmp_path / "out" / "lineage-0000" / "state" / "step-00000000" / "tensors.safetensors")
    assert all(torch.equal(state[f"master.{name}"], tensor.float()) for name, tensor in tensors.items())
    checks = inspect_export(newest_export(tmp_path / "out"))
    assert [check.name for check in checks if not check.is_passed] == []


WRONG = {
    "hidden size": ({"hidden_size": 32, "head_dim": 8}, 2, "hidden size 32 against 64"),
    "depth": ({"num_target_layers": 12, "target_layer_ids": (1, 9)}, 2, "layers 12 against 8"),
    "vocabulary": ({"vocab_size": 128}, 2, "vocabulary 128 against 97"),
}


@pytest.mark.parametrize(("shape", "code", "words"), WRONG.values(), ids=WRONG)
def test_a_drafter_of_another_target_is_refused(places, tmp_path, capsys, shape, code, words) -> None:
    assert take(published(tmp_path, **shape), places[0], tmp_path / "out") == code

    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


DAMAGED = {
    "layer outside": (lambda c: c["dflash_config"].update(target_layer_ids=[1, 9]), "cannot be captured"),
    "mask outside": (lambda c: c["dflash_config"].update(mask_token_id=200), "mask token 200"),
    "no mask": (lambda c: c["dflash_config"].pop("mask_token_id"), "mask_token_id is missing"),
    "rope types differ": (lambda c: c.update(rope_theta=1.0), "disagree"),
}


@pytest.mark.parametrize(("change", "words"), DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_drafter_is_refused(places, tmp_path, capsys, change, words) -> None:
    source = published(tmp_path)
    edit(source, change)

    assert take(source, places[0], tmp_path / "out") == 4

    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
