"""The commands against a real server in a thread: data on stdout, exit codes, errors that help.

The reconciler is absent; where a command waits, `settle` plays it: it ends operations as a test says.
"""

from __future__ import annotations

import io
import json
import re
import sys
import threading
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass

import pytest
import yaml
from sqlmodel import select

from supervisor import cli
from supervisor.services import telemetry
from supervisor.store.operations import finish_operation
from supervisor.store.queries import list_open_operations
from supervisor.store.tables import Node, Run
from tests.support.api_app import (
    build_api,
    end_attempt,
    live_server,
    seed_attempt,
    seed_node,
    seed_run,
)

RUN_FILE = """
name = "slammed"
node = "local"
[command]
args = ["--data-dir", "/data"]
"""


@dataclass
class Result:
    code: int
    out: str
    err: str

    def json(self):
        return json.loads(self.out)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    api = build_api(tmp_path_factory.mktemp("cli") / "state")
    with live_server(api) as live:
        yield live
    api.state.store.close()


@pytest.fixture
def live(server, tmp_path, monkeypatch):
    """The server with an empty store and the environment of an admin."""
    token_file = tmp_path / "token"
    token_file.write_text(server.api.tokens["admin"] + "\n")
    monkeypatch.setenv("DFLASHCTL_URL", server.url)
    monkeypatch.setenv("DFLASHCTL_TOKEN_FILE", str(token_file))

    def empty(session):
        for table in (Run, Node):
            for row in session.exec(select(table)).all():
                session.delete(row)
            session.flush()

    server.api.state.store.write_sync(empty)
    server.api.state.logs.is_unreachable = False
    return server


@pytest.fixture
def node(live):
    return seed_node(live.api.state)


@pytest.fixture
def run(live, node):
    return seed_run(live.api.state)


def ctl(*words, stdin=""):
    """Run a command in this process as the console script does."""

    class Out(io.TextIOWrapper):
        def __init__(self):
            super().__init__(io.BytesIO(), encoding="utf-8", write_through=True)

        def text(self):
            return self.buffer.getvalue().decode()

    out, err = Out(), Out()
    given, sys.stdin = sys.stdin, io.TextIOWrapper(io.BytesIO(stdin.encode()), encoding="utf-8")
    try:
        with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as end:
            cli.main([str(word) for word in words])
    finally:
        sys.stdin = given
    return Result(end.value.code or 0, out.text(), err.text())


@contextmanager
def settle(live, *, status="done", result=None, error=None, first=None):
    """End every operation that comes up, until the block ends; `first` runs once before."""
    stop = threading.Event()
    store = live.api.state.store

    def end_all(session):
        for operation in list_open_operations(session):
            operation.progress = {"step": "working", "message": "on it"}
            finish_operation(session, operation, status=status, result=result, error=error)

    def loop():
        waiting = [first] if first is not None else []
        while not stop.wait(0.05):
            if waiting:
                if not store.read_sync(list_open_operations):
                    continue
                waiting.pop()()
            store.write_sync(end_all)

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(10)


def test_nodes_from_add_to_rm(live):
    added = ctl("node", "add", "ct1", "--root", "/srv/x", "-o", "json")
    changed = ctl("node", "set", "ct1", "--python", "/usr/bin/python3", "-o", "json")
    listed = ctl("node", "ls", "-o", "json")
    shown = ctl("node", "show", "ct1", "-o", "yaml")
    removed = ctl("node", "rm", "ct1", "--yes")

    assert added.code == changed.code == removed.code == 0
    assert added.json()["log_dir"] == "/srv/x/logs"
    assert changed.json()["python"] == "/usr/bin/python3"
    assert [item["name"] for item in listed.json()] == ["ct1"]
    assert yaml.safe_load(shown.out)["name"] == "ct1"
    assert removed.out == ""
    assert ctl("node", "ls", "-o", "json").json() == []


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["node", "add", "Bad_NAME!"], ["NAME 'Bad_NAME!'", "lower case letters"]),
        (["node", "add", "n", "--root", "foo"], ["--root 'foo'", "absolute path"]),
        (["node", "set", "local", "--log-dir", "foo"], ["--log-dir 'foo'", "absolute path"]),
        (["node", "set", "local", "--root", ""], ["--root cannot be empty", "--python"]),
        (["node", "add", "n", "--transport", "ssh"], ["--transport ssh needs --host"]),
        (["node", "add", "n", "--transport", "proxmox", "--host", "203.0.113.1"], ["proxmox needs --vmid"]),
    ],
)
def test_a_refused_setting_is_told_as_the_option_its_value_and_what_is_allowed(live, node, words, told):
    result = ctl(*words)

    assert (result.code, result.out) == (2, "")
    assert all(part in result.err for part in told), result.err
    assert "pattern" not in result.err


