"""Whole runs with each objective and drafter option, as a user would ask for them."""

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.support.tiny import tiny_target, write_tiny_corpus
from tests.support.trainer_runs import metrics_lines, run_here, settings_for
from trainer.drafter import worker
from trainer.drafter.exported import load_drafter
from trainer.flags import resolve
from trainer.target.capture import Target
from trainer.train import Trainer


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return tiny_target(folder), write_tiny_corpus(folder / "data")


@pytest.fixture
def packs(monkeypatch):
    """Every pack that a drafter worker trained on."""
    seen, real = [], worker.microbatch_sums

    def sums(drafter, ends, pack, *rest, **options):
        seen.append(pack)
        return real(drafter, ends, pack, *rest, **options)

    monkeypatch.setattr(worker, "microbatch_sums", sums)
    return seen


LONGER = {"queue__ordered": True, "optim__epochs": 3, "optim__lr": 3e-3}


@pytest.mark.parametrize(
    "changes",
    [
        {"loss__soft_label_weight": 1.0},
        {"loss__soft_label_weight": 0.5, "target__cache_features_bytes": 1 << 24, "queue__ordered": False},
        {"loss__weighting": '"dpace"'},
        {"loss__soft_label_weight": 0.5, "loss__weighting": '"dpace"', "optim__grad_accum": 2},
        {
            "loss__soft_label_weight": 1.0,
            "loss__weighting": '"dpace"',
            "queue__ordered": False,
            "devices__target_gpus": "cpu,cpu",
            "devices__drafter_gpus": "cpu,cpu",
        },
        {"drafter__split_fc_layers": True},
        {"drafter__sliding_window": 8, "optim__schedule": '"wsd"'},
    ],
    ids=["kl", "mixed-cached", "dpace", "mixed-dpace", "kl-dpace-two-drafters", "split-fc", "sliding-wsd"],
)
def test_run_learns_with_every_objective(tiny, tmp_path, changes):
    assert run_here(settings_for(*tiny, tmp_path / "out", **(LONGER | changes))) == 0

    lines = metrics_lines(tmp_path / "out" / "run")
    losses = [line["train"]["loss"] for line in lines]
    assert lines[-1]["train"]["skipped"] == 0
    assert sum(losses[-3:]) < sum(losses[:3])


def test_soft_labels_ship_the_last_hidden_state_and_count_its_bytes(tiny, tmp_path, packs, caplog):
    caplog.set_level("INFO")
    words = settings_for(*tiny, tmp_path / "out")

    assert Trainer(resolve({"--use-soft-labels": True}, overrides=words, environ={})).train() == 0

    assert "objective: KL against the target, decay 7" in caplog.text
    assert packs
    for pack in packs:
        tokens, layers, width = pack.features_TLD.shape
        assert pack.last_hidden_TD.shape == (tokens, width)
        assert pack.nbytes == tokens * (layers + 1) * width * 4


def test_soft_labels_need_all_layers_of_the_target_and_never_its_head(tiny, tmp_path, packs, monkeypatch):
    ran, heads, real = [], [], Target.hidden_states

    def hidden_states(self, *arguments, **options):
        last = self._body.layers[-1].register_forward_hook(lambda *_: ran.append("last layer"))
        head = self._model.get_output_embeddings().register_forward_hook(lambda *_: heads.append("head"))
        try:
            return real(self, *arguments, **options)
        finally:
            last.remove()
            head.remove()

    monkeypatch.setattr(Target, "hidden_states", hidden_states)

    assert run_here(settings_for(*tiny, tmp_path / "hard")) == 0
    assert (ran, heads) == ([], [])
    assert all(pack.last_hidden_TD is None for pack in packs)

    assert run_here(settings_for(*tiny, tmp_path / "soft", loss__soft_label_weight=0.5)) == 0
    assert len(ran) == 18
    assert heads == []


def test_golden_22_a_run_with_soft_label_weight_0_is_the_plain_run(tiny, tmp_path):
    tensors = []
    for name, flags in (("plain", {}), ("zero", {"--soft-label-weight": 0.0})):
        words = settings_for(*tiny, tmp_path / name, queue__ordered=True)
        assert Trainer(resolve(flags, overrides=words, environ={})).train() == 0
        state = tmp_path / name / "lineage-0000" / "state" / "step-00000018"
        tensors.append(load_file(state / "tensors.safetensors"))

    assert tensors[0].keys() == tensors[1].keys()
    assert all(torch.equal(value, tensors[1][name]) for name, value in tensors[0].items())


def test_split_fc_from_the_environment_learns_what_the_fused_product_learns(tiny, tmp_path):
    exports = []
    for name, value in (("fused", "0"), ("split", "1")):
        words = settings_for(*tiny, tmp_path / name, queue__ordered=True)
        resolved = resolve({}, overrides=words, environ={"DFLASH_SPLIT_FC_LAYERS": value})
        assert resolved.config.drafter.split_fc_layers is (value == "1")
        assert Trainer(resolved).train() == 0
        exports.append(
            load_drafter(tmp_path / name / "lineage-0000" / "export" / "step-00000018", dtype=torch.float32)
        )

    fused, split = (drafter.state_dict() for drafter in exports)
    assert fused.keys() == split.keys()
    for name, value in fused.items():
        torch.testing.assert_close(split[name], value, atol=2e-3, rtol=1e-2, msg=name)


def test_named_sliding_layers_are_exported(tiny, tmp_path):
    changes = {"drafter__sliding_window": 8, "drafter__sliding_layers": [1], "optim__max_steps": 1}

    assert run_here(settings_for(*tiny, tmp_path / "out", **changes)) == 0

    export = tmp_path / "out" / "lineage-0000" / "export" / "step-00000001"
    config = json.loads((export / "config.json").read_text())
    assert config["layer_types"] == ["full_attention", "sliding_attention"]
    assert (config["sliding_window"], config["use_sliding_window"]) == (8, True)
    assert config["max_window_layers"] == 2
    assert load_drafter(export).config.layer_types == ("full_attention", "sliding_attention")
