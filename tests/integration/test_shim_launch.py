"""Launch of an attempt by the real shim: verified exec, locks, logs, idempotence, secrets."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from supervisor.shim.cgroup import group_path
from supervisor.shim.proc import is_alive, signal_identity
from tests.support.shim_bench import WAIT_S, ShimBench, wait_for


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[ShimBench]:
    bench = ShimBench(tmp_path)
    yield bench
    bench.close()


def test_start_reports_the_identity_of_a_process_that_really_runs(bench: ShimBench) -> None:
    state = bench.start("a1", "--hang")

    assert state["phase"] == "running"
    assert is_alive(state["identity"]) is True
    assert is_alive(state["shim"]) is True
    argv = Path(f"/proc/{state['identity']['pid']}/cmdline").read_bytes()
    assert argv.split(b"\0")[1].endswith(b"toy_trainer.py")
    assert bench.read("a1", "state.json")["identity"] == state["identity"]
    assert bench.read("a1", "spec.json") == {"name": "slammed"}


def test_trainer_runs_in_its_own_session_with_nothing_inherited_but_locks(
    bench: ShimBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEAKED_FROM_CALLER", "1")
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    try:
        body = bench.body("a1", argv=["/bin/sleep", "600"], gpus=["GPU-a"])
        done = subprocess.Popen(
            bench.command("start"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[writer]
        )
        out, _ = done.communicate(json.dumps(body).encode(), timeout=WAIT_S)
        pid = json.loads(out)["state"]["identity"]["pid"]
    finally:
        os.close(reader)
        os.close(writer)

    assert os.getsid(pid) == pid
    names = sorted(str(fd.readlink()) for fd in Path(f"/proc/{pid}/fd").iterdir())
    log = str(bench.logs / "a1.log")
    locks = bench.root / "locks"
    expected = ["/dev/null", log, log, str(locks / "gpu-GPU-a"), str(locks / "run-run-1")]
    assert names == sorted([*expected, str(bench.folder("a1") / "attempt.lock")])
    environ = Path(f"/proc/{pid}/environ").read_bytes()
    assert b"LEAKED_FROM_CALLER" not in environ
    assert b"DFLASH_RUN_DIR=" + str(bench.folder("a1")).encode() in environ


@pytest.mark.parametrize(
    ("argv", "number"),
    [
        pytest.param(["/no/such/program"], errno.ENOENT, id="missing"),
        pytest.param(["no-such-program-anywhere"], errno.ENOENT, id="missing in PATH"),
        pytest.param(["/etc/passwd"], errno.EACCES, id="not executable"),
    ],
)
def test_exec_failure_carries_errno_and_path(bench: ShimBench, argv: list[str], number: int) -> None:
    reply = bench.post(bench.body("a1", argv=argv))

    assert reply["error"]["reason"] == "ExecFailed"
    assert reply["error"]["errno"] == number
    assert reply["error"]["data"]["path"] == argv[0]
    assert argv[0] in reply["error"]["message"]
    state = bench.read("a1", "state.json")
    assert state["phase"] == "launch_failed"
    assert state["identity"] is None
    assert state["launch_error"]["errno"] == number


def test_missing_interpreter_of_a_script_is_named_as_such(bench: ShimBench, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("#!/no/such/shell\n")
    script.chmod(0o755)

    reply = bench.post(bench.body("a1", argv=[str(script)]))

    assert reply["error"]["errno"] == errno.ENOENT
    assert "interpreter in its first line" in reply["error"]["message"]


def test_missing_cwd_is_an_exec_failure_that_names_the_folder(bench: ShimBench) -> None:
    reply = bench.post(bench.body("a1", cwd="/no/such/folder"))

    assert reply["error"]["reason"] == "ExecFailed"
    assert reply["error"]["data"]["path"] == "/no/such/folder"
    assert reply["error"]["data"]["step"] == "change folder to"


def test_immediate_exit_is_recorded_with_code_and_last_lines(bench: ShimBench) -> None:
    bench.start("a1", "--die", "3")

    record = bench.wait_exit("a1")

    assert record["code"] == 3
    assert record["signal"] is None
    assert record["last_lines"] == ["toy trainer: cannot boot: no such data folder"]
    assert record["stop_id"] is None
    assert record["killed"] is False
    assert record["rusage"]["max_rss_bytes"] > 0
    assert wait_for(lambda: bench.read("a1", "state.json")["phase"] == "exited", "state says exited")


def test_death_by_signal_is_recorded_as_signal(bench: ShimBench) -> None:
    state = bench.start("a1", "--hang")

    signal_identity(state["identity"], signal.SIGSEGV)

    record = bench.wait_exit("a1")
    assert (record["code"], record["signal"]) == (None, signal.SIGSEGV)


def test_start_is_idempotent_by_attempt_id(bench: ShimBench) -> None:
    first = bench.start("a1", "--hang")

    again = bench.post(bench.body("a1", "--hang"))

    assert again["ok"]
    assert again["existing"] is True
    assert again["state"]["identity"] == first["identity"]


def test_twenty_simultaneous_starts_of_one_attempt_give_one_process(bench: ShimBench) -> None:
    replies = []
    threads = [
        threading.Thread(target=lambda: replies.append(bench.post(bench.body("a1", "--hang"))))
        for _ in range(20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)

    assert len(replies) == 20
    assert [reply["ok"] for reply in replies] == [True] * 20
    assert sum(not reply["existing"] for reply in replies) == 1
    pids = {reply["state"]["identity"]["pid"] for reply in replies if reply["state"]["identity"]}
    assert pids == {bench.read("a1", "state.json")["identity"]["pid"]}


def test_second_attempt_of_a_live_run_is_refused_and_names_the_holder(bench: ShimBench) -> None:
    first = bench.start("a1", "--hang")

    reply = bench.post(bench.body("a2", "--hang"))

    assert reply["error"]["reason"] == "LockHeld"
    holder = reply["error"]["data"]["holders"]
    assert [(h["attempt_id"], h["pid"]) for h in holder] == [("a1", first["identity"]["pid"])]
    assert "attempt a1 of run slammed" in reply["error"]["message"]
    assert not (bench.logs / "a2.log").exists()
    assert bench.read("a2", "state.json")["phase"] == "launch_failed"


def test_trainer_holds_the_run_lock_after_its_shim_was_killed(bench: ShimBench) -> None:
    first = bench.start("a1", "--hang")
    signal_identity(first["shim"], signal.SIGKILL)
    wait_for(lambda: is_alive(first["shim"]) is False, "shim gone")

    reply = bench.post(bench.body("a2", "--hang"))

    assert is_alive(first["identity"]) is True
    assert reply["error"]["reason"] == "LockHeld"
    assert reply["error"]["data"]["holders"][0]["attempt_id"] == "a1"


def test_next_attempt_starts_once_the_first_has_ended(bench: ShimBench) -> None:
    bench.start("a1", "--die", "1")
    bench.wait_exit("a1")
    wait_for(lambda: is_alive(bench.read("a1", "state.json")["shim"]) is False, "shim gone")

    assert bench.start("a2", "--hang")["phase"] == "running"


def test_a_gpu_belongs_to_one_run_unless_both_share(bench: ShimBench) -> None:
    bench.start("a1", "--hang", gpus=["GPU-a", "GPU-b"], share=True)

    alone = bench.post(bench.body("b1", "--hang", run_id="run-2", gpus=["GPU-b"]))
    shared = bench.post(bench.body("c1", "--hang", run_id="run-3", gpus=["GPU-b"], share=True))

    assert alone["error"]["reason"] == "LockHeld"
    assert alone["error"]["data"]["name"] == "GPU-b"
    assert alone["error"]["data"]["holders"][0]["attempt_id"] == "a1"
    assert shared["ok"], shared


def test_existing_log_is_never_touched(bench: ShimBench) -> None:
    bench.logs.mkdir()
    log = bench.logs / "a1.log"
    log.write_bytes(b"earlier\n")

    reply = bench.post(bench.body("a1", "--hang"))

    assert reply["error"]["reason"] == "LogExists"
    assert log.read_bytes() == b"earlier\n"
    assert bench.post(bench.body("a2", "--hang"))["ok"], "the run lock was given back"


def test_a_dangling_link_in_place_of_the_log_is_not_followed(bench: ShimBench, tmp_path: Path) -> None:
    bench.logs.mkdir()
    (bench.logs / "a1.log").symlink_to(tmp_path / "elsewhere")

    reply = bench.post(bench.body("a1", "--hang"))

    assert reply["error"]["reason"] == "LogExists"
    assert not (tmp_path / "elsewhere").exists()


def test_launch_is_refused_below_min_free_bytes(bench: ShimBench) -> None:
    reply = bench.post(bench.body("a1", limits={"min_free_bytes": 1 << 60}))

    assert reply["error"]["reason"] == "NoSpace"
    assert reply["error"]["errno"] == errno.ENOSPC
    assert not (bench.logs / "a1.log").exists()


def test_tombstone_makes_a_late_start_refuse(bench: ShimBench) -> None:
    done = subprocess.run(
        bench.command("tombstone", "--attempt", "a1"), capture_output=True, timeout=WAIT_S, check=True
    )
    assert b'"phase":"abandoned"' in done.stdout

    reply = bench.post(bench.body("a1", "--hang"))

    assert reply["error"]["reason"] == "Tombstone"
    assert not (bench.logs / "a1.log").exists()


def test_tombstone_for_a_live_attempt_changes_nothing(bench: ShimBench) -> None:
    state = bench.start("a1", "--hang")

    done = subprocess.run(
        bench.command("tombstone", "--attempt", "a1"), capture_output=True, timeout=WAIT_S, check=True
    )

    assert b'"existing":true' in done.stdout
    assert bench.read("a1", "state.json")["phase"] == "running"
    assert is_alive(state["identity"]) is True


def test_secrets_reach_the_trainer_and_no_file_and_no_command_line(bench: ShimBench) -> None:
    canary = "canary-" + uuid.uuid4().hex
    state = bench.start("a1", secrets={"WANDB_API_KEY": canary})
    bench.wait_training("a1")
    agent = bench.agent()
    agent.result("status", attempt_id="a1")

    environ = Path(f"/proc/{state['identity']['pid']}/environ").read_bytes()
    assert f"WANDB_API_KEY={canary}".encode() in environ
    for path in [*bench.root.rglob("*"), *bench.logs.rglob("*")]:
        if path.is_file():
            with contextlib.suppress(FileNotFoundError):  # a record on its way to its final name
                assert canary.encode() not in path.read_bytes(), path
    for process in Path("/proc").glob("[0-9]*"):
        try:
            argv = (process / "cmdline").read_bytes()
        except OSError:
            continue
        assert canary.encode() not in argv
    shim_environ = Path(f"/proc/{state['shim']['pid']}/environ").read_bytes()
    assert canary.encode() not in shim_environ


def test_refused_request_does_not_repeat_a_secret(bench: ShimBench) -> None:
    reply = bench.post(bench.body("a1", secrets={"KEY": "canary\0value"}))
    broken = bench.post(b'{"v":1,"secrets":{"K":"canary"},')

    assert reply["error"]["reason"] == "BadRequest"
    assert broken["error"]["reason"] == "BadRequest"
    assert "canary" not in str(reply) + str(broken)
    assert not bench.folder("a1").exists()


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"v": 2}, id="version"),
        pytest.param({"attempt_id": "../a"}, id="id that leaves the folder"),
        pytest.param({"argv": []}, id="no argv"),
        pytest.param({"argv": "sh -c x"}, id="argv is text"),
        pytest.param({"log_path": "relative.log"}, id="relative log"),
        pytest.param({"stop": {"grace_s": -1}}, id="negative grace"),
        pytest.param({"stop": {"signal": "SIGNOPE"}}, id="unknown signal"),
        pytest.param({"env": {"A=B": "x"}}, id="bad name"),
    ],
)
def test_bad_request_leaves_no_trace(bench: ShimBench, fields: dict[str, object]) -> None:
    reply = bench.post({**bench.body("a1", "--hang"), **fields})

    assert reply["error"]["reason"] == "BadRequest"
    assert not bench.root.exists()


def test_a_shim_that_died_before_the_exec_is_a_failed_launch_not_an_open_question(bench: ShimBench) -> None:
    folder = bench.folder("a1")
    folder.mkdir(parents=True)
    (folder / "state.json").write_text(
        '{"v":1,"attempt_id":"a1","run_id":"run-1","phase":"launching","identity":null,"shim":null}'
    )

    listed = bench.agent().result("list")["attempts"]

    assert listed[0]["state"]["phase"] == "launch_failed"
    assert listed[0]["state"]["launch_error"]["reason"] == "ShimDied"
    assert listed[0]["alive"] is False


def test_long_roots_are_no_obstacle_for_the_socket(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 120) / ("e" * 120)
    deep.mkdir(parents=True)
    bench = ShimBench(deep)
    try:
        bench.start("a1", "--hang")
        state = bench.agent().result("stop", attempt_id="a1", stop_id="s1", save=False)["state"]
        assert state["phase"] == "stopping"
    finally:
        bench.close()


def test_launch_goes_on_when_the_starter_is_killed(bench: ShimBench) -> None:
    starter = subprocess.Popen(bench.command("start"), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    assert starter.stdin is not None
    starter.stdin.write(json.dumps(bench.body("a1", "--hang")).encode())
    starter.stdin.close()
    wait_for(lambda: bench.folder("a1").exists() or starter.poll() is not None, "launch began")
    starter.kill()
    starter.wait(WAIT_S)

    wait_for(lambda: bench.read("a1", "state.json")["phase"] == "running", "launch finished")
    assert sys.executable in bench.read("a1", "state.json")["argv"]


def test_shim_killed_at_any_moment_of_a_launch_leaves_no_unknown_trainer(bench: ShimBench) -> None:
    outcomes = set()
    for turn in range(10):
        attempt = f"a{turn}"
        body = json.dumps(bench.body(attempt, "--hang", run_id=f"run-{turn}")).encode()
        starter = subprocess.Popen(bench.command("start"), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert starter.stdin is not None
        starter.stdin.write(body)
        starter.stdin.close()
        shim = wait_for(lambda a=attempt: (bench.read(a, "state.json") or {}).get("shim"), "shim recorded")
        time.sleep(turn * 0.0015)
        signal_identity(shim, signal.SIGKILL)
        starter.wait(WAIT_S)
        assert starter.stdout is not None
        starter.stdout.close()

        agent = bench.agent()
        status = agent.result("status", attempt_id=attempt)
        if status["alive"] is None:
            status = wait_for(
                lambda g=agent, a=attempt: (s := g.result("status", attempt_id=a))["alive"] is not None and s,
                "decided",
            )
        agent.close()
        outcomes.add(status["alive"])
        trainers = [
            process.name
            for process in Path("/proc").glob("[0-9]*")
            if str(bench.folder(attempt)).encode() in _environ(process)
        ]
        if status["alive"]:
            assert trainers == [str(status["state"]["identity"]["pid"])]
        else:
            assert status["state"]["phase"] == "launch_failed"
            assert trainers == []
            group = group_path(str(bench.root), attempt)
            assert group is None or not Path(group).exists()
    assert outcomes


def _environ(process: Path) -> bytes:
    try:
        return (process / "environ").read_bytes()
    except OSError:
        return b""


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_exit_record_is_written_once_a_full_disk_has_room_again(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], check=True)
    bench = ShimBench(tmp_path)
    bench.root = disk / "node"
    try:
        state = bench.start("a1", argv=["/bin/sleep", "600"])
        filler = disk / "filler"
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(b"x" * 4096)
        agent = bench.agent()
        agent.result("stop", attempt_id="a1", stop_id="s1", reason="r", actor="me", save=True)
        wait_for(lambda: is_alive(state["identity"]) is False, "stopped in spite of the full disk")
        time.sleep(0.5)
        assert not (bench.folder("a1") / "exit.json").exists()

        filler.unlink()

        assert bench.wait_exit("a1")["signal"] == signal.SIGTERM
        wait_for(lambda: is_alive(state["shim"]) is False, "shim gone")
        agent.close()
    finally:
        bench.close()
        umount = ["umount", str(disk)]
        wait_for(
            lambda: subprocess.run(umount, capture_output=True, check=False).returncode == 0, "unmounted"
        )
