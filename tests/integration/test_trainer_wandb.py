"""W&B for real, without the service: what an offline run holds; a service down, slow or rejecting."""

import contextlib
import http.server
import json
import os
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import wandb

from tests.support.tiny import tiny_target, write_tiny_corpus
from tests.support.trainer_runs import REPOSITORY, launch, metrics_lines, read_status, settings_for
from trainer.telemetry.fields import FIELDS
from trainer.telemetry.sink import WandbSink

KEY = "a" * 40
GPU = {
    "uuid": "GPU-1",
    "name": "A card",
    "util": 90,
    "used": 7,
    "total": 9,
    "power_mw": 500_000,
    "temp": 50,
    "clock": 1900,
}
OFFLINE = {"wandb__mode": "offline", "wandb__init_timeout_s": 240.0, "wandb__finish_timeout_s": 240.0}
NOT_ON_A_CPU = {
    "profile/*/d2h_ms",
    "profile/*/h2d_ms",
    "profile/*/all_reduce_ms",
    "gpu/*/cuda_index",
    *(field.path for field in FIELDS if field.group == "cuda"),
}
"""Null or absent in a run on the CPU; `test_an_offline_run_takes_the_fields_of_gpus` has them."""


def private_environ(folder: Path) -> dict[str, str]:
    """What keeps W&B away from the home folder and from a real key."""
    return {
        "WANDB_API_KEY": KEY,
        "WANDB_CONFIG_DIR": str(folder / "config"),
        "WANDB_CACHE_DIR": str(folder / "cache"),
        "WANDB_DATA_DIR": str(folder / "data-dir"),
    }


