"""`prepare`: chats become tokenized rows whose mask is exactly what the target would say."""

from __future__ import annotations

import argparse
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.tiny import END_ID, tiny_target, tiny_tokenizer
from trainer.arguments import add_prepare_arguments
from trainer.data.chat import encode_chat, encode_prompt
from trainer.data.corpus import Corpus
from trainer.data.prepare import DROP_REASONS, run_prepare
from trainer.data.prompts import read_prompts
from trainer.errors import ConfigError, DataError

GOOD = {
    "id": "one",
    "domain": "qa",
    "messages": [{"role": "user", "content": "hello there"}, {"role": "assistant", "content": "good day"}],
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return tiny_target(tmp_path_factory.mktemp("prepare"))


def prepare(model_dir, folder, rows, *extra: str) -> dict:
    source = folder / "chats.jsonl"
    source.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    parser = argparse.ArgumentParser()
    add_prepare_arguments(parser)
    arguments = [
        "--target-model",
        str(model_dir),
        "--input",
        str(source),
        "--output",
        str(folder / "out"),
        *extra,
    ]
    assert run_prepare(parser.parse_args(arguments)) == 0
    return json.loads((folder / "out" / "report.json").read_text())


def chat(question: str, answer: str, **fields: object) -> dict:
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": turns, **fields}


def spoken(tokenizer, encoded) -> str:
    pairs = zip(encoded.input_ids, encoded.loss_mask, strict=True)
    return tokenizer.decode([token for token, flag in pairs if flag])


def test_mask_covers_the_answer_and_its_end_of_turn_but_not_the_line_break_behind_it():
    tokenizer = tiny_tokenizer()

    encoded = encode_chat(tokenizer, GOOD["messages"], stop_ids={END_ID})

    assert spoken(tokenizer, encoded) == "good day<|im_end|>"
    assert tokenizer.decode(encoded.input_ids).endswith("good day<|im_end|>\n")
    assert encoded.loss_mask[-1] == 0


def test_what_comes_before_the_mask_is_exactly_the_prompt_of_inference():
    tokenizer = tiny_tokenizer()

    encoded = encode_chat(tokenizer, GOOD["messages"], stop_ids={END_ID})

    first = encoded.loss_mask.index(1)
    assert encoded.input_ids[:first] == encode_prompt(tokenizer, GOOD["messages"][:1])


def test_every_assistant_turn_is_supervised_and_no_other():
    tokenizer = tiny_tokenizer()
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
        {"role": "assistant", "content": "four"},
    ]

    encoded = encode_chat(tokenizer, messages, stop_ids={END_ID})

    assert spoken(tokenizer, encoded) == "two<|im_end|>four<|im_end|>"
    assert encoded.unsupervised_turns == 0


def test_a_completion_cut_off_by_length_does_not_teach_the_end_of_turn():
    tokenizer = tiny_tokenizer()

    encoded = encode_chat(tokenizer, GOOD["messages"], stop_ids={END_ID}, is_cut_off=True)

    assert spoken(tokenizer, encoded) == "good day"


def test_a_turn_that_the_template_rewrites_later_is_not_supervised():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
        "{% if m['role'] == 'assistant' and not loop.last %}short{% else %}{{ m['content'] }}{% endif %}"
        "<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    messages = [
        *GOOD["messages"],
        {"role": "user", "content": "more"},
        {"role": "assistant", "content": "yes"},
    ]

    encoded = encode_chat(tokenizer, messages, stop_ids={END_ID})

    assert spoken(tokenizer, encoded) == "yes<|im_end|>"
    assert encoded.unsupervised_turns == 1


