"""The daemon on a local node, over real processes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlmodel import select

from supervisor.domain.errors import ConflictError
from supervisor.services.secrets import put_secret
from supervisor.store.queries import find_run
from supervisor.store.tables import MetricLine
from tests.support.daemon import RunningDaemon, end_leftovers, make_lock, make_spec, running_daemon


@pytest.fixture
async def daemon(tmp_path: Path) -> AsyncIterator[RunningDaemon]:
    async with running_daemon(tmp_path) as running:
        yield running
    end_leftovers(tmp_path / "node")


@pytest.fixture
async def deployed(daemon: RunningDaemon) -> RunningDaemon:
    await daemon.add_local_node(find_links=str(daemon.folder / "wheels"))
    operation = await daemon.deploy(lock=make_lock(daemon.folder))
    assert operation.status == "done", operation.error
    return daemon


async def test_a_run_is_launched_becomes_ready_reports_metrics_and_stops(deployed: RunningDaemon) -> None:
    await deployed.put_run(make_spec("local", output_dir=deployed.folder / "out", args=["--need", "toylib"]))

    started = await deployed.start()
    assert started.status == "done", started.error
    attempt = await deployed.attempt(1, "ready")
    lines = await deployed.until(lambda s: s.exec(select(MetricLine)).all(), "metrics")
    stopped = await deployed.stop()

    assert attempt.identity is not None
    assert lines[0].record["queue"]["buckets"] == [{"upto": 512, "depth": 3}]
    assert stopped.status == "done", stopped.error
    ended = await deployed.attempt(1, "stopped")
    assert ended.exit_code == 9
    assert ended.last_checkpoint is not None
    assert Path(ended.log_path).read_text().count("toy trainer: pid") == 1


async def test_the_last_step_of_a_program_that_ended_is_the_one_in_its_log(daemon: RunningDaemon) -> None:
    await daemon.add_local_node()
    script = "echo step 1; sleep 2; for i in $(seq 2 24); do echo step $i; done; printf 'step 25'"
    spec = make_spec("local", output_dir=daemon.folder / "out") | {
        "source": "none",
        "command": {"argv": ["/bin/sh", "-c", script]},
        "health": {"progress_regex": r"step (\d+)", "ready_regex": "step 1"},
    }
    await daemon.put_run(spec)

    await daemon.start()
    ended = await daemon.attempt(1, "succeeded")

    assert ended.last_step == 25


async def test_a_run_on_another_lock_than_its_file_names_is_launched_with_a_warning(
    deployed: RunningDaemon,
) -> None:
    other = make_lock(deployed.folder, toylib="2.0", name="other.txt")
    spec = make_spec("local", output_dir=deployed.folder / "out", environment={"lock": str(other)})
    await deployed.put_run(spec)

    started = await deployed.start()
    (warning,) = await deployed.events(reason="LaunchWarning")
    await deployed.stop()

    assert started.status == "done", started.error
    assert warning.level == "warning"
    assert f"was not built from {other}" in warning.message
    assert "node deploy local --lock" in warning.message


async def test_a_run_that_fails_is_started_again_with_the_next_log_number(deployed: RunningDaemon) -> None:
    args = ["--fail-at", "5", "--fail-once", "--checkpoint-every", "2"]
    await deployed.put_run(make_spec("local", output_dir=deployed.folder / "out", args=args))

    await deployed.start()
    second = await deployed.attempt(2, "ready")
    first = await deployed.attempt(1, "failed")
    await deployed.stop()

    assert first.exit_code == 7
    assert first.is_counted
    assert second.trigger == "failure"
    assert second.log_path != first.log_path
    assert "from step 4" in Path(second.log_path).read_text()


async def test_a_run_that_dies_at_once_is_reported_with_its_cause(deployed: RunningDaemon) -> None:
    spec = make_spec(
        "local", output_dir=deployed.folder / "out", args=["--die-at-once"], restart={"policy": "never"}
    )
    await deployed.put_run(spec)

    operation = await deployed.start()

    assert operation.status == "failed"
    assert operation.error is not None
    assert "no such data folder" in operation.error["message"]
    assert operation.error["data"]["exit_code"] == 7


async def test_a_crash_loop_ends_held_with_the_last_words(deployed: RunningDaemon) -> None:
    spec = make_spec("local", output_dir=deployed.folder / "out", args=["--die-at-once"])
    await deployed.put_run(spec)

    await deployed.start()
    run = await deployed.until(lambda s: (r := find_run(s, "toy")) and r.hold and r, "the run to be held")

    assert run.hold["reason"] in {"NoProgress", "RepeatedCause", "CrashLoop"}
    attempts = await deployed.attempts()
    assert [attempt.state for attempt in attempts] == ["failed"] * len(attempts)
    assert 2 <= len(attempts) <= 5
    assert "no such data folder" in attempts[-1].exit_record["last_lines"][-1]


async def test_a_stop_of_a_stopped_run_is_done_at_once(deployed: RunningDaemon) -> None:
    await deployed.put_run(make_spec("local", output_dir=deployed.folder / "out"))

    operation = await deployed.stop()

    assert operation.status == "done"
    assert await deployed.attempts() == []


async def test_a_second_start_is_a_conflict(deployed: RunningDaemon) -> None:
    await deployed.put_run(make_spec("local", output_dir=deployed.folder / "out"))
    await deployed.start()

    with pytest.raises(ConflictError) as caught:
        await deployed.start()

    assert caught.value.reason == "AlreadyRunning"
    await deployed.stop()
    assert len(await deployed.attempts()) == 1


async def test_a_restart_resumes_from_the_checkpoint_and_another_one_from_scratch(
    deployed: RunningDaemon,
) -> None:
    await deployed.put_run(make_spec("local", output_dir=deployed.folder / "out"))
    await deployed.start()
    await deployed.attempt(1, "ready")

    again = await deployed.restart()
    scratch = await deployed.restart(resume="scratch")
    await deployed.stop()

    assert (again.status, scratch.status) == ("done", "done")
    first, second, third = await deployed.attempts()
    resumed_at = first.last_checkpoint["step"]
    assert f"resume latest from step {resumed_at}," in Path(second.log_path).read_text()
    assert "resume scratch from step 0," in Path(third.log_path).read_text()
    assert [item.reason for item in (first, second)] == ["RestartRequested"] * 2


async def test_logs_of_others_are_never_written_to_and_their_numbers_are_skipped(
    deployed: RunningDaemon,
) -> None:
    logs = deployed.folder / "logs"
    logs.mkdir(exist_ok=True)
    for number in (1, 2):
        (logs / f"train_toy{number}.log").write_text(f"somebody else's {number}\n")
    await deployed.put_run(make_spec("local", output_dir=deployed.folder / "out"))

    await deployed.start()
    attempt = await deployed.attempt(3, "started", "ready")
    await deployed.stop()

    assert attempt.log_path.endswith("train_toy3.log")
    assert (logs / "train_toy1.log").read_text() == "somebody else's 1\n"
    skipped = await deployed.events(reason="AttemptNumberSkipped")
    assert skipped[0].data["numbers"] == [1, 2]


async def test_a_trainer_that_ignores_the_stop_is_killed_and_reported(deployed: RunningDaemon) -> None:
    spec = make_spec(
        "local",
        output_dir=deployed.folder / "out",
        args=["--ignore-term"],
        stop={"grace_s": 0.5, "extend_max_s": 0.5, "term_s": 0.5},
    )
    await deployed.put_run(spec)
    await deployed.start()
    await deployed.attempt(1, "ready")

    operation = await deployed.stop()

    assert operation.status == "done"
    attempt = await deployed.attempt(1, "stopped")
    assert attempt.exit_signal == 9
    assert attempt.exit_record["killed"] is True


async def test_a_reported_nan_turns_the_quality_condition_false(deployed: RunningDaemon) -> None:
    await deployed.put_run(
        make_spec("local", output_dir=deployed.folder / "out", args=["--nan-at", "3", "--step-s", "0.1"])
    )
    await deployed.start()

    def quality(session):
        run = find_run(session, "toy")
        return next((c for c in run.conditions if c["type"] == "QualityOK" and c["status"] == "false"), None)

    found = await deployed.until(quality, "QualityOK to become false")
    await deployed.stop()

    assert found["reason"] == "NonFinite"


async def test_a_program_of_ones_own_is_ready_by_pattern(deployed: RunningDaemon) -> None:
    script = deployed.folder / "run.sh"
    script.write_text("#!/bin/sh\necho starting\nsleep 0.3\necho 'step 1 of 9'\nexec sleep 600\n")
    script.chmod(0o755)
    spec = {
        **make_spec("local", output_dir="unused"),
        "source": "none",
        "command": {"argv": [str(script)]},
        "environment": {"python": "/usr/bin/python3"},
        "health": {"ready_regex": r"^step \d+"},
    }
    await deployed.put_run(spec)

    started = await deployed.start()
    attempt = await deployed.attempt(1, "ready")
    await deployed.stop()

    assert started.status == "done", started.error
    assert attempt.argv == [str(script)]
    assert (await deployed.attempt(1, "stopped")).exit_signal == 15


async def test_a_secret_reaches_the_trainer_and_lies_nowhere(deployed: RunningDaemon) -> None:
    canary = "canary-5f0c1d7e"
    script = deployed.folder / "run.sh"
    script.write_text(
        '#!/bin/sh\nif [ -n "$MY_TOKEN" ]; then echo it is ${#MY_TOKEN} long; fi\nexec sleep 600\n'
    )
    script.chmod(0o755)
    await deployed.daemon.store.write(
        lambda s: put_secret(s, deployed.daemon.secret_box, name="MY_TOKEN", actor="token/test", value=canary)
    )
    spec = {**make_spec("local", output_dir="unused"), "source": "none", "secrets": ["MY_TOKEN"]}
    spec["command"] = {"argv": [str(script)]}
    await deployed.put_run(spec)

    await deployed.start()
    attempt = await deployed.attempt(1, "ready")
    await deployed.stop()

    assert f"it is {len(canary)} long" in Path(attempt.log_path).read_text()
    holders = [path for path in deployed.folder.rglob("*") if path.is_file() and canary in _text(path)]
    assert holders == []
    launched = await deployed.events(reason="LaunchRequested")
    assert launched[0].data["secrets"] == ["MY_TOKEN"]


def _text(path: Path) -> str:
    return path.read_bytes().decode("latin-1")


async def test_a_tree_is_staged_before_the_launch_and_a_missing_one_refuses(deployed: RunningDaemon) -> None:
    source = deployed.folder / "model"
    source.mkdir()
    (source / "weights").write_text("w" * 1000)
    good = {"copy": [{"from": str(source), "to": str(deployed.folder / "shm" / "model")}]}
    bad = {"copy": [{"from": "/nowhere/model", "to": str(deployed.folder / "shm" / "other")}]}
    await deployed.put_run(make_spec("local", output_dir=deployed.folder / "out", stage=good))
    await deployed.put_run(make_spec("local", "bad", output_dir=deployed.folder / "bad", stage=bad))

    started = await deployed.start()
    refused = await deployed.start("bad")
    await deployed.stop()

    assert started.status == "done", started.error
    assert (deployed.folder / "shm" / "model" / "weights").read_text() == "w" * 1000
    assert refused.status == "failed"
    assert "/nowhere/model" in refused.error["message"]
