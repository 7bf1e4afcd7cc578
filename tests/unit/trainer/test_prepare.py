"""`prepare`: chats become tokenized rows whose mask is exactly what the target would say."""

from __future__ import annotations

import argparse
import json
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerFast

from tests.support.tiny import END_ID, tiny_target, tiny_tokenizer
from trainer.arguments import add_prepare_arguments
from trainer.data import prepare as prepare_module
from trainer.data.chat import ChatEncoder, ChatSample, Turn, encode_prompt
from trainer.data.corpus import Corpus
from trainer.data.prepare import fit_sample, run_prepare
from trainer.data.prepare_report import ALTER_REASONS, DROP_REASONS
from trainer.data.pretrained import get_tokenizer
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
    return prepare_files(model_dir, source, folder / "out", *extra)


def prepare_files(model_dir, source, output, *extra: str) -> dict:
    parser = argparse.ArgumentParser()
    add_prepare_arguments(parser)
    places = ["--target-model", str(model_dir), "--input", str(source), "--output", str(output)]
    assert run_prepare(parser.parse_args([*places, *extra])) == 0
    return json.loads((output / "report.json").read_text())


def chat(question: str, answer: str, **fields: object) -> dict:
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": turns, **fields}


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
        "not_an_object": "[]",
        "no_messages": {"id": 1},
        "bad_message": {"messages": [{"role": "user"}]},
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
    assert report["dropped"]["not_an_object"]["count"] == 3


def sample_of(*turns, length):
    return ChatSample(list(range(length)), tuple(Turn(2 * n + 1, *span) for n, span in enumerate(turns)))


@pytest.mark.parametrize(
    ("turns", "limit", "kept", "change"),
    [
        (((2, 6), (8, 12)), 12, ((2, 6), (8, 12)), ""),
        (((2, 6), (8, 12)), 11, ((2, 6),), "later_turns_cut"),
        (((2, 6), (8, 12)), 6, ((2, 6),), "later_turns_cut"),
        (((2, 6), (8, 12)), 5, ((2, 5),), "answer_cut"),
        (((2, 6), (8, 12)), 4, ((2, 4),), "answer_cut"),
        (((2, 6), (8, 12)), 3, None, "too_long"),
        (((11, 12),), 12, None, "no_anchor"),
        (((0, 2),), 12, None, "no_anchor"),
        (((0, 3),), 12, ((0, 3),), ""),
    ],
)
def test_a_sample_is_cut_at_the_border_of_a_turn_and_else_inside_the_first(turns, limit, kept, change):
    fitted, reason = fit_sample(sample_of(*turns, length=12), limit)

    assert reason == change
    assert (fitted and tuple((turn.start, turn.end) for turn in fitted.turns)) == kept
    if fitted:
        assert len(fitted.input_ids) == len(fitted.loss_mask) <= limit
        assert change in ("", "answer_cut") or len(fitted.input_ids) == fitted.turns[-1].end


def test_hundreds_of_turns_behind_the_limit_are_not_even_rendered(model_dir, tmp_path, monkeypatch):
    turns = [message for n in range(300) for message in chat(f"question {n}", "yes it is")["messages"]]
    rendered = []
    original = PreTrainedTokenizerFast.apply_chat_template
    monkeypatch.setattr(
        PreTrainedTokenizerFast,
        "apply_chat_template",
        lambda *args, **options: rendered.append(1) or original(*args, **options),
    )

    report = prepare(model_dir, tmp_path, [{"messages": turns}], "--max-seq-len", "200")

    assert len(rendered) < 20
    assert report["altered"]["later_turns_cut"]["count"] == 1
    ids = pq.read_table(tmp_path / "out" / "train-00000.parquet")["input_ids"].to_pylist()[0]
    assert len(ids) <= 200
    assert tiny_tokenizer().decode(ids).endswith("yes it is<|im_end|>")


