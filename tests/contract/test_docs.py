"""The documentation against the program: generated pages, examples, commands, links, names and tests.

Pages are found in the working tree, so a page that is not committed yet is held to the same rules.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from docs.generate import PAGES
from docs.run_file import EXAMPLE, PROGRAM, iter_keys
from supervisor import cli
from supervisor.domain.errors import ConfigError
from supervisor.domain.run import ConditionType, Reason
from supervisor.domain.spec import RunSpec, parse_run_file, render_spec
from supervisor.domain.toml_lines import locate_keys
from tests.support.reference import list_commands
from tests.support.tiny_drafter import talkative_target
from trainer.__main__ import COMMANDS as TRAINER_COMMANDS
from trainer.__main__ import build_parser, build_train_parser, main
from trainer.flags import resolve

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "docs" / "reference"
PROSE = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "demo" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
CLI = list_commands(typer.main.get_command(cli.app))
SHELL_FENCES = ("sh", "bash", "console")


def names(path: Path) -> str:
    return str(path.relative_to(ROOT))


def fences(path: Path, *languages: str) -> Iterator[str]:
    for match in re.finditer(r"^```(\w*)\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL):
        if match.group(1) in languages:
            yield match.group(2)


def outside_fences(path: Path) -> str:
    return re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)


# --- generated pages ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_is_what_the_program_says(name: str) -> None:
    assert (REFERENCE / name).read_text() == PAGES[name](), "write it anew: make docs"


def test_every_reason_and_condition_stands_on_the_page_of_states() -> None:
    page = (REFERENCE / "states.md").read_text()

    for item in (*Reason, *ConditionType):
        assert f"\n| `{item.value}` | " in page, item


@pytest.mark.parametrize("module", ["prepare", "capabilities"])
def test_every_cause_that_a_check_names_stands_on_the_page_of_states(module: str) -> None:
    page = (REFERENCE / "states.md").read_text()
    tree = ast.parse((ROOT / "supervisor" / "reconciler" / f"{module}.py").read_text())
    words = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    causes = [word for word in words if isinstance(word, str) and re.fullmatch(r"([A-Z][a-z]+){2,}", word)]

    assert causes
    for cause in causes:
        assert f"\n| `{cause}` | " in page, cause


# --- run files ------------------------------------------------------------------------------------------


def test_the_complete_example_names_every_key_but_the_two_alternatives() -> None:
    written = {re.sub(r"\.\d+", "[]", ".".join(str(part) for part in path)) for path in locate_keys(EXAMPLE)}
    spec = render_spec(parse_run_file(EXAMPLE, "example.toml"))

    for path, _ in iter_keys(RunSpec):
        if path in ("environment.python", "command.argv"):
            continue
        if "[]" in path:
            table, _, key = path.partition("[].")
            items = spec
            for part in table.split("."):
                items = items[part]
            assert any(item.get(key) is not None for item in items), path
        elif path.startswith(("health.liveness.", "health.readiness.")):
            assert path.rpartition(".")[0] in written, path
        else:
            assert path in written, path


def test_the_example_of_a_program_is_one() -> None:
    spec = parse_run_file(PROGRAM, "program.toml")

    assert spec.command.is_program
    assert not spec.has_release


RUN_FILES = [
    pytest.param(text, id=f"{names(page)}-{position}")
    for page in PROSE
    for position, text in enumerate(fences(page, "toml"))
    if re.search(r"^node\s*=", text, re.MULTILINE)
]
TRAINER_FILES = [
    pytest.param(text, id=f"{names(page)}-{position}")
    for page in PROSE
    for position, text in enumerate(fences(page, "toml"))
    if not re.search(r"^node\s*=", text, re.MULTILINE)
]


@pytest.mark.parametrize("text", RUN_FILES)
def test_every_run_file_in_the_documentation_is_accepted(text: str) -> None:
    parse_run_file(text, "page.toml")


@pytest.mark.parametrize("text", RUN_FILES)
def test_the_flags_of_every_documented_run_are_accepted_by_the_trainer(text: str, tmp_path: Path) -> None:
    args = parse_run_file(text, "page.toml").command.args
    if args is None:
        return
    given = vars(build_train_parser().parse_args(list(args)))
    for flag in ("--target-model", "--data-dir", "--output-dir"):
        given[flag] = str(tmp_path / flag[2:])
        (tmp_path / flag[2:]).mkdir()
    (tmp_path / "target-model" / "config.json").write_text("{}")
    given.pop("config"), given.pop("overrides")

    resolve(given, toml_path=None, overrides=[], environ={})


@pytest.mark.parametrize("text", TRAINER_FILES)
def test_every_other_toml_is_a_part_of_a_run_file_or_a_trainer_configuration(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # files that pages name stand below a folder of this name, as `prepare` writes them
    monkeypatch.chdir(tmp_path)
    (tmp_path / "held_out").mkdir()
    for name in ("prompts.jsonl", "held_out.parquet"):
        (tmp_path / "held_out" / name).touch()
    head = 'name = "part"\nnode = "local"\n'
    command = "" if "[command]" in text else "\n[command]\nargs = []\n"
    try:
        parse_run_file(f"{head}{text}{command}", "part.toml")
    except ConfigError:
        path = tmp_path / "trainer.toml"
        path.write_text(text)
        for name in ("model", "data", "out"):
            (tmp_path / name).mkdir()
        (tmp_path / "model" / "config.json").write_text("{}")
        flags = {
            "--target-model": str(tmp_path / "model"),
            "--data-dir": str(tmp_path / "data"),
            "--output-dir": str(tmp_path / "out"),
        }
        resolve(flags, toml_path=str(path), overrides=[], environ={})


# --- commands -------------------------------------------------------------------------------------------


def command_lines() -> Iterator[tuple[str, str]]:
    """Commands of ours in shell blocks, and whole commands in backticks, with the page that shows them."""
    for page in PROSE:
        for block in fences(page, *SHELL_FENCES):
            for line in block.replace("\\\n", " ").splitlines():
                line = re.sub(r"^\$ ", "", line.strip())
                if re.match(r"(?:\S*/)?(dflashctl|dflash-train) ", line):
                    yield names(page), line
        for match in re.finditer(r"`((?:dflashctl|dflash-train) [^`]+)`", outside_fences(page)):
            yield names(page), match.group(1).replace("\n", " ")


LINES = [pytest.param(line, id=f"{page}: {line}"[:110]) for page, line in dict.fromkeys(command_lines())]


def test_there_are_commands_to_check() -> None:
    assert len(LINES) > 40


@pytest.mark.parametrize("line", LINES)
def test_every_documented_command_exists_with_its_options(line: str) -> None:
    words = shlex.split(line, comments=True)
    words = words[: next((place for place, word in enumerate(words) if re.match(r"[|<>&;]", word)), None)]
    program, arguments = Path(words[0]).name, words[1:]
    assert not (unknown := unknown_words(program, arguments)), f"{line}: {unknown}"


def unknown_words(program: str, arguments: list[str]) -> list[str]:
    """What the program would not know: its command, or options of it."""
    if program == "dflash-train":
        known = trainer_options(arguments[0])
        return [arguments[0]] if known is None else unknown_options(arguments[1:], known)
    for count in (2, 1):
        command = CLI.get(" ".join(arguments[:count]))
        if command is not None:
            known = {name for item in command.params for name in (*item.opts, *item.secondary_opts)}
            return unknown_options(arguments[count:], known | {"--help", "-h"})
    return arguments[:2]


def unknown_options(words: list[str], known: set[str]) -> list[str]:
    return [word for word in words if re.match(r"--?[A-Za-z]", word) and word.partition("=")[0] not in known]


def trainer_options(command: str) -> set[str] | None:
    if command not in TRAINER_COMMANDS:
        return None
    parser = build_train_parser() if command == "train" else build_parser(command)
    return {option for action in parser._actions for option in action.option_strings}


@pytest.mark.parametrize(
    "line",
    [
        "dflashctl frobnicate x",
        "dflashctl node polish ct200",
        "dflashctl logs slammed --forever",
        "dflash-train sing",
    ],
)
def test_the_check_of_commands_finds_what_does_not_exist(line: str) -> None:
    program, *arguments = shlex.split(line)

    assert unknown_words(program, arguments)


# --- the guide to training by hand, carried out -----------------------------------------------------------

HERE = {
    "--target-gpus": "cpu",
    "--drafter-gpus": "cpu",
    "--device": "cpu",
    "--dtype": "float32",
    "--max-new-tokens": "6",
}
"""What this machine needs in place of the guide's words; everything else is carried out as it stands."""


