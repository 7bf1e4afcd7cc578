"""Paths in flags: one that nothing can lie at is refused where it is read; a missing one is the command's."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from trainer.arguments import given_path


def test_a_path_is_taken_whether_or_not_something_lies_there(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()

    for text in (str(file), str(tmp_path / "missing" / "x"), str(file / "below"), "."):
        assert given_path(text) == Path(text)


@pytest.mark.parametrize(
    ("name", "told"),
    [("", "the path is empty"), ("x" * 300, "File name too long"), ("loop/x", "Too many levels")],
    ids=["empty", "too long", "loop of links"],
)
def test_a_path_that_nothing_can_lie_at_is_refused_with_the_reason(
    tmp_path: Path, name: str, told: str
) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")

    with pytest.raises(argparse.ArgumentTypeError, match=told):
        given_path(str(tmp_path / name) if name else "")