@pytest.mark.parametrize("limit", range(20, 130, 3))
def test_at_any_limit_the_last_supervised_answer_is_whole_or_the_row_says_otherwise(limit):
    tokenizer = tiny_tokenizer()
    messages = [*chat("one", "two three")["messages"], *chat("four", "five six")["messages"]]
    (sample,) = ChatEncoder(tokenizer, stop_ids={END_ID}).encode(messages).samples

    fitted, change = fit_sample(sample, limit)

    if fitted is None:
        assert change == "too_long"
        return
    assert len(fitted.input_ids) <= limit
    assert fitted.input_ids == sample.input_ids[: len(fitted.input_ids)]
    whole = tokenizer.decode(fitted.input_ids).endswith("<|im_end|>")
    assert whole == (change != "answer_cut")
    assert (change == "") == (limit >= len(sample.input_ids))


def test_progress_is_told_with_rates_and_reasons(model_dir, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(prepare_module, "PROGRESS_SECONDS", 0.0)

    with caplog.at_level("INFO"):
        prepare(model_dir, tmp_path, [GOOD, "{oops"])

    assert [
        message for message in caplog.messages if "rows/s: 1 of 2 rows kept, dropped: bad_json 1" in message
    ]


def test_a_prompt_longer_than_the_limit_leaves_nothing_to_learn(model_dir, tmp_path):
    report = prepare(model_dir, tmp_path, [GOOD, chat("x" * 80, "never seen")], "--max-seq-len", "60")

    assert report["dropped"]["too_long"]["count"] == 1
    assert report["train"] == 1


def test_a_long_answer_is_cut_and_counted(model_dir, tmp_path):
    report = prepare(model_dir, tmp_path, [chat("hi", "y" * 200)], "--max-seq-len", "64")

    assert report["altered"]["answer_cut"]["count"] == 1
    assert pq.read_table(tmp_path / "out" / "train-00000.parquet")["input_ids"].to_pylist()[0][-1] == (
        tiny_tokenizer().convert_tokens_to_ids("y")
    )


def test_a_chat_whose_history_is_rewritten_becomes_several_samples(tmp_path):
    model = tiny_target(tmp_path)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "m['content']", "(m['content'] if loop.last or m['role'] != 'assistant' else 'gone')"
    )
    tokenizer.save_pretrained(model)
    turns = [*GOOD["messages"], {"role": "user", "content": "more"}, {"role": "assistant", "content": "no"}]

    report = prepare(model, tmp_path, [{"id": "x", "messages": turns}])

    table = pq.read_table(tmp_path / "out" / "train-00000.parquet").to_pylist()
    assert [row["id"] for row in table] == ["x#1", "x#2"]
    assert [
        tokenizer.decode([t for t, m in zip(row["input_ids"], row["loss_mask"], strict=True) if m])
        for row in table
    ] == ["good day<|im_end|>", "no<|im_end|>"]
    assert (report["kept"], report["train"], report["altered"]["split"]["count"]) == (1, 2, 1)


def test_what_is_altered_is_counted_with_examples_and_meaning(model_dir, tmp_path):
    trailing = {"messages": [*chat("a", "yes")["messages"], {"role": "user", "content": "thanks"}]}
    blank = chat("b", "\n")["messages"] + chat("c", "no")["messages"]

    report = prepare(model_dir, tmp_path, [trailing, {"messages": blank}, chat("d", "Yes")])

    assert {reason: entry["count"] for reason, entry in report["altered"].items()} == {
        "respelled": 1,
        "trailing_messages": 1,
        "turns_unsupervised": 1,
    }
    assert report["lost_turns"] == {"empty_turn": 1}
    for reason, entry in report["altered"].items():
        assert entry["meaning"] == ALTER_REASONS[reason]
    assert report["altered"]["trailing_messages"]["examples"] == [
        {"file": "chats.jsonl", "row": 1, "start": json.dumps(trailing)[:120]}
    ]


def test_five_examples_of_a_reason_are_kept_and_name_file_and_row(model_dir, tmp_path):
    report = prepare(model_dir, tmp_path, [GOOD, *[{"text": f"no {n}"} for n in range(9)]])

    examples = report["dropped"]["no_messages"]["examples"]
    assert [(entry["file"], entry["row"]) for entry in examples] == [("chats.jsonl", n) for n in range(2, 7)]
    assert examples[0]["start"] == '{"text": "no 0"}'