def test_output_is_a_corpus_that_training_can_read(model_dir, tmp_path):
    rows = [chat(f"question {n}", f"answer number {n}", id=f"r{n}", domain="ab"[n % 2]) for n in range(6)]

    report = prepare(model_dir, tmp_path, rows)

    corpus = Corpus.open(tmp_path / "out", max_seq_len=512, vocab_size=97)
    tokenizer = tiny_tokenizer()
    assert [corpus[i].domain for i in range(6)] == ["a", "b"] * 3
    assert tokenizer.decode(corpus[4].input_ids_T[corpus[4].loss_mask_T]) == "answer number 4<|im_end|>"
    assert (report["rows"], report["train"], report["held_out"]) == (6, 6, 0)
    assert report["domains"] == {"a": 3, "b": 3}
    assert report["supervised_tokens"] == corpus.report.supervised_tokens
    assert report["dropped"] == {}


def test_every_bad_row_is_dropped_with_its_reason_and_the_good_one_stays(model_dir, tmp_path):
    bad = {
        "bad_json": "{oops",
        "no_messages": {"id": 1},
        "bad_message": {"messages": [{"role": "narrator", "content": "x"}]},
        "no_assistant_turn": {"messages": [{"role": "user", "content": "hi"}]},
        "empty_completion": chat("hi", "  "),
        "duplicate": GOOD,
        "no_anchor": chat("hi", "a", finish_reason="length"),
    }

    report = prepare(model_dir, tmp_path, [GOOD, *bad.values()])

    assert {reason: entry["count"] for reason, entry in report["dropped"].items()} == dict.fromkeys(bad, 1)
    assert (report["rows"], report["train"]) == (len(bad) + 1, 1)
    for reason, entry in report["dropped"].items():
        assert entry["meaning"] == DROP_REASONS[reason]
        assert entry["examples"][0]["row"] == 2 + list(bad).index(reason)


@pytest.mark.parametrize("content", [None, 3, ["text"], {"a": 1}], ids=["null", "number", "list", "object"])
def test_a_message_whose_content_is_no_text_is_dropped(model_dir, tmp_path, content):
    row = {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "x"}]}

    report = prepare(model_dir, tmp_path, [GOOD, row, 7, [], None])

    assert report["dropped"]["bad_message"]["count"] == 1
    assert report["dropped"]["bad_json"]["count"] == 3


def test_a_prompt_longer_than_the_limit_leaves_nothing_to_learn(model_dir, tmp_path):
    report = prepare(model_dir, tmp_path, [GOOD, chat("x" * 80, "never seen")], "--max-seq-len", "60")

    assert report["dropped"]["no_supervised_token"]["count"] == 1
    assert report["train"] == 1


def test_a_long_answer_is_cut_and_counted(model_dir, tmp_path):
    report = prepare(model_dir, tmp_path, [chat("hi", "y" * 200)], "--max-seq-len", "64")

    assert report["truncated"] == 1
    assert pq.read_table(tmp_path / "out" / "train.parquet")["input_ids"].to_pylist()[0][-1] == (
        tiny_tokenizer().convert_tokens_to_ids("y")
    )


def test_held_out_rows_stand_apart_and_do_not_depend_on_the_answers(model_dir, tmp_path):
    rows = [chat(f"question {n}", "yes it is", id=f"r{n}") for n in range(60)]
    other = [chat(f"question {n}", "no it is not", id=f"r{n}") for n in range(60)]
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()

    report = prepare(model_dir, tmp_path / "a", rows, "--held-out-ratio", "0.3")
    prepare(model_dir, tmp_path / "b", other, "--held-out-ratio", "0.3")

    held = [
        prompt.id for prompt in read_prompts(tmp_path / "a" / "out" / "held_out" / "prompts.jsonl").prompts
    ]
    again = [
        prompt.id for prompt in read_prompts(tmp_path / "b" / "out" / "held_out" / "prompts.jsonl").prompts
    ]
    trained = pq.read_table(tmp_path / "a" / "out" / "train.parquet")["id"].to_pylist()
    assert held == again
    assert 0 < len(held) < 40
    assert sorted(held + trained) == sorted(f"r{n}" for n in range(60))
    assert report["held_out"] == len(held)
    assert len(Corpus.open(tmp_path / "a" / "out", max_seq_len=512, vocab_size=97)) == len(trained)