def test_an_empty_value_unsets_an_optional_setting(live):
    ctl("node", "add", "ct1", "--python", "/usr/bin/python3")

    changed = ctl("node", "set", "ct1", "--python", "", "-o", "json")

    assert (changed.code, changed.json()["python"]) == (0, None)


def test_tables_in_pipes_are_tab_separated_and_whole(live, run):
    lines = ctl("ps").out.splitlines()

    assert lines[0].split("\t")[:3] == ["NAME", "NODE", "PHASE"]
    assert lines[1].split("\t")[:3] == ["slammed", "local", "pending"]


def test_an_empty_list_says_the_next_command_on_stderr(live):
    result = ctl("ps")

    assert (result.code, result.out) == (0, "")
    assert "dflashctl run FILE.toml" in result.err


def test_every_listing_is_one_json_document(live, run):
    seed_attempt(live.api.state, run)
    for words in (
        ["ps"],
        ["show", "slammed"],
        ["events"],
        ["events", "slammed"],
        ["node", "ls"],
        ["node", "show", "local"],
        ["drift", "slammed"],
        ["explain", "slammed"],
        ["plan", "start", "slammed"],
        ["plan", "stop", "slammed"],
        ["plan", "restart", "slammed"],
        ["plan", "deploy", "local"],
        ["top", "--once"],
        ["top", "slammed", "--once"],
        ["top", "local", "--once"],
        ["secret", "ls"],
        ["token", "ls"],
        ["version"],
        ["doctor"],
    ):
        document = ctl(*words, "-o", "json")
        assert document.code == 0, (words, document.err)
        document.json()
        table = ctl(*words)
        assert table.code == 0, (words, table.err)


def test_a_node_is_checked_with_one_line_for_each_check(live, node):
    report = [
        {"name": "python", "status": "ok", "value": "3.11.2", "message": "", "remedy": None},
        {
            "name": "root free",
            "status": "fail",
            "value": "1.0 GiB",
            "message": "too little",
            "remedy": "free space",
        },
    ]

    def store(session):
        row = session.get(Node, node.id)
        row.check_report = report
        session.add(row)

    live.api.state.store.write_sync(store)
    with settle(live):
        result = ctl("node", "check", "local")

    assert result.code == 1
    assert result.out.splitlines() == [
        "ok    python     3.11.2",
        "fail  root free  1.0 GiB  too little",
        "                 → free space",
    ]
    assert "root free" in result.err


def test_a_deploy_waits_and_shows_its_plan_before(live, node):
    plan = ctl("node", "deploy", "local", "--dry-run")
    with settle(live, result={"message": "unchanged"}):
        result = ctl("node", "deploy", "local")

    assert "1. check" in plan.out
    assert (result.code, result.out) == (0, "local: unchanged\n")


def test_run_stores_and_starts(live, node, tmp_path):
    file = tmp_path / "slammed.toml"
    file.write_text(RUN_FILE)

    with settle(live, result={"message": "attempt 1 started"}):
        result = ctl("run", file)

    assert (result.code, result.out) == (0, "slammed: attempt 1 started\n")
    assert "generation 1 stored" in result.err
    assert "operation op" in result.err


def test_run_without_start_only_stores(live, node, tmp_path):
    file = tmp_path / "slammed.toml"
    file.write_text(RUN_FILE)

    result = ctl("run", file, "--no-start")

    assert (result.code, result.out) == (0, "slammed\n")
    assert ctl("show", "slammed", "-o", "json").json()["desired"] == "stopped"


