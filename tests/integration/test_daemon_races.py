"""Requests that cross each other: serialised per run, one end each, never two trainers, none left over."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from supervisor.app import Daemon
from supervisor.domain.errors import ConflictError, StoreCorruptError
from supervisor.services.auth import authenticate_token
from tests.support.daemon import (
    RunningDaemon,
    end_leftovers,
    live_processes,
    make_lock,
    make_settings,
    make_spec,
    running_daemon,
)


@pytest.fixture
async def daemon(tmp_path: Path) -> AsyncIterator[RunningDaemon]:
    async with running_daemon(tmp_path) as running:
        await running.add_local_node(find_links=str(tmp_path / "wheels"))
        operation = await running.deploy(lock=make_lock(tmp_path))
        assert operation.status == "done", operation.error
        yield running
    end_leftovers(tmp_path / "node")


def lifetimes(root: Path) -> list[tuple[float, float]]:
    """When each trainer lived, by the shim's own records."""
    found = []
    for path in (root / "attempts").glob("*/exit.json"):
        record = json.loads(path.read_text())
        found.append((record["started_at"], record["ended_at"]))
    return sorted(found)


@pytest.mark.parametrize("seed", range(3))
async def test_crossing_requests_each_end_once_and_never_make_two_trainers(
    daemon: RunningDaemon, seed: int
) -> None:
    rng = random.Random(seed)
    await daemon.put_run(make_spec("local", output_dir=daemon.folder / "out", args=["--step-s", "0.02"]))
    operations = []

    for _ in range(8):
        action = rng.choice([daemon.start, daemon.stop, daemon.restart])
        with contextlib.suppress(ConflictError):  # a start of what runs, a restart of what does not
            operations.append(await action(wait=rng.random() < 0.3))
    operations.append(await daemon.stop())

    ended = [await daemon.finished(operation.id) for operation in operations]
    assert {item.status for item in ended} <= {"done", "superseded"}, [item.error for item in ended]
    assert ended[-1].status == "done"
    assert live_processes(daemon.root, "toy") == []
    times = lifetimes(daemon.root)
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(times)), times


async def test_a_stop_that_follows_a_start_at_once_leaves_nothing(daemon: RunningDaemon) -> None:
    await daemon.put_run(make_spec("local", output_dir=daemon.folder / "out"))

    started = await daemon.start(wait=False)
    stopped = await daemon.stop()

    assert stopped.status == "done"
    assert (await daemon.finished(started.id)).status in {"superseded", "done"}
    assert live_processes(daemon.root, "toy") == []
    assert all(item.state in {"stopped", "succeeded"} for item in await daemon.attempts())


async def test_a_second_daemon_on_the_same_state_folder_names_the_first(daemon: RunningDaemon) -> None:
    second = Daemon(make_settings(daemon.folder / "state"))

    with pytest.raises(ConflictError) as caught:
        await second.start()

    assert caught.value.reason == "StateFolderInUse"
    assert "pid" in caught.value.message
    assert (await daemon.check()).status == "done"


async def test_a_start_that_is_refused_gives_the_state_folder_back(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    (state / "supervisor.db").write_bytes(b"this is no database, but its bytes are somebody's" * 100)

    for _ in range(2):
        with pytest.raises(StoreCorruptError):
            await Daemon(make_settings(state)).start()

    assert (state / "supervisor.db").read_bytes().startswith(b"this is no database")


async def test_the_admin_token_is_made_once_and_is_readable_by_us_alone(tmp_path: Path) -> None:
    values = []
    for _ in range(2):
        async with running_daemon(tmp_path) as running:
            file = running.daemon.settings.admin_token_file
            values.append((file.read_text(), file.stat().st_mode & 0o777))
            principal = await running.daemon.store.read(
                lambda session, file=file: authenticate_token(session, file.read_text().strip())
            )
            assert principal.scope == "admin"

    assert values[0] == values[1]
    assert values[0][1] == 0o600
