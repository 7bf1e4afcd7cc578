"""`plan` as people use it: what it prints and writes, its exit codes, what it refuses before any work."""

from __future__ import annotations

import json

import pytest

from tests.support.planning import know_seconds
from tests.support.tiny import tiny_target, write_tiny_corpus
from tests.support.trainer_runs import settings_for
from trainer.__main__ import main


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan")
    tiny_target(folder), write_tiny_corpus(folder / "data")
    return folder


@pytest.fixture
def _known_seconds(monkeypatch):
    know_seconds(monkeypatch)


def plan(folder, capsys, *words, **changes):
    settings = settings_for(folder / "tiny-target-0", folder / "data", folder / "out", **changes)
    code = main(["plan", *[word for text in settings for word in ("--set", text)], *words])
    return code, capsys.readouterr()


@pytest.mark.usefixtures("root_logger", "_known_seconds")
def test_the_command_measures_and_recommends(folder, capsys, tmp_path):
    record_file = tmp_path / "plan.json"

    code, output = plan(folder, capsys, "--json", str(record_file), "--gpus", "4")

    record = json.loads(record_file.read_text())
    assert code == 0
    tokens = record["measured"]["tokens"]
    assert record["measured"]["target_tokens_per_s"] == tokens / 0.5
    assert record["measured"]["drafter_tokens_per_s"] == tokens / 2.0
    assert record["split"]["best"] == {"targets": 1, "drafters": 3, "tokens_per_s": 3 * tokens / 2.0}
    assert record["split"]["configured"] == {"targets": 1, "drafters": 1, "tokens_per_s": tokens / 2.0}
    assert record["measured"]["drafter_peak_bytes"] is None
    assert "split     of 4: 1 target + 3 drafter, " in output.out
    told = [line.split(" MainThread ")[1] for line in output.err.splitlines() if " INFO " in line]
    assert [line.partition(",")[0] for line in told] == [
        f"plan: reading the lengths of {folder / 'data'}",
        "plan: predicting memory by dry runs",
        f"loading the target onto cpu: {folder / 'tiny-target-0'}",
        "plan: measuring the target on cpu",
        "plan: measuring the drafter on cpu",
    ]
    assert [memory["name"] for memory in record["memory"]] == ["host", "disk of --output-dir"]
    assert record["packs"]["total_steps"] == 18


@pytest.mark.usefixtures("root_logger")
def test_on_the_cpu_there_is_nothing_to_divide(folder, capsys):
    code, output = plan(folder, capsys, "--no-measure")

    assert code == 0
    assert "split" not in output.out


@pytest.mark.usefixtures("root_logger")
def test_the_command_refuses_what_cannot_fit_with_exit_2(folder, capsys, tmp_path):
    record_file = tmp_path / "plan.json"

    code, output = plan(
        folder,
        capsys,
        *("--no-measure", "--gpu-memory-gib", "0.7", "--json", str(record_file)),
        devices__target_gpus="0",
        devices__drafter_gpus="1",
    )

    assert code == 2
    assert "of 716.8 MiB, too large by " in output.out
    assert "verdict   too large: target on cuda:0; drafter on cuda:1\n" in output.out
    assert "target on cuda:0 needs" in json.loads(record_file.read_text())["refusal"]
    assert not (folder / "out").exists()


@pytest.mark.usefixtures("root_logger")
def test_planning_for_absent_gpus_needs_no_measurement_and_says_so(folder, capsys):
    code, output = plan(
        folder,
        capsys,
        *("--no-measure", "--gpu-memory-gib", "80", "--gpus", "8"),
        devices__target_gpus="0,1,2,3,4",
        devices__drafter_gpus="5,6,7",
    )

    assert code == 0
    assert "not measured; by counted work" in output.out
    assert "drafter on cuda:6, cuda:7, each" in output.out
    assert "not judged, as the size is not known: host; disk of --output-dir" in output.out
    assert "sum over drafters" in output.out


@pytest.mark.usefixtures("root_logger")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--gpu-memory-gib", "nan"), "--gpu-memory-gib must be above 0"),
        (("--gpu-memory-gib", "inf"), "--gpu-memory-gib must be above 0"),
        (("--gpu-memory-gib", "0"), "--gpu-memory-gib must be above 0"),
        (("--gpus", "100000000"), "--gpus must be at most 4096"),
        (("--json", "nowhere/plan.json"), "--json lies in a folder that does not exist"),
        (("--json", "."), "--json names a folder"),
        (("--json", "mine.json"), "--json would replace a file that this command did not write"),
        (("--set", "loss.max_anchors=100000000000"), "max_anchors must be at most 65536"),
        (("--set", "optim.epochs=100000000000000000000"), "epochs must be at most 100000"),
        (("--set", "optim.max_steps=100000000000000000000"), "max_steps must be at most 1000000000"),
        (("--set", "data.max_seq_len=100000000000000000000"), "max_seq_len must be at most"),
    ],
)
def test_flags_that_cannot_work_are_refused_before_anything_is_planned(
    folder, capsys, tmp_path, monkeypatch, words, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.json").write_text("{}")
    monkeypatch.setattr("trainer.plan.read_facts", lambda *_, **__: pytest.fail("planned all the same"))

    code, output = plan(folder, capsys, *words)

    assert (code, output.err.count("\n")) == (2, 1)
    assert message in output.err
    assert (tmp_path / "mine.json").read_text() == "{}"
