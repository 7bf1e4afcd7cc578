"""One run on several machines, here two ranks on the loopback: the same result, one stop, one end."""

import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from tests.support.ports import reserved_port
from tests.support.tiny import tiny_target, write_tiny_corpus
from tests.support.trainer_runs import (
    REPOSITORY,
    await_status,
    launch,
    metrics_lines,
    read_status,
    run_here,
    settings_for,
)
from trainer.checkpoint.store import CheckpointStore, verify

LONG = {"optim__epochs": 20_000, "telemetry__status_interval_s": 0.2}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return tiny_target(folder), write_tiny_corpus(folder / "data")


@pytest.fixture
def port():
    """Where the ranks meet; nobody else gets it meanwhile."""
    with reserved_port() as number:
        yield str(number)


@pytest.fixture
def ranks(tmp_path, port):
    """Start two ranks as `torchrun` would set them up; ends whatever is left of them."""
    started = []

    def begin(settings):
        for rank in range(2):
            variables = {
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            }
            started.append(
                launch(settings, tmp_path / f"log-{rank}", **variables, **environment(tmp_path, rank))
            )
        return started

    yield begin
    for process in started:
        process.kill()
        process.wait(180)


def environment(tmp_path, rank):
    return {"DFLASH_RUN_DIR": str(tmp_path / f"run-{rank}"), "GLOO_SOCKET_IFNAME": "lo"}


def logs(tmp_path):
    return "\n".join(f"--- {rank}\n{(tmp_path / f'log-{rank}').read_text()}" for rank in range(2))


def lineage(tmp_path):
    return CheckpointStore(tmp_path / "out" / "lineage-0000")


def state_of(out):
    folder = sorted((out / "lineage-0000" / "state").glob("step-*"))[-1]
    return json.loads((folder / "state.json").read_text()), load_file(folder / "tensors.safetensors")


def consumed(tensors):
    return sum(int(v.sum()) for v in (unpack(t) for n, t in tensors.items() if n.startswith("consumed.")))


def unpack(packed):
    return torch.tensor([bin(byte).count("1") for byte in packed.tolist()])


def test_golden_20_two_machines_train_as_one_with_two_drafters(tiny, tmp_path, port):
    """Through torchrun itself, one agent per machine."""
    common = {"queue__ordered": True, "optim__epochs": 3, "optim__grad_accum": 2, "optim__lr": 0.003}
    settings = settings_for(*tiny, tmp_path / "out", **common)
    words = [word for text in settings for word in ("--set", text)]
    program = ["-m", "trainer", "train", *words]
    agents = []
    for rank in range(2):
        place = ["--nnodes", "2", "--nproc-per-node", "1", "--node-rank", str(rank)]
        meet = ["--master-addr", "127.0.0.1", "--master-port", port]
        with (tmp_path / f"log-{rank}").open("wb") as log:
            agents.append(
                subprocess.Popen(
                    [sys.executable, "-m", "torch.distributed.run", *place, *meet, *program],
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    cwd=REPOSITORY,
                    env=os.environ | {"OMP_NUM_THREADS": "1"} | environment(tmp_path, rank),
                )
            )
    try:
        assert [agent.wait(300) for agent in agents] == [0, 0], logs(tmp_path)
    finally:
        for agent in agents:
            agent.kill()
            agent.wait(180)

    single = settings_for(*tiny, tmp_path / "single", **common, devices__drafter_gpus="cpu,cpu")
    assert run_here(single) == 0

    (record, ours), (_, theirs) = state_of(tmp_path / "out"), state_of(tmp_path / "single")
    assert record["world"]["machines"] == 2
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-6, msg=name)
    assert consumed(ours) == 27
    lines = [metrics_lines(folder) for folder in (tmp_path / "run-0", tmp_path / "run-1")]
    reference = metrics_lines(tmp_path / "single" / "run")
    for own in lines:
        assert [line["step"] for line in own] == [line["step"] for line in reference]
        for line, other in zip(own, reference, strict=True):
            assert line["train"]["loss"] == pytest.approx(other["train"]["loss"], rel=1e-4)
            assert line["tokens"] == other["tokens"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [".trainer.lock", "lineage-0000"]


def test_golden_20_two_machines_with_two_drafters_each_train_as_one_with_four(tiny, tmp_path, ranks):
    common = {"queue__ordered": True, "optim__epochs": 2, "optim__lr": 0.003}
    started = ranks(settings_for(*tiny, tmp_path / "out", **common, devices__drafter_gpus="cpu,cpu"))
    assert [process.wait(300) for process in started] == [0, 0], logs(tmp_path)

    single = settings_for(*tiny, tmp_path / "single", **common, devices__drafter_gpus="cpu,cpu,cpu,cpu")
    assert run_here(single) == 0

    (record, ours), (_, theirs) = state_of(tmp_path / "out"), state_of(tmp_path / "single")
    assert (record["world"]["machines"], len(record["world"]["drafters"])) == (2, 2)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-6, msg=name)
    assert consumed(ours) == 18


def test_sigterm_on_one_machine_stops_both_with_one_checkpoint(tiny, tmp_path, ranks):
    started = ranks(settings_for(*tiny, tmp_path / "out", **LONG))
    await_status(started[0], tmp_path / "run-0", lambda status: status["step"] >= 3)

    started[1].send_signal(signal.SIGTERM)

    assert [process.wait(300) for process in started] == [9, 9], logs(tmp_path)
    newest = lineage(tmp_path).find_newest()
    record, tensors = state_of(tmp_path / "out")
    assert lineage(tmp_path).steps("state") == [newest.step]
    assert newest.skipped == ()
    steps = [read_status(tmp_path / f"run-{rank}")["step"] for rank in range(2)]
    assert steps == [newest.step] * 2
    assert consumed(tensors) == 2 * record["step"]
    assert "rank 1 stops" in (tmp_path / "log-0").read_text()


@pytest.mark.parametrize("lost", [0, 1])
def test_machine_that_is_lost_ends_the_other_with_exit_7_and_a_whole_checkpoint(tiny, tmp_path, ranks, lost):
    left = 1 - lost
    started = ranks(settings_for(*tiny, tmp_path / "out", **LONG, checkpoint__every=2))
    await_status(started[0], tmp_path / "run-0", lambda s: (s["last_checkpoint"] or {}).get("step", 0) >= 4)

    os.kill(started[lost].pid, signal.SIGKILL)

    assert started[left].wait(300) == 7, logs(tmp_path)
    assert f"rank {lost}" in read_status(tmp_path / f"run-{left}")["message"]
    newest = lineage(tmp_path).find_newest()
    assert newest.skipped == ()
    assert newest.step >= 4
    verify(newest.path)
