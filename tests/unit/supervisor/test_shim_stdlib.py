"""The shim runs on whatever Python from 3.9 on a node has: standard library only, Python 3.9 syntax."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from supervisor.transport.bundle import SHIM_FOLDER

MODULES = sorted(SHIM_FOLDER.glob("*.py"))
SOURCE_TREE_START = "_run.py"
"""Starts the shim from the source tree; not part of the zipapp, so it alone may name our package."""


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name.partition(".")[0] for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield (node.module or "").partition(".")[0]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_module_parses_as_python_3_9(path: Path) -> None:
    ast.parse(path.read_text(), feature_version=(3, 9))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_module_imports_only_the_standard_library(path: Path) -> None:
    allowed = set(sys.stdlib_module_names) | ({"supervisor"} if path.name == SOURCE_TREE_START else set())

    assert set(imported(ast.parse(path.read_text()))) <= allowed


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_annotations_of_newer_pythons_are_never_evaluated(path: Path) -> None:
    tree = ast.parse(path.read_text())
    has_code = any(not isinstance(node, ast.Expr) for node in tree.body)

    assert not has_code or "annotations" in {
        name.name for node in tree.body if isinstance(node, ast.ImportFrom) for name in node.names
    }