def test_parquet_chats_are_read_too(model_dir, tmp_path):
    pq.write_table(pa.Table.from_pylist([GOOD]), tmp_path / "chats.parquet")
    parser = argparse.ArgumentParser()
    add_prepare_arguments(parser)

    run_prepare(
        parser.parse_args(
            [
                "--target-model",
                str(model_dir),
                "--input",
                str(tmp_path / "chats.parquet"),
                "--output",
                str(tmp_path / "o"),
            ]
        )
    )

    assert pq.read_table(tmp_path / "o" / "train.parquet").num_rows == 1


def test_nothing_usable_is_an_error_and_leaves_no_half_file(model_dir, tmp_path):
    with pytest.raises(DataError, match=r"no usable chat for training.*no_messages"):
        prepare(model_dir, tmp_path, [{"text": "x"}])

    assert list((tmp_path / "out").iterdir()) == []


def test_a_second_run_replaces_its_own_files(model_dir, tmp_path):
    prepare(model_dir, tmp_path, [GOOD, chat("b", "cc")])
    report = prepare(model_dir, tmp_path, [GOOD])

    assert report["train"] == 1
    assert pq.read_table(tmp_path / "out" / "train.parquet").num_rows == 1


def test_an_output_with_data_of_someone_else_is_refused(model_dir, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "other.jsonl").write_text("{}\n")

    with pytest.raises(ConfigError, match=r"would read too: .*other\.jsonl"):
        prepare(model_dir, tmp_path, [GOOD])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--max-seq-len", "2"), "--max-seq-len must be at least 3: 2"),
        (("--held-out-ratio", "1"), "--held-out-ratio must be from 0 to below 1: 1.0"),
        (("--held-out-ratio", "-0.1"), "--held-out-ratio must be"),
        (("--held-out-ratio", "nan"), "--held-out-ratio must be"),
    ],
)
def test_flags_that_cannot_work_are_refused(model_dir, tmp_path, flags, message):
    with pytest.raises(ConfigError, match=message):
        prepare(model_dir, tmp_path, [GOOD], *flags)


def test_a_target_without_a_tokenizer_or_template_is_refused(tmp_path):
    bare = tiny_target(tmp_path, with_tokenizer=False)
    with pytest.raises(ConfigError, match="no tokenizer files"):
        prepare(bare, tmp_path, [GOOD])

    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(bare)
    with pytest.raises(ConfigError, match="no chat template"):
        prepare(bare, tmp_path, [GOOD])


def test_a_missing_input_is_refused(model_dir, tmp_path):
    parser = argparse.ArgumentParser()
    add_prepare_arguments(parser)
    arguments = [
        "--target-model",
        str(model_dir),
        "--input",
        str(tmp_path / "none.jsonl"),
        "--output",
        str(tmp_path / "o"),
    ]

    with pytest.raises(DataError, match=r"cannot read: .*none\.jsonl: No such file"):
        run_prepare(parser.parse_args(arguments))


def test_recorded_completion_tokens_are_used_as_they_are(model_dir, tmp_path):
    tokenizer = tiny_tokenizer()
    ids = [*tokenizer("good day")["input_ids"], END_ID]

    report = prepare(model_dir, tmp_path, [GOOD | {"completion_ids": ids, "finish_reason": "stop"}])

    corpus = Corpus.open(tmp_path / "out", max_seq_len=512, vocab_size=97)
    prompt = encode_prompt(tokenizer, GOOD["messages"][:1])
    assert corpus[0].input_ids_T.tolist() == prompt + ids
    assert corpus[0].loss_mask_T.tolist() == [False] * len(prompt) + [True] * len(ids)
    assert report["from_completion_ids"] == 1


@pytest.mark.parametrize(
    "ids", [[5, 6, 7], "text", [], [True], [-1], [1.5], None, [2**40]], ids=lambda ids: str(ids)[:10]
)
def test_recorded_tokens_that_do_not_spell_the_text_are_replaced_by_the_text(model_dir, tmp_path, ids):
    report = prepare(model_dir, tmp_path, [GOOD | {"completion_ids": ids}])

    assert report["from_completion_ids"] == 0
    assert report["train"] == 1