def test_run_reads_stdin(live, node):
    assert ctl("run", "-", "--no-start", stdin=RUN_FILE).code == 0


def test_a_typo_in_a_run_file_names_file_line_and_the_near_key(live, node, tmp_path):
    file = tmp_path / "slammed.toml"
    file.write_text(RUN_FILE + "[restrat]\npolicy = 'never'\n")

    result = ctl("run", file)

    assert result.code == 2
    assert f"{file}:6" in result.err
    assert "did you mean restart" in result.err
    assert ctl("ps", "-o", "json").json() == []


def test_a_run_file_that_is_not_there_is_a_usage_error(live, tmp_path):
    result = ctl("run", tmp_path / "nothing.toml")

    assert result.code == 2
    assert "nothing.toml" in result.err


def test_run_on_a_live_run_stores_the_generation_and_is_a_conflict(live, run, tmp_path):
    seed_attempt(live.api.state, run)
    file = tmp_path / "slammed.toml"
    file.write_text(RUN_FILE + "[env]\nA = '1'\n")

    result = ctl("run", file)

    assert result.code == 4
    assert "AlreadyRunning" in result.err
    assert "generation 2 stored; used at the next start" in result.err
    assert "generation 2 unchanged" in ctl("run", file).err
    assert ctl("show", "slammed", "-o", "json").json()["generation"] == 2


def test_a_start_whose_attempt_was_never_launched_is_no_success(live, run):
    def fail():
        attempt = seed_attempt(live.api.state, run, attempt_state="preflight")
        end_attempt(live.api.state, attempt, ended="launch_failed", exit_code=None)

    with settle(live, first=fail):
        result = ctl("start", "slammed")

    assert (result.code, result.out) == (1, "")
    assert "was not launched" in result.err


def test_no_step_is_told_after_the_end(live, node):
    with settle(live):
        result = ctl("node", "deploy", "local")

    assert result.code == 0
    assert "on it" not in result.err


def test_start_of_a_live_run_is_a_conflict_and_stop_of_a_stopped_run_is_done(live, run):
    stopped = ctl("stop", "slammed")
    seed_attempt(live.api.state, run)

    assert (stopped.code, ctl("start", "slammed").code) == (0, 4)


def test_no_wait_prints_the_operation_and_returns(live, run):
    result = ctl("start", "slammed", "--no-wait", "-o", "json")

    assert result.json()["status"] == "pending"
    assert ctl("restart", "slammed", "--no-wait").out.startswith("op")


def test_a_wait_that_takes_too_long_says_that_it_goes_on(live, run):
    result = ctl("start", "slammed", "--timeout", "0.3")

    assert result.code == 6
    assert "it goes on" in result.err


@pytest.mark.parametrize(
    ("reason", "code"),
    [("PreflightFailed", 1), ("OutcomeUnknown", 5), ("ConnectRefused", 5), ("AlreadyRunning", 4)],
)
def test_a_failed_operation_ends_with_its_code_and_cause(live, run, reason, code):
    error = {"reason": reason, "message": "module pynvml is missing", "hint": "deploy a lock that has it"}
    with settle(live, status="failed", error=error):
        result = ctl("start", "slammed")

    assert (result.code, result.out) == (code, "")
    assert "start failed: module pynvml is missing" in result.err
    assert f"why: {reason}" in result.err
    assert "do: deploy a lock that has it" in result.err


def test_a_superseded_operation_is_a_conflict(live, run):
    with settle(live, status="superseded"):
        assert ctl("start", "slammed").code == 4


def test_start_can_wait_until_training_has_begun(live, run):
    with settle(live, first=lambda: seed_attempt(live.api.state, run, attempt_state="ready")):
        result = ctl("start", "slammed", "--wait", "ready", "--timeout", "20")

    assert (result.code, result.out) == (0, "slammed: ready\n"), result.err


def test_start_says_why_the_training_will_not_begin(live, run):
    def fail():
        attempt = seed_attempt(live.api.state, run)
        end_attempt(live.api.state, attempt, ended="failed", exit_code=3)

    with settle(live, first=fail):
        result = ctl("start", "slammed", "--wait", "ready", "--timeout", "20")

    assert result.code == 1
    assert "before it was ready" in result.err
    assert "dflashctl explain slammed" in result.err


