"""The daemon over sshd and the stand-in pct: a lost link is not a dead trainer, a stopped container is."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from sqlmodel import Session, select

from supervisor.store.queries import find_node, find_run
from supervisor.store.tables import Event
from tests.support.daemon import ACTOR, RunningDaemon, make_lock, make_spec, running_daemon
from tests.support.pct_host import DEFAULT_VMID, PctHost

pytestmark = pytest.mark.sshd

ROOT = "/srv/dflash"


@pytest.fixture
async def daemon(tmp_path: Path, pct_host: PctHost) -> AsyncIterator[RunningDaemon]:
    """A daemon whose node is container 200, with the toy trainer deployed."""
    async with running_daemon(tmp_path) as running:
        await add_container_node(running, pct_host)
        wheels = tmp_path / "wheels"
        lock = make_lock(tmp_path)
        for wheel in wheels.iterdir():
            pct_host.ct_path(f"/srv/wheels/{wheel.name}").write_bytes(wheel.read_bytes())
        operation = await running.deploy("ct200", lock=lock)
        assert operation.status == "done", operation.error
        yield running


async def add_container_node(running: RunningDaemon, host: PctHost) -> None:
    from supervisor.services import nodes

    node = await running.daemon.store.write(
        lambda session: nodes.add_node(
            session,
            name="ct200",
            transport="proxmox",
            host="127.0.0.1",
            port=host.port,
            user="root",
            vmid=DEFAULT_VMID,
            identity_file=str(host.identity),
            host_key=host.host_key_line,
            root=ROOT,
            log_dir="/workspace",
            find_links="/srv/wheels",
            actor=ACTOR,
        )
    )
    running.daemon.hint(node.id)


async def start(running: RunningDaemon, **changes: Any) -> None:
    await running.put_run(make_spec("ct200", output_dir="/workspace/out", **changes))
    operation = await running.start()
    assert operation.status == "done", operation.error
    await running.attempt(1, "ready")


async def node_condition(running: RunningDaemon, status: str, *, not_since: str = "") -> dict[str, Any]:
    """The node's Reachable condition once it has this status (and has it since another moment)."""

    def read(session: Any) -> dict[str, Any] | None:
        node = find_node(session, "ct200")
        found = next((c for c in node.conditions if c["type"] == "Reachable" and c["status"] == status), None)
        return found if found is not None and found["since"] != not_since else None

    return await running.until(read, f"Reachable to become {status}")


async def test_a_link_that_is_cut_again_and_again_restarts_nothing(
    daemon: RunningDaemon, pct_host: PctHost
) -> None:
    await start(daemon)
    before = len(await daemon.events())

    for _ in range(5):
        since = (await node_condition(daemon, "true"))["since"]
        pct_host.link.cut()
        # true again since another moment: what lay between may be over before anybody looks
        await node_condition(daemon, "true", not_since=since)
    metrics_after = len(await daemon.events())
    attempts = await daemon.attempts()
    stopped = await daemon.stop()

    assert [item.state for item in attempts] == ["ready"]
    assert metrics_after - before <= 2, "an outage that is over in seconds is no history"
    assert stopped.status == "done", stopped.error
    assert (await daemon.attempt(1, "stopped")).exit_code == 9
    log = pct_host.ct_path("/workspace/train_toy1.log").read_text()
    assert log.count("toy trainer: pid") == 1


async def test_a_trainer_that_ends_while_the_host_is_out_of_reach_is_taken_in_later(
    daemon: RunningDaemon, pct_host: PctHost
) -> None:
    await start(daemon, args=["--until", "/workspace/enough"])

    pct_host.link.refuse()
    await node_condition(daemon, "unknown")
    pct_host.ct_path("/workspace/enough").touch()
    exit_file = next((pct_host.ct_path(f"{ROOT}/attempts/x").parent).glob("*")) / "exit.json"
    await daemon.until(lambda _session: exit_file.exists(), "the trainer to end by itself")
    during = await daemon.attempts()
    pct_host.link.accept()

    ended = await daemon.attempt(1, "succeeded")
    assert [item.state for item in during] == ["ready"]
    assert ended.exit_code == 0


