"""Bad data rows, each kept or counted under a stated reason (row T7 of the fault table).

Every case says what must become of it. All cases of a kind lie in one file, so that the run has to go on
behind each of them.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.tiny import TEMPLATE, VOCAB, tiny_target, tiny_tokenizer
from trainer.arguments import add_prepare_arguments
from trainer.data import conversations as conversations_module
from trainer.data import corpus as corpus_module
from trainer.data import prepare_report as report_module
from trainer.data import sources as sources_module
from trainer.data.corpus import SKIP_REASONS, Corpus
from trainer.data.prepare import run_prepare
from trainer.data.prepare_report import DROP_REASONS
from trainer.errors import DataError

KEPT = "kept"
LINE_LIMIT = 300_000
HUGE_CHARACTERS = 100_000
HUGE_TOKENS = 1_000


def user(content="hi there", **fields):
    return {"role": "user", "content": content, **fields}


def said(content="good day", **fields):
    return {"role": "assistant", "content": content, **fields}


def chat(*messages, **fields):
    return {"messages": list(messages), **fields}


def nested(depth, inner="x"):
    for _ in range(depth):
        inner = {"a": [inner]}
    return inner


ANSWER = '[{"role": "user", "content": "%s"}, {"role": "assistant", "content": "yes it is"}]'
CALL = {"function": {"name": "look", "arguments": {}}}

CHATS = [
    # lines that are no row
    ("not json", b"{oops", "bad_json"),
    ("a word", b"hello", "bad_json"),
    ("single quotes", b"{'messages': []}", "bad_json"),
    ("half a line", b'{"messages": [{"role": "user"', "bad_json"),
    ("two objects", b"{} {}", "bad_json"),
    ("comma at the end", b'{"messages": [],}', "bad_json"),
    ("line break inside a text", b'{"prompt": "a\tb", "completion": "c"}', "bad_json"),
    ("number of 5000 digits", b'{"messages": ' + b"9" * 5000 + b"}", "bad_json"),
    ("zero bytes", b"\0\0\0\0", "bad_json"),
    ("binary", bytes(range(128, 256)).replace(b"\n", b""), "bad_encoding"),
    ("latin-1", '{"prompt": "é", "completion": "x"}'.encode("latin-1"), "bad_encoding"),
    ("surrogate in UTF-8", b'{"prompt": "\xed\xa0\x80", "completion": "x y"}', "bad_encoding"),
    ("UTF-16", '{"prompt": "a"}'.encode("utf-16"), "bad_encoding"),
    ("overlong UTF-8", b'{"prompt": "\xc0\xaf", "completion": "x y"}', "bad_encoding"),
    ("null", b"null", "not_an_object"),
    ("a number", b"7", "not_an_object"),
    ("a list", b"[]", "not_an_object"),
    ("a text", b'"chat"', "not_an_object"),
    ("true", b"true", "not_an_object"),
    ("NaN alone", b"NaN", "not_an_object"),
    ("a key twice", b'{"messages": [], "messages": ' + (ANSWER % "twice").encode() + b"}", "duplicate_key"),
    ("a key twice inside", b'{"messages": [{"role": "user", "role": "user"}]}', "duplicate_key"),
    ("brackets without end", b"[" * 200_000, "too_deep"),
    ("deep objects", b'{"a":' * 40_000 + b"1" + b"}" * 40_000, "too_deep"),
    ("very long line", b'{"prompt": "' + b"a" * (LINE_LIMIT + 1) + b'", "completion": "b"}', "line_too_long"),
    ("very long rubbish", b"x" * (2 * LINE_LIMIT), "line_too_long"),
    # rows that are no chat
    ("empty object", {}, "no_messages"),
    ("only an id", {"id": 5}, "no_messages"),
    ("messages null", {"messages": None}, "no_messages"),
    ("messages empty", {"messages": []}, "no_messages"),
    ("messages a text", {"messages": "hi"}, "no_messages"),
    ("messages an object", {"messages": {"role": "user"}}, "no_messages"),
    ("messages a number", {"messages": 3}, "no_messages"),
    ("completion alone", {"completion": "x"}, "no_messages"),
    ("prompt alone", {"prompt": "x"}, "no_messages"),
    ("message null", {"messages": [None]}, "bad_message"),
    ("message a text", {"messages": ["hi", "there"]}, "bad_message"),
    ("message a list", {"messages": [["user", "hi"]]}, "bad_message"),
    ("no role", chat({"content": "x"}, said()), "bad_message"),
    ("role null", chat({"role": None, "content": "x"}, said()), "bad_message"),
    ("role a number", chat({"role": 1, "content": "x"}, said()), "bad_message"),
    ("role a list", chat({"role": ["user"], "content": "x"}, said()), "bad_message"),
    ("no content", chat({"role": "user"}, said()), "bad_message"),
    ("content null", chat(user(None), said()), "bad_message"),
    ("content a number", chat(user(5), said()), "bad_message"),
    ("content true", chat(user(True), said()), "bad_message"),
    ("content an object", chat(user({"text": "x"}), said()), "bad_message"),
    ("content NaN", b'{"messages": [{"role": "user", "content": NaN}]}', "bad_message"),
    ("content an empty list", chat(user([]), said()), "bad_message"),
    ("content a list of texts", chat(user(["x"]), said()), "bad_message"),
    ("part without text", chat(user([{"type": "text"}]), said()), "bad_message"),
    ("prompt a number", {"prompt": 3, "completion": "x"}, "bad_message"),
    ("completion a number", {"prompt": "x", "completion": 1.5}, "bad_message"),
    ("thinking a list", chat(user("t"), said(reasoning_content=["x"])), "bad_message"),
    ("sharegpt without value", {"conversations": [{"from": "human"}]}, "bad_message"),
    ("sharegpt value null", {"conversations": [{"from": "human", "value": None}]}, "bad_message"),
    ("sharegpt from a number", {"conversations": [{"from": 1, "value": "x"}]}, "bad_message"),
    ("an image", chat(user([{"type": "image", "url": "x"}]), said()), "not_text"),
    ("text and an image", chat(user([{"type": "text", "text": "x"}, {"type": "image"}]), said()), "not_text"),
    ("unknown role", chat({"role": "narrator", "content": "x"}, said()), "unknown_role"),
    ("role in capitals", chat({"role": "User", "content": "x"}, said()), "unknown_role"),
    ("role empty", chat({"role": "", "content": "x"}, said()), "unknown_role"),
    ("sharegpt unknown", {"conversations": [{"from": "alien", "value": "x"}]}, "unknown_role"),
    ("call without name", chat(user(), said(tool_calls=[{"function": {}}])), "bad_tool_call"),
    ("call a text", chat(user(), said(tool_calls=["look"])), "bad_tool_call"),
    ("calls an object", chat(user(), said(tool_calls={"name": "look"})), "bad_tool_call"),
    ("arguments a number", chat(user(), said(tool_calls=[{"name": "a", "arguments": 3}])), "bad_tool_call"),
    ("sharegpt call", {"conversations": [{"from": "function_call", "value": "look()"}]}, "bad_tool_call"),
    ("tools a text", chat(user(), said(), tools="look"), "bad_tools"),
    ("tools an object", chat(user(), said(), tools={"name": "x"}), "bad_tools"),
    ("tools without names", chat(user(), said(), tools=[{}]), "bad_tools"),
    ("tools a list of texts", chat(user(), said(), tools=["look"]), "bad_tools"),
    ("answer first", chat(said(), user()), "bad_role_order"),
    ("answer behind system", chat({"role": "system", "content": "x"}, said()), "bad_role_order"),
    ("two answers", chat(user(), said("a b"), said("c d")), "bad_role_order"),
    ("late system", chat(user(), said(), {"role": "system", "content": "x"}), "bad_role_order"),
    ("result of no call", chat(user(), {"role": "tool", "content": "x"}, said()), "bad_role_order"),
    ("result first", chat({"role": "tool", "content": "x"}, said()), "bad_role_order"),
    ("huge text", chat(user("a" * (HUGE_CHARACTERS + 1)), said()), "huge"),
    ("lone surrogate asked", b'{"messages": ' + (ANSWER % "\\ud800 x").encode() + b"}", "lone_surrogate"),
    ("lone surrogate said", b'{"prompt": "a", "completion": "\\udfff b"}', "lone_surrogate"),
    ("lone surrogate in tools", b'{"messages": %s, "tools": [{"name": "\\ud83d"}]}' % (ANSWER % "t").encode(),
     "lone_surrogate"),
    # chats without anything to learn from
    ("only system", chat({"role": "system", "content": "x"}), "no_assistant_turn"),
    ("only the user", chat(user()), "no_assistant_turn"),
    ("user twice", chat(user(), user("anyone?")), "no_assistant_turn"),
    ("answer empty", chat(user("e"), said("")), "empty_completion"),
    ("answer blank", chat(user("f"), said(" \n\t")), "empty_completion"),
    ("last answer blank", chat(user("g"), said(), user("h"), said("")), "empty_completion"),
    ("refused by the template", chat(user("boom"), said()), "template_error"),
    ("not rendered", chat(user("i"), said("vanish")), "not_in_template"),
    ("thinking not rendered", chat(user("j"), said(reasoning_content="so")), "reasoning_not_in_template"),
    ("call not rendered", chat(user("k"), said(tool_calls=[CALL])), "tool_call_not_in_template"),
    ("end of turn inside", chat(user("l"), said("a<|im_end|>b")), "stop_inside"),
    ("no such letters", chat(user("m"), said("漢字")), "unknown_token"),
    ("prompt too long", chat(user("n" * 150), said()), "too_long"),
    ("one token", chat(user("o"), said("a"), finish_reason="length"), "no_anchor"),
    # odd, but a chat
    ("plain", chat(user("plain"), said()), KEPT),
    ("plain again", chat(user("plain"), said()), "duplicate"),
    ("again in another form", {"prompt": "plain", "completion": "good day\r\n"}, "duplicate"),
    ("again as sharegpt", {"conversations": [{"from": "human", "value": "plain"},
                                             {"from": "gpt", "value": "good day"}]}, "duplicate"),
    ("byte order mark", b"\xef\xbb\xbf" + json.dumps(chat(user("bom"), said())).encode(), KEPT),
    ("carriage return", json.dumps(chat(user("crlf"), said())).encode() + b"\r", KEPT),
    ("blanks around", b"  " + json.dumps(chat(user("blanks"), said())).encode() + b"  ", KEPT),
    ("NaN beside", b'{"score": NaN, "messages": ' + (ANSWER % "nan").encode() + b"}", KEPT),
    ("infinity beside", b'{"score": -Infinity, "messages": ' + (ANSWER % "inf").encode() + b"}", KEPT),
    ("surrogate pair", b'{"messages": ' + (ANSWER % "\\ud83d\\ude00").encode() + b"}", KEPT),
    ("zero inside", b'{"messages": ' + (ANSWER % "a\\u0000b").encode() + b"}", KEPT),
    ("deep column beside", chat(user("deep"), said(), extra=nested(200)), KEPT),
    ("id a list", chat(user("id list"), said(), id=[1]), KEPT),
    ("id true", chat(user("id true"), said(), id=True), KEPT),
    ("id half a character", b'{"id": "\\ud800", "messages": ' + (ANSWER % "id half").encode() + b"}", KEPT),
    ("id very long", chat(user("id long"), said(), id="x" * 10_000), KEPT),
    ("domain a number", chat(user("domain"), said(), domain=7), KEPT),
    ("domain half a character", b'{"domain": "\\ud8ab", "messages": ' + (ANSWER % "d").encode() + b"}", KEPT),
    ("tokens of nothing", chat(user("ids"), said(), completion_ids=[-1, True, "x"]), KEPT),
    ("tools empty", chat(user("no tools"), said(), tools=[]), KEPT),
    ("tools as an empty text", chat(user("tools text"), said(), tools=""), KEPT),
    ("thinking switch a text", chat(user("switch"), said(), thinking="yes"), KEPT),
    ("user twice, then said", chat(user("one more"), user("please"), said()), KEPT),
    ("asked behind the answer", chat(user("trailing"), said(), user("and?")), KEPT),
    ("answer cut inside", chat(user("cut"), said("y" * 150)), KEPT),
    ("blank answer before", chat(user("p"), said(" "), user("q"), said("yes it is")), KEPT),
    ("unknown fields", chat(user("extra", weight=1), said(logprobs=None), split="train"), KEPT),
]  # fmt: skip
"""Name, line or row, and what must become of it."""


def as_line(row):
    return row if isinstance(row, bytes) else json.dumps(row).encode()


def write_cases(path, cases):
    path.write_bytes(b"\n".join(as_line(row) for _, row, _ in cases) + b"\n")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    folder = tiny_target(tmp_path_factory.mktemp("bad-rows"))
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE.replace(
        "{{ m['content'] }}",
        "{% if m['content'] == 'boom' %}{{ raise_exception('no') }}{% endif %}"
        "{{ 'gone' if m['content'] == 'vanish' else m['content'] }}",
    )
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def small_limits(monkeypatch):
    monkeypatch.setattr(sources_module, "LINE_LIMIT_BYTES", LINE_LIMIT)
    monkeypatch.setattr(conversations_module, "HUGE_CHARACTERS", HUGE_CHARACTERS)
    monkeypatch.setattr(corpus_module, "HUGE_TOKENS", HUGE_TOKENS)
    for module in (report_module, corpus_module):
        monkeypatch.setattr(module, "EXAMPLES_PER_REASON", 10_000)


def prepare(model_dir, source, output):
    parser = argparse.ArgumentParser()
    add_prepare_arguments(parser)
    flags = ["--target-model", str(model_dir), "--input", str(source), "--output", str(output)]
    assert run_prepare(parser.parse_args([*flags, "--max-seq-len", "128"])) == 0
    return json.loads((output / "report.json").read_text())


def outcomes(report):
    """What became of each row of a `prepare`, by its number."""
    found = {
        example["row"]: reason for reason, entry in report["dropped"].items() for example in entry["examples"]
    }
    return [found.get(number, KEPT) for number in range(1, report["rows"] + 1)]


def test_t7_every_bad_chat_is_kept_or_counted_under_its_reason(model_dir, tmp_path):
    write_cases(tmp_path / "chats.jsonl", CHATS)

    report = prepare(model_dir, tmp_path / "chats.jsonl", tmp_path / "out")

    became = dict(zip([name for name, _, _ in CHATS], outcomes(report), strict=True))
    assert became == {name: reason for name, _, reason in CHATS}
    counts = {reason: entry["count"] for reason, entry in report["dropped"].items()}
    assert counts == Counter(reason for _, _, reason in CHATS if reason != KEPT)
    assert report["kept"] + sum(counts.values()) == report["rows"] == len(CHATS)
    kept = Corpus.open(tmp_path / "out", max_seq_len=128, vocab_size=VOCAB)
    assert len(kept) == report["train"] == report["kept"]
    assert not kept.report.skipped


def test_t7_there_are_a_hundred_distinct_bad_rows_and_every_reason_is_tried():
    bad = {as_line(row) for _, row, reason in (*CHATS, *TOKENS) if reason != KEPT}
    assert len(bad) >= 150
    assert len({name for name, _, _ in CHATS}) == len(CHATS)
    assert len({name for name, _, _ in TOKENS}) == len(TOKENS)
    elsewhere = {"empty_turn", "not_marked", "open_thinking", "token_border"}
    """of single turns, in test_chat.py"""
    assert {reason for _, _, reason in CHATS} - {KEPT} == set(DROP_REASONS) - elsewhere
    assert {reason for _, _, reason in TOKENS} - {KEPT} == set(SKIP_REASONS)


@pytest.mark.parametrize(
    ("row", "reason"), [(row, reason) for _, row, reason in CHATS if reason not in (KEPT, "duplicate")][::7]
)
def test_t7_a_set_of_nothing_but_bad_chats_fails_with_the_reason(model_dir, tmp_path, row, reason):
    write_cases(tmp_path / "chats.jsonl", [("bad", row, reason)])

    with pytest.raises(DataError, match=rf"no usable chat for training .*{reason} 1") as raised:
        prepare(model_dir, tmp_path / "chats.jsonl", tmp_path / "out")

    assert raised.value.exit_code == 3
    assert not (tmp_path / "out").exists()


GOOD = {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1]}

TOKENS = [
    ("not json", b"{oops", "bad_json"),
    ("half a line", b'{"input_ids": [1, 2', "bad_json"),
    ("trailing comma", b'{"input_ids": [5, 6,], "prompt_len": 0}', "bad_json"),
    ("binary", b"\xff\xfe\xfd", "bad_encoding"),
    ("latin-1", '{"domain": "é"}'.encode("latin-1"), "bad_encoding"),
    ("null", b"null", "not_an_object"),
    ("a list of ids", b"[5, 6, 7, 8]", "not_an_object"),
    ("ids twice", b'{"input_ids": [5], "input_ids": [5, 6, 7], "prompt_len": 0}', "duplicate_key"),
    ("deep", b"[" * 200_000, "too_deep"),
    ("very long line", b'{"input_ids": [' + b"5," * LINE_LIMIT + b'5], "prompt_len": 1}', "line_too_long"),
    ("empty object", {}, "missing_input_ids"),
    ("ids null", GOOD | {"input_ids": None}, "missing_input_ids"),
    ("a chat", chat(user(), said()), "missing_input_ids"),
    ("no mask", {"input_ids": [5, 6, 7]}, "missing_mask"),
    ("mask null", {"input_ids": [5, 6, 7], "loss_mask": None}, "missing_mask"),
    ("both null", {"input_ids": [5, 6, 7], "loss_mask": None, "prompt_len": None}, "missing_mask"),
    ("ids a text", GOOD | {"input_ids": "5 6 7 8"}, "wrong_type"),
    ("ids a number", GOOD | {"input_ids": 5}, "wrong_type"),
    ("ids true", GOOD | {"input_ids": True}, "wrong_type"),
    ("ids an object", GOOD | {"input_ids": {"0": 5}}, "wrong_type"),
    ("ids nested", GOOD | {"input_ids": [[5, 6, 7, 8]]}, "wrong_type"),
    ("ids nested in part", GOOD | {"input_ids": [5, [6], 7, 8]}, "wrong_type"),
    ("ids with null", GOOD | {"input_ids": [5, None, 7, 8]}, "wrong_type"),
    ("ids with a text", GOOD | {"input_ids": [5, "6", 7, 8]}, "wrong_type"),
    ("ids with a fraction", GOOD | {"input_ids": [5, 6.5, 7, 8]}, "wrong_type"),
    ("ids as floats", GOOD | {"input_ids": [5.0, 6.0, 7.0, 8.0]}, "wrong_type"),
    ("ids with NaN", b'{"input_ids": [5, NaN, 7, 8], "prompt_len": 1}', "wrong_type"),
    ("ids with infinity", b'{"input_ids": [5, Infinity, 7, 8], "prompt_len": 1}', "wrong_type"),
    ("ids booleans", GOOD | {"input_ids": [True, False, True, True]}, "wrong_type"),
    ("ids with a boolean", GOOD | {"input_ids": [5, True, 7, 8]}, "wrong_type"),
    ("id beyond 64 bits", GOOD | {"input_ids": [5, 2**70, 7, 8]}, "wrong_type"),
    ("id below 64 bits", GOOD | {"input_ids": [5, -(2**70), 7, 8]}, "wrong_type"),
    ("mask a text", GOOD | {"loss_mask": "0011"}, "wrong_type"),
    ("mask a number", GOOD | {"loss_mask": 1}, "wrong_type"),
    ("mask of texts", GOOD | {"loss_mask": ["0", "0", "1", "1"]}, "wrong_type"),
    ("mask with null", GOOD | {"loss_mask": [0, None, 1, 1]}, "wrong_type"),
    ("mask of floats", GOOD | {"loss_mask": [0.0, 0.0, 1.0, 1.0]}, "wrong_type"),
    ("mask nested", GOOD | {"loss_mask": [[0, 0, 1, 1]]}, "wrong_type"),
    ("ids empty", {"input_ids": [], "loss_mask": []}, "empty"),
    ("ids empty with a prompt", {"input_ids": [], "prompt_len": 0}, "empty"),
    ("huge", {"input_ids": [5] * (HUGE_TOKENS + 1), "prompt_len": 1}, "huge"),
    ("mask too short", GOOD | {"loss_mask": [0, 1, 1]}, "wrong_length"),
    ("mask too long", GOOD | {"loss_mask": [0, 0, 1, 1, 1]}, "wrong_length"),
    ("mask empty", GOOD | {"loss_mask": []}, "wrong_length"),
    ("mask with a two", GOOD | {"loss_mask": [0, 2, 1, 1]}, "bad_mask"),
    ("mask negative", GOOD | {"loss_mask": [0, -1, 1, 1]}, "bad_mask"),
    ("prompt negative", {"input_ids": [5, 6, 7], "prompt_len": -1}, "bad_prompt_len"),
    ("prompt beyond", {"input_ids": [5, 6, 7], "prompt_len": 4}, "bad_prompt_len"),
    ("prompt true", {"input_ids": [5, 6, 7], "prompt_len": True}, "bad_prompt_len"),
    ("prompt a text", {"input_ids": [5, 6, 7], "prompt_len": "1"}, "bad_prompt_len"),
    ("prompt a float", {"input_ids": [5, 6, 7], "prompt_len": 1.0}, "bad_prompt_len"),
    ("prompt NaN", b'{"input_ids": [5, 6, 7], "prompt_len": NaN}', "bad_prompt_len"),
    ("prompt a list", {"input_ids": [5, 6, 7], "prompt_len": [1]}, "bad_prompt_len"),
    ("id negative", GOOD | {"input_ids": [5, -1, 7, 8]}, "token_out_of_vocabulary"),
    ("id too large", GOOD | {"input_ids": [5, 6, 7, VOCAB]}, "token_out_of_vocabulary"),
    ("id of 40 bits", GOOD | {"input_ids": [5, 2**40, 7, 8]}, "token_out_of_vocabulary"),
    ("label padding", GOOD | {"input_ids": [5, 6, 7, -100]}, "token_out_of_vocabulary"),
    ("nothing supervised", GOOD | {"loss_mask": [0, 0, 0, 0]}, "no_supervised_token"),
    ("all is prompt", {"input_ids": [5, 6, 7], "prompt_len": 3}, "no_supervised_token"),
    ("supervised behind the cut", {"input_ids": [5] * 200, "prompt_len": 130}, "no_supervised_token"),
    ("no neighbours", GOOD | {"loss_mask": [0, 1, 0, 1]}, "no_anchor"),
    ("one supervised", GOOD | {"loss_mask": [0, 0, 0, 1]}, "no_anchor"),
    ("nothing before", {"input_ids": [5, 6], "loss_mask": [1, 1]}, "no_anchor"),
    ("one token", {"input_ids": [5], "prompt_len": 0}, "no_anchor"),
    ("good", GOOD, KEPT),
    ("good again", GOOD, KEPT),
    ("prompt_len", {"input_ids": [5, 6, 7], "prompt_len": 1}, KEPT),
    ("prompt zero", {"input_ids": [5, 6, 7], "prompt_len": 0}, KEPT),
    ("mask of booleans", GOOD | {"loss_mask": [False, False, True, True]}, KEPT),
    ("mask before prompt", GOOD | {"prompt_len": 99}, KEPT),
    ("byte order mark", b"\xef\xbb\xbf" + json.dumps(GOOD).encode(), KEPT),
    ("carriage return", json.dumps(GOOD).encode() + b"\r", KEPT),
    ("domain a number", GOOD | {"domain": 3}, KEPT),
    ("domain half a character", b'{"domain": "\\ud800", "input_ids": [5, 6, 7], "prompt_len": 1}', KEPT),
    ("last id of the vocabulary", GOOD | {"input_ids": [5, 6, 7, VOCAB - 1]}, KEPT),
    ("longer than the limit", {"input_ids": [5] * 200, "prompt_len": 3}, KEPT),
    ("unknown fields", GOOD | {"extra": nested(200)}, KEPT),
]
"""Name, line or row of token ids, and what must become of it."""


def test_t7_every_bad_row_of_tokens_is_kept_or_counted_under_its_reason(tmp_path):
    write_cases(tmp_path / "train.jsonl", TOKENS)

    corpus = Corpus.open(tmp_path, max_seq_len=128, vocab_size=VOCAB)

    report = corpus.report
    found = {
        int(place.split(":")[1]): reason for reason, places in report.examples.items() for place in places
    }
    became = {name: found.get(number, KEPT) for number, (name, _, _) in enumerate(TOKENS, start=1)}
    assert became == {name: reason for name, _, reason in TOKENS}
    assert report.kept + sum(report.skipped.values()) == report.rows == len(TOKENS)
    assert len(corpus) == report.kept
    assert report.truncated == 1


@pytest.mark.parametrize(
    ("row", "reason"), [(row, reason) for _, row, reason in TOKENS if reason != KEPT][::7]
)
def test_t7_a_set_of_nothing_but_bad_tokens_fails_with_the_reason(tmp_path, row, reason):
    write_cases(tmp_path / "train.jsonl", [("bad", row, reason)])

    with pytest.raises(DataError, match=rf"no usable sample in .*{reason} 1") as raised:
        Corpus.open(tmp_path, max_seq_len=128, vocab_size=VOCAB)

    assert raised.value.exit_code == 3


NOT_UTF8 = pa.array([b"good", b"\xff\xfe", b"fine"]).cast(pa.binary())


def as_text_column(column):
    """A column that says it is text, whose bytes nobody has checked."""
    return pa.Array.from_buffers(pa.string(), len(column), column.buffers())


def test_t7_text_of_a_table_that_is_not_utf8_costs_its_row_only(model_dir, tmp_path):
    chats = pa.table(
        {"prompt": as_text_column(NOT_UTF8), "completion": ["yes it is", "no it is not", "perhaps so"]}
    )
    tokens = pa.table(
        {"input_ids": [[5, 6, 7]] * 3, "prompt_len": [1] * 3, "domain": as_text_column(NOT_UTF8)}
    )
    pq.write_table(chats, tmp_path / "chats.parquet")
    (tmp_path / "tokens").mkdir()
    pq.write_table(tokens, tmp_path / "tokens" / "train.parquet")

    report = prepare(model_dir, tmp_path / "chats.parquet", tmp_path / "out")
    corpus = Corpus.open(tmp_path / "tokens", max_seq_len=128, vocab_size=VOCAB)

    assert outcomes(report) == [KEPT, "bad_encoding", KEPT]
    assert dict(corpus.report.skipped) == {"bad_encoding": 1}
    assert [sample.domain for sample in corpus] == ["good", "fine"]


TEXT_MAP = pa.map_(pa.string(), pa.string())
COLUMNS = [
    ("messages of numbers", {"messages": [[1, 2]]}, "bad_message"),
    ("messages of texts", {"messages": [["hi"]]}, "bad_message"),
    ("messages null", {"messages": pa.nulls(1)}, "no_messages"),
    ("messages a time", {"messages": pa.array([0], pa.timestamp("s"))}, "no_messages"),
    ("content bytes", {"messages": [[{"role": "user", "content": b"x"}]]}, "bad_message"),
    ("prompt a date", {"prompt": pa.array([1], pa.date32()), "completion": ["x"]}, "bad_message"),
    ("no known column", {"text": ["x"]}, "no_messages"),
    ("messages a map", {"messages": pa.array([[("role", "user")]], TEXT_MAP)}, "bad_message"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("columns", "reason"), [case[1:] for case in COLUMNS], ids=[case[0] for case in COLUMNS]
)
@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_t7_columns_of_wrong_types_are_counted_row_by_row(model_dir, tmp_path, columns, reason, suffix):
    (tmp_path / "in").mkdir()
    table = pa.table(columns)
    if suffix == "parquet":
        pq.write_table(table, tmp_path / "in" / "a.parquet")
    else:
        with (
            pa.OSFile(str(tmp_path / "in" / "a.arrow"), "wb") as sink,
            pa.ipc.new_stream(sink, table.schema) as writer,
        ):
            writer.write_table(table)
    (tmp_path / "in" / "b.jsonl").write_text(json.dumps(chat(user(), said())) + "\n")

    report = prepare(model_dir, tmp_path / "in", tmp_path / "out")

    assert {name: entry["count"] for name, entry in report["dropped"].items()} == {reason: 1}
    assert report["dropped"][reason]["examples"][0]["file"] == f"a.{suffix}"
    assert report["kept"] == 1
