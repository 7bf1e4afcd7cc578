"""`generate`: batched greedy completions equal one-by-one decoding, and an interrupted file goes on."""

from __future__ import annotations

import argparse
import errno
import fcntl
import json
import logging
import os
import pathlib
import shutil

import pytest
import torch

from benchmarks import generation
from tests.support.tiny import END_ID, TEMPLATE, VOCAB, tiny_target
from trainer.arguments import add_generate_arguments, add_prepare_arguments
from trainer.data import target_decoding
from trainer.data.chat import encode_prompt
from trainer.data.completions import RowFile, locked_output
from trainer.data.corpus import Corpus
from trainer.data.generate import run_generate
from trainer.data.plain_decoding import complete_batch
from trainer.data.prepare import run_prepare
from trainer.data.pretrained import get_tokenizer, load_causal_lm
from trainer.errors import ConfigError, DataError

PROMPTS = ["hi", "what is this?", "count to three", "a", "say something about the sea", "why?", "ok"]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return tiny_target(tmp_path_factory.mktemp("generate"))


@pytest.fixture(scope="module")
def model(model_dir):
    return load_causal_lm(model_dir, device="cpu", dtype=torch.float32)


def write_prompts(folder, rows=None):
    rows = rows or [{"id": f"p{n}", "domain": "ab"[n % 2], "prompt": text} for n, text in enumerate(PROMPTS)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def run(model_dir, folder, *extra: str) -> list[dict]:
    parser = argparse.ArgumentParser()
    add_generate_arguments(parser)
    files = ["--prompts", str(folder / "prompts.jsonl"), "--output", str(folder / "out.jsonl")]
    flags = ["--target-model", str(model_dir), *files, "--max-new-tokens", "6", "--batch-size", "3", *extra]
    assert run_generate(parser.parse_args(flags)) == 0
    return [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]


def greedy_without_cache(model, prompt, max_new_tokens, stop_ids):
    ids = list(prompt)
    for _ in range(max_new_tokens):
        with torch.no_grad():
            ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        if ids[-1] in stop_ids:
            break
    return ids[len(prompt) :]


def test_a_batch_of_unequal_prompts_equals_decoding_each_alone(model):
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(4, VOCAB, (n,), generator=generator).tolist() for n in (1, 9, 4, 17, 5)]
    alone = [greedy_without_cache(model, prompt, 12, frozenset()) for prompt in prompts]
    # Tokens that these very completions pass through early, so that sequences end at different times.
    stops = frozenset({alone[1][2], alone[3][5]})
    expected = [greedy_without_cache(model, prompt, 12, stops) for prompt in prompts]

    completions = complete_batch(model, prompts, max_new_tokens=12, stop_ids=stops)

    assert [completion.token_ids for completion in completions] == expected
    assert len({len(ids) for ids in expected}) > 1
    assert [c.is_cut_off for c in completions] == [ids[-1] not in stops for ids in expected]


def test_rows_carry_identity_domain_answer_and_its_tokens(model_dir, tmp_path):
    write_prompts(tmp_path)

    rows = run(model_dir, tmp_path)

    assert sorted(row["id"] for row in rows) == [f"p{n}" for n in range(len(PROMPTS))]
    for row in rows:
        assert row["messages"][0] == {"role": "user", "content": PROMPTS[int(row["id"][1:])]}
        assert row["messages"][-1]["role"] == "assistant"
        assert row["domain"] == "ab"[int(row["id"][1:]) % 2]
        assert 1 <= len(row["completion_ids"]) <= 6
        assert (row["finish_reason"] == "stop") == (row["completion_ids"][-1] == END_ID)


def test_batch_size_does_not_change_the_completions(model_dir, tmp_path):
    write_prompts(tmp_path)
    (tmp_path / "b").mkdir()
    write_prompts(tmp_path / "b")

    three = run(model_dir, tmp_path)
    one = run(model_dir, tmp_path / "b", "--batch-size", "1")

    assert {r["id"]: r["completion_ids"] for r in three} == {r["id"]: r["completion_ids"] for r in one}


