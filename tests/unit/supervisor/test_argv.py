"""Quoting, masking and framing: what real shells make of the text that `argv` builds."""

from __future__ import annotations

import os
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from supervisor.domain.errors import RequestError
from supervisor.transport.argv import (
    MAX_INLINE_BYTES,
    Frame,
    check_argv,
    host_command,
    render,
    with_environment,
)

WORDS = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=30)


def run_login_shell(text: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """What sshd does with a command's text."""
    return subprocess.run(["/bin/bash", "-c", text], input=stdin, capture_output=True, check=False)


def between(frame: Frame, stream: bytes) -> tuple[bytes, int]:
    _, begin, rest = stream.partition(frame.begin)
    data, end, status = rest.partition(frame.end)
    assert begin
    assert end
    assert status.endswith(b">>")
    return data, int(status[:-2])


@given(st.lists(WORDS, max_size=6))
@settings(max_examples=60, deadline=None)
def test_any_words_survive_both_shells(words: list[str]) -> None:
    frame = Frame()
    command = host_command((), frame.script(["printf", "%s\\0", *words]))
    done = run_login_shell(command.text, command.preamble)
    data, status = between(frame, done.stdout)
    assert status == 0
    assert data == b"".join(os.fsencode(word) + b"\0" for word in words or [""])


@pytest.mark.parametrize("word", ["é", "x" * (MAX_INLINE_BYTES + 1), "'" * 60_000])
def test_what_a_command_line_would_spoil_travels_on_stdin(word: str) -> None:
    frame = Frame()
    command = host_command((), frame.script(["sh", "-c", 'printf %s "$1"; cat', "x", word]))
    assert command.text.isascii()
    assert len(command.text) < 200
    done = run_login_shell(command.text, command.preamble + b" and stdin")
    assert between(frame, done.stdout)[0] == word.encode() + b" and stdin"


def test_short_plain_commands_need_no_preamble() -> None:
    assert host_command((), Frame().script(["true", "a b"])).preamble == b""


def test_the_prefix_gets_words_and_not_text() -> None:
    command = host_command(("printf", "<%s>", "a b", "--"), "it's")
    assert run_login_shell(command.text).stdout == b"<a b><--></bin/sh><-c><it's>"


@pytest.mark.parametrize("status", [0, 1, 255])
def test_both_streams_carry_the_status(status: int) -> None:
    frame = Frame()
    done = run_login_shell(host_command((), frame.script(["sh", "-c", f"exit {status}"])).text)
    assert between(frame, done.stdout) == (b"", status)
    assert between(frame, done.stderr) == (b"", status)


def test_a_listing_of_the_script_holds_no_marker() -> None:
    """`ps` inside the command, or `set -x` around it, must not look like its end."""
    frame = Frame()
    for script in (frame.script(["true"]), frame.channel_script(["true"])):
        assert frame.begin.decode() not in script
        assert frame.end.decode() not in script


def test_frames_differ() -> None:
    assert len({Frame().token for _ in range(100)}) == 100


def test_the_environment_is_set_inside_the_frame() -> None:
    frame = Frame()
    command = host_command((), frame.script(["sh", "-c", 'printf %s "$X"'], env={"X": "a 'b'\n$HOME"}))
    assert between(frame, run_login_shell(command.text).stdout)[0] == b"a 'b'\n$HOME"


def test_with_environment() -> None:
    assert with_environment(["true"]) == ("true",)
    words = with_environment(["p"], env={"A": "1 2"}, cwd="/x y", clear=True)
    assert words == ("/usr/bin/env", "-i", "-C", "/x y", "A=1 2", "p")
    with pytest.raises(RequestError, match="not a name"):
        with_environment(["p"], env={"A B": "1"})


@pytest.mark.parametrize("argv", [(), ("",), ("-rf", "/"), ("a", "b\0c")])
def test_check_argv_refuses(argv: tuple[str, ...]) -> None:
    with pytest.raises(RequestError) as caught:
        check_argv(argv)
    assert caught.value.reason == "BadArgv"


def test_render_masks_secrets_and_shortens() -> None:
    shown = render(
        ["env", "WANDB_API_KEY=abc", "--token=def", "Bearer s3cret", "a b", "x" * 1000],
        secret_values=["s3cret", ""],
    )
    assert shown.startswith("env 'WANDB_API_KEY=***' '--token=***' 'Bearer ***' 'a b' ")
    assert "abc" not in shown
    assert "def" not in shown
    assert len(shown) < 400
