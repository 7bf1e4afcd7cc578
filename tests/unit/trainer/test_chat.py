"""Assistant-only masks: supervised is what the assistant said, behind what the target would have read."""

from __future__ import annotations

import copy

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.support.chat_templates import FAMILIES, chat_tokenizer, stop_of
from tests.support.tiny import END_ID, tiny_tokenizer
from trainer.data.chat import ChatEncoder, encode_prompt
from trainer.data.conversations import parse_messages
from trainer.data.rendering import has_generation_marks

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def user(text):
    return {"role": "user", "content": text}


def said(text, **fields):
    return {"role": "assistant", "content": text, **fields}


def call(arguments):
    return {"type": "function", "function": {"name": "weather", "arguments": arguments}}


def encoder_of(family, **options):
    tokenizer = chat_tokenizer(family)
    return ChatEncoder(tokenizer, stop_ids={tokenizer.eos_token_id}, **options)


def encode(family, messages, **options):
    return encoder_of(family).encode(messages, **options)


def spoken(family, sample):
    """What each supervised turn spells."""
    tokenizer = chat_tokenizer(family)
    return [tokenizer.decode(sample.input_ids[turn.start : turn.end]) for turn in sample.turns]


def read(family, sample, turn=0):
    """What the target reads before it says a turn."""
    return chat_tokenizer(family).decode(sample.input_ids[: sample.turns[turn].start])


@pytest.mark.parametrize("family", ["chatml", "marked", "llama3", "gemma", "object_tools"])
def test_every_answer_and_its_end_of_turn_is_supervised_in_one_sample(family):
    chat = encode(family, [user("one"), said("two\nthree"), user("four"), said("five")])

    (sample,) = chat.samples
    assert spoken(family, sample) == ["two\nthree" + stop_of(family), "five" + stop_of(family)]
    assert (dict(chat.lost), chat.respelled) == ({}, 0)


texts = st.text(
    st.sampled_from("ab \n.,!1é漢🙂\t{}<|>/"), min_size=1, max_size=12
).filter(str.strip)  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(answers=st.lists(texts, min_size=1, max_size=3), questions=st.lists(texts, min_size=3, max_size=3))
def test_supervised_tokens_spell_byte_by_byte_what_was_said_behind_the_exact_prompt(
    family, answers, questions
):
    if family == "open_thinking":
        answers = [f"so</think>{answer}" for answer in answers]
    messages = []
    for question, answer in zip(questions, answers, strict=False):
        messages += [user(question), said(answer)]

    chat = encode(family, messages)

    turns = [(sample, turn) for sample in chat.samples for turn in sample.turns]
    assert not chat.lost
    assert [turn.message for _, turn in turns] == list(range(1, len(messages), 2))
    tokenizer = chat_tokenizer(family)
    for sample, turn in turns:
        # The one family with a blank that the template writes: the target generates it too.
        blank = " " if family == "plain_space" else ""
        spelled = tokenizer.decode(sample.input_ids[turn.start : turn.end])
        answer = messages[turn.message]["content"]
        if blank and not spelled.startswith(answer):
            assert spelled in (blank + answer + stop_of(family), blank + answer.strip() + stop_of(family))
        else:
            assert spelled == answer + stop_of(family)
        prompt = encode_prompt(tokenizer, messages[: turn.message])
        start = sample.input_ids[: turn.start]
        if family == "open_block":
            assert tokenizer.decode(start).startswith(tokenizer.decode(prompt))
            assert "<think>\n\n</think>\n\n".startswith(tokenizer.decode(start).split("assistant\n")[-1])
        elif family != "thinking":
            assert start == prompt
        else:
            # Behind the prompt may stand the empty thinking block that the template writes.
            assert start[: len(prompt)] == prompt
            assert "<think>\n\n</think>\n\n".startswith(tokenizer.decode(start[len(prompt) :]))


def test_a_template_that_drops_earlier_thinking_gives_a_sample_per_answer():
    messages = [
        user("one"),
        said("two", reasoning_content="I count"),
        user("three"),
        said("four", reasoning_content="I go on"),
    ]

    chat = encode("thinking", messages)

    first, second = chat.samples
    assert spoken("thinking", first) == ["<think>\nI count\n</think>\n\ntwo<|im_end|>"]
    assert spoken("thinking", second) == ["<think>\nI go on\n</think>\n\nfour<|im_end|>"]
    assert "I count" not in read("thinking", second)
    assert second.input_ids[: second.turns[0].start] == encode_prompt(
        chat_tokenizer("thinking"), messages[:3]
    )
    assert not chat.lost


