"""Paths that nothing can lie at, and what lies there but is no file: one line, before anything is loaded."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from tests.support.tiny import write_tiny_corpus
from trainer.__main__ import main
from trainer.config import PATH_MARGIN, why_unusable
from trainer.data.completions import locked_output
from trainer.data.prompts import read_prompts
from trainer.errors import ConfigError
from trainer.flags import resolve
from trainer.lifecycle.results import ResultFile, check_results, write_result
from trainer.preflight import check_run

LONG = "/" + "/".join(["d" * 200] * 21)
NEARLY_LONG = "/" + "/".join(["d" * 200] * 20) + "/" + "e" * 70
UNUSABLE = {
    "a long name": ("x" * 256, "File name too long"),
    "a long path": (LONG, "File name too long"),
    "no room below it": (NEARLY_LONG, "File name too long"),
    "a character of nought": ("a\0b", "it holds a NUL character"),
    "no text": (os.fsdecode(b"a\xff"), "it is not UTF-8"),
    "a circle of links": ("loop", "Too many levels of symbolic links"),
}
KEYS = {
    "--target-model": "paths.target_model",
    "--data-dir": "paths.data_dir",
    "--output-dir": "paths.output_dir",
    "--resume": "checkpoint.resume",
    "--eval-prompts": "eval.prompts",
    "eval.held_out_data": "eval.held_out_data",
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    Path("model").mkdir()
    Path("model/config.json").write_text('{"model_type": "llama"}')
    Path("model/model.safetensors").touch()
    write_tiny_corpus(Path("data"))
    return tmp_path


def settings(**changes: str) -> list[str]:
    paths = {"paths.target_model": "model", "paths.data_dir": "data", "paths.output_dir": "out"}
    return [f"{key}={value}" for key, value in (paths | changes).items()]


@pytest.mark.parametrize(("path", "reason"), UNUSABLE.values(), ids=UNUSABLE.keys())
@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS.keys())
def test_unusable_path_of_a_run_is_one_line(key, path, reason) -> None:
    text = "a\\u0000b" if "\0" in path else path

    with pytest.raises(ConfigError) as caught:
        resolve({}, overrides=settings(**{key: f'"{text}"'}), environ={})

    assert reason in str(caught.value)
    assert "is no usable path" in str(caught.value)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize(("path", "reason"), UNUSABLE.values(), ids=UNUSABLE.keys())
def test_unusable_path_of_other_commands_and_variables_is_one_line(path, reason, capsys) -> None:
    for words in (["export", "--check", path], ["prepare", "--target-model", "m", "--input", path]):
        assert main(words) == ConfigError.exit_code
    with pytest.raises(ConfigError, match="DFLASH_RUN_DIR is no usable path"):
        resolve({}, overrides=settings(), environ={"DFLASH_RUN_DIR": path})

    assert [reason in line for line in capsys.readouterr().err.splitlines()] == [True, True]


def test_a_path_just_short_enough_for_what_lies_below_it_is_usable() -> None:
    path = NEARLY_LONG[: 4095 - PATH_MARGIN - 1]

    assert why_unusable(path) == ""
    assert why_unusable(path + "e") == "File name too long"


def test_a_home_that_no_path_can_lead_to_hides_no_error(monkeypatch) -> None:
    monkeypatch.setenv("NETRC", "x" * 5000)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("DFLASH_TARGET_MODEL", "nowhere")

    assert main(["train", "--data-dir", "data", "--output-dir", "out"]) == ConfigError.exit_code


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


NO_FILE = {
    "a pipe": lambda path: os.mkfifo(path),
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a socket": make_socket,
}


@pytest.mark.parametrize("make", NO_FILE.values(), ids=NO_FILE.keys())
def test_what_is_no_file_is_refused_where_rows_are_read_or_written(make, here) -> None:
    path = Path("special.jsonl")
    make(path)

    with pytest.raises(ConfigError, match=r"is no place for rows: special\.jsonl; name a file"):
        read_prompts(path)
    with pytest.raises(ConfigError, match=r"is no place for rows: special\.jsonl; name a file"):
        locked_output(path, {}).__enter__()
    for name, key in (("--data-dir", "paths.data_dir"), (r"eval\.held_out_data", "eval.held_out_data")):
        config = resolve({}, overrides=settings(**{key: str(path)}), environ={}).config
        with pytest.raises(ConfigError, match=f"{name} is neither a folder nor a"):
            check_run(config, has_wandb_key=False)
    assert sorted(entry.name for entry in here.iterdir()) == ["data", "loop", "model", "special.jsonl"]


def test_held_out_folder_without_data_is_refused_before_anything_is_loaded() -> None:
    Path("empty").mkdir()
    config = resolve({}, overrides=settings(**{"eval.held_out_data": "empty"}), environ={}).config

    with pytest.raises(ConfigError, match=r"eval\.held_out_data holds no"):
        check_run(config, has_wandb_key=False)


def test_prompts_come_through_a_pipe_that_is_open() -> None:
    reading, writing = os.pipe()
    os.write(writing, b'{"prompt": "hello"}\n')
    os.close(writing)
    try:
        assert len(read_prompts(f"/dev/fd/{reading}").prompts) == 1
    finally:
        os.close(reading)


def test_an_output_whose_companions_have_no_name_left_is_refused() -> None:
    output = Path("g" * 240)

    with pytest.raises(ConfigError, match="--output leaves no room behind its name"):
        locked_output(output, {}).__enter__()
    assert not output.exists()

    with locked_output(Path("g" * 237), {}):
        pass


def test_a_result_is_written_under_a_name_as_long_as_names_can_be() -> None:
    for flag, path in (("--json", Path("r" * 255)), ("--markdown", Path("s" * 255))):
        check_results([ResultFile(flag=flag, path=path, is_own=lambda _content: False)])
        write_result(flag, path, lambda place: place.write_text("all"))

        assert path.read_text() == "all"
    assert not list(Path().glob(".tmp-*"))
