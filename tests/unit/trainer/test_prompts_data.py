"""Prompt files: rows in both shapes, stable ids, bad rows counted."""

from __future__ import annotations

import json

import pytest

from trainer.data.prompts import read_prompts
from trainer.errors import DataError


def read(tmp_path, *rows):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return read_prompts(path)


def test_prompt_and_messages_rows_are_both_read_in_order(tmp_path):
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]

    file = read(tmp_path, {"id": "a", "domain": "qa", "prompt": "hello"}, "", {"id": 7, "messages": turns})

    assert [(p.id, p.domain) for p in file.prompts] == [("a", "qa"), ("7", None)]
    assert file.prompts[0].messages == ({"role": "user", "content": "hello"},)
    assert list(file.prompts[1].messages) == turns


def test_a_prompt_without_id_gets_the_same_one_each_time(tmp_path):
    first = read(tmp_path, {"prompt": "x"}).prompts[0].id

    assert read(tmp_path, {"prompt": "y"}, {"prompt": "x"}).prompts[1].id == first


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("{", "bad_json"),
        ([1], "not_an_object"),
        ({"id": "x"}, "no_prompt"),
        ({"prompt": 3}, "no_prompt"),
        ({"prompt": " \n"}, "no_prompt"),
        ({"messages": []}, "no_messages"),
        ({"messages": "hi"}, "no_messages"),
        ({"messages": [{"role": "user"}]}, "bad_message"),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
            "ends_with_assistant",
        ),
        ({"id": "good", "prompt": "again"}, "duplicate_id"),
    ],
)
def test_a_bad_row_is_skipped_under_its_reason(tmp_path, row, reason):
    file = read(tmp_path, {"id": "good", "prompt": "x"}, row)

    assert [prompt.id for prompt in file.prompts] == ["good"]
    assert dict(file.skipped) == {reason: 1}


def test_a_file_without_prompts_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r"no usable prompt in .*'no_prompt': 1"):
        read(tmp_path, {"id": 1})
    with pytest.raises(DataError, match="nothing, it is empty"):
        read(tmp_path, "")


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r"cannot read: .*none\.jsonl: No such file"):
        read_prompts(tmp_path / "none.jsonl")
