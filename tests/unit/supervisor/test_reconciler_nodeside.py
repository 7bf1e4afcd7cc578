"""The programs that run in a node need nothing but its Python, from 3.9 on."""

from __future__ import annotations

import ast
import sys
from importlib import resources

import pytest

from supervisor.reconciler import scripts

NAMES = sorted(
    path.name.removesuffix(".py")
    for path in resources.files("supervisor.reconciler.nodeside").iterdir()
    if path.name.endswith(".py") and path.name != "__init__.py"
)


@pytest.mark.parametrize("name", NAMES)
def test_a_node_program_is_old_syntax_and_the_standard_library_alone(name: str) -> None:
    tree = ast.parse(scripts.load_script(name), feature_version=(3, 9))

    for node in ast.walk(tree):
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            modules = [node.module or ""]
        for module in modules:
            assert module.split(".")[0] in sys.stdlib_module_names, module


def test_only_the_line_behind_the_newest_marker_is_the_answer() -> None:
    output = b'noise\n@m@{"ok": false}\nmore\n@m@{"ok": true, "result": {"a": 1}}\nbye'
    assert scripts.parse_marked(output, "@m@") == {"ok": True, "result": {"a": 1}}


@pytest.mark.parametrize("output", [b"", b"no marker", b"@m@ cut off {", b"@m@[1]"])
def test_what_is_not_an_answer_is_none(output: bytes) -> None:
    assert scripts.parse_marked(output, "@m@") is None
