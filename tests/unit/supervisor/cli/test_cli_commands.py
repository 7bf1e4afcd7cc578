"""The commands against a real server in a thread: data on stdout, exit codes, errors that help.

The reconciler is absent; where a command waits, `settle` plays it: it ends operations as a test says.
"""

from __future__ import annotations

import re

import pytest
import yaml

from supervisor.commands.plans import CHAIN, led_here
from supervisor.store.tables import Node
from tests.support.api_app import (
    end_attempt,
    seed_attempt,
    seed_run,
)
from tests.support.commandline import ctl, settle

RUN_FILE = """
name = "slammed"
node = "local"
[command]
args = ["--data-dir", "/data"]
"""


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
    assert result.err.count("did you mean restart") == 1
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


def test_a_start_tells_what_the_checks_before_it_found_wanting(live, run):
    checks = [
        {
            "name": "capability wandb",
            "status": "warn",
            "message": "wandb is wanted\x1b[2J",
            "remedy": "install it",
        },
        {"name": "capability nvml", "status": "warn", "message": "no nvml", "remedy": ""},
        {"name": "python", "status": "ok", "message": "3.11", "remedy": ""},
    ]

    with settle(live, first=lambda: seed_attempt(live.api.state, run, preflight=checks)):
        result = ctl("start", "slammed")

    warnings = [line for line in result.err.splitlines() if line.startswith("warning")]
    assert result.code == 0
    assert warnings == ["warning: wandb is wanted (remedy: install it)", "warning: no nvml"]


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
    assert "next:" not in result.err


def test_a_failed_start_says_what_follows_and_the_name_of_the_end(live, run):
    error = {
        "reason": "ProgramMissing",
        "message": "attempt 1 launch_failed: program: /x does not exist",
        "hint": "correct [command] argv",
        "data": {"attempt_reason": "PreflightFailed", "follows": "no further attempt starts by itself"},
    }
    with settle(live, status="failed", error=error):
        result = ctl("start", "slammed")

    assert result.err.splitlines()[-4:] == [
        "error: start failed: attempt 1 launch_failed: program: /x does not exist",
        "  why: ProgramMissing (PreflightFailed)",
        "  next: no further attempt starts by itself",
        "  do: correct [command] argv",
    ]


def test_a_superseded_operation_is_a_conflict(live, run):
    with settle(live, status="superseded"):
        assert ctl("start", "slammed").code == 4


def test_start_can_wait_until_training_has_begun(live, run):
    with settle(live, first=lambda: seed_attempt(live.api.state, run, attempt_state="ready")):
        result = ctl("start", "slammed", "--wait", "ready", "--timeout", "120")

    assert (result.code, result.out) == (0, "slammed: ready\n"), result.err


def test_start_says_why_the_training_will_not_begin(live, run):
    def fail():
        attempt = seed_attempt(live.api.state, run)
        end_attempt(live.api.state, attempt, ended="failed", exit_code=3)

    with settle(live, first=fail):
        result = ctl("start", "slammed", "--wait", "ready", "--timeout", "120")

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

    answer, _, chain = result.out.partition("\n\nled here (newest last)\n")
    lines = answer.splitlines()
    assert (result.code, 3 <= len(lines) <= 8) == (0, True), result.out
    assert lines[0].startswith("phase ")
    assert lines[-1].startswith("to do ")
    assert re.search(r"^  \d{4}-\S+Z  \d+s ago +RunCreated +created$", chain, re.MULTILINE)
    assert "dflashctl explain slammed -o yaml" in result.err
    assert "detects_within_s" in yaml.safe_load(ctl("explain", "slammed", "-o", "yaml").out)


def event(reason, attempt=None):
    return {"reason": reason, "attempt_id": attempt, "message": "", "at": "2026-01-01T00:00:00Z"}


def test_what_led_to_a_state_is_told_oldest_first_without_the_steps_between():
    newest_first = [
        event("OperationFailed", "a1"),
        event("RestartScheduled", "a1"),
        event("AttemptFailed", "a1"),
        event("TelemetryOKFalse"),
        event("AttemptStarted", "a1"),
        event("LaunchRequested", "a1"),
        event("OperationFailed", "a0"),
        event("StartRequested"),
    ]

    assert [found["reason"] for found in led_here(newest_first)] == [
        "StartRequested",
        "OperationFailed",
        "AttemptStarted",
        "AttemptFailed",
        "RestartScheduled",
    ]
    assert len(led_here([event("StartRequested")] * 30)) == CHAIN


def test_an_end_before_the_launch_is_called_by_its_cause_everywhere(live, run):
    failed = {"name": "program", "status": "fail", "reason": "ProgramMissing", "message": "/x does not exist"}
    attempt = seed_attempt(live.api.state, run, attempt_state="preflight", preflight=[failed])
    end_attempt(live.api.state, attempt, ended="launch_failed", exit_code=None, reason="PreflightFailed")

    said = [ctl(*words).out for words in (["ps"], ["show", "slammed"], ["explain", "slammed"])]

    assert all("ProgramMissing (PreflightFailed)" in text for text in said), said


def test_beginnings_of_names_are_enough_when_they_are_unambiguous(live, run):
    seed_run(live.api.state, "slow")

    assert ctl("show", "sla", "-o", "json").json()["name"] == "slammed"
    assert ctl("show", run.id, "-o", "json").json()["name"] == "slammed"
    ambiguous = ctl("show", "sl")
    assert ambiguous.code == 2
    assert "slammed, slow" in ambiguous.err
    assert "did you mean slammed" in ctl("show", "slamed").err
    assert "do: did you mean local" in ctl("node", "show", "lokal").err
    assert "do: known: local (`dflashctl node ls`); or add it with `dflashctl node add gpu7" in (
        ctl("node", "show", "gpu7").err
    )


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
