"""The guide on preparing data against the program: reasons, columns, formats and figures."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from trainer.data.corpus import SKIP_REASONS
from trainer.data.prepare import CHAT_COLUMNS
from trainer.data.prepare_report import ALTER_REASONS, DROP_REASONS
from trainer.data.sources import LINE_LIMIT_BYTES, SUFFIXES
from trainer.data.token_store import MEMORY_TOKENS, TOKEN_BYTES

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "guides" / "preparing-data.md").read_text()


def rows_below(heading):
    section = PAGE.split(f"{heading}\n", 1)[1].split("\n#", 1)[0]
    return dict(re.findall(r"^\| `([^|]+)` \| ([^|]+) \|$", section, re.MULTILINE))


@pytest.mark.parametrize(
    ("heading", "table"),
    [
        ("### Dropped rows", DROP_REASONS),
        ("### Altered rows", ALTER_REASONS),
        ("## Data of your own", SKIP_REASONS),
    ],
)
def test_every_reason_stands_on_the_page_with_its_meaning_and_no_other(heading, table):
    assert rows_below(heading) == table


def test_every_column_and_every_kind_of_file_stands_on_the_page():
    named = set(re.findall(r"`(\w+)`", PAGE.split("| column |", 1)[1].split("\n\n", 1)[0]))

    assert named >= set(CHAT_COLUMNS)
    assert all(f"`{suffix}`" in PAGE for suffix in SUFFIXES)


def test_the_figures_of_the_page_are_those_of_the_program():
    assert f"lines up to {LINE_LIMIT_BYTES >> 20} MiB" in PAGE
    assert f"up to {MEMORY_TOKENS // 10**6} million tokens ({MEMORY_TOKENS * TOKEN_BYTES >> 20} MiB)" in PAGE
    assert f"{TOKEN_BYTES} bytes a token" in PAGE