def test_duplicates_are_found_after_normalisation(model_dir, tmp_path):
    rows = [GOOD, chat(" hello there\r\n", "good day "), chat("hello there", "good  day")]

    report = prepare(model_dir, tmp_path, rows)

    assert report["dropped"]["duplicate"]["count"] == 1
    assert report["train"] == 2


def test_added_rows_leave_the_others_on_their_side_and_no_question_is_on_both(model_dir, tmp_path):
    rows = [chat(f"question {n}", "yes it is", id=f"r{n}") for n in range(40)]
    longer = [
        {"messages": [*row["messages"], *chat("and why?", f"since {n}")["messages"]], "id": f"l{n}"}
        for n, row in enumerate(rows)
    ]
    spelled = [chat(f" QUESTION  {n}", "it is", id=f"s{n}") for n in range(40)]
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    prepare(model_dir, tmp_path / "a", rows, "--held-out-ratio", "0.3")
    prepare(model_dir, tmp_path / "b", [*longer, *spelled, *rows], "--held-out-ratio", "0.3")

    def held(name):
        return set(
            pq.read_table(tmp_path / name / "out" / "held_out" / "held_out-00000.parquet")["id"].to_pylist()
        )

    numbers = {identity[1:] for identity in held("a")}
    assert 0 < len(numbers) < 40
    assert held("b") == {kind + number for kind in "rls" for number in numbers}


@pytest.fixture
def switch_dir(tmp_path):
    """A target whose template has the thinking switch and repeats the tools."""
    folder = tiny_target(tmp_path)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{{ (tools or []) | length }}{{ 'on' if enable_thinking | default(true) else 'off' }}\n"
        + tokenizer.chat_template
    )
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("flags", "row", "start"),
    [
        ((), {}, "0on"),
        (("--thinking", "off"), {}, "0off"),
        (("--thinking", "on"), {"thinking": False}, "0off"),
        (("--thinking", "off"), {"thinking": True}, "0on"),
        ((), {"tools": [{"type": "function", "function": {"name": "look"}}]}, "1on"),
    ],
)
def test_the_thinking_switch_of_row_and_flag_and_the_tools_reach_the_template(
    switch_dir, tmp_path, flags, row, start
):
    prepare(switch_dir, tmp_path, [{**GOOD, **row}], *flags)

    ids = pq.read_table(tmp_path / "out" / "train-00000.parquet")["input_ids"].to_pylist()[0]
    assert tiny_tokenizer().decode(ids).startswith(start + "\n<|im_start|>user")


def test_held_out_prompts_keep_tools_and_switch_and_stand_once_for_each_chat(switch_dir, tmp_path):
    tools = [{"type": "function", "function": {"name": "look"}}]
    rows = [chat(f"question {n}", "yes it is", tools=tools, thinking=False, id=f"r{n}") for n in range(30)]

    prepare(switch_dir, tmp_path, rows, "--held-out-ratio", "0.3")

    prompts = read_prompts(tmp_path / "out" / "held_out" / "prompts.jsonl").prompts
    table = pq.read_table(tmp_path / "out" / "held_out" / "held_out-00000.parquet")
    assert [prompt.id for prompt in prompts] == table["id"].to_pylist()
    tokenizer = get_tokenizer(switch_dir)
    for prompt, ids, mask in zip(
        prompts, table["input_ids"].to_pylist(), table["loss_mask"].to_pylist(), strict=True
    ):
        assert (list(prompt.tools), prompt.thinking) == (tools, False)
        encoded = encode_prompt(tokenizer, prompt.messages, tools=prompt.tools, thinking=prompt.thinking)
        assert encoded == ids[: mask.index(1)]


