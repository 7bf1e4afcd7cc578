"""Stopping by the real shim: checkpoint first, then TERM, then KILL of exactly what is ours."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from supervisor.shim.proc import identity_of, is_alive, signal_identity
from tests.support.shim_bench import PATIENT_STOP, SHORT_STOP, TOY, WAIT_S, ShimBench, is_removed, wait_for


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[ShimBench]:
    bench = ShimBench(tmp_path)
    yield bench
    bench.close()


def events(bench: ShimBench, attempt_id: str) -> list[str]:
    lines = (bench.folder(attempt_id) / "events.ndjson").read_text().splitlines()
    return [json.loads(line)["reason"] for line in lines]


def stop(bench: ShimBench, attempt_id: str, stop_id: str = "s1", **fields: Any) -> dict[str, Any]:
    request = {"reason": "test", "actor": "me", "save": True, **fields}
    return bench.agent().result("stop", attempt_id=attempt_id, stop_id=stop_id, **request)["state"]


def kill_shim(bench: ShimBench, state: dict[str, Any]) -> None:
    signal_identity(state["shim"], signal.SIGKILL)
    wait_for(lambda: is_alive(state["shim"]) is False, "shim gone")


def test_graceful_stop_saves_a_checkpoint_and_exits_9(bench: ShimBench) -> None:
    bench.start("a1")
    bench.wait_training("a1")

    state = stop(bench, "a1", reason="operator asked")

    assert state["phase"] in ("stopping", "exited")
    assert state["stop"]["id"] == "s1"
    assert state["stop"]["actor"] == "me"
    record = bench.wait_exit("a1")
    assert (record["code"], record["signal"], record["stop_id"]) == (9, None, "s1")
    assert record["killed"] is False
    request = bench.read("a1", "control/stop.json")
    assert request["reason"] == "operator asked"
    assert request["save"] is True
    status = bench.read("a1", "status.json")
    assert status["stop"]["id"] == "s1"
    assert Path(status["last_checkpoint"]["path"], "manifest.json").exists()


def test_stop_is_idempotent_by_its_id_and_done_for_a_stopped_attempt(bench: ShimBench) -> None:
    bench.start("a1", "--save-s", "1")
    bench.wait_training("a1")

    first = stop(bench, "a1")
    again = stop(bench, "a1")
    bench.wait_exit("a1")
    wait_for(lambda: bench.read("a1", "state.json")["phase"] == "exited", "exited")
    late = stop(bench, "a1", stop_id="s2")

    assert again["stop"]["requested_at"] == first["stop"]["requested_at"]
    assert events(bench, "a1").count("StopRequested") == 1
    assert late["phase"] == "exited"
    assert late["stop"]["id"] == "s1"


def test_trainer_that_ignores_term_is_killed_and_the_record_says_so(bench: ShimBench) -> None:
    bench.start("a1", "--ignore-term", stop=SHORT_STOP)
    bench.wait_training("a1")

    stop(bench, "a1")

    record = bench.wait_exit("a1")
    assert (record["code"], record["signal"]) == (None, signal.SIGKILL)
    assert record["killed"] is True
    assert record["oom"] in (None, False)
    assert record["survivors"] == []
    steps = [reason for reason in events(bench, "a1") if reason in ("StopRequested", "StopStep", "Exited")]
    assert steps == ["StopRequested", "StopStep", "StopStep", "Exited"]


def test_trainer_may_extend_its_grace_for_a_checkpoint(bench: ShimBench, tmp_path: Path) -> None:
    for grace_s in (0.5, 5, 50):  # the longer ones for a machine on which the trainer was not heard in time
        attempt, saved = f"a{grace_s}", tmp_path / f"saved-{grace_s}"
        policy = {**PATIENT_STOP, "grace_s": grace_s, "extend_max_s": 300}
        bench.start(attempt, "--extend-s", "200", "--save-until", str(saved), stop=policy)
        bench.wait_training(attempt)
        stop(bench, attempt)
        wait_for(lambda a=attempt: {"StopExtended", "StopStep"} & set(events(bench, a)), "the toy is heard")
        if "StopStep" not in events(bench, attempt):
            break
        saved.touch()
        bench.wait_exit(attempt)
    time.sleep(grace_s)
    assert bench.read(attempt, "exit.json") is None, "its own grace is over, the extension is not"

    saved.touch()

    record = bench.wait_exit(attempt)
    assert (record["code"], record["killed"]) == (9, False)
    assert bench.read(attempt, "status.json")["last_checkpoint"] is not None
    assert bench.read(attempt, "state.json")["stop"]["deadline_s"] == grace_s + 200
    assert "StopExtended" in events(bench, attempt)


def test_extension_is_capped(bench: ShimBench) -> None:
    # Another first signal: the kernel would merge two SIGTERMs that a slow machine has not delivered yet.
    policy = {**PATIENT_STOP, "grace_s": 0.3, "extend_max_s": 0.6, "signal": "SIGUSR1"}
    bench.start("a1", "--extend-s", "600", "--save-s", "600", "--abandon-at", "1", stop=policy)
    bench.wait_training("a1")

    stop(bench, "a1")

    record = bench.wait_exit("a1")
    assert record["code"] == 9, "the SIGTERM after the grace abandoned the save"
    assert bench.read("a1", "status.json")["last_checkpoint"] is None


def test_a_second_stop_may_end_the_grace_earlier(bench: ShimBench) -> None:
    bench.start("a1", "--ignore-term", stop={**SHORT_STOP, "grace_s": 600, "extend_max_s": 600})
    bench.wait_training("a1")
    stop(bench, "a1")

    state = stop(bench, "a1", stop_id="s2", grace_s=0)

    assert state["stop"]["id"] == "s1"
    assert bench.wait_exit("a1")["killed"] is True


@pytest.mark.parametrize("cgroup", ["auto", "off"])
@pytest.mark.parametrize("wipe", [(), ("--wipe",)], ids=["token", "environ wiped"])
def test_children_that_outlive_the_trainer_are_ended_and_a_bystander_is_not(
    bench: ShimBench, wipe: tuple[str, ...], cgroup: str
) -> None:
    argv = ["--children", "2", "--children-ignore-term", *wipe]
    bystander = bench.bystander([sys.executable, "-c", "import time; time.sleep(600)", str(TOY), *argv])
    bench.start("a1", *argv, cgroup=cgroup, stop=SHORT_STOP)
    bench.wait_training("a1")
    children = [identity_of(pid) for pid in bench.children("a1", 2)]
    assert all(is_alive(child) for child in children)
    assert all(
        os.getsid(child["pid"]) != bench.read("a1", "state.json")["identity"]["pid"] for child in children
    )

    stop(bench, "a1")

    record = bench.wait_exit("a1")
    assert [is_alive(child) for child in children] == [False, False]
    assert bystander.poll() is None
    assert record["killed"] is True
    assert record["survivors"] == []


def test_children_of_a_trainer_that_dies_unasked_are_ended_too(bench: ShimBench) -> None:
    state = bench.start("a1", "--children", "2", cgroup="off")
    bench.wait_training("a1")
    children = [identity_of(pid) for pid in bench.children("a1", 2)]

    signal_identity(state["identity"], signal.SIGKILL)

    record = bench.wait_exit("a1")
    assert record["signal"] == signal.SIGKILL
    assert record["killed"] is False, "SIGTERM was enough for the children"
    assert record["stop_id"] is None
    assert [is_alive(child) for child in children] == [False, False]
    assert "LeftoversFound" in events(bench, "a1")


def test_program_under_a_wrapper_gets_the_signal_and_the_grace(bench: ShimBench, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    saved = tmp_path / "saved"
    script.write_text(f'#!/bin/sh\n"{sys.executable}" "{TOY}" --save-until "{saved}"\necho unreachable\n')
    script.chmod(0o755)
    bench.start("a1", argv=[str(script)], cgroup="off")
    bench.wait_training("a1")

    stop(bench, "a1")
    wait_for(lambda: "MainExited" in events(bench, "a1"), "the wrapper's end")
    saved.touch()

    record = bench.wait_exit("a1")
    assert record["signal"] == signal.SIGTERM, "the wrapper itself died of the signal"
    assert record["killed"] is False
    assert bench.read("a1", "status.json")["last_checkpoint"] is not None
    assert record["last_lines"][-1].startswith("stopped at step")


def test_trainer_with_a_wiped_environ_is_still_ours(bench: ShimBench) -> None:
    state = bench.start("a1", "--wipe", "--ignore-term", stop=SHORT_STOP, cgroup="off")
    bench.wait_training("a1")
    assert b"DFLASH" not in Path(f"/proc/{state['identity']['pid']}/environ").read_bytes()

    stop(bench, "a1")

    assert bench.wait_exit("a1")["killed"] is True
    assert is_alive(state["identity"]) is False


def test_signal_refuses_when_pid_is_another_process_now(bench: ShimBench) -> None:
    stranger = bench.bystander(["/bin/sleep", "600"])
    identity = identity_of(stranger.pid)
    assert identity is not None
    agent = bench.agent()

    for forged in (
        {**identity, "start_ticks": identity["start_ticks"] - 1},
        {**identity, "boot_id": "another boot"},
        {**identity, "init_ticks": identity["init_ticks"] + 1},
    ):
        reply = agent.ask("signal", identity=forged, signal="SIGKILL")
        assert reply["error"]["reason"] == "IdentityMismatch"

    assert stranger.poll() is None
    assert agent.result("signal", identity=identity, signal="SIGKILL")["sent"] is True
    assert stranger.wait(WAIT_S) == -signal.SIGKILL


def test_reused_pid_in_the_record_is_never_signalled_by_a_stop(bench: ShimBench) -> None:
    state = bench.start("a1", "--hang", cgroup="off", stop=SHORT_STOP)
    kill_shim(bench, state)
    signal_identity(state["identity"], signal.SIGKILL)
    wait_for(lambda: is_alive(state["identity"]) is False, "trainer gone")
    stranger = bench.bystander(["/bin/sleep", "600"])
    state["identity"] = {**state["identity"], "pid": stranger.pid}
    (bench.folder("a1") / "state.json").write_text(json.dumps(state))

    stop(bench, "a1")

    record = bench.wait_exit("a1")
    assert record["code"] is None
    assert record["killed"] is False
    assert stranger.poll() is None


def test_dead_shim_is_reported_and_its_trainer_can_still_be_stopped(bench: ShimBench) -> None:
    state = bench.start("a1")
    bench.wait_training("a1")
    kill_shim(bench, state)
    agent = bench.agent()

    before = agent.result("status", attempt_id="a1")
    answer = agent.result("stop", attempt_id="a1", stop_id="s1", reason="r", actor="me", save=True)

    assert before["shim_alive"] is False
    assert before["alive"] is True
    assert before["exit"] is None
    assert answer["state"]["phase"] in ("stopping", "exited")
    record = bench.wait_exit("a1")
    assert (record["code"], record["signal"]) == (None, None), "nobody was there to reap it"
    assert record["stop_id"] == "s1"
    assert bench.read("a1", "status.json")["last_checkpoint"] is not None
    assert is_alive(state["identity"]) is False


def test_stop_after_shim_and_trainer_died_ends_what_is_left(bench: ShimBench) -> None:
    state = bench.start("a1", "--children", "1", cgroup="off", stop=SHORT_STOP)
    bench.wait_training("a1")
    child = identity_of(bench.children("a1", 1)[0])
    kill_shim(bench, state)
    signal_identity(state["identity"], signal.SIGKILL)
    wait_for(lambda: is_alive(state["identity"]) is False, "trainer gone")
    agent = bench.agent()
    seen = agent.result("status", attempt_id="a1")

    agent.result("stop", attempt_id="a1", stop_id="s1", reason="clear away", actor="me", save=False)

    assert (seen["alive"], seen["shim_alive"], seen["exit"]) == (False, False, None)
    bench.wait_exit("a1")
    assert is_alive(child) is False


def test_stop_begun_before_the_agent_is_cut_off_completes(bench: ShimBench) -> None:
    state = bench.start("a1", "--ignore-term", stop={**SHORT_STOP, "grace_s": 1})
    bench.wait_training("a1")
    agent = bench.agent()
    agent.result("stop", attempt_id="a1", stop_id="s1", reason="r", actor="me", save=True)

    agent.kill()

    assert bench.wait_exit("a1")["killed"] is True
    assert is_alive(state["identity"]) is False


def test_orphaned_attempt_is_stopped_after_its_limit_without_contact(bench: ShimBench) -> None:
    # What the limit may end before it has a handler of its own must be deaf until then.
    argv = ["/bin/sh", "-c", 'trap "" TERM; exec "$@"', "sh", sys.executable, str(TOY)]
    bench.start("a1", argv=argv, orphan_after_s=1)

    record = bench.wait_exit("a1")

    assert record["code"] == 9
    assert bench.read("a1", "state.json")["stop"]["reason"] == "Orphaned"


def test_children_are_reaped_while_the_trainer_runs(bench: ShimBench) -> None:
    double = (
        "import os,time\n"
        "if os.fork() == 0:\n    os.setsid()\n    os.fork() or os._exit(0)\n    os._exit(0)\n"
        "os.wait()\nprint('forked', flush=True)\ntime.sleep(600)\n"
    )
    state = bench.start("a1", argv=[sys.executable, "-c", double])
    wait_for(lambda: (bench.logs / "a1.log").read_bytes() == b"forked\n", "the children's birth")

    def zombies_of_the_shim() -> list[str]:
        pid = state["shim"]["pid"]
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [child for child in children if int(child) != state["identity"]["pid"]]

    wait_for(lambda: zombies_of_the_shim() == [], "reaped")
    assert is_alive(state["identity"]) is True


@pytest.mark.skipif(
    not Path("/sys/fs/cgroup/freezer/cgroup.procs").exists() or os.geteuid() != 0,
    reason="a process that outlives SIGKILL needs the v1 freezer",
)
def test_what_survives_sigkill_is_quarantined_until_it_is_gone(bench: ShimBench) -> None:
    policy = {"grace_s": 0.2, "extend_max_s": 0.2, "term_s": 0.2, "kill_s": 0.2, "verify_s": 0.5}
    state = bench.start("a1", "--hang", stop=policy)
    pid = state["identity"]["pid"]
    freezer = Path(f"/sys/fs/cgroup/freezer/dflash-test-{pid}")
    freezer.mkdir()
    try:
        (freezer / "cgroup.procs").write_text(str(pid))
        (freezer / "freezer.state").write_text("FROZEN")
        wait_for(lambda: (freezer / "freezer.state").read_text() == "FROZEN\n", "frozen")
        stop(bench, "a1")
        record = wait_for(lambda: bench.read("a1", "exit.json"), "quarantine record")
        assert record["quarantined"] is True
        assert [survivor["pid"] for survivor in record["survivors"]] == [pid]
        assert record["code"] is None
        assert bench.agent().result("status", attempt_id="a1")["alive"] is True
    finally:
        (freezer / "freezer.state").write_text("THAWED")
        final = bench.wait_exit("a1")
        wait_for(lambda: is_removed(freezer), "freezer removed")
    assert (final["signal"], final["quarantined"]) == (signal.SIGKILL, False)


def test_stop_that_arrives_during_the_launch_ends_stopped_without_an_orphan(bench: ShimBench) -> None:
    agent = bench.agent()
    for turn in range(6):
        attempt = f"a{turn}"
        body = json.dumps(bench.body(attempt, "--hang", run_id=f"run-{turn}", stop=SHORT_STOP)).encode()
        starter = subprocess.Popen(bench.command("start"), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert starter.stdin is not None
        starter.stdin.write(body)
        starter.stdin.close()
        wait_for(bench.folder(attempt).exists, "launch began")

        agent.result("stop", attempt_id=attempt, stop_id="s1", reason="early", actor="me", save=True)

        starter.wait(WAIT_S)
        assert starter.stdout is not None
        starter.stdout.close()
        record = bench.wait_exit(attempt)
        assert record["stop_id"] == "s1"
        assert is_alive(bench.read(attempt, "state.json")["identity"]) is False
