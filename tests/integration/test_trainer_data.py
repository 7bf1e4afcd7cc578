"""From chats to a trained drafter by the real commands, with bad rows on the way (row T7)."""

from __future__ import annotations

import json

import pytest

from tests.support.tiny import tiny_samples, tiny_target
from tests.support.trainer_runs import run_here, settings_for
from trainer.__main__ import main


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_target(tmp_path_factory.mktemp("data-runs"))


def test_t7_training_goes_on_beside_bad_rows_and_says_how_many(model, tmp_path, caplog):
    data = tmp_path / "data"
    data.mkdir()
    lines = [json.dumps(row) for row in tiny_samples(12)]
    bad = ["{oops", "null", json.dumps({"input_ids": [5, 96_000, 7], "prompt_len": 1}), "{}"]
    (data / "a.jsonl").write_text("\n".join([*lines[:6], *bad[:2], *lines[6:], *bad[2:]]) + "\n")

    with caplog.at_level("INFO"):
        code = run_here(settings_for(model, data, tmp_path / "out"))

    assert code == 0
    assert (
        "12 of 16 rows kept, 0 truncated, skipped: bad_json 1, missing_input_ids 1, not_an_object 1, "
        "token_out_of_vocabulary 1"
    ) in caplog.text


@pytest.mark.usefixtures("root_logger")
def test_t7_chats_of_several_shapes_are_prepared_and_trained_on(model, tmp_path, capsys):
    chats = tmp_path / "chats"
    chats.mkdir()
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"what is {n}?"},
                {"role": "assistant", "content": f"it is {n}."},
            ]
        }
        for n in range(8)
    ]
    shared = [
        {"conversations": [{"from": "human", "value": f"and {n}?"}, {"from": "gpt", "value": f"also {n}."}]}
        for n in range(8)
    ]
    (chats / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "{oops\n")
    (chats / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in shared) + "[]\n")
    places = ["--input", str(chats), "--output", str(tmp_path / "data")]

    assert main(["prepare", "--target-model", str(model), *places]) == 0

    report = json.loads(capsys.readouterr().out)
    assert (report["rows"], report["kept"]) == (18, 16)
    assert report["dropped"] == {"bad_json": 1, "not_an_object": 1}
    assert run_here(settings_for(model, tmp_path / "data", tmp_path / "out")) == 0
    status = json.loads((tmp_path / "out" / "run" / "status.json").read_text())
    assert status["phase"] == "done"


@pytest.mark.usefixtures("root_logger")
def test_t7_nothing_but_bad_chats_ends_with_exit_3_and_the_reasons(model, tmp_path, capsys):
    (tmp_path / "chats.jsonl").write_text('{oops\n{"messages": []}\n')
    places = ["--input", str(tmp_path / "chats.jsonl"), "--output", str(tmp_path / "data")]

    assert main(["prepare", "--target-model", str(model), *places]) == 3

    error = capsys.readouterr().err
    assert "no usable chat for training" in error
    assert "bad_json 1, no_messages 1" in error
    assert "chats.jsonl:1 bad_json" in error