@pytest.mark.parametrize(
    "words",
    [
        ["show", "nothing"],
        ["stop", "nothing"],
        ["logs", "nothing"],
        ["events", "nothing"],
        ["explain", "nothing"],
        ["node", "show", "nothing"],
        ["node", "check", "nothing"],
        ["top", "nothing", "--once"],
        ["token", "revoke", "nothing", "--yes"],
        ["secret", "rm", "NOTHING", "--yes"],
        ["logs", "slammed", "--attempt", "9"],
    ],
    ids=" ".join,
)
def test_what_does_not_exist_is_exit_3_with_a_hint(live, run, words):
    result = ctl(*words)

    assert (result.code, result.out) == (3, "")
    assert result.err.startswith("error: ")


@pytest.mark.parametrize("state", ["new", "running", "failed"])
def test_explain_answers_in_a_few_lines_and_keeps_the_evidence_for_programs(live, run, state):
    if state != "new":
        attempt = seed_attempt(live.api.state, run)
        if state == "failed":
            end_attempt(live.api.state, attempt, ended="failed", exit_code=3)

    result = ctl("explain", "slammed")

    lines = result.out.splitlines()
    assert (result.code, 3 <= len(lines) <= 8) == (0, True), result.out
    assert lines[0].startswith("phase ")
    assert lines[-1].startswith("to do ")
    assert "RunCreated" in result.out
    assert "dflashctl explain slammed -o yaml" in result.err
    assert "detects_within_s" in yaml.safe_load(ctl("explain", "slammed", "-o", "yaml").out)


def test_beginnings_of_names_are_enough_when_they_are_unambiguous(live, run):
    seed_run(live.api.state, "slow")

    assert ctl("show", "sla", "-o", "json").json()["name"] == "slammed"
    assert ctl("show", run.id, "-o", "json").json()["name"] == "slammed"
    ambiguous = ctl("show", "sl")
    assert ambiguous.code == 2
    assert "slammed, slow" in ambiguous.err
    assert "did you mean slammed" in ctl("show", "slamed").err


def test_destructive_commands_without_terminal_need_yes(live, run):
    result = ctl("rm", "slammed")

    assert result.code == 2
    assert "--yes" in result.err
    assert ctl("rm", "slammed", "--yes").code == 0
    assert ctl("show", "slammed").code == 3


def test_an_attempt_is_declared_lost_after_confirmation_only(live, run):
    nothing = ctl("declare-lost", "slammed", "--yes")
    seed_attempt(live.api.state, run)
    asked = ctl("declare-lost", "slammed")
    plan = ctl("declare-lost", "slammed", "--dry-run")
    with settle(live):
        done = ctl("declare-lost", "slammed", "--yes", "--reason", "burnt")

    assert (nothing.code, asked.code, plan.code, done.code) == (4, 2, 0, 0)
    assert "its locks in the node" in plan.out
    assert "burnt" in ctl("events", "slammed").out


def test_a_rollback_without_an_earlier_pair_is_refused_with_what_to_do(live, run):
    result = ctl("rollback", "slammed")

    assert result.code == 4
    assert "deploy the one you want" in result.err


def test_a_live_run_is_not_deleted(live, run):
    seed_attempt(live.api.state, run)

    assert ctl("rm", "slammed", "--yes").code == 4


def test_logs_are_the_bytes_of_the_newest_attempt(live, run):
    end_attempt(live.api.state, seed_attempt(live.api.state, run, log=b"old\n"))
    seed_attempt(live.api.state, run, log="naïve\n\x1b[31mred\x1b[0m\n".encode())

    assert ctl("logs", "slammed").out == "naïve\n\x1b[31mred\x1b[0m\n"
    assert ctl("logs", "slammed", "--attempt", "1").out == "old\n"


