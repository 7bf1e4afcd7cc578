"""Paths in the node, log patterns, and numbers whose log exists already."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from supervisor.domain.errors import ConfigError, ConflictError
from supervisor.domain.layout import Layout, attempt_id, first_free_number, is_name, render_log_path

DEFAULT = "{log_dir}/train_{name}{attempt}.log"


def render(pattern: str = DEFAULT, attempt: int = 5, log_dir: str = "/workspace") -> str:
    return render_log_path(
        pattern, log_dir=log_dir, root="/srv/dflash", name="slammed", node="ct200", attempt=attempt
    )


def test_the_default_pattern_gives_the_names_people_know() -> None:
    assert render() == "/workspace/train_slammed5.log"
    assert render("{root}/logs/{node}-{name}-{attempt}.txt") == "/srv/dflash/logs/ct200-slammed-5.txt"


@pytest.mark.parametrize("log_dir", ["logs", "/a/../b", "/a//b"])
def test_a_path_that_is_not_plain_is_refused(log_dir: str) -> None:
    with pytest.raises(ConfigError, match="plain absolute path"):
        render(log_dir=log_dir)


def test_numbers_whose_log_exists_are_skipped_and_told() -> None:
    taken = {1, 2, 4}
    assert first_free_number(1, taken.__contains__) == (3, [1, 2])
    assert first_free_number(4, taken.__contains__) == (5, [4])
    with pytest.raises(ConflictError, match="3 attempt numbers") as caught:
        first_free_number(1, lambda _: True, limit=3)
    assert caught.value.reason == "LogExists"


@given(taken=st.sets(st.integers(1, 30)), first=st.integers(1, 30))
@settings(derandomize=True, max_examples=100, deadline=None)
def test_the_number_found_is_free_and_the_first_one(taken: set[int], first: int) -> None:
    number, skipped = first_free_number(first, taken.__contains__)
    assert number not in taken
    assert skipped == list(range(first, number))
    assert set(skipped) <= taken


def test_attempt_ids_follow_from_run_and_number_and_are_file_names() -> None:
    ids = {attempt_id(run, number) for run in ("r1", "r11") for number in range(1, 50)}
    assert len(ids) == 98
    assert attempt_id("r1", 1) == attempt_id("r1", 1)
    assert all(is_name(found) for found in ids)


def test_everything_lies_below_the_root() -> None:
    layout = Layout("/srv/dflash")
    paths = [
        layout.shim("d"), layout.uv("d"), layout.release("d"), layout.environment("d"), layout.python("d"),
        layout.attempt("a"), layout.current, layout.locks, layout.temporary, layout.logs,
    ]  # fmt: skip
    assert len(set(paths)) == len(paths)
    assert all(path.startswith("/srv/dflash/") for path in paths)
    assert layout.shim("d") == "/srv/dflash/shim/d/dflash-shim.pyz"
    assert layout.python("d") == "/srv/dflash/envs/d/bin/python"