def history(file: Path) -> list[dict]:
    """The lines that a run file of W&B holds."""
    inspected = subprocess.run(
        [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    records = [json.loads(line) for line in inspected.stdout.splitlines() if line.startswith("{")]
    return [record["history"]["item"] for record in records if record["type"] == "history"]


def missing_fields(keys: set[str], *, without: set[str] = frozenset()) -> list[str]:
    """The documented numbers that no key stands for."""
    numbers = [
        field.path
        for field in FIELDS
        if field.unit != "text" and field.group != "eval" and field.path not in without
    ]
    shapes = {path: re.compile(re.escape(path).replace(r"\*", "[^/]+")) for path in numbers}
    return [path for path, shape in shapes.items() if not any(shape.fullmatch(key) for key in keys)]


@pytest.fixture(scope="module")
def offline(tmp_path_factory):
    """A run of 8 steps, and its resumed rest; returns the folder of each attempt."""
    folder = tmp_path_factory.mktemp("offline")
    target, data = tiny_target(folder), write_tiny_corpus(folder / "data")
    (folder / "scene.json").write_text(json.dumps({"gpus": [GPU]}))
    fake = REPOSITORY / "tests" / "support" / "fake_nvml"
    environ = private_environ(folder) | {
        "FAKE_NVML": str(folder / "scene.json"),
        "PYTHONPATH": os.pathsep.join([str(fake), str(REPOSITORY)]),
    }
    attempts = []
    for place, changes in enumerate(({"optim__max_steps": 8}, {})):
        settings = settings_for(target, data, folder / "out", **OFFLINE, **changes)
        attempts.append(folder / f"attempt-{place}")
        log = folder / f"log-{place}"
        finish(launch(settings, log, DFLASH_RUN_DIR=str(attempts[-1]), **environ), log)
    return attempts


def finish(process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait for a run that must end well; one that hangs is ended."""
    try:
        assert process.wait(300) == 0, log.read_text()
    finally:
        process.kill()


def run_file(attempt: Path) -> Path:
    return next(attempt.glob("wandb/offline-run-*/run-*.wandb"))


def test_an_offline_run_read_back_holds_every_group_and_field(offline):
    keys = {key for line in history(run_file(offline[1])) for key in line}

    assert missing_fields(keys, without=NOT_ON_A_CPU) == []


def test_what_the_check_looks_for_can_be_missing():
    assert "train/loss" in missing_fields({"train/eal"})


def test_an_offline_run_has_the_values_of_the_metrics_file(offline):
    kept = {line["step"]: line for line in history(run_file(offline[1])) if "step" in line}
    written = {line["step"]: line for line in metrics_lines(offline[1])}

    assert sorted(kept) == sorted(written)
    for step, line in written.items():
        assert kept[step]["train/loss"] == pytest.approx(line["train"]["loss"])
        assert kept[step]["gpu/0/power_w"] == 500.0


def test_a_resumed_run_keeps_its_id(offline):
    first, second = (run_file(attempt) for attempt in offline)

    assert first.name == second.name
    assert min(line["step"] for line in history(second) if line["step"]) >= 8


def test_an_offline_run_takes_the_fields_of_gpus(tmp_path, monkeypatch, offline):
    for name, value in private_environ(tmp_path).items():
        monkeypatch.setenv(name, value)
    line = metrics_lines(offline[1])[-1]
    for stage in ("d2h", "h2d", "all_reduce"):
        line["profile"]["drafter"][f"{stage}_ms"] = 1.5
    line["gpu"][0]["cuda_index"] = 0
    line["cuda"] = [{field.path.rpartition("/")[2]: 1 for field in FIELDS if field.group == "cuda"}]
    sink = WandbSink(
        run_dir=tmp_path,
        mode="offline",
        project="p",
        run_id="abc",
        config={},
        init_timeout_s=240.0,
        finish_timeout_s=240.0,
        on_trouble=pytest.fail,
    )
    sink.write(line)
    sink.close()
    # else every run launched from here on shares this process's service, and the ids that it holds
    wandb.teardown()
    monkeypatch.delenv("WANDB_SERVICE", raising=False)

    assert missing_fields({key for entry in history(run_file(tmp_path)) for key in entry}) == []


class Rejecting(http.server.BaseHTTPRequestHandler):
    """Refuses every request as a service does that does not know the key."""

    def answer(self):
        body = b'{"errors": [{"message": "invalid API key"}]}'
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(401)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = do_HEAD = answer  # noqa: N815 - the names that the server calls

    def log_message(self, *words):
        pass


BUCKET = {
    "id": "b",
    "name": "n",
    "displayName": "n",
    "description": "",
    "config": "{}",
    "sweepName": None,
    "historyLineCount": 0,
    "project": {"id": "p", "name": "p", "entity": {"id": "e", "name": "e"}},
}


class Dying(http.server.BaseHTTPRequestHandler):
    """Answers until a run is registered; every request after that waits for ever."""

    def answer(self):
        query = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode(errors="replace")
        if self.server.is_gone.is_set():
            self.server.is_over.wait(600)
            return
        data = {}
        if "mutation UpsertBucket" in query:
            data = {"upsertBucket": {"bucket": BUCKET, "inserted": True}}
            self.server.is_gone.set()
        elif "query Viewer" in query:
            teams = {"edges": []}
            data = {"viewer": {"id": "v", "entity": "e", "username": "u", "flags": "{}", "teams": teams}}
        body = json.dumps({"data": data}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = do_HEAD = answer  # noqa: N815 - the names that the server calls

    def log_message(self, *words):
        pass


@contextlib.contextmanager
def serving(handler: type[http.server.BaseHTTPRequestHandler]):
    """A W&B service on a loopback port."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.is_gone, server.is_over = threading.Event(), threading.Event()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.is_over.set()
        server.shutdown()
        server.server_close()
        thread.join(10)


@contextlib.contextmanager
def service(kind: str):
    """A W&B service on loopback that is `down`, `slow` (takes calls, never answers) or `rejecting`."""
    if kind == "rejecting":
        with serving(Rejecting) as port:
            yield port
        return
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if kind == "slow":
            listener.listen(64)
        yield listener.getsockname()[1]


@pytest.mark.parametrize("kind", ["down", "slow", "rejecting"])
def test_m2_a_service_in_trouble_means_offline_files_with_every_line(tmp_path, kind):
    target, data = tiny_target(tmp_path), write_tiny_corpus(tmp_path / "data")
    settings = settings_for(
        target,
        data,
        tmp_path / "out",
        wandb__mode="online",
        wandb__init_timeout_s=3.0,
        wandb__finish_timeout_s=240.0,
        wandb__project="p",
    )
    run_dir, log = tmp_path / "run", tmp_path / "log"

    with service(kind) as port:
        environ = private_environ(tmp_path) | {"WANDB_BASE_URL": f"http://127.0.0.1:{port}"}
        finish(launch(settings, log, DFLASH_RUN_DIR=str(run_dir), **environ), log)

    text = log.read_text()
    assert "W&B ONLINE FAILED" in text
    assert "Using an existing wandb-core service" not in text
    assert KEY not in text
    assert read_status(run_dir)["degraded"]["wandb"] == "offline (online failed)"
    assert {line["step"] for line in history(run_file(run_dir))} == {
        line["step"] for line in metrics_lines(run_dir)
    }


SINK = """
import logging, os, pathlib, sys, time
from trainer.telemetry.sink import WandbSink

logging.basicConfig(stream=sys.stdout, level=logging.WARNING)
sink = WandbSink(
    run_dir=pathlib.Path(sys.argv[1]), mode="online", project="p", run_id="abc", config={},
    init_timeout_s=240.0, finish_timeout_s=2.0, on_trouble=print,
)
while sink.state == "starting online":
    time.sleep(0.05)
print("state:", sink.state)
for step in range(5):
    sink.write({"step": step, "train": {"loss": 1.0}})
started = time.monotonic()
sink.close()
print("closed within the limit:", time.monotonic() - started < 240)
sys.stdout.flush()
os._exit(0)  # as the trainer ends when threads are left
"""


def test_m2_a_service_that_dies_after_the_start_costs_a_bounded_end(tmp_path):
    """What W&B has on disk by then is its own affair: 0.31 may have written next to nothing."""
    log = tmp_path / "log"

    with serving(Dying) as port, log.open("wb") as stream:
        environ = private_environ(tmp_path) | {"WANDB_BASE_URL": f"http://127.0.0.1:{port}"}
        process = subprocess.Popen(
            [sys.executable, "-c", SINK, str(tmp_path)],
            stdout=stream,
            stderr=subprocess.STDOUT,
            cwd=REPOSITORY,
            env=os.environ | environ,
        )
        finish(process, log)

    text = log.read_text()
    assert "state: online" in text
    assert "W&B did not finish in 2 s; what it has written by now stays in" in text
    assert "metrics.ndjson has every line" in text
    assert KEY not in text
    assert "closed within the limit: True" in text