@pytest.mark.parametrize(
    ("log", "lines", "expected"),
    [
        (b"a\nb\nc\n", 2, "b\nc\n"),
        (b"a\nb\nc", 2, "b\nc"),
        (b"a\nb\n", 9, "a\nb\n"),
        (b"a\nb\n", 0, ""),
        (b"", 5, ""),
        (b"\n\n\n", 1, "\n"),
        (b"x" * 300_000 + b"\nlast\n", 1, "last\n"),
        (b"first\n" + b"y" * 300_000 + b"\n", 1, "y" * 300_000 + "\n"),
    ],
    ids=["two", "open-end", "more", "none", "empty", "blank", "far", "long-line"],
)
def test_tail_counts_lines_from_the_end(live, run, log, lines, expected):
    seed_attempt(live.api.state, run, log=log)

    assert ctl("logs", "slammed", "--tail", lines).out == expected


def test_a_log_that_is_not_there_is_told_with_the_attempts_that_are(live, run):
    never = seed_attempt(live.api.state, run, attempt_state="preflight")
    live.api.state.logs.path(never.id).unlink()
    end_attempt(live.api.state, never, ended="launch_failed", exit_code=None)
    seed_attempt(live.api.state, run, log=b"")

    missing = ctl("logs", "slammed", "--attempt", "9")
    unlaunched = [ctl("logs", "slammed", "--attempt", "1", *more) for more in ([], ["--tail", "5"])]
    empty = ctl("logs", "slammed")

    assert missing.code == 3
    assert "no attempt 9: it has 1, 2" in missing.err
    assert "dflashctl show slammed" in missing.err
    for result in unlaunched:
        assert (result.code, result.out) == (3, "")
        assert "attempt 1 of slammed has no log (launch_failed)" in result.err
    assert (empty.code, empty.out) == (0, "")
    assert "attempt 2 of slammed has no log (" in empty.err


def test_grep_prints_whole_matching_lines_without_escapes(live, run):
    seed_attempt(live.api.state, run, log=b"step 1\n\x1b[31mloss nan\x1b[0m\nstep 2")

    assert ctl("logs", "slammed", "--grep", "loss|2").out == "loss nan\nstep 2\n"
    assert ctl("logs", "slammed", "--grep", "(").code == 2


def test_following_goes_on_into_the_next_attempt_with_a_marker(live, run):
    first = seed_attempt(live.api.state, run, log=b"one\n")

    def restart():
        threading.Event().wait(0.8)
        with live.api.state.logs.path(first.id).open("ab") as log:
            log.write(b"two\n")
        second = seed_attempt(live.api.state, run, log=b"three\n")
        end_attempt(live.api.state, first, ended="failed")
        threading.Event().wait(0.8)
        end_attempt(live.api.state, second)

    thread = threading.Thread(target=restart, daemon=True)
    thread.start()
    result = ctl("logs", "slammed", "-f", "--attempt", "1")
    thread.join(20)
    whole = ctl("logs", "slammed", "-f")

    assert (result.code, result.out) == (0, "one\ntwo\n")
    assert (whole.code, whole.out) == (0, "three\n")


def test_following_from_the_first_attempt_shows_each_log_once(live, run):
    first = seed_attempt(live.api.state, run, log=b"one\n")
    done = threading.Event()

    def restart():
        threading.Event().wait(0.8)
        second = seed_attempt(live.api.state, run, log=b"two\n")
        end_attempt(live.api.state, first, ended="failed")
        threading.Event().wait(1.5)
        end_attempt(live.api.state, second)
        done.set()

    thread = threading.Thread(target=restart, daemon=True)
    thread.start()
    result = ctl("logs", "slammed", "-f")
    thread.join(20)

    assert done.is_set()
    assert (result.code, result.out) == (0, "one\ntwo\n")
    assert result.err == "--- slammed attempt 2: /srv/dflash/logs/train_slammed2.log\n"


