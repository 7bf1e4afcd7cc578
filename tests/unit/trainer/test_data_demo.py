"""The shipped demo data: enough, varied, and no held-out prompt that repeats a training template."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from trainer.data.prompts import read_prompts

DEMO = Path(__file__).parents[3] / "demo"
DOMAINS = {"arithmetic", "code", "rewriting", "qa", "lists", "explanation"}
MAX_SHARED_TRIGRAMS = 0.2


def template_of(text: str) -> list[str]:
    """Words of a prompt without what a template fills in: numbers, quotations, the text behind a colon."""
    text = re.sub(r'"[^"]*"', " quotation ", text.lower())
    text = re.sub(r"\d+", " number ", text)
    head, colon, _ = text.partition(": ")
    return re.findall(r"[a-z']+|:", head + colon)


def trigrams(words: list[str]) -> set[tuple[str, ...]]:
    return {tuple(words[start : start + 3]) for start in range(len(words) - 2)}


def shares_a_template(left: str, right: str) -> bool:
    a, b = template_of(left), template_of(right)
    shared = trigrams(a) & trigrams(b)
    return a[:2] == b[:2] or len(shared) > MAX_SHARED_TRIGRAMS * max(1, len(trigrams(a)))


def prompts(name: str):
    file = read_prompts(DEMO / "prompts" / f"{name}.jsonl")
    assert not file.skipped
    return file.prompts


def text_of(prompt) -> str:
    return prompt.messages[0]["content"]


@pytest.mark.parametrize(("name", "least", "least_per_domain"), [("train", 320, 40), ("held_out", 24, 4)])
def test_there_are_enough_different_prompts_of_every_domain(name, least, least_per_domain):
    entries = prompts(name)
    counts = Counter(prompt.domain for prompt in entries)

    assert len(entries) >= least
    assert set(counts) == DOMAINS
    assert min(counts.values()) >= least_per_domain
    assert len({re.sub(r"\W+", " ", text_of(prompt).lower()) for prompt in entries}) == len(entries)


def test_training_prompts_are_varied_and_not_one_template_with_numbers():
    for domain in DOMAINS:
        openings = Counter(tuple(template_of(text_of(p))[:4]) for p in prompts("train") if p.domain == domain)

        assert len(openings) >= 25, domain
        assert openings.most_common(1)[0][1] <= 0.25 * openings.total(), domain


def test_no_held_out_prompt_shares_a_template_with_a_training_prompt():
    train = [text_of(prompt) for prompt in prompts("train")]

    clashes = [
        (text_of(held), other)
        for held in prompts("held_out")
        for other in train
        if shares_a_template(text_of(held), other)
    ]

    assert clashes == []


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("What is 17 plus 26?", "What is 3 plus 9?"),
        ("Correct the spelling: I recieved it.", "Correct the spelling: Helo."),
        ("Please name four birds that live near a lake.", "Name four birds that live in a desert."),
    ],
)
def test_the_template_check_sees_a_shared_template(left, right):
    assert shares_a_template(left, right)


def test_completions_belong_to_the_training_prompts_and_are_small():
    path = DEMO / "completions.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    asked = {prompt.id: text_of(prompt) for prompt in prompts("train")}

    assert path.stat().st_size < 600_000
    assert {row["id"]: row["messages"][0]["content"] for row in rows} == asked
    assert len(rows) == len(asked)
    assert all(row["messages"][-1]["content"].strip() and row["completion_ids"] for row in rows)
    assert {row["finish_reason"] for row in rows} == {"stop", "length"}


def test_the_settings_of_the_completions_stand_beside_them_and_in_the_readme():
    settings = json.loads((DEMO / "completions.jsonl.settings.json").read_text())
    command = (DEMO / "README.md").read_text()

    assert settings["decoding"] == "greedy"
    assert f"--max-new-tokens {settings['max_new_tokens']}" in command
    assert f"--dtype {settings['dtype']}" in command
