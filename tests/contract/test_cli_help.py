"""The help of every command, and the reference pages that are made from it and from the OpenAPI document."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer
from starlette.testclient import TestClient

from supervisor import cli
from tests.support.api_app import build_api
from tests.support.reference import list_commands, render_api_page, render_cli_page

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
COMMANDS = list_commands(typer.main.get_command(cli.app))

PROMISED = {
    "serve",
    "demo",
    "node add",
    "node ls",
    "node show",
    "node set",
    "node check",
    "node deploy",
    "node rm",
    "run",
    "start",
    "stop",
    "restart",
    "ps",
    "show",
    "logs",
    "events",
    "top",
    "drift",
    "explain",
    "plan start",
    "plan stop",
    "plan restart",
    "plan deploy",
    "rollback",
    "declare-lost",
    "rm",
    "secret set",
    "secret ls",
    "secret rm",
    "token create",
    "token ls",
    "token revoke",
    "doctor",
    "completion",
    "version",
}
"""Commands of the product so far. `demo` may be missing; nothing else may, and nothing comes in unseen."""


def test_the_commands_are_those_that_were_promised():
    assert set(COMMANDS) | {"demo"} == PROMISED


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_says_what_it_does_and_has_help_for_every_option(name):
    command = COMMANDS[name]

    assert command.help, name
    for parameter in command.params:
        if parameter.param_type_name == "option" and parameter.name not in ("help", "is_yes"):
            assert parameter.help, f"{name}: {parameter.name}"


@pytest.mark.parametrize("name", [name for name in COMMANDS if " " not in name])
def test_top_level_commands_show_two_examples(name):
    if name == "demo":
        return
    help_text = COMMANDS[name].help

    assert len(re.findall(r"^ *dflashctl ", help_text, re.MULTILINE)) == 2, name


def test_both_help_flags_work(capsys):
    texts = []
    for flag in ("-h", "--help"):
        with pytest.raises(SystemExit) as end:
            cli.main([flag])
        assert not end.value.code
        texts.append(capsys.readouterr().out)

    assert texts[0] == texts[1]
    assert "Examples" in texts[0]


def test_the_page_of_the_command_line_is_the_real_help():
    assert (REFERENCE / "cli.md").read_text() == render_cli_page(COMMANDS), (
        "write it anew: python -m tests.support.reference"
    )


def test_the_page_of_the_rest_interface_is_the_real_document(tmp_path):
    api = build_api(tmp_path)
    with TestClient(api.app, base_url="http://127.0.0.1"):
        page = render_api_page(api.app.openapi())
    api.state.store.close()

    assert (REFERENCE / "api.md").read_text() == page, "write it anew: python -m tests.support.reference"


def test_every_exit_code_is_documented():
    page = (REFERENCE / "cli.md").read_text()

    for code in (*range(8), 130):
        assert f"\n| {code} |" in page