def test_a_thinking_switch_that_the_template_does_not_have_is_refused(model_dir, tmp_path):
    with pytest.raises(ConfigError, match=r"--thinking off has no effect: .*no enable_thinking"):
        prepare(model_dir, tmp_path, [GOOD], "--thinking", "off")


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
    trained = pq.read_table(tmp_path / "a" / "out" / "train-00000.parquet")["id"].to_pylist()
    assert held == again
    assert 0 < len(held) < 40
    assert sorted(held + trained) == sorted(f"r{n}" for n in range(60))
    assert report["held_out"] == len(held)
    assert len(Corpus.open(tmp_path / "a" / "out", max_seq_len=512, vocab_size=97)) == len(trained)


def as_parquet(folder, rows):
    pq.write_table(pa.Table.from_pylist(rows), folder / "chats.parquet", row_group_size=2)


def as_arrow_file(folder, rows):
    table = pa.Table.from_pylist(rows)
    with pa.OSFile(str(folder / "chats.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)


def as_data_set_folder(folder, rows):
    """As data set libraries save one: stream files, a list of them, and a cache beside."""
    table = pa.Table.from_pylist(rows)
    parts = {"data-00000-of-00002.arrow": table.slice(0, 2), "data-00001-of-00002.arrow": table.slice(2)}
    for name, part in {**parts, "cache-1f.arrow": table}.items():
        with pa.OSFile(str(folder / name), "wb") as sink, pa.ipc.new_stream(sink, part.schema) as writer:
            writer.write_table(part)
    listed = [{"filename": name} for name in parts]
    (folder / "state.json").write_text(json.dumps({"_data_files": listed}))


def as_folder_of_jsonl(folder, rows):
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\r\n" for row in rows[:2]))
    (folder / "b.jsonl").write_text("\ufeff" + "\n\n".join(json.dumps(row) for row in rows[2:]))


@pytest.mark.parametrize(
    "write",
    [as_parquet, as_arrow_file, as_data_set_folder, as_folder_of_jsonl],
    ids=lambda write: write.__name__,
)
def test_every_format_gives_the_same_samples(model_dir, tmp_path, write):
    rows = [chat(f"question {n}", f"answer {n}", id=f"r{n}", domain="d") for n in range(5)]
    prepare(model_dir, tmp_path, rows)
    (tmp_path / "in").mkdir()
    write(tmp_path / "in", rows)

    report = prepare_files(model_dir, tmp_path / "in", tmp_path / "other")

    assert report["kept"] == report["rows"] == 5
    first, other = (pq.read_table(tmp_path / name / "train-00000.parquet") for name in ("out", "other"))
    assert first == other


SHAPES = {
    "conversations": {
        "conversations": [{"from": "human", "value": "hello there"}, {"from": "gpt", "value": "good day"}]
    },
    "conversations with roles": {"conversations": GOOD["messages"]},
    "prompt and completion": {"prompt": "hello there", "completion": "good day"},
    "prompt and completion as messages": {
        "prompt": GOOD["messages"][:1],
        "completion": GOOD["messages"][1:],
    },
    "text parts": chat([{"type": "text", "text": "hello "}, {"type": "text", "text": "there"}], "good day"),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_of_a_row_gives_the_same_tokens(model_dir, tmp_path, shape):
    prepare(model_dir, tmp_path, [SHAPES[shape]])
    shaped = pq.read_table(tmp_path / "out" / "train-00000.parquet")

    prepare(model_dir, tmp_path, [GOOD])

    assert shaped.column("input_ids") == pq.read_table(tmp_path / "out" / "train-00000.parquet").column(
        "input_ids"
    )


def test_a_system_column_and_tool_roles_of_sharegpt_are_read(model_dir, tmp_path):
    row = {
        "system": "be brief",
        "conversations": [
            {"from": "human", "value": "look it up"},
            {"from": "gpt", "value": "wait"},
            {"from": "observation", "value": "found"},
            {"from": "gpt", "value": "found it"},
        ],
    }

    prepare(model_dir, tmp_path, [row])

    ids = pq.read_table(tmp_path / "out" / "train-00000.parquet")["input_ids"].to_pylist()[0]
    text = tiny_tokenizer().decode(ids)
    assert text.startswith("<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nlook it up")
    assert "<|im_start|>tool\nfound<|im_end|>" in text


def test_tools_of_a_table_reach_the_template_without_the_fields_that_tables_fill(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{{ tools | length }}{{ (tools | tojson) | length }}\n" + tokenizer.chat_template
    )
    model = tiny_target(tmp_path)
    tokenizer.save_pretrained(model)
    tools = [
        [{"type": "function", "function": {"name": "aa", "parameters": {"x": "1"}}}],
        [{"type": "function", "function": {"name": "bb", "parameters": {"y": "1"}}}],
    ]
    rows = [chat(f"q{n}", "yes", tools=tool) for n, tool in enumerate(tools)]
    as_parquet(tmp_path, rows)
    prepare_files(model, tmp_path / "chats.parquet", tmp_path / "table")
    prepare(model, tmp_path, [{**row, "tools": json.dumps(row["tools"])} for row in rows])

    table, lines = (
        pq.read_table(tmp_path / name / "train-00000.parquet")["input_ids"].to_pylist()
        for name in ("table", "out")
    )
    assert table == lines
    assert tokenizer.decode(table[0]).startswith(f"1{len(json.dumps(tools[0]))}\n")


def test_nothing_usable_is_an_error_and_leaves_no_half_file(model_dir, tmp_path):
    with pytest.raises(DataError, match=r"no usable chat for training.*no_messages 1.*chats\.jsonl:1 no_"):
        prepare(model_dir, tmp_path, [{"text": "x"}])

    assert not (tmp_path / "out").exists()


def test_a_second_run_replaces_its_own_files(model_dir, tmp_path):
    prepare(model_dir, tmp_path, [GOOD, chat("b", "cc")])
    report = prepare(model_dir, tmp_path, [GOOD])

    assert report["train"] == 1
    assert pq.read_table(tmp_path / "out" / "train-00000.parquet").num_rows == 1


def test_an_output_with_data_of_someone_else_is_refused(model_dir, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "other.jsonl").write_text("{}\n")

    with pytest.raises(ConfigError, match=r"would read too: .*other\.jsonl"):
        prepare(model_dir, tmp_path, [GOOD])


@pytest.mark.parametrize(
    "name",
    [
        "train-00000.parquet",
        "train.parquet",
        "report.json",
        "held_out/prompts.jsonl",
        "held_out/held_out-00000.parquet",
        "prepare.partial/notes.txt",
    ],
)
def test_files_that_only_look_like_those_of_prepare_are_never_removed(model_dir, tmp_path, name):
    (tmp_path / "out" / name).parent.mkdir(parents=True)
    (tmp_path / "out" / name).write_text("{}\n")

    with pytest.raises(ConfigError, match=f"--output holds .*{name}"):
        prepare(model_dir, tmp_path, [GOOD])

    assert (tmp_path / "out" / name).read_text() == "{}\n"


def test_held_out_files_beside_a_set_without_any_stay(model_dir, tmp_path):
    prepare(model_dir, tmp_path, [GOOD])
    (tmp_path / "out" / "held_out").mkdir()
    (tmp_path / "out" / "held_out" / "prompts.jsonl").write_text("mine")

    with pytest.raises(ConfigError, match=r"held_out/prompts\.jsonl"):
        prepare(model_dir, tmp_path, [GOOD])

    assert (tmp_path / "out" / "held_out" / "prompts.jsonl").read_text() == "mine"


def test_input_inside_the_output_is_refused(model_dir, tmp_path):
    prepare(model_dir, tmp_path, [GOOD])
    before = (tmp_path / "out" / "train-00000.parquet").read_bytes()

    with pytest.raises(ConfigError, match="--input lies inside --output"):
        prepare_files(model_dir, tmp_path / "out", tmp_path / "out")

    assert (tmp_path / "out" / "train-00000.parquet").read_bytes() == before


def test_input_that_is_no_file_is_refused_and_leaves_no_output(model_dir, tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")

    with pytest.raises(DataError, match="neither a file nor a folder"):
        prepare_files(model_dir, tmp_path / "pipe.jsonl", tmp_path / "deep" / "out")

    assert not (tmp_path / "deep").exists()


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
