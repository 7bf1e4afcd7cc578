"""`generate --sample-prompts`: prompts drawn from the target behind its own user-turn header."""

from __future__ import annotations

import argparse
import json

import pytest
import torch

from tests.support.tiny import END_ID, TEMPLATE, UNK_ID, tiny_target, tiny_tokenizer
from trainer.arguments import add_generate_arguments
from trainer.data import self_prompts
from trainer.data.completions import RowFile, companion_rows
from trainer.data.generate import run_generate
from trainer.data.pretrained import load_causal_lm
from trainer.data.self_prompts import DrawSettings, choose_prompts, find_user_header
from trainer.data.token_choice import Sampling
from trainer.errors import ConfigError, DataError

SYSTEM = "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nhelp<|im_end|>\n{% endif %}"
HEADER = "<|im_start|>user\n"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    # Likely to end a turn now and then, so that some draws are whole and some cut off.
    return tiny_target(tmp_path_factory.mktemp("self"), vocab_size=55, initializer_range=0.02)


def run(model_dir, folder, *extra: str) -> list[dict]:
    parser = argparse.ArgumentParser()
    add_generate_arguments(parser)
    flags = ["--target-model", str(model_dir), "--output", str(folder / "out.jsonl"), "--max-new-tokens", "4"]
    sampled = ["--sample-prompts", "40", "--prompt-max-tokens", "30", "--batch-size", "7", *extra]
    assert run_generate(parser.parse_args([*flags, *sampled])) == 0
    return [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]


def draws(folder) -> list[dict]:
    lines = (folder / "out.jsonl.prompts.jsonl").read_text().splitlines()
    return sorted((json.loads(line) for line in lines), key=lambda draw: draw["index"])


def with_template(template: str, **special):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    for name, value in special.items():
        setattr(tokenizer, name, value)
    return tokenizer


@pytest.mark.parametrize(
    ("template", "special", "text"),
    [
        (TEMPLATE, {}, HEADER),
        (SYSTEM + TEMPLATE, {}, HEADER),
        ("<s>" + TEMPLATE, {"bos_token": "<s>"}, "<s>" + HEADER),
        ("<s>" + SYSTEM + TEMPLATE, {"bos_token": "<s>"}, "<s>" + HEADER),
        (SYSTEM + TEMPLATE, {"bos_token": "<|im_start|>"}, HEADER),
        (
            "{% if messages|length > 1 %}{{ raise_exception('one message only') }}{% endif %}"
            + SYSTEM
            + TEMPLATE,
            {},
            "<|im_start|>system\nhelp<|im_end|>\n" + HEADER,
        ),
    ],
    ids=["plain", "default system", "bos", "bos and system", "bos is the turn's own", "system stays"],
)
def test_the_header_is_what_stands_before_a_users_text(template, special, text):
    assert find_user_header(with_template(template, **special)).text == text


def test_the_end_of_a_users_turn_is_read_off_the_template():
    template = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_start|>\n{% endfor %}"

    header = find_user_header(with_template(template))

    assert header.end_ids == {2}
    assert header.input_ids == [2]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("fixed", "does not show what the user says"),
        ("{{ messages[0]['content'] }}", "puts nothing in front"),
    ],
)
def test_a_template_without_a_header_is_refused(template, message):
    with pytest.raises(ConfigError, match=message):
        find_user_header(with_template(template))


def test_sampled_prompts_are_completed_and_marked(model_dir, tmp_path, capsys):
    rows = run(model_dir, tmp_path)

    made = draws(tmp_path)
    texts = {
        f"self-0-{draw['index']:07d}": draw["text"] for draw in made if draw["fault"] in (None, "cut_off")
    }
    summary = json.loads(capsys.readouterr().out)
    assert [draw["index"] for draw in made] == list(range(40))
    assert all(row["messages"][0]["content"] in texts[row["id"]] for row in rows)
    assert {row["domain"] for row in rows} == {"self"}
    assert all(row["messages"][0]["role"] == "user" and row["completion_ids"] for row in rows)
    assert len(rows) + sum(summary["skipped"].values()) == 40
    assert summary["skipped"]["cut_off"] > 0
    assert len(rows) > 3


def test_a_draw_continues_the_header_by_the_targets_own_probabilities(model_dir, tmp_path):
    run(model_dir, tmp_path)
    model = load_causal_lm(model_dir, device="cpu", dtype=torch.float32)
    tokenizer = tiny_tokenizer()
    header = find_user_header(tokenizer)
    settings = DrawSettings(count=40, seed=0, sampling=Sampling(temperature=1.0), max_tokens=30)

    for draw in draws(tmp_path)[:3]:
        ids, said = list(header.input_ids), []
        for uniform in self_prompts._uniforms(settings, draw["index"]):
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
            mass = torch.softmax(logits, -1).cumsum(-1)
            said.append(int((mass <= uniform * mass[-1]).sum()))
            ids.append(said[-1])
            if said[-1] == END_ID:
                break
        assert len(said) == draw["tokens"]
        assert tokenizer.decode([token for token in said if token != END_ID]) == draw["text"]


