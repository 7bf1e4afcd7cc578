"""The agent over its streams: requests, events, log bytes, and input that wants to break it."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import signal
import socket
import sys
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from supervisor.shim.proc import is_alive
from tests.support.shim_bench import FAKE_NVML, WAIT_S, AgentProcess, ShimBench, wait_for


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[ShimBench]:
    bench = ShimBench(tmp_path)
    yield bench
    bench.close()


def download(agent: AgentProcess, attempt_id: str, limit: int = 262_144) -> bytes:
    data = b""
    while True:
        piece = agent.result("tail", attempt_id=attempt_id, offset=len(data), limit=limit)
        data += base64.b64decode(piece["data_b64"])
        if len(data) >= piece["size"]:
            return data


def test_hello_comes_first_and_names_the_boot(bench: ShimBench) -> None:
    hello = bench.agent().hello

    assert hello["ev"] == "hello"
    assert hello["api"] == 1
    assert hello["boot_id"] == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert hello["python"].startswith("3.")


def test_list_shows_every_attempt_with_its_evidence(bench: ShimBench) -> None:
    bench.start("a1", "--die", "3")
    bench.wait_exit("a1")
    bench.start("b1", "--hang", run_id="run-2")

    attempts = {row["attempt_id"]: row for row in bench.agent().result("list")["attempts"]}

    assert attempts["a1"]["exit"]["code"] == 3
    assert attempts["a1"]["alive"] is False
    assert attempts["b1"]["exit"] is None
    assert attempts["b1"]["alive"] is True
    assert attempts["b1"]["shim_alive"] is True


def test_start_through_the_agent_is_a_start_like_any_other(bench: ShimBench) -> None:
    agent = bench.agent()
    body = bench.body("a1", "--hang", secrets={"KEY": "value"})

    first = agent.result("start", request=body)
    again = agent.result("start", request=body)
    held = agent.ask("start", request=bench.body("a2", "--hang"))
    failed = agent.ask("start", request=bench.body("b1", argv=["/no/such/program"], run_id="run-2"))
    bad = agent.ask("start", request=[1])
    agent.close()

    assert (first["existing"], again["existing"]) == (False, True)
    assert first["state"]["identity"] == again["state"]["identity"]
    assert held["error"]["reason"] == "LockHeld"
    assert (failed["error"]["reason"], failed["error"]["errno"]) == ("ExecFailed", 2)
    assert bad["error"]["reason"] == "BadRequest"
    assert agent.process.returncode == 0
    assert is_alive(first["state"]["identity"]) is True, "it outlives the agent that started it"
    assert is_alive(first["state"]["shim"]) is True
    names = {path.readlink().name for path in Path(f"/proc/{first['state']['identity']['pid']}/fd").iterdir()}
    assert names == {"null", "a1.log", "attempt.lock", "run-run-1"}


def open_files(process: Path) -> set[Path]:
    """What a process has open, /dev/null aside."""
    found = set()
    for path in (process / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed in between
            found.add(path.readlink())
    return found - {Path("/dev/null")}


def test_launcher_of_an_agent_ends_with_it_and_holds_none_of_its_streams(bench: ShimBench) -> None:
    agent = bench.agent()
    pid = agent.process.pid
    launcher = Path("/proc") / Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0]
    streams = open_files(Path(f"/proc/{pid}"))
    # a launcher that was only just forked still has them all
    wait_for(lambda: not (open_files(launcher) & streams), "launcher without the agent's streams")

    agent.kill()

    wait_for(lambda: not launcher.exists(), "launcher gone")


def test_damaged_record_is_unknown_and_harms_no_other(bench: ShimBench) -> None:
    bench.start("b1", "--hang")
    for name, text in (
        ("a1", "{half"),
        ("a2", '{"v":1,"phase":"dreaming"}'),
        ("a3", '{"v":1,"phase":"running"}'),
    ):
        bench.folder(name).mkdir()
        (bench.folder(name) / "state.json").write_text(text)

    rows = {row["attempt_id"]: row for row in bench.agent().result("list")["attempts"]}

    assert rows["b1"]["alive"] is True
    assert [rows[name]["state"] for name in ("a1", "a2")] == [None, None]
    assert [rows[name]["alive"] for name in ("a1", "a2")] == [None, None]
    assert rows["a3"]["shim_alive"] is False
    for name in ("a1", "a2", "a3"):
        (bench.folder(name) / "state.json").unlink()


def test_unknown_attempt_is_its_own_error(bench: ShimBench) -> None:
    agent = bench.agent()

    for op in ("status", "tail", "stop", "ack"):
        reply = agent.ask(op, attempt_id="nobody", stop_id="s1")
        assert reply["error"]["reason"] == "NoSuchAttempt", op


def test_status_gives_the_trainers_own_record_and_the_log_size(bench: ShimBench) -> None:
    bench.start("a1")
    bench.wait_training("a1")

    status = bench.agent().result("status", attempt_id="a1")

    assert status["state"]["phase"] == "running"
    assert status["status"]["phase"] == "training"
    assert status["log_size"] == (bench.logs / "a1.log").stat().st_size > 0
    assert (status["alive"], status["shim_alive"], status["exit"]) == (True, True, None)


def test_log_bytes_are_the_files_bytes_also_for_binary_floods(bench: ShimBench) -> None:
    bench.start("a1", "--flood", "3000000", "--steps", "1")
    bench.wait_exit("a1")

    served = download(bench.agent(), "a1")

    written = (bench.logs / "a1.log").read_bytes()
    assert hashlib.sha256(served).digest() == hashlib.sha256(written).digest()
    assert b"\xff\x00\r" in served


def test_one_line_of_100_mb_keeps_the_record_and_the_shim_small(bench: ShimBench) -> None:
    bench.start("a1", "--flood", str(100 << 20), "--long-line", "--steps", "1")

    record = bench.wait_exit("a1")

    assert (bench.logs / "a1.log").stat().st_size > 100_000_000
    assert record["code"] == 0
    assert "end of flood" in record["last_lines"]
    assert (bench.folder("a1") / "exit.json").stat().st_size < 200_000


def test_shim_memory_stays_bounded_while_the_log_grows(bench: ShimBench) -> None:
    state = bench.start("a1", "--flood", str(100 << 20), "--long-line")
    bench.wait_training("a1")
    agent = bench.agent()
    agent.result("tail_lines", attempt_id="a1", lines=200)

    for pid in (state["shim"]["pid"], agent.process.pid):
        fields = dict(
            line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line
        )
        assert int(fields["VmHWM"].split()[0]) < 80 * 1024


def test_tail_of_what_is_not_there_is_empty_or_an_error(bench: ShimBench) -> None:
    bench.start("a1", "--silent", "--hang")
    agent = bench.agent()

    assert agent.result("tail", attempt_id="a1", offset=10_000, limit=10)["data_b64"] == ""
    assert agent.ask("tail", attempt_id="a1", offset=-1, limit=10)["error"]["reason"] == "BadRequest"
    assert agent.result("tail_lines", attempt_id="a1", lines=5)["lines"] == []
    (bench.logs / "a1.log").unlink()
    assert agent.ask("tail", attempt_id="a1", offset=0, limit=10)["error"]["reason"] == "NoLog"


def test_watch_delivers_state_status_metrics_log_and_exit(bench: ShimBench) -> None:
    bench.start("a1", "--nan-at", "3", "--steps", "5")
    agent = bench.agent()

    agent.result("watch", attempt_ids=["a1"], gpu=None, log=True)

    agent.wait_event(lambda event: event["ev"] == "exit")
    events = agent.events
    assert {event["ev"] for event in events} >= {"state", "status", "metrics", "log", "exit"}
    metrics = [event for event in events if event["ev"] == "metrics"]
    assert [event["record"]["step"] for event in metrics] == [1, 2, 3, 4, 5]
    assert metrics[0]["record"]["train"]["loss"] == 3.0
    assert "nonfinite" not in metrics[0]
    assert metrics[2]["record"]["train"]["loss"] is None
    assert metrics[2]["nonfinite"] == ["train.loss"]
    assert metrics[-1]["offset"] == (bench.folder("a1") / "metrics.ndjson").stat().st_size
    exits = [event["exit"]["code"] for event in events if event["ev"] == "exit"]
    assert exits == [0]


def test_watch_resumes_metrics_at_an_offset_and_follows_rotation(bench: ShimBench) -> None:
    bench.start("a1", "--hang")
    path = bench.folder("a1") / "metrics.ndjson"
    first = b'{"step":1}\n'
    path.write_bytes(first + b'{"step":2}\n')
    agent = bench.agent()

    agent.result("watch", attempt_ids=["a1"], offsets={"a1": len(first)})
    agent.wait_event(lambda event: event["ev"] == "metrics" and event["record"]["step"] == 2)
    with path.open("ab") as file:
        file.write(b'not json\n{"step":3}\n')
    path.rename(path.with_suffix(".old"))
    path.write_bytes(b'{"step":4}\n')
    agent.wait_event(lambda event: event["ev"] == "metrics" and event["record"]["step"] == 4)

    steps = [event["record"]["step"] for event in agent.events if event["ev"] == "metrics"]
    assert steps == [2, 3, 4]


def test_heartbeats_are_no_state_events(bench: ShimBench) -> None:
    bench.start("a1")
    bench.wait_training("a1")
    agent = bench.agent()
    agent.result("watch", attempt_ids=["a1"])
    before = bench.read("a1", "state.json")["heartbeat_at"]

    wait_for(lambda: bench.read("a1", "state.json")["heartbeat_at"] > before, "a heartbeat")
    agent.wait_event(lambda event: event["ev"] == "status" and event["status"]["step"] > 120)

    assert [event["ev"] for event in agent.events].count("state") == 1


def test_agent_killed_mid_stream_leaves_the_attempt_and_a_new_one_sees_it(bench: ShimBench) -> None:
    state = bench.start("a1")
    first = bench.agent()
    first.result("watch", attempt_ids=["a1"], log=True)
    first.wait_event(lambda event: event["ev"] == "metrics")

    first.kill()

    second = bench.agent()
    status = second.result("status", attempt_id="a1")
    assert status["alive"] is True
    assert status["state"]["identity"] == state["identity"]
    second.result("watch", attempt_ids=["a1"])
    second.wait_event(lambda event: event["ev"] == "metrics" and event["record"]["step"] == 1)


def test_agent_leaves_when_its_input_ends(bench: ShimBench) -> None:
    state = bench.start("a1", "--hang")
    agent = bench.agent()

    agent.close()

    assert agent.process.returncode == 0
    assert is_alive(state["identity"]) is True


def test_ack_only_after_the_end(bench: ShimBench) -> None:
    state = bench.start("a1", "--hang")
    agent = bench.agent()
    early = agent.ask("ack", attempt_id="a1")
    agent.result("signal", attempt_id="a1", signal="SIGKILL")
    bench.wait_exit("a1")
    wait_for(lambda: is_alive(state["shim"]) is False, "shim gone")

    assert early["error"]["reason"] == "NotEnded"
    assert agent.result("ack", attempt_id="a1") == {"acked": True}
    assert agent.result("ack", attempt_id="a1") == {"acked": True}
    assert agent.result("list")["attempts"][0]["acked"] is True


def test_stacks_tell_what_each_thread_waits_for(bench: ShimBench) -> None:
    state = bench.start("a1", "--hang")

    answer = bench.agent().result("stacks", attempt_id="a1")

    assert answer["pid"] == state["identity"]["pid"]
    assert answer["threads"][0]["tid"] == state["identity"]["pid"]
    assert answer["threads"][0]["state"] in ("S", "R", "D")


HOSTILE = [
    pytest.param(b"{not json\n", "BadFrame", id="not JSON"),
    pytest.param(b"[1,2]\n", "BadFrame", id="not an object"),
    pytest.param(b'"text"\n', "BadFrame", id="text"),
    pytest.param(b"\xff\xfe\x00\n", "BadFrame", id="not text"),
    pytest.param(b'{"id":7,"op":"rm -rf"}\n', "UnknownOp", id="unknown op"),
    pytest.param(b'{"id":7}\n', "UnknownOp", id="no op"),
    pytest.param(b'{"id":7,"op":["list"]}\n', "UnknownOp", id="op is a list"),
    pytest.param(b'{"id":7,"op":"status","attempt_id":"../../etc"}\n', "BadRequest", id="path as id"),
    pytest.param(b'{"id":7,"op":"status","attempt_id":{}}\n', "BadRequest", id="object as id"),
    pytest.param(b'{"id":7,"op":"signal","identity":{"pid":1},"signal":9}\n', "IdentityMismatch", id="init"),
    pytest.param(
        b'{"id":7,"op":"signal","identity":{"pid":"x"},"signal":9}\n', "NoSuchProcess", id="pid text"
    ),
    pytest.param(b'{"id":7,"op":"watch","attempt_ids":"a"}\n', "BadRequest", id="ids are text"),
    pytest.param(b'{"id":7,"op":"list","x":' + b"[" * 200_000 + b"}\n", "BadFrame", id="deep nesting"),
    pytest.param(b"x" * (3 << 20) + b"\n", "FrameTooLarge", id="huge line"),
]


@pytest.mark.parametrize(("data", "reason"), HOSTILE)
def test_hostile_frame_gets_one_error_and_the_agent_lives(bench: ShimBench, data: bytes, reason: str) -> None:
    agent = bench.agent()

    agent.send_raw(data)
    reply = agent.next_frame()

    assert reply["ok"] is False
    assert reply["error"]["reason"] == reason
    assert agent.ask("ping")["ok"] is True
    assert agent.events == [], "exactly one error"


def test_many_requests_at_once_are_all_answered(bench: ShimBench) -> None:
    bench.start("a1", "--hang")
    agent = bench.agent()

    frames = [json.dumps({"id": n, "op": "status", "attempt_id": "a1"}) for n in range(1, 201)]
    agent.send_raw("\n".join(frames).encode() + b"\n")

    answers = [agent.next_frame() for _ in frames]
    assert sorted(answer["id"] for answer in answers) == list(range(1, 201))
    assert all(answer["ok"] for answer in answers)


def test_socket_of_the_shim_survives_noise_and_silent_clients(bench: ShimBench) -> None:
    bench.start("a1", "--hang")
    folder = os.open(bench.folder("a1"), os.O_RDONLY)
    clients = []
    try:
        for data in (b"", b"{broken\n", b"x" * 100_000, b'{"op":"nope"}\n'):
            client = socket.socket(socket.AF_UNIX)
            client.settimeout(WAIT_S)
            client.connect(f"/proc/self/fd/{folder}/shim.sock")
            client.sendall(data)
            clients.append(client)
        assert b"BadFrame" in clients[1].recv(65536)
        assert b"UnknownOp" in clients[3].recv(65536)
        state = bench.agent().result("stop", attempt_id="a1", stop_id="s1")["state"]
        assert state["phase"] == "stopping"
    finally:
        for client in clients:
            client.close()
        os.close(folder)


SCENE: dict[str, Any] = {
    "gpus": [
        {
            "uuid": f"GPU-{index}",
            "name": "H200",
            "util": 97,
            "used": 1 << 30,
            "total": 140 << 30,
            "power_mw": 590_000,
            "temp": 61,
            "clock": 1980,
        }
        for index in range(2)
    ]
}


def nvml_env(tmp_path: Path, scene: dict[str, Any]) -> dict[str, str]:
    path = tmp_path / "nvml.json"
    path.write_text(json.dumps(scene))
    return {**os.environ, "PYTHONPATH": str(FAKE_NVML), "FAKE_NVML": str(path)}


def watch_gpu(bench: ShimBench, env: dict[str, str], python: str = sys.executable) -> dict[str, Any]:
    agent = bench.agent(env)
    agent.result("watch", attempt_ids=[], gpu={"python": python, "interval_s": 0.2})
    sample = agent.wait_event(lambda event: event["ev"] == "gpu")["sample"]
    agent.close()
    return sample


def test_gpu_samples_carry_values_and_units(bench: ShimBench, tmp_path: Path) -> None:
    sample = watch_gpu(bench, nvml_env(tmp_path, SCENE))

    assert sample["reason"] is None
    assert len(sample["gpus"]) == 2
    assert sample["gpus"][1] == {
        "index": 1,
        "uuid": "GPU-1",
        "name": "H200",
        "util_ratio": 0.97,
        "mem_used_bytes": 1 << 30,
        "mem_total_bytes": 140 << 30,
        "power_w": 590.0,
        "temp_c": 61,
        "sm_clock_mhz": 1980,
        "reason": None,
        "reasons": {},
    }


@pytest.mark.parametrize(
    ("old_driver", "extra"), [(False, 0), (True, 600 << 20)], ids=["version 2", "version 1"]
)
def test_used_memory_leaves_out_the_drivers_reserve_where_it_can(
    bench: ShimBench, tmp_path: Path, old_driver: bool, extra: int
) -> None:
    scene = {**SCENE, "reserved": 600 << 20, "old_driver": old_driver}

    gpus = watch_gpu(bench, nvml_env(tmp_path, scene))["gpus"]

    assert [gpu["mem_used_bytes"] for gpu in gpus] == [(1 << 30) + extra] * 2


def test_field_that_a_gpu_cannot_give_is_null_with_its_reason(bench: ShimBench, tmp_path: Path) -> None:
    broken = {**SCENE["gpus"][0], "power_mw": {"error": 3}, "util": {"error": 999}}

    gpus = watch_gpu(bench, nvml_env(tmp_path, {"gpus": [broken, SCENE["gpus"][1]]}))["gpus"]

    assert gpus[0]["power_w"] is None
    assert gpus[0]["util_ratio"] is None
    assert gpus[0]["reasons"] == {"power_w": "Unsupported", "util_ratio": "Unknown"}
    assert gpus[0]["temp_c"] == 61
    assert gpus[1]["reason"] is None


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        pytest.param(12, "LibraryNotFound", id="library"),
        pytest.param(18, "DriverMismatch", id="mismatch"),
        pytest.param(9, "DriverNotLoaded", id="driver"),
        pytest.param(4, "NoPermission", id="permission"),
        pytest.param(7777, "NvmlError", id="unheard of"),
    ],
)
def test_nvml_that_cannot_start_is_a_reason(bench: ShimBench, tmp_path: Path, code: int, reason: str) -> None:
    sample = watch_gpu(bench, nvml_env(tmp_path, {"init_error": code, "gpus": []}))

    assert sample["gpus"] == []
    assert sample["reason"] == reason
    assert sample["message"]


def test_missing_module_is_a_reason_that_names_the_distribution(bench: ShimBench, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)

    sample = watch_gpu(bench, dict(os.environ), str(tmp_path / "venv" / "bin" / "python"))

    assert sample["reason"] == "MissingDependency"
    assert "nvidia-ml-py" in sample["message"]


def test_missing_interpreter_is_a_reason(bench: ShimBench) -> None:
    assert watch_gpu(bench, dict(os.environ), "/no/python")["reason"] == "InterpreterMissing"


def test_hanging_nvml_never_blocks_requests_and_its_child_ends_with_the_agent(
    bench: ShimBench, tmp_path: Path
) -> None:
    agent = bench.agent(nvml_env(tmp_path, {"hang": True, "gpus": []}))
    agent.result("watch", attempt_ids=[], gpu={"python": sys.executable, "interval_s": 0.2})
    child = wait_for(lambda: nvml_child(agent.process.pid), "the NVML child")

    assert agent.ask("ping")["ok"] is True
    os.kill(agent.process.pid, signal.SIGKILL)
    agent.process.wait(WAIT_S)

    wait_for(lambda: not Path(f"/proc/{child}").exists(), "NVML child gone")


def nvml_child(agent: int) -> int | None:
    """Pid of the agent's child that runs another program than the agent; its launcher does not."""
    own = Path(f"/proc/{agent}/cmdline").read_bytes()
    for children in Path(f"/proc/{agent}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread that has ended meanwhile
            for child in children.read_text().split():
                if Path(f"/proc/{child}/cmdline").read_bytes() not in (own, b""):
                    return int(child)
    return None


def test_listing_change_of_the_environment_is_an_event(bench: ShimBench, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    agent = bench.agent()
    agent.result("watch", attempt_ids=[], gpu={"python": python, "interval_s": 60}, env_interval_s=0.1)
    first = agent.wait_event(lambda event: event["ev"] == "env")

    folder = next((tmp_path / "venv" / "lib").glob("python3*")) / "site-packages"
    (folder / "nvidia_ml_py-13.0.dist-info").mkdir()

    second = agent.wait_event(
        lambda event: event["ev"] == "env" and event["listing_digest"] != first["listing_digest"]
    )
    assert second["python"] == python


def test_probe_reports_disk_interpreter_and_capabilities_with_reasons(
    bench: ShimBench, tmp_path: Path
) -> None:
    agent = bench.agent(nvml_env(tmp_path, SCENE))

    found = agent.result("probe", python=sys.executable, capabilities=["nvml", "kernels"], modules=["json"])
    missing = agent.result("probe", python="/no/python", capabilities=["nvml"])

    assert found["python"]["version"].startswith("3.")
    assert found["disk"][str(bench.root)]["free"] > 0
    assert found["nproc"] >= 1
    assert found["mem_total"] > 0
    assert found["capabilities"]["nvml"]["available"] is True
    assert [gpu["uuid"] for gpu in found["gpus"]["gpus"]] == ["GPU-0", "GPU-1"]
    assert found["modules"]["json"]["usable"] is True
    assert found["capabilities"]["kernels"]["available"] is False
    assert found["capabilities"]["kernels"]["reason"] == "MissingDependency"
    assert missing["python"]["reason"] == "InterpreterMissing"
    assert missing["capabilities"]["nvml"]["available"] is False


def test_fingerprint_is_taken_by_the_interpreter_itself(bench: ShimBench, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    folder = next((tmp_path / "venv" / "lib").glob("python3*")) / "site-packages"
    info = folder / "Some_Package-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: Some_Package\nVersion: 1.2\n")

    taken = bench.agent().result("fingerprint", python=str(tmp_path / "venv" / "bin" / "python"))

    assert taken["distributions"] == {"some-package": "1.2"}
    assert taken["prefix"] == str(tmp_path / "venv")
    assert taken["torch_cuda"] is None


def test_processes_lists_recorded_trainers_with_their_reason(bench: ShimBench) -> None:
    state = bench.start("a1", "--hang")

    rows = bench.agent().result("processes")["processes"]

    mine = [row for row in rows if row["pid"] == state["identity"]["pid"]]
    assert mine[0]["attempt_id"] == "a1"
    assert mine[0]["reasons"] == ["RecordedTrainer"]


def test_paths_tells_files_folders_and_room(bench: ShimBench, tmp_path: Path) -> None:
    missing = str(tmp_path / "missing" / "deeper")

    found = bench.agent().result("paths", paths=["/bin/sh", str(tmp_path), missing])["paths"]

    assert (found["/bin/sh"]["is_file"], found["/bin/sh"]["executable"]) == (True, True)
    assert found[str(tmp_path)]["is_dir"] is True
    assert found[missing]["exists"] is False
    assert found[missing]["disk"]["free"] > 0