def test_an_interrupted_run_goes_on_without_loss_or_duplicates(model_dir, tmp_path, monkeypatch):
    write_prompts(tmp_path)
    real = RowFile.write
    calls = []

    def interrupted(self, rows):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        real(self, rows)

    monkeypatch.setattr(RowFile, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(model_dir, tmp_path)
    monkeypatch.undo()
    with (tmp_path / "out.jsonl").open("a") as stream:
        stream.write('{"id": "p6", "mess')

    rows = run(model_dir, tmp_path)

    assert sorted(row["id"] for row in rows) == [f"p{n}" for n in range(len(PROMPTS))]


def test_a_finished_run_is_not_repeated_and_needs_no_weights(model_dir, tmp_path, monkeypatch):
    write_prompts(tmp_path)
    rows = run(model_dir, tmp_path)
    monkeypatch.setattr(target_decoding, "load_causal_lm", None)

    assert run(model_dir, tmp_path) == rows


def test_other_settings_on_the_same_output_are_refused(model_dir, tmp_path):
    write_prompts(tmp_path)
    run(model_dir, tmp_path)

    with pytest.raises(ConfigError, match=r"made with other settings \(max_new_tokens\)"):
        run(model_dir, tmp_path, "--max-new-tokens", "7")


def test_other_settings_are_taken_where_a_killed_start_left_no_row(model_dir, tmp_path):
    write_prompts(tmp_path)
    rows = run(model_dir, tmp_path, "--max-new-tokens", "7")
    (tmp_path / "out.jsonl").write_text("")
    (tmp_path / "out.jsonl.settings.json").write_text('{"max_new_tokens": 3}')

    assert run(model_dir, tmp_path, "--max-new-tokens", "7") == rows
    assert json.loads((tmp_path / "out.jsonl.settings.json").read_text())["max_new_tokens"] == 7


def test_an_output_of_unknown_origin_is_refused(model_dir, tmp_path):
    write_prompts(tmp_path)
    (tmp_path / "out.jsonl").write_text("{}\n")

    with pytest.raises(ConfigError, match=r"exists and out\.jsonl\.settings\.json does not"):
        run(model_dir, tmp_path)
    assert (tmp_path / "out.jsonl").read_text() == "{}\n"


def test_two_writers_of_one_output_are_refused(model_dir, tmp_path):
    write_prompts(tmp_path)
    with (tmp_path / "out.jsonl").open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)

        with pytest.raises(ConfigError, match="another generate writes to this output"):
            run(model_dir, tmp_path)


@pytest.mark.parametrize("thinking", ["on", "off"])
def test_thinking_switches_the_template_and_is_recorded(model_dir, tmp_path, thinking):
    switching = tmp_path / "target"
    shutil.copytree(model_dir, switching)
    template = "{% if enable_thinking %}t{% else %}n{% endif %}" + TEMPLATE
    (switching / "chat_template.jinja").write_text(template)
    write_prompts(tmp_path, [{"id": "a", "prompt": "hi"}])

    rows = run(switching, tmp_path, "--thinking", thinking)

    prompt = encode_prompt(get_tokenizer(switching), rows[0]["messages"][:-1], thinking=thinking == "on")
    model = load_causal_lm(switching, device="cpu", dtype=torch.float32)
    assert rows[0]["completion_ids"] == greedy_without_cache(model, prompt, 6, frozenset({END_ID}))
    assert rows[0]["thinking"] == (thinking == "on")
    settings = json.loads((tmp_path / "out.jsonl.settings.json").read_text())
    assert settings["thinking"] == thinking


def test_bad_prompt_rows_are_skipped_and_counted(model_dir, tmp_path, capsys):
    good = {"id": "g", "prompt": "hi"}
    bad = [{"id": "n"}, {"prompt": "  "}, good, {"messages": [{"role": "assistant", "content": "x"}]}, 3]
    write_prompts(tmp_path, [good, *bad])

    rows = run(model_dir, tmp_path)

    summary = json.loads(capsys.readouterr().out)
    assert [row["id"] for row in rows] == ["g"]
    assert summary["skipped"] == {"no_prompt": 2, "duplicate_id": 1, "bad_role_order": 1, "not_an_object": 1}
    assert summary["written"] == 1


def test_prompts_beyond_the_context_of_the_target_are_left_out(model_dir, tmp_path, capsys):
    write_prompts(tmp_path, [{"id": "long", "prompt": "x" * 600}, {"id": "short", "prompt": "x"}])

    rows = run(model_dir, tmp_path)

    assert [row["id"] for row in rows] == ["short"]
    assert json.loads(capsys.readouterr().out)["too_long"] == 1


def test_only_too_long_prompts_are_an_error(model_dir, tmp_path):
    write_prompts(tmp_path, [{"id": "long", "prompt": "x" * 600}])

    with pytest.raises(DataError, match="every prompt is longer than the target allows"):
        run(model_dir, tmp_path)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--max-new-tokens", "0"), "--max-new-tokens must be at least 1: 0"),
        (("--batch-size", "0"), "--batch-size must be at least 1: 0"),
        (("--temperature", "0"), "--temperature must be above 0: 0.0"),
        (("--top-p", "1.5"), "--top-p must be above 0 and at most 1: 1.5"),
        (("--thinking", "on"), "--thinking on has no effect: the target's chat template has no enable_thin"),
        (("--sample-prompts", "4"), "prompts come from one place: give --prompts FILE or --sample-prompts N"),
        (("--device", "warp"), "--device is unknown: warp"),
        (("--device", "cuda:99"), "--device is not there: cuda:99"),
    ],
)
def test_flags_that_cannot_work_are_refused(model_dir, tmp_path, flags, message):
    write_prompts(tmp_path)

    with pytest.raises(ConfigError, match=message):
        run(model_dir, tmp_path, *flags)