def test_other_batches_draw_the_same_and_other_seeds_do_not(model_dir, tmp_path):
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()

    first = run(model_dir, tmp_path / "a")
    again = run(model_dir, tmp_path / "b", "--batch-size", "16")
    other = run(model_dir, tmp_path / "c", "--seed", "1")

    assert sorted(first, key=lambda row: row["id"]) == sorted(again, key=lambda row: row["id"])
    assert {row["messages"][0]["content"] for row in first} != {
        row["messages"][0]["content"] for row in other
    }


def test_an_interrupted_drawing_goes_on_with_what_is_missing(model_dir, tmp_path, monkeypatch):
    (tmp_path / "whole").mkdir()
    whole = run(model_dir, tmp_path / "whole")
    real, calls = RowFile.write, []

    def interrupted(self, rows):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        real(self, rows)

    monkeypatch.setattr(RowFile, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(model_dir, tmp_path)
    monkeypatch.undo()
    kept = draws(tmp_path)

    rows = run(model_dir, tmp_path)

    assert 0 < len(kept) < 40
    assert [draw for draw in draws(tmp_path) if draw in kept] == kept
    assert sorted(rows, key=lambda row: row["id"]) == sorted(whole, key=lambda row: row["id"])


def test_more_prompts_continue_an_output(model_dir, tmp_path):
    few = run(model_dir, tmp_path, "--sample-prompts", "15")
    more = run(model_dir, tmp_path)

    assert more[: len(few)] == few
    assert len({row["id"] for row in more}) == len(more) > len(few)


def test_other_draws_on_the_same_output_are_refused(model_dir, tmp_path):
    run(model_dir, tmp_path, "--sample-prompts", "5")

    with pytest.raises(ConfigError, match=r"made with other settings \(sampled_prompts\)"):
        run(model_dir, tmp_path, "--seed", "3")


def test_draws_are_chosen_in_the_order_of_their_numbers(tmp_path):
    path = tmp_path / "draws.jsonl"
    drawn = [
        {"index": 3, "text": "b", "fault": None},
        {"index": 2, "text": " a ", "fault": None},
        {"index": 0, "text": "a", "fault": None},
        {"index": 1, "text": "", "fault": "empty"},
        {"index": 9, "text": "beyond", "fault": None},
    ]
    path.write_text("".join(json.dumps(draw) + "\n" for draw in drawn))
    settings = DrawSettings(count=9, seed=4, sampling=Sampling(temperature=1.0), max_tokens=5)

    prompts, dropped = choose_prompts(path, settings)

    assert [(prompt.id, prompt.messages[0]["content"]) for prompt in prompts] == [
        ("self-4-0000000", "a"),
        ("self-4-0000003", "b"),
    ]
    assert dropped == {"duplicate": 1, "empty": 1}


SEPARATORS = ["\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029"]


def choose_texts(tmp_path, *draws):
    path = tmp_path / "draws.jsonl"
    with companion_rows(path, key="index") as rows:
        rows.write(
            [
                {"index": index, "text": text, "tokens": 3, "fault": fault}
                for index, (text, fault) in enumerate(draws)
            ]
        )
    settings = DrawSettings(count=len(draws), seed=0, sampling=Sampling(temperature=1.0), max_tokens=8)
    prompts, dropped = choose_prompts(path, settings)
    return [prompt.messages[0]["content"] for prompt in prompts], dropped


@pytest.mark.parametrize("separator", SEPARATORS)
def test_a_text_may_hold_any_line_separator_of_unicode(tmp_path, separator):
    text = f"one{separator}two"
    assert choose_texts(tmp_path, (text, None)) == ([text], {})


def test_a_draw_that_was_cut_off_is_used_up_to_its_last_sentence(tmp_path):
    texts, dropped = choose_texts(
        tmp_path,
        ("How far is it? Say it in mi", "cut_off"),
        ("First line\nsecond li", "cut_off"),
        ('He said "no." Then he we', "cut_off"),
        ("version 3.14 has no sentence end", "cut_off"),
        ("How far is it? And so", "cut_off"),
    )

    assert texts == ["How far is it?", "First line", 'He said "no."']
    assert dropped == {"cut_off": 1, "duplicate": 1}


def test_a_draw_that_holds_a_control_token_is_no_prompt():
    completion = self_prompts.Completion([10, UNK_ID, 11, END_ID], is_cut_off=False)

    draw = self_prompts._draw(tiny_tokenizer(), self_prompts.Request(0, [2]), completion, frozenset({END_ID}))

    assert draw["fault"] == "special_token"


def test_no_usable_draw_is_an_error(model_dir, tmp_path):
    with pytest.raises(DataError, match=r"none of 2 sampled prompts is usable: dropped \{.*: [12]"):
        run(model_dir, tmp_path, "--sample-prompts", "2", "--prompt-max-tokens", "1")


def test_prompts_beyond_the_context_are_refused(model_dir, tmp_path):
    with pytest.raises(ConfigError, match="--prompt-max-tokens is beyond the target's context: 600"):
        run(model_dir, tmp_path, "--prompt-max-tokens", "600")
