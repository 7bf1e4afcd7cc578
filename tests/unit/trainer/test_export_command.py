"""The `export` command."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from tests.support.tiny_drafter import make_drafter
from trainer.arguments import add_export_arguments
from trainer.checkpoint.export import check_export, export_drafter
from trainer.errors import CheckpointError, ConfigError
from trainer.eval.export_command import run_export


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    return export_drafter(make_drafter(), None, tmp_path / "run" / "export" / "step-00000003")


def _run(*words: str | Path) -> int:
    parser = argparse.ArgumentParser()
    add_export_arguments(parser)
    return run_export(parser.parse_args([str(word) for word in words]))


def test_check_prints_what_it_found(exported: Path, capsys) -> None:
    assert _run("--drafter", exported, "--check") == 0

    out = capsys.readouterr().out
    assert "ok, 25 tensors" in out
    assert "bfloat16, block size 4, target layers 1,5" in out


def test_output_is_a_full_copy(exported: Path, tmp_path: Path) -> None:
    assert _run("--drafter", exported, "--output", tmp_path / "copy") == 0

    assert check_export(tmp_path / "copy").parameters == check_export(exported).parameters
    with pytest.raises(CheckpointError, match="exists"):
        _run("--drafter", exported, "--output", tmp_path / "copy")
    assert _run("--drafter", exported, "--output", tmp_path / "copy", "--overwrite") == 0


def test_a_training_state_is_answered_with_the_export_beside_it(exported: Path) -> None:
    state = exported.parent.parent / "state" / exported.name
    state.mkdir(parents=True)

    with pytest.raises(CheckpointError, match=f"use {exported}"):
        _run("--drafter", state, "--check")


@pytest.mark.parametrize("words", [[], ["--check", "--output", "x"]], ids=["neither", "both"])
def test_check_and_output_exclude_each_other(exported: Path, words: list[str]) -> None:
    with pytest.raises(ConfigError, match="either --check or --output"):
        _run("--drafter", exported, *words)
