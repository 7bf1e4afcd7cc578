"""Killed at every named point and started again: one trainer, one end for every request, nothing lost."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlmodel import Session, col, select

from supervisor.domain.run import LIVE, AttemptState
from supervisor.reconciler import crash
from supervisor.reconciler.crash import CRASH_POINTS
from supervisor.services import nodes, runs
from supervisor.store.queries import find_run, get_node
from supervisor.store.tables import Event, Operation
from supervisor.store.writer import Store
from tests.support.daemon import (
    ACTOR,
    TOY_TRAINER,
    RunningDaemon,
    end_leftovers,
    live_processes,
    make_lock,
    make_spec,
    running_daemon,
)

DIES_WITHIN_S = 240.0
CRASHED = 137

DEPLOY_POINTS = [name for name in CRASH_POINTS if name.startswith("deploy.")]
RUN_POINTS = [name for name in CRASH_POINTS if not name.startswith("deploy.")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A state folder whose node has the toy trainer deployed; no daemon runs on it."""
    path = tmp_path_factory.mktemp("crash")

    async def deploy() -> None:
        async with running_daemon(path) as running:
            await running.add_local_node(find_links=str(path / "wheels"))
            operation = await running.deploy(lock=make_lock(path))
            assert operation.status == "done", operation.error

    asyncio.run(deploy())
    yield path
    end_leftovers(path / "node")


def die_at(folder: Path, point: str) -> int:
    """Run a daemon in a child of our own until it dies at the point; returns its exit code."""
    child = os.fork()
    if child == 0:
        crash._CRASH_AT = point  # what the environment variable would have set at import
        try:
            asyncio.run(_serve(folder))
        finally:
            os._exit(1)
    _pid, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


async def _serve(folder: Path) -> None:
    async with running_daemon(folder):
        await asyncio.sleep(DIES_WITHIN_S)


def write(folder: Path, function: Callable[[Session], Any]) -> Any:
    """One transaction while no daemon runs, as the API would have committed it just before the crash."""
    store = Store(folder / "state" / "supervisor.db")
    try:
        return store.write_sync(function)
    finally:
        store.close()


def request(folder: Path, kind: str, name: str) -> str:
    def function(session: Session) -> str:
        run = find_run(session, name)
        assert run is not None
        return getattr(runs, f"request_{kind}")(session, run, actor=ACTOR).id

    return write(folder, function)


async def prepare_live(folder: Path, name: str) -> None:
    """Have the run's trainer running, with the daemon gone again."""
    async with running_daemon(folder) as running:
        operation = await running.start(name)
        assert operation.status == "done", operation.error


async def recover(folder: Path, name: str, operation_id: str, check: Callable[[RunningDaemon], Any]) -> None:
    """A new daemon on the same folder: the request ends, the invariants hold, then everything is stopped."""
    async with running_daemon(folder) as running:
        operation = await running.finished(operation_id)
        await check(running)
        # A first attempt that fails by itself ends its start as failed; the restart after it is policy's.
        assert operation.status == "done" or name.startswith("restart-"), operation.error
        assert await ends_of(running, operation_id) == 1
        await running.stop(name)
        assert live_processes(folder / "node", name) == []


async def ends_of(running: RunningDaemon, operation_id: str) -> int:
    """How often an operation ended, by the history."""

    def read(session: Session) -> int:
        query = select(Event).where(Event.operation_id == operation_id, col(Event.reason).like("Operation%"))
        return len(session.exec(query).all())

    return await running.daemon.store.read(read)


def await_death(folder: Path, name: str) -> None:
    """Wait until the run's trainer is gone, with no daemon to see it."""
    for _ in range(6_000):
        if not live_processes(folder / "node", name):
            return
        time.sleep(0.02)
    raise AssertionError(f"the trainer of {name} did not end")


def run_name(point: str) -> str:
    return point.replace(".", "-").replace("_", "-")


@pytest.mark.parametrize("point", RUN_POINTS)
def test_a_daemon_killed_at_any_point_of_a_run_recovers(folder: Path, point: str) -> None:
    name = run_name(point)
    args = ["--fail-at", "3", "--fail-once"] if point.startswith("restart.") else []
    spec = make_spec("local", name, output_dir=folder / f"out-{name}", args=args)
    write(folder, lambda session: runs.put_run(session, _parse(spec), actor=ACTOR))
    wants_stop = point.startswith(("stop.", "finish."))
    if wants_stop:
        asyncio.run(prepare_live(folder, name))
    operation_id = request(folder, "stop" if wants_stop else "start", name)

    assert die_at(folder, point) == CRASHED

    async def check(running: RunningDaemon) -> None:
        attempts = await running.attempts(name)
        live = [item for item in attempts if AttemptState(item.state) in LIVE]
        assert len(live_processes(folder / "node", name)) == len(live) == (0 if wants_stop else 1)
        expected = 2 if point.startswith("restart.") else 1
        assert [item.number for item in attempts] == list(range(1, expected + 1))

    async def checked() -> None:
        if point.startswith("restart."):
            async with running_daemon(folder) as running:
                await running.attempt(2, "ready", name=name)
        await recover(folder, name, operation_id, check)

    asyncio.run(checked())


