"""T5: resumed with other data, configuration, target, devices or code: refused by name, or recorded."""

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from tests.support.tiny import tiny_samples, tiny_target, write_tiny_corpus
from tests.support.trainer_runs import read_status, run_here, settings_for
from trainer import train as train_module
from trainer.checkpoint.lineage import total_steps_after
from trainer.drafter.worker import DrafterWorker
from trainer.errors import CheckpointError
from trainer.target.identity import sample_digest


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return tiny_target(folder), write_tiny_corpus(folder / "data")


@pytest.fixture
def out(tiny, tmp_path):
    """The output of a run that was ended at step 2 of 18."""
    run_here(settings_for(*tiny, tmp_path / "out", optim__max_steps=2))
    return tmp_path / "out"


def recorded(out):
    record = json.loads((out / "run" / "resume.json").read_text())
    return {entry["field"]: (entry["was"], entry["is"]) for entry in record["differences"]}


REFUSED = {
    "block size": ({"drafter__block_size": 5}, r"drafter\.block_size was 4, is 5"),
    "drafter layers": ({"drafter__num_layers": 3}, r"drafter\.num_layers was 2, is 3"),
    "tapped layers": (
        {"target__target_layer_ids": (2, 4)},
        r"target\.target_layer_ids was \[\], is \[2, 4\]",
    ),
    "mask token": ({"target__mask_token_id": 90}, r"target\.mask_token_id was .*, is 90"),
    "token budget": ({"data__token_budget": 160}, r"data\.token_budget was 128, is 160"),
    "seed": ({"optim__seed": 4}, r"optim\.seed was 0, is 4"),
    "accumulation": ({"optim__grad_accum": 2}, r"optim\.grad_accum was 1, is 2"),
}


@pytest.mark.parametrize(("changes", "says"), REFUSED.values(), ids=REFUSED.keys())
def test_t5_setting_that_breaks_the_state_is_refused_with_both_values(tiny, out, changes, says):
    with pytest.raises(CheckpointError, match=says) as caught:
        run_here(settings_for(*tiny, out, **changes))

    assert "restore these or use --resume scratch" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 4


def test_t5_other_data_is_refused_by_digest(tiny, out, tmp_path):
    other = write_tiny_corpus(tmp_path / "other", tiny_samples(seed=5))

    with pytest.raises(CheckpointError, match=r"data\.sha256 was .* --resume scratch"):
        run_here(settings_for(tiny[0], other, out))