def test_following_waits_for_the_launch_and_passes_over_what_was_never_launched(live, run):
    first = seed_attempt(live.api.state, run, attempt_state="preflight")
    live.api.state.logs.path(first.id).unlink()

    def launch():
        threading.Event().wait(0.8)
        end_attempt(live.api.state, first, ended="launch_failed", exit_code=None)
        second = seed_attempt(live.api.state, run, log=b"late\n")
        threading.Event().wait(0.8)
        end_attempt(live.api.state, second)

    thread = threading.Thread(target=launch, daemon=True)
    thread.start()
    result = ctl("logs", "slammed", "-f", "--attempt", "1")
    whole = ctl("logs", "slammed", "-f")
    thread.join(20)

    assert (result.code, result.out) == (0, "")
    assert "attempt 1 was never launched" in result.err
    assert (whole.code, whole.out) == (0, "late\n")


def test_a_node_that_cannot_be_asked_is_exit_5(live, run):
    seed_attempt(live.api.state, run, log=b"x")
    live.api.state.logs.is_unreachable = True

    result = ctl("logs", "slammed")

    assert result.code == 5
    assert "ConnectTimeout" in result.err


def test_events_are_printed_oldest_first_without_terminal_escapes(live, run):
    ctl("restart", "slammed", "--no-wait", "--reason", "wrong \x1b[31mdata")
    reasons = [event["reason"] for event in ctl("events", "slammed", "-o", "json").json()]
    table = ctl("events", "slammed").out

    assert reasons == ["RunCreated", "RestartRequested"]
    assert "wrong data" in table
    assert "\x1b" not in table


def test_events_name_the_token_for_those_who_may_list_tokens(live, run, tmp_path, monkeypatch):
    ctl("restart", "slammed", "--no-wait")
    named = ctl("events", "slammed")
    file = tmp_path / "reader.token"
    ctl("token", "create", "reader", "--scope", "read", "--file", file)
    monkeypatch.setenv("DFLASHCTL_TOKEN_FILE", str(file))
    unnamed = ctl("events", "slammed")

    assert "(token admin)" in named.out
    assert (unnamed.code, "(token/" in unnamed.out) == (0, True)


def test_top_shows_queue_buckets_and_why_there_are_no_gpus(live, run):
    attempt = seed_attempt(live.api.state, run)
    record = {
        "t": 1.0,
        "step": 5,
        "train": {"loss": 2.5, "tok_s": 1234.0, "eal": 3.1},
        "queue": {
            "hs": 31,
            "min_ready": 30,
            "max_depth": 90,
            "buckets": [{"upto": 512, "depth": 1}, {"upto": 1024, "depth": 2}],
        },
    }
    live.api.state.store.write_sync(
        lambda session: telemetry.append_metrics(
            session, run_id=run.id, attempt_id=attempt.id, records=[record]
        )
    )

    out = ctl("top", "--once").out

    assert "31 (30–90)" in out
    assert "[1,2]" in out
    assert "2.5000" in out
    assert "local: GPU telemetry unavailable: NoSample" in out


def test_secrets_come_from_stdin_and_are_never_printed(live):
    stored = ctl("secret", "set", "WANDB_API_KEY", stdin="hunter2\n")
    listed = ctl("secret", "ls")

    assert stored.code == 0
    assert "hunter2" not in stored.out + stored.err + listed.out
    assert "WANDB_API_KEY" in listed.out
    assert ctl("secret", "set", "EMPTY", stdin="\n").code == 2
    assert ctl("secret", "rm", "WANDB_API_KEY", "--yes").code == 0
    assert ctl("secret", "set", "FROM_ENV", "--reference", "env:WANDB_API_KEY").code == 0
    assert "FROM_ENV\tenv:WANDB_API_KEY" in ctl("secret", "ls").out
    assert ctl("secret", "set", "FROM_ENV", "--reference", "http://x").code == 2
    assert ctl("secret", "rm", "FROM_ENV", "--yes").code == 0


def test_tokens_are_created_into_a_private_file_and_work(live, tmp_path, monkeypatch):
    file = tmp_path / "ci.token"

    created = ctl("token", "create", "ci", "--scope", "read", "--file", file)
    monkeypatch.setenv("DFLASHCTL_TOKEN_FILE", str(file))

    assert (created.code, created.out) == (0, "")
    assert file.stat().st_mode & 0o777 == 0o600
    assert ctl("ps").code == 0
    assert ctl("node", "add", "x").code == 7
    assert ctl("token", "create", "again", "--file", file).code == 2