def test_thinking_behind_a_prompt_that_opens_its_block_begins_behind_the_opening():
    messages = [user("one"), said("two", reasoning_content="I count"), user("three"), said("four")]

    first, second = encode("open_block", messages).samples

    assert spoken("open_block", first) == ["I count\n</think>\n\ntwo<|im_end|>"]
    assert first.input_ids[: first.turns[0].start] == encode_prompt(
        chat_tokenizer("open_block"), messages[:1]
    )
    assert spoken("open_block", second) == ["four<|im_end|>"]
    assert read("open_block", second).endswith(
        "three<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def test_thinking_inside_the_text_is_supervised_as_it_was_said():
    chat = encode("thinking", [user("one"), said("<think>\nI count\n</think>\n\ntwo")])

    assert spoken("thinking", chat.samples[0]) == ["<think>\nI count\n</think>\n\ntwo<|im_end|>"]
    assert chat.respelled == 0


def test_thinking_spelled_otherwise_than_the_template_does_is_kept_verbatim():
    chat = encode("thinking", [user("one"), said("<think>I count</think>two")])

    assert spoken("thinking", chat.samples[0]) == ["<think>I count</think>two<|im_end|>"]
    assert chat.respelled == 1


def test_an_answer_without_thinking_does_not_teach_the_empty_block():
    chat = encode("thinking", [user("one"), said("two")])

    assert spoken("thinking", chat.samples[0]) == ["two<|im_end|>"]
    assert read("thinking", chat.samples[0]).endswith("assistant\n<think>\n\n</think>\n\n")


def test_the_thinking_switch_reaches_the_template():
    off = encoder_of("thinking", thinking=False).encode([user("one"), said("two")])

    prompt = encode_prompt(chat_tokenizer("thinking"), [user("one")], thinking=False)
    assert off.samples[0].input_ids[: off.samples[0].turns[0].start] == prompt
    assert chat_tokenizer("thinking").decode(prompt).endswith("</think>\n\n")


def test_tool_calls_are_supervised_and_tool_results_are_not():
    messages = [
        user("weather?"),
        said("I look.", tool_calls=[call('{"city":"Oslo"}')]),
        {"role": "tool", "content": "rain"},
        said("It rains."),
    ]

    chat = encode("thinking", messages, tools=[WEATHER])

    assert [text for sample in chat.samples for text in spoken("thinking", sample)] == [
        "<think>\n\n</think>\n\nI look.\n<tool_call>\n"
        '{"name": "weather", "arguments": {"city":"Oslo"}}\n</tool_call><|im_end|>',
        "It rains.<|im_end|>",
    ]
    last = chat.samples[-1]
    assert "<tool_response>\nrain\n</tool_response>" in read("thinking", last, turn=len(last.turns) - 1)
    assert '"name": "weather"' in read("thinking", chat.samples[0])
    assert not chat.lost


def test_arguments_as_text_are_parsed_for_a_template_that_wants_objects():
    messages = [
        user("weather?"),
        said("", tool_calls=[call('{"city":"Oslo"}')]),
        {"role": "tool", "content": "rain"},
        said("It rains."),
    ]

    chat = encode("object_tools", messages)

    (sample,) = chat.samples
    assert spoken("object_tools", sample) == ['[call weather city="Oslo"]<|im_end|>', "It rains.<|im_end|>"]
    assert chat.respelled == 1


def test_a_template_that_ignores_tool_calls_or_thinking_loses_the_turn_with_its_reason():
    called = encode("chatml", [user("weather?"), said("I look.", tool_calls=[call({"city": "Oslo"})])])
    thought = encode("chatml", [user("one"), said("two", reasoning_content="I count")])

    assert (called.samples, dict(called.lost)) == ([], {"tool_call_not_in_template": 1})
    assert (thought.samples, dict(thought.lost)) == ([], {"reasoning_not_in_template": 1})


def test_a_trimmed_answer_is_supervised_as_it_was_said():
    chat = encode("llama3", [user("one"), said("  two\n"), user("three"), said("four")])

    assert [text for sample in chat.samples for text in spoken("llama3", sample)] == [
        "  two\n<|eot_id|>",
        "four<|eot_id|>",
    ]
    assert read("llama3", chat.samples[0]).endswith("assistant<|end_header_id|>\n\n")
    # The later turn read the trimmed answer, so it cannot share a sample with the untrimmed one.
    assert "two<|eot_id|>" in read("llama3", chat.samples[1])
    assert chat.respelled == 1


def test_a_generation_prompt_that_opens_a_thinking_block_needs_an_answer_that_closes_it():
    closed = encode("open_thinking", [user("one"), said("I count</think>two")])
    opened = encode("open_thinking", [user("one"), said("two")])

    assert spoken("open_thinking", closed.samples[0]) == ["I count</think>two<|eos|>"]
    assert read("open_thinking", closed.samples[0]).endswith("<|Assistant|><think>\n")
    assert dict(opened.lost) == {"open_thinking": 1}


@pytest.mark.parametrize(
    ("thought", "answer", "whole"),
    [
        ("I count", "two", "I count\n</think>\n\ntwo<|eos|>"),
        ("I count\n", "\n\ntwo", "I count\n</think>\n\ntwo<|eos|>"),
        ("I count", "\ntwo", "I count</think>\ntwo<|eos|>"),
    ],
)
def test_thinking_that_a_server_has_taken_apart_is_put_back_behind_the_open_block(thought, answer, whole):
    chat = encode("open_thinking", [user("one"), said(answer, reasoning_content=thought)])

    assert spoken("open_thinking", chat.samples[0]) == [whole]
    assert read("open_thinking", chat.samples[0]).endswith("<|Assistant|><think>\n")
    assert chat.respelled == 1


def test_a_turn_whose_text_the_template_replaces_is_lost():
    tokenizer = copy.deepcopy(chat_tokenizer("chatml"))
    tokenizer.chat_template = tokenizer.chat_template.replace("m['content']", "'short'")
    encoder = ChatEncoder(tokenizer, stop_ids={tokenizer.eos_token_id})

    assert dict(encoder.encode([user("one"), said("two")]).lost) == {"not_in_template": 1}


def test_marks_of_the_template_decide_which_answers_are_supervised():
    tokenizer = copy.deepcopy(chat_tokenizer("marked"))
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "m['role'] == 'assistant'", "m['role'] == 'assistant' and 'secret' not in m['content']"
    )
    encoder = ChatEncoder(tokenizer, stop_ids={tokenizer.eos_token_id})

    chat = encoder.encode([user("one"), said("a secret"), user("three"), said("four")])

    assert has_generation_marks(tokenizer)
    assert dict(chat.lost) == {"not_marked": 1}
    (sample,) = chat.samples
    marked = [token for token, flag in zip(sample.input_ids, sample.loss_mask, strict=True) if flag]
    assert tokenizer.decode(marked) == "four<|im_end|>"