async def test_a_stopped_container_loses_the_attempt_and_a_started_one_gets_the_next(
    daemon: RunningDaemon, pct_host: PctHost
) -> None:
    await start(daemon, args=["--checkpoint-every", "2"])
    await daemon.until(lambda s: find_run(s, "toy") is not None, "the run")

    pct_host.pct("stop", str(DEFAULT_VMID))
    lost = await daemon.attempt(1, "lost")
    waiting = await daemon.attempts()
    pct_host.pct("start", str(DEFAULT_VMID))
    second = await daemon.attempt(2, "ready")
    await daemon.stop()

    assert lost.reason in {"ContainerStopped", "ContainerRestarted"}
    assert len(waiting) == 1
    assert second.trigger in {"host", "failure"}
    assert second.log_path == "/workspace/train_toy2.log"


async def test_a_run_declared_lost_waits_for_its_node_and_a_living_first_copy_keeps_the_second_away(
    daemon: RunningDaemon, pct_host: PctHost
) -> None:
    await start(daemon)
    pct_host.link.refuse()
    pct_host.link.cut()
    await node_condition(daemon, "unknown")

    declared = await daemon.declare_lost(reason="the machine burnt")
    started = await daemon.start(wait=False)
    await daemon.until(lambda s: decision_of(s) == "HostNotSeen", "the start to wait for its node")
    meanwhile = await daemon.attempts()
    pct_host.link.accept()
    ended = await daemon.finished(started.id)

    assert declared.status == "done", declared.error
    assert [(item.state, item.reason) for item in meanwhile] == [("lost", "DeclaredLost")]
    assert ended.status == "failed"
    assert f"in use by attempt {meanwhile[0].id}" in ended.error["message"]
    assert [item.state for item in await daemon.attempts()] == ["lost", "launch_failed"]
    told = await daemon.until(
        lambda s: s.exec(select(Event).where(Event.reason == "SurvivorFound")).all(),
        "the survivor to be told",
    )
    assert [event.attempt_id for event in told] == [meanwhile[0].id]
    await daemon.stop()


def decision_of(session: Session) -> str | None:
    """Reason of the newest decision about the run."""
    run = find_run(session, "toy")
    return (run.last_decision or {}).get("reason") if run is not None else None


async def test_a_changed_host_key_stops_all_traffic_and_no_run(
    daemon: RunningDaemon, pct_host: PctHost
) -> None:
    await start(daemon)

    pct_host.swap_host_key()
    pct_host.link.cut()
    condition = await node_condition(daemon, "false")
    attempts = await daemon.attempts()

    assert condition["reason"] == "HostKeyChanged"
    assert [item.state for item in attempts] == ["ready"]
    events = await daemon.events(reason="HostKeyMismatch")
    assert len(events) == 1
    assert events[0].level == "error"


async def test_a_start_on_a_stopped_container_names_it(daemon: RunningDaemon, pct_host: PctHost) -> None:
    await daemon.put_run(make_spec("ct200", output_dir="/workspace/out"))
    pct_host.pct("stop", str(DEFAULT_VMID))
    await node_condition(daemon, "false")

    operation = await daemon.start()

    assert operation.status == "failed"
    assert operation.error["reason"] == "ContainerStopped"
    assert operation.error["hint"]
    await daemon.stop()


async def test_a_frozen_link_is_noticed_and_recovers_without_touching_the_run(
    daemon: RunningDaemon, pct_host: PctHost
) -> None:
    await start(daemon)

    pct_host.link.freeze()
    await node_condition(daemon, "unknown")
    pct_host.link.thaw()
    await node_condition(daemon, "true")

    assert [item.state for item in await daemon.attempts()] == ["ready"]
    assert (await daemon.stop()).status == "done"
