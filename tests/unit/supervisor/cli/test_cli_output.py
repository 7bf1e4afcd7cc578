"""What commands show and follow: logs, events, `top`, secrets and tokens, errors, Ctrl-C."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from supervisor.services import telemetry
from tests.support.api_app import (
    WAIT_S,
    end_attempt,
    seed_attempt,
)
from tests.support.commandline import ctl


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
    restarted = []

    def restart():
        with live.api.state.logs.path(first.id).open("ab") as log:
            log.write(b"two\n")
        restarted.append(seed_attempt(live.api.state, run, log=b"three\n"))
        end_attempt(live.api.state, first, ended="failed")

    with once_asked(live, first, restart):
        result = ctl("logs", "slammed", "-f", "--attempt", "1")
    end_attempt(live.api.state, *restarted)
    whole = ctl("logs", "slammed", "-f")

    assert (result.code, result.out) == (0, "one\ntwo\n")
    assert (whole.code, whole.out) == (0, "three\n")
    assert "--- slammed attempt 1 failed: " in result.err
    assert result.err.endswith("; attempt 2 follows\n")


def test_following_from_the_first_attempt_shows_each_log_once(live, run):
    first = seed_attempt(live.api.state, run, log=b"one\n")
    logs = live.api.state.logs

    def restart():
        second = seed_attempt(live.api.state, run, log=b"two\n")
        end_attempt(live.api.state, first, ended="failed")
        assert logs.asked(second.id).wait(WAIT_S)
        end_attempt(live.api.state, second)

    with once_asked(live, first, restart):
        result = ctl("logs", "slammed", "-f")

    assert (result.code, result.out) == (0, "one\ntwo\n")
    told = result.err.splitlines()
    assert told[0].startswith("--- slammed attempt 1 failed: ")
    assert told[0].endswith("; attempt 2 follows")
    assert told[1] == "--- slammed attempt 2: /srv/dflash/logs/train_slammed2.log"
    assert told[2].endswith("; no further attempt starts by itself")
    assert len(told) == 3


def test_following_waits_for_the_launch_and_passes_over_what_was_never_launched(live, run):
    first = seed_attempt(live.api.state, run, attempt_state="preflight")
    live.api.state.logs.path(first.id).unlink()
    relaunched = []

    def launch():
        end_attempt(live.api.state, first, ended="launch_failed", exit_code=None)
        relaunched.append(seed_attempt(live.api.state, run, log=b"late\n"))

    with once_asked(live, first, launch):
        result = ctl("logs", "slammed", "-f", "--attempt", "1")
    (second,) = relaunched
    with once_asked(live, second, lambda: end_attempt(live.api.state, second)):
        whole = ctl("logs", "slammed", "-f")

    assert (result.code, result.out) == (0, "")
    assert "attempt 1 was never launched" in result.err
    assert (whole.code, whole.out) == (0, "late\n")


def test_following_an_old_attempt_says_which_one_came_after_it(live, run):
    for log in (b"one\n", b"two\n"):
        end_attempt(live.api.state, seed_attempt(live.api.state, run, log=log), ended="failed")
    seed_attempt(live.api.state, run, log=b"three\n")

    result = ctl("logs", "slammed", "-f", "--attempt", "1")

    assert (result.code, result.out) == (0, "one\n")
    assert result.err.endswith("; attempt 2 follows\n")


@contextmanager
def once_asked(live, attempt, act):
    """Act in a thread as soon as somebody reads the attempt's log: from then on it is being followed."""

    def wait():
        assert live.api.state.logs.asked(attempt.id).wait(WAIT_S), "nobody followed the log"
        act()

    with ThreadPoolExecutor(1) as pool:
        acting = pool.submit(wait)
        yield
        acting.result(WAIT_S)


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