def test_marks_stand_where_the_generation_prompt_does_not_return():
    tokenizer = copy.deepcopy(chat_tokenizer("marked"))
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}"
    )
    encoder = ChatEncoder(tokenizer, stop_ids={tokenizer.eos_token_id})

    (sample,) = encoder.encode([user("one"), said("two")]).samples

    assert tokenizer.decode(sample.input_ids[sample.turns[0].start :]).lstrip("\n") == "two<|im_end|>"


def test_an_answer_that_holds_an_end_of_turn_or_nothing_is_lost():
    assert dict(encode("chatml", [user("a"), said("x<|im_end|>y")]).lost) == {"stop_inside": 1}
    chat = encode("chatml", [user("a"), said(" \n"), user("b"), said("yes")])
    assert dict(chat.lost) == {"empty_turn": 1}
    assert spoken("chatml", chat.samples[0]) == ["yes<|im_end|>"]


def test_an_answer_without_tokens_of_its_own_is_lost():
    tokenizer = tiny_tokenizer()

    chat = ChatEncoder(tokenizer, stop_ids={END_ID}).encode([user("a"), said("漢字")])

    assert dict(chat.lost) == {"unknown_token": 1}


def test_a_spelling_that_the_tokenizer_changes_is_counted():
    tokenizer = tiny_tokenizer()

    chat = ChatEncoder(tokenizer, stop_ids={END_ID}).encode([user("a"), said("Yes")])

    assert chat.respelled == 1
    assert tokenizer.decode(chat.samples[0].input_ids[chat.samples[0].turns[0].start :]) == "yes<|im_end|>"


def test_a_completion_cut_off_by_length_does_not_teach_the_end_of_turn():
    chat = encode("chatml", [user("a"), said("one"), user("b"), said("two")], is_cut_off=True)

    assert spoken("chatml", chat.samples[0]) == ["one<|im_end|>", "two"]


def test_an_answer_that_begins_with_the_prompts_last_blank_does_not_change_the_prompt():
    messages = [user("one"), said("\n\nanswer: yes")]

    (sample,) = encode("llama3", messages).samples

    assert sample.input_ids[: sample.turns[0].start] == encode_prompt(chat_tokenizer("llama3"), messages[:1])
    assert spoken("llama3", sample) == ["\n\nanswer: yes<|eot_id|>"]


def test_recorded_tokens_count_when_they_spell_text_thinking_and_calls():
    encoder, tokenizer = encoder_of("thinking"), chat_tokenizer("thinking")
    text = "<think>\nI count\n</think>\n\ntwo<|im_end|>"
    ids = tokenizer(text)["input_ids"]
    messages = [user("one"), said("two", reasoning_content="I count")]

    sample = encoder.join_completion(messages, ids)

    assert sample.input_ids == encode_prompt(tokenizer, messages[:1]) + ids
    assert spoken("thinking", sample) == [text]
    assert encoder.join_completion([user("one"), said("three", reasoning_content="I count")], ids) is None
    assert encoder.join_completion([user("one"), said("two")], ids) is None


def test_a_tokenizer_that_cannot_part_answer_and_prompt_loses_the_turn():
    vocabulary = {"<unk>": 0, "</s>": 1, "a:": 2, "a:yes": 3, "yes": 4}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="</s>")
    tokenizer.chat_template = (
        "a:{% for m in messages if m['role'] == 'assistant' %}{{ m['content'] }}</s>{% endfor %}"
    )

    chat = ChatEncoder(tokenizer, stop_ids={1}).encode([user("a"), said("yes")])

    assert dict(chat.lost) == {"token_border": 1}


def test_parts_of_text_are_joined_and_other_parts_are_no_text():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]

    assert parse_messages([user(parts)]) == [user("ab")]
    assert parse_messages([user([{"type": "image"}])]) == "not_text"