@pytest.mark.parametrize("point", ["launch.after_commit", "launch.after_start_request"])
def test_a_stop_that_follows_a_crash_during_the_launch_leaves_no_orphan(folder: Path, point: str) -> None:
    name = f"stopped-{run_name(point)}"
    spec = make_spec("local", name, output_dir=folder / f"out-{name}")
    write(folder, lambda session: runs.put_run(session, _parse(spec), actor=ACTOR))
    start_id = request(folder, "start", name)
    assert die_at(folder, point) == CRASHED
    stop_id = request(folder, "stop", name)

    async def check() -> None:
        async with running_daemon(folder) as running:
            stopped = await running.finished(stop_id)
            started = await running.finished(start_id)
            (attempt,) = await running.attempts(name)
            assert stopped.status == "done", stopped.error
            assert started.status == "superseded"
            assert attempt.state == "stopped"

    asyncio.run(check())
    assert live_processes(folder / "node", name) == []


def _parse(spec: dict[str, Any]) -> Any:
    from supervisor.domain.spec import parse_run_dict

    return parse_run_dict(spec)


@pytest.mark.parametrize("point", DEPLOY_POINTS)
def test_a_daemon_killed_at_any_point_of_a_deploy_finishes_it(
    folder: Path, point: str, tmp_path: Path
) -> None:
    version = f"2.{DEPLOY_POINTS.index(point)}"
    lock = make_lock(folder, toylib=version, name=f"lock-{version}.txt")

    def ask(session: Session) -> str:
        node = get_node(session, "local")
        return nodes.request_deploy(session, node, source=str(TOY_TRAINER), lock=str(lock), actor=ACTOR).id

    operation_id = write(folder, ask)

    assert die_at(folder, point) == CRASHED

    async def check() -> None:
        async with running_daemon(folder) as running:
            operation = await running.finished(operation_id)
            assert operation.status == "done", operation.error
            assert await ends_of(running, operation_id) == 1
            environment = folder / "node" / "envs" / operation.result["environment"]
            assert (environment / "complete.json").exists()
            assert (folder / "node" / "current").readlink().name == operation.result["release"]

    asyncio.run(check())


def test_a_killed_daemon_leaves_its_runs_running_and_finds_them_again(folder: Path) -> None:
    spec = make_spec("local", "adopted", output_dir=folder / "out-adopted")
    write(folder, lambda session: runs.put_run(session, _parse(spec), actor=ACTOR))
    asyncio.run(prepare_live(folder, "adopted"))
    before = live_processes(folder / "node", "adopted")

    async def check() -> None:
        async with running_daemon(folder) as running:
            attempt = await running.attempt(1, "ready", name="adopted")
            assert [attempt.identity["pid"]] == before
            await running.stop("adopted")
            assert len(await running.attempts("adopted")) == 1

    asyncio.run(check())


def test_a_trainer_that_ended_while_no_daemon_ran_is_taken_in(folder: Path) -> None:
    is_enough = folder / "enough"
    spec = make_spec("local", "short", output_dir=folder / "out-short", args=["--until", str(is_enough)])
    write(folder, lambda session: runs.put_run(session, _parse(spec), actor=ACTOR))
    asyncio.run(prepare_live(folder, "short"))
    is_enough.touch()
    await_death(folder, "short")

    async def check() -> None:
        async with running_daemon(folder) as running:
            attempt = await running.attempt(1, "succeeded", name="short")
            assert attempt.exit_code == 0
            await running.until(
                lambda session: session.get(type(attempt), attempt.id).acknowledged_at, "the acknowledgement"
            )

    asyncio.run(check())


def leave_stranger(folder: Path, name: str) -> Path:
    """An attempt's folder that no daemon of ours made."""
    stranger = folder / "node" / "attempts" / name
    stranger.mkdir(parents=True)
    record = {"v": 1, "attempt_id": name, "run_id": "r0", "phase": "exited"}
    (stranger / "state.json").write_text(json.dumps(record))
    return stranger


def test_an_unknown_attempt_folder_is_reported_once_and_left_alone(folder: Path) -> None:
    names: list[str] = []

    async def told(running: RunningDaemon, name: str) -> int:
        return len(await running.events(reason="OrphanFound", attempt_id=name))

    async def check() -> None:
        for number in range(3):
            names.append(f"stranger{number}")
            leave_stranger(folder, names[-1])
            async with running_daemon(folder) as running:
                # a look at the folders is one transaction: the new one is told, so the others were seen
                await running.until(
                    lambda session: session.exec(select(Event).where(Event.attempt_id == names[-1])).all(),
                    "the orphan to be reported",
                )
                assert [await told(running, name) for name in names] == [1] * len(names)

    asyncio.run(check())
    assert all((folder / "node" / "attempts" / name).exists() for name in names)


def test_every_acknowledged_request_has_reached_one_end(folder: Path) -> None:
    async def check() -> None:
        async with running_daemon(folder) as running:
            await running.until(
                lambda session: (
                    not session.exec(
                        select(Operation).where(col(Operation.status).in_(("pending", "running")))
                    ).all()
                ),
                "all operations to end",
            )

    asyncio.run(check())