def test_prepare_reads_what_generate_wrote_token_by_token(model_dir, tmp_path):
    write_prompts(tmp_path)
    rows = [row for row in run(model_dir, tmp_path) if row["messages"][-1]["content"].strip()]
    parser = argparse.ArgumentParser()
    add_prepare_arguments(parser)
    flags = ["--input", str(tmp_path / "out.jsonl"), "--output", str(tmp_path / "data")]

    run_prepare(parser.parse_args(["--target-model", str(model_dir), *flags]))

    corpus = Corpus.open(tmp_path / "data", max_seq_len=512, vocab_size=VOCAB)
    spoken = [sample.input_ids_T[sample.loss_mask_T].tolist() for sample in corpus]
    assert spoken == [row["completion_ids"] for row in rows if len(row["completion_ids"]) > 1]


def test_output_that_is_no_file_is_one_clear_error(model_dir, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "hello"}\n')
    parser = argparse.ArgumentParser()
    add_generate_arguments(parser)
    words = ["--target-model", str(model_dir), "--prompts", str(prompts), "--output", str(tmp_path)]
    words += ["--max-new-tokens", "8"]

    with pytest.raises(ConfigError, match=r"--output cannot be written.*Is a directory"):
        run_generate(parser.parse_args(words))


def test_the_benchmark_compares_both_ways(model_dir, tmp_path, capsys):
    write_prompts(tmp_path)
    files = ["--target-model", str(model_dir), "--prompts", str(tmp_path / "prompts.jsonl")]

    generation.main([*files, "--count", "9", "--max-new-tokens", "5", "--batch-size", "4"])

    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("9 prompts of ")
    assert lines[1].startswith("plain batches of 4: ")
    assert lines[2].startswith("4 slots: ")
    assert lines[3].endswith("same tokens 100.0 %")


def test_a_completion_that_fills_the_context_is_refused_by_its_flag_and_leaves_nothing(model_dir, tmp_path):
    write_prompts(tmp_path, [{"id": "one", "prompt": "x"}])

    with pytest.raises(ConfigError, match="--max-new-tokens leaves no room for a prompt: 100000"):
        run(model_dir, tmp_path, "--max-new-tokens", "100000")

    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["prompts.jsonl"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES])
def test_a_disk_that_refuses_rows_or_settings_ends_in_one_line_and_leaves_nothing(
    tmp_path, monkeypatch, code
):
    def refuse(*_args, **_words):
        raise OSError(code, os.strerror(code))

    output = tmp_path / "chats.jsonl"
    for place in ((os, "fsync"), (pathlib.Path, "write_text")):
        with monkeypatch.context() as patched:
            patched.setattr(*place, refuse)
            with (
                pytest.raises(
                    DataError, match=rf"cannot write to --output: .*{os.strerror(code)}; free space"
                ),
                locked_output(output, {"a": 1}),
            ):
                pass
        assert list(tmp_path.iterdir()) == []


def test_prompts_of_others_beside_a_new_output_are_not_touched(tmp_path):
    (tmp_path / "chats.jsonl.prompts.jsonl").write_text('{"prompt": "mine"}')

    with (
        pytest.raises(ConfigError, match=r"prompts\.jsonl exists and chats\.jsonl\.settings\.json does not"),
        locked_output(tmp_path / "chats.jsonl", {"sampled_prompts": {}}),
    ):
        pass

    assert (tmp_path / "chats.jsonl.prompts.jsonl").read_text() == '{"prompt": "mine"}'


def test_without_a_batch_size_the_log_says_that_the_device_decides(model_dir, tmp_path, caplog):
    write_prompts(tmp_path)
    files = ["--prompts", str(tmp_path / "prompts.jsonl"), "--output", str(tmp_path / "out.jsonl")]
    parser = argparse.ArgumentParser()
    add_generate_arguments(parser)

    with caplog.at_level(logging.INFO):
        run_generate(parser.parse_args(["--target-model", str(model_dir), *files, "--max-new-tokens", "2"]))

    assert "generate: 7 prompts, as many as suit the device at a time, on cpu" in caplog.text