def test_a_wrong_token_is_exit_7(live, tmp_path, monkeypatch):
    file = tmp_path / "wrong"
    file.write_text("dfs_wrong")
    monkeypatch.setenv("DFLASHCTL_TOKEN_FILE", str(file))

    assert ctl("ps").code == 7


def test_a_missing_token_file_is_a_usage_error_with_the_remedy(live, tmp_path, monkeypatch):
    monkeypatch.setenv("DFLASHCTL_TOKEN_FILE", str(tmp_path / "none"))

    result = ctl("ps")

    assert result.code == 2
    assert "dflashctl serve" in result.err


def test_a_daemon_that_is_not_there_is_exit_5_with_the_next_command(live, monkeypatch):
    monkeypatch.setenv("DFLASHCTL_URL", "http://127.0.0.1:9")

    result = ctl("ps")

    assert result.code == 5
    assert "dflashctl serve" in result.err


def test_flags_win_over_the_environment(live, monkeypatch):
    monkeypatch.setenv("DFLASHCTL_URL", "http://127.0.0.1:9")

    assert ctl("--url", live.url, "ps").code == 0


def test_doctor_tells_where_each_value_came_from(live, monkeypatch):
    values = {item["name"]: item for item in ctl("doctor", "-o", "json").json()}
    monkeypatch.setenv("DFLASHCTL_URL", "http://127.0.0.1:9")
    broken = ctl("doctor")

    assert values["url"]["value"] == f"{live.url} (environment)"
    assert values["daemon"]["status"] == "ok"
    assert broken.code == 1
    assert "fail  daemon" in broken.out


def test_debug_shows_the_traceback_and_plain_errors_do_not(live):
    assert "Traceback" in ctl("--debug", "show", "nothing").err
    assert "Traceback" not in ctl("show", "nothing").err


def test_ctrl_c_detaches_and_leaves_the_operation_alone(live, run, monkeypatch):
    from supervisor.client import Client

    def interrupt(*_args, **_kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(Client, "wait_operation", interrupt)
    result = ctl("start", "slammed")

    assert result.code == 0
    assert "detached; start goes on as op" in result.err
    assert ctl("show", "slammed", "-o", "json").json()["desired"] == "running"


@pytest.mark.parametrize(
    ("words", "method"),
    [
        (["ps", "-w", "-o", "json"], "list_all"),
        (["top", "-o", "json"], "list_all"),
        (["events", "-f"], "events"),
        (["logs", "slammed", "-f"], "follow_log"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_ctrl_c_is_the_ordinary_end_of_what_is_followed(live, run, monkeypatch, words, method):
    from supervisor.client import Client

    seed_attempt(live.api.state, run)
    true_method = getattr(Client, method)

    def interrupt(self, *args, **options):
        if args and args[0] == "/v1/events":
            return true_method(self, *args, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(Client, method, interrupt)

    assert ctl(*words).code == 0


def test_the_version_is_an_option_too():
    assert ctl("--version").out == ctl("version").out


def test_top_says_what_is_missing(live):
    nothing = ctl("top", "--once")
    unknown = ctl("top", "nosuch", "--once")

    assert (nothing.code, nothing.out) == (0, "")
    assert "no runs" in nothing.err
    assert "no nodes" in nothing.err
    assert unknown.code == 3
    assert "no such run or node: 'nosuch'" in unknown.err


def test_tables_show_times_to_the_second_and_documents_show_them_whole(live, run):
    end_attempt(live.api.state, seed_attempt(live.api.state, run))
    fraction = re.compile(r"T\d\d:\d\d:\d\d\.\d")

    for words in (["events"], ["show", "slammed"], ["node", "show", "local"]):
        table = ctl(*words).out
        assert re.search(r"T\d\d:\d\d:\d\d", table), table
        assert not fraction.search(table), table
    assert fraction.search(ctl("events", "-o", "json").out)


def test_ssh_nodes_need_a_confirmed_fingerprint(live):
    result = ctl("node", "add", "far", "--transport", "ssh", "--host", "127.0.0.1", "--port", "9")

    assert result.code == 5
    assert "127.0.0.1:9" in result.err
