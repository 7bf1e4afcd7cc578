"""Prompts that a chat template refuses, and target files that are not what their names say: one line each."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.support.tiny import TEMPLATE, tiny_target
from trainer.__main__ import build_parser
from trainer.data.encoded_prompts import encode_prompts, encode_some
from trainer.data.generate import run_generate
from trainer.data.pretrained import get_tokenizer, stop_token_ids
from trainer.data.prompts import Prompt
from trainer.data.self_prompts import find_user_header
from trainer.errors import ConfigError, DataError
from trainer.target.identity import export_identity, is_other_target, target_fingerprint

REFUSES_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
GOOD = {"id": "good", "prompt": "hi there"}
SYSTEM = {"id": "system", "messages": [{"role": "system", "content": "be"}, {"role": "user", "content": "x"}]}
ASKED = [Prompt("a", None, ({"role": "user", "content": "hello"},))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def target(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "target"))


def _generate(target: Path, folder: Path, *rows: dict[str, object]) -> int:
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--target-model", target, "--prompts", prompts, "--output", folder / "out.jsonl"]
    words += ["--max-new-tokens", 4]
    return run_generate(build_parser("generate").parse_args([str(word) for word in words]))


def _ids(folder: Path) -> list[str]:
    return [json.loads(line)["id"] for line in (folder / "out.jsonl").read_text().splitlines()]


def test_a_prompt_that_the_template_refuses_costs_no_other_one(target, tmp_path, capsys) -> None:
    (target / "chat_template.jinja").write_text(REFUSES_SYSTEM + TEMPLATE)

    for _ in range(2):
        assert _generate(target, tmp_path, SYSTEM, GOOD) == 0
        assert json.loads(capsys.readouterr().out)["skipped"] == {"template_error": 1}

    assert _ids(tmp_path) == ["good"]


@pytest.mark.parametrize("other", [SYSTEM, {"id": "long", "prompt": "a" * 600}], ids=["refused", "too long"])
def test_an_output_in_which_only_unusable_prompts_are_missing_is_done(target, tmp_path, other) -> None:
    (target / "chat_template.jinja").write_text(REFUSES_SYSTEM + TEMPLATE)

    with pytest.raises(DataError):
        _generate(target, tmp_path, other)
    assert not (tmp_path / "out.jsonl").exists()
    assert _generate(target, tmp_path, other, GOOD) == 0
    assert _generate(target, tmp_path, other, GOOD) == 0
    assert _ids(tmp_path) == ["good"]


@pytest.mark.parametrize(
    "template", ["{% for", "{{ messages[0].a.b }}", "{{ raise_exception('no') }}", "{% if x %}{% endif %}"]
)
def test_a_template_that_takes_no_prompt_is_told_with_its_reason(target, template: str) -> None:
    (target / "chat_template.jinja").write_text(template)
    tokenizer = get_tokenizer(target)

    assert not encode_prompts(tokenizer, ASKED, "template").prompts
    with pytest.raises(DataError, match="chat template takes"):
        encode_some(tokenizer, ASKED, "template")
    with pytest.raises(ConfigError, match="--prompts"):
        find_user_header(tokenizer)


def test_a_target_that_cannot_render_prompts_is_told(target) -> None:
    with pytest.raises(ConfigError, match="no tokenizer"):
        encode_prompts(None, ASKED, "template")
    with pytest.raises(ConfigError, match="has no effect"):
        encode_prompts(get_tokenizer(target), ASKED, "on")
    (target / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="no chat template"):
        encode_prompts(get_tokenizer(target), ASKED, "template")


CONTENTS = {
    "list": "[1, 2]",
    "null": "null",
    "deep": "[" * 100_000,
    "half": '{"a": ',
    "bytes": "\xff\xfe\x00",
}


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer.json", "tokenizer_config.json"])
def test_a_garbled_file_of_the_target_is_named_in_one_line(target, name: str, content: str) -> None:
    (target / name).write_bytes(content.encode("latin-1"))

    with pytest.raises(ConfigError, match=str(target)):
        stop_token_ids(target, get_tokenizer(target))


@pytest.mark.parametrize("value", ["x", True, [1, "x"], [[1]], {"a": 1}])
def test_stop_tokens_that_are_none_are_refused(target, value: object) -> None:
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))

    with pytest.raises(ConfigError, match="eos_token_id"):
        stop_token_ids(target, None)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_folder_in_place_of_a_file_of_the_target_is_named(target, name: str) -> None:
    meta = export_identity(target_fingerprint(target, mask_token_id=60))
    assert not is_other_target(meta, target)
    (target / name).unlink()
    (target / name).mkdir()

    with pytest.raises(ConfigError, match=f"{name}: Is a directory"):
        target_fingerprint(target, mask_token_id=60)


@pytest.mark.parametrize("path", ["", "x" * 5000, "y" * 300])
@pytest.mark.parametrize("command", ["generate", "prepare", "eval", "export", "import"])
def test_a_path_that_no_file_can_have_is_refused_before_anything_is_done(command: str, path: str) -> None:
    flag = "--target-model"

    with pytest.raises(ConfigError, match=f"{flag}: the path is"):
        build_parser(command).parse_args([flag, path])