def test_t5_other_target_of_the_same_shape_is_refused_by_its_weights(tiny, out, tmp_path):
    shutil.copytree(tiny[0], tmp_path / "tuned")
    weights = load_file(tmp_path / "tuned" / "model.safetensors")
    tuned = {name: tensor + 1e-3 for name, tensor in weights.items()}
    save_file(tuned, tmp_path / "tuned" / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(CheckpointError, match=r"target\.weights_sample_sha256 was .* --resume scratch"):
        run_here(settings_for(tmp_path / "tuned", tiny[1], out))


def test_t5_target_that_only_moved_is_the_same(tiny, out, tmp_path):
    shutil.copytree(tiny[0], tmp_path / "elsewhere")

    assert run_here(settings_for(tmp_path / "elsewhere", tiny[1], out, optim__max_steps=3)) == 0

    assert set(recorded(out)) == {"optim.max_steps", "plan.total_steps"}


RECORDED = {
    "learning rate": ({"optim__lr": 0.01}, "optim.lr", (0.0006, 0.01)),
    "loss weights": ({"loss__decay_gamma": 3.0}, "loss.decay_gamma", (7.0, 3.0)),
    "queue": ({"queue__hs_max_depth": 5}, "queue.hs_max_depth", (4, 5)),
    "attention": ({"target__attention": "eager"}, "target.attention", ("sdpa", "eager")),
}


@pytest.mark.parametrize(("changes", "field", "values"), RECORDED.values(), ids=RECORDED.keys())
def test_t5_setting_that_changes_learning_is_recorded_with_old_and_new_value(
    tiny, out, caplog, changes, field, values
):
    assert run_here(settings_for(*tiny, out, optim__max_steps=3, **changes)) == 0

    assert recorded(out)[field] == values
    assert f"resumed with a difference: {field} was" in caplog.text


def test_t5_other_code_and_torch_are_recorded(tiny, out, monkeypatch):
    real = train_module.describe_code

    def other():
        code = real()
        versions = code["versions"] | {"torch": "9.9"}
        return code | {"git_sha": "f" * 40, "source_sha256": "e" * 64, "versions": versions}

    monkeypatch.setattr(train_module, "describe_code", other)

    assert run_here(settings_for(*tiny, out, optim__max_steps=3)) == 0

    found = recorded(out)
    assert found["code.source_sha256"] == (real()["source_sha256"], "e" * 64)
    assert found["code.git_sha"][1] == "f" * 40
    assert found["versions.torch"][1] == "9.9"


def test_t5_other_number_of_targets_and_drafters_goes_on_and_is_recorded(tiny, tmp_path, monkeypatch):
    out, consumed = tmp_path / "out", []
    real_step, real_add = DrafterWorker.train_step, train_module.DrafterWorker

    def stop_at_4(self):
        went_on = real_step(self)
        if self.step >= 4:
            self._board.stop.set()
        return went_on

    with monkeypatch.context() as patch:
        patch.setattr(DrafterWorker, "train_step", stop_at_4)
        assert run_here(settings_for(*tiny, out)) == 9
    assert real_add is DrafterWorker
    assert read_status(out / "run")["last_checkpoint"]["step"] == 4

    real = train_module.Trainer._hooks

    def hooks(self, parts, lines):
        made = real(self, parts, lines)
        object.__setattr__(made, "consumed", counting(made.consumed, consumed))
        return made

    monkeypatch.setattr(train_module.Trainer, "_hooks", hooks)
    two = {"devices__target_gpus": '"cpu,cpu"', "devices__drafter_gpus": '"cpu,cpu"'}
    assert run_here(settings_for(*tiny, out, **two)) == 0

    found = recorded(out)
    assert found["world.targets"] == (["cpu"], ["cpu", "cpu"])
    assert found["world.drafters"] == (["cpu"], ["cpu", "cpu"])
    # 14 packs were left; two drafters take two in a step
    assert read_status(out / "run")["step"] == 4 + 7
    assert len(consumed) == len(set(consumed)) == 14


def test_state_that_a_resume_points_to_is_never_pruned(tiny, tmp_path):
    out = tmp_path / "out"
    run_here(settings_for(*tiny, out, optim__max_steps=6))
    named = out / "lineage-0000" / "state" / "step-00000006"
    changes = {"checkpoint__every": 2, "checkpoint__keep": 1, "checkpoint__keep_best": 0}

    assert run_here(settings_for(*tiny, out, checkpoint__resume=named, **changes)) == 0

    assert sorted(path.name for path in named.parent.iterdir()) == ["step-00000006", "step-00000018"]


def counting(real, seen):
    def consumed(epoch, pack):
        seen.append((epoch, pack))
        real(epoch, pack)

    return consumed


@pytest.mark.parametrize(
    ("step", "consumed", "packs_per_step", "max_steps", "total"),
    [
        (0, 0, 1, 0, 18),
        (4, 4, 1, 0, 18),
        (4, 4, 2, 0, 11),
        (4, 8, 4, 0, 7),
        (9, 18, 2, 0, 9),
        (4, 4, 1, 10, 10),
        (4, 4, 1, 3, 4),
    ],
)
def test_t5_length_of_a_resumed_run_follows_from_the_packs_that_are_left(
    step, consumed, packs_per_step, max_steps, total
):
    found = total_steps_after(
        step, consumed=consumed, total_packs=18, packs_per_step=packs_per_step, max_steps=max_steps
    )

    assert found == total


def test_t5_sampled_digest_reads_a_bounded_part_and_sees_both_ends(tmp_path):
    file = tmp_path / "a.safetensors"
    file.write_bytes(bytes(8_000_000))
    base = sample_digest([file])
    for place in (0, 7_999_999):
        data = bytearray(8_000_000)
        data[place] = 1
        file.write_bytes(data)
        assert sample_digest([file]) != base