@pytest.mark.usefixtures("root_logger")
def test_the_guide_to_training_by_hand_works_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guide = ROOT / "docs" / "guides" / "train-by-hand.md"
    model = talkative_target(tmp_path)
    monkeypatch.chdir(tmp_path)
    (config,) = fences(guide, "toml")
    Path("small.toml").write_text(config)
    for name in ("prompts.jsonl", "held_out.jsonl"):
        rows = [{"id": f"{name}-{n}", "domain": "a", "prompt": f"say {n} words"} for n in range(6)]
        Path(name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    done = [
        run_line(line, model)
        for block in fences(guide, "sh")
        for line in block.replace("\\\n", " ").splitlines()
    ]

    assert done == ["generate", "prepare", "train", "train", "eval", "export", "export"]
    assert json.loads(Path("eval.json").read_text())["measured_prompts"] > 0
    assert Path("drafter/config.json").exists()
    assert list(Path("small/lineage-0000/export").iterdir())


def run_line(line: str, model: Path) -> str:
    words = shlex.split(line.replace("/models/target", str(model)))[1:]
    for position, word in enumerate(words[:-1]):
        words[position + 1] = HERE.get(word, words[position + 1])
    for export in Path("out/lineage-0000/export").glob("step-*"):
        words = [re.sub(r"^(out/.*)step-\d+$", rf"\g<1>{export.name}", word) for word in words]
    assert main(words) == 0, line
    return words[0]


# --- links and names ------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", outside_fences(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PROSE, ids=names)
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", outside_fences(page)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        linked = (page.parent / name).resolve() if name else page
        assert linked.exists(), f"{names(page)}: {target}"
        if anchor:
            assert anchor in anchors(linked), f"{names(page)}: {target}"


@pytest.mark.parametrize("page", PROSE, ids=names)
def test_every_file_of_ours_that_a_page_names_exists(page: Path) -> None:
    own = r"`((?:supervisor|trainer|tests|docs|demo|benchmarks|webui|requirements|migrations)/[\w./-]+?)/?`"
    for path in re.findall(own, outside_fences(page)):
        assert (ROOT / path).exists(), f"{names(page)}: {path}"


# --- tests that pages name ------------------------------------------------------------------------------

TEST_NAME = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`|`(test_\w+\.py)::(test_\w+)`")
WITNESSED = [ROOT / "docs" / "faults.md", ROOT / "docs" / "security.md"]


def functions_of(path: Path) -> set[str]:
    return {
        node.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


@pytest.mark.parametrize("page", WITNESSED, ids=names)
def test_every_test_that_a_page_names_exists(page: Path) -> None:
    files = {path.name: path for path in (ROOT / "tests").rglob("test_*.py")}
    found = TEST_NAME.findall(page.read_text())

    assert len(found) > 20
    for full, function, short, short_function in found:
        path = ROOT / full if full else files.get(short, ROOT / short)
        name = function or short_function
        assert path.exists(), f"{names(page)} names {full or short}"
        assert name in functions_of(path), f"{names(page)} names {path.name}::{name}"


def test_every_row_of_the_fault_table_names_a_test_or_says_that_it_is_open() -> None:
    page = (ROOT / "docs" / "faults.md").read_text()
    rows = re.findall(r"^\| ([LCDPTM]\d+) \|(.*)\|$", page, re.MULTILINE)

    numbers = [number for number, _ in rows]
    assert len(numbers) == len(set(numbers))
    for number, text in rows:
        assert TEST_NAME.search(text) or "open" in text.split("|")[-1], number
