"""The program around the commands: quick start, the daemon's own start and end, completion."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress

import httpx2
import pytest

from supervisor.client import Client
from supervisor.commands import session
from supervisor.settings import default_state_dir

HEAVY = ("fastapi", "sqlmodel", "sqlalchemy", "paramiko", "torch", "pydantic", "yaml", "uvicorn")
WAIT_S = 240


def environment(state_dir, **more):
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return kept | {"SUPERVISOR_STATE_DIR": str(state_dir), "PYTHONWARNINGS": "error"} | more


def ctl(*words, state_dir, **more):
    return subprocess.run(
        [sys.executable, "-m", "supervisor", *words],
        env=environment(state_dir, **more),
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )


@contextmanager
def daemon(state_dir, *words):
    """A real `serve` in a process of its own; yields the process and its one line."""
    process = subprocess.Popen(
        [sys.executable, "-m", "supervisor", "serve", "--state-dir", str(state_dir), "--port", "0", *words],
        env=environment(state_dir),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    errors = []
    drain = threading.Thread(target=lambda: errors.extend(process.stderr), daemon=True)
    drain.start()

    def all_errors():
        drain.join(WAIT_S)
        return errors

    process.errors = all_errors
    watchdog = threading.Timer(WAIT_S, process.kill)
    watchdog.start()
    try:
        line = process.stdout.readline()
        assert line, "".join(errors)
        yield process, line
    finally:
        watchdog.cancel()
        if process.poll() is None:
            process.kill()
        process.wait(WAIT_S)
        drain.join(WAIT_S)
        process.stdout.close()
        process.stderr.close()


def until_cut(lines):
    """What still comes; a daemon that is held up for longer than its grace closes without the last chunk."""
    seen = []
    with suppress(httpx2.RemoteProtocolError):
        seen.extend(lines)
    return seen


def test_commands_import_nothing_heavy():
    code = f"import supervisor.cli, sys; print([name for name in {HEAVY!r} if name in sys.modules])"

    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_S, check=True
    )

    assert found.stdout.strip() == "[]"


def test_the_client_looks_for_the_token_where_the_daemon_writes_it(monkeypatch, tmp_path):
    for name in ("SUPERVISOR_STATE_DIR", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert session.default_state_dir() == default_state_dir()

    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert session.default_state_dir() == default_state_dir()

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert session.default_state_dir() == default_state_dir() == tmp_path / "dflash-supervisor"


def test_serve_prints_one_line_and_ends_with_open_streams(tmp_path):
    state_dir = tmp_path / "state"
    with daemon(state_dir) as (process, line):
        url, _, rest = line.removeprefix("listening on ").partition("/#code=")
        code, _, token_file = rest.strip().partition("  admin token: ")
        token = (state_dir / "admin.token").read_text().strip()

        login = httpx2.post(
            f"{url}/v1/session", json={}, headers={"Authorization": f"Bearer {code}"}, timeout=WAIT_S
        )
        with Client(url, token) as client:
            assert client.get("/readyz")["status"] == "ready"
            with client._http.stream("GET", "/v1/events", headers={"Accept": "text/event-stream"}) as stream:
                lines = stream.iter_lines()
                next(lines)
                process.send_signal(signal.SIGTERM)
                rest_of_stream = until_cut(lines)
        ended = process.wait(WAIT_S)
        more_output = process.stdout.read()

    assert login.status_code == 201
    assert token_file == str(state_dir / "admin.token")
    assert (state_dir / "admin.token").stat().st_mode & 0o777 == 0o600
    assert state_dir.stat().st_mode & 0o777 == 0o700
    assert not any(line.startswith("event:") for line in rest_of_stream)
    assert (ended, more_output) == (0, "")


def test_serve_says_how_the_client_finds_it_and_leaves_out_routine_lines(tmp_path):
    with daemon(tmp_path / "a b") as (process, line):
        url = line.removeprefix("listening on ").partition("/#code=")[0]
        process.send_signal(signal.SIGTERM)
        process.wait(WAIT_S)
        errors = process.errors()

    assert errors == [
        f"export DFLASHCTL_URL={url}\n",
        f"export DFLASHCTL_TOKEN_FILE='{tmp_path}/a b/admin.token'\n",
    ]


def test_serve_shows_routine_lines_when_asked(tmp_path):
    with daemon(tmp_path, "--log-level", "info") as (process, _):
        process.send_signal(signal.SIGTERM)
        process.wait(WAIT_S)
        errors = "".join(process.errors())

    assert "uvicorn.error" in errors
    assert "alembic" in errors


def test_a_second_daemon_on_the_same_state_is_refused_by_name(tmp_path):
    with daemon(tmp_path) as (process, _):
        second = ctl("serve", "--port", "0", state_dir=tmp_path)

        assert process.poll() is None

    assert second.returncode == 4
    assert str(process.pid) in second.stderr
    assert "Traceback" not in second.stderr


@pytest.mark.parametrize("spoilt", ["daemon.lock", "admin.token.tmp", "the folder itself"])
def test_a_state_folder_that_cannot_be_written_is_refused_in_plain_words(tmp_path, spoilt):
    state = tmp_path / "state"
    if spoilt == "the folder itself":
        state.symlink_to("/proc/self/nowhere")
    else:
        (state / spoilt).mkdir(parents=True)

    result = ctl("serve", "--port", "0", state_dir=state)

    assert result.returncode == 2, result.stderr
    assert f"state folder {state} cannot be used" in result.stderr
    assert "Traceback" not in result.stderr


def test_serve_refuses_to_carry_tokens_in_clear_text_over_a_network(tmp_path):
    result = ctl("serve", "--host", "0.0.0.0", "--port", "0", state_dir=tmp_path)

    assert result.returncode == 2
    assert "tls_cert" in result.stderr
    assert not (tmp_path / "supervisor.db").exists()


def test_serve_says_when_its_port_is_taken(tmp_path):
    with daemon(tmp_path / "one") as (_, line):
        port = line.partition("127.0.0.1:")[2].partition("/")[0]
        result = ctl("serve", "--port", port, state_dir=tmp_path / "two")

    assert result.returncode == 2
    assert port in result.stderr
    assert "--port" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_typo_in_the_settings_names_the_key(tmp_path):
    (tmp_path / "config.toml").write_text("prot = 1\n")

    result = ctl("serve", state_dir=tmp_path)

    assert result.returncode == 2
    assert "prot" in result.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_are_printed(tmp_path, shell):
    result = ctl("completion", shell, state_dir=tmp_path)

    assert result.returncode == 0
    assert "_DFLASHCTL_COMPLETE" in result.stdout


def test_completion_knows_the_commands_and_is_silent_without_a_daemon(tmp_path):
    complete = {"_DFLASHCTL_COMPLETE": "complete_bash", "COMP_CWORD": "1"}

    commands = ctl(state_dir=tmp_path, COMP_WORDS="dflashctl st", **complete)
    names = ctl(
        state_dir=tmp_path,
        DFLASHCTL_URL="http://127.0.0.1:9",
        COMP_WORDS="dflashctl stop x",
        **(complete | {"COMP_CWORD": "2"}),
    )

    assert commands.stdout.split() == ["start", "stop"]
    assert (names.stdout.strip(), names.stderr) == ("", "")


def test_a_mistyped_command_gets_the_near_one(tmp_path):
    result = ctl("strat", state_dir=tmp_path)

    assert result.returncode == 2
    assert "start" in result.stderr
