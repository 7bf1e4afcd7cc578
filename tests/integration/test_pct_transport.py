"""The container transport when the container, its host or `pct` itself is the obstacle."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

import pytest

from supervisor.domain.errors import (
    AuthError,
    ChecksumMismatchError,
    CommandFailedError,
    ConfigError,
    ContainerError,
    DeadlineError,
    LockedError,
    MissingError,
    NotRunningError,
    OutcomeUnknownError,
    TransportError,
)
from supervisor.transport.pct import PctTransport, classify
from supervisor.transport.ssh import SshTransport
from tests.support.deadlines import missed
from tests.support.pct_host import PctHost

pytestmark = [pytest.mark.anyio, pytest.mark.sshd, pytest.mark.usefixtures("patient_link")]

LIMIT_S = 60.0
BIG = os.urandom(1 << 20)


@pytest.fixture
async def node(pct_host: PctHost) -> AsyncIterator[PctTransport]:
    transport = pct_host.transport()
    yield transport
    await transport.close()


def host_rests(host: PctHost) -> bytes:
    return host.on_host("find", "/var/tmp", "-maxdepth", "1", "-name", "dflash-put-*").stdout


@pytest.mark.parametrize("vmid", [0, 99, -1, 10**9, True])
def test_ids_that_cannot_be_a_container(pct_host: PctHost, vmid: int) -> None:
    with pytest.raises(ConfigError):
        PctTransport(SshTransport(pct_host.target()), vmid)


async def test_a_stopped_container_is_evidence_and_not_a_link_error(
    pct_host: PctHost, node: PctTransport
) -> None:
    pct_host.pct("stop", "200")
    with pytest.raises(NotRunningError):
        await node.run(["true"], deadline_s=LIMIT_S)
    with pytest.raises(NotRunningError):
        await node.open_channel(["cat"], deadline_s=LIMIT_S)
    for size in (10, len(BIG)):
        with pytest.raises(NotRunningError):
            await node.put(BIG[:size], "/root/x", deadline_s=LIMIT_S)
    with pytest.raises(NotRunningError):
        await node.get("/root/x", max_bytes=10, deadline_s=LIMIT_S)
    probe = await node.probe(deadline_s=LIMIT_S)
    assert (probe.is_reachable, probe.reason, probe.container_status) == (
        False,
        "ContainerStopped",
        "stopped",
    )
    assert host_rests(pct_host) == b""
    pct_host.pct("start", "200")
    assert (await node.probe(deadline_s=LIMIT_S)).is_reachable


async def test_a_container_that_is_not_there(pct_host: PctHost, node: PctTransport) -> None:
    missing = pct_host.transport(999)
    with pytest.raises(MissingError) as caught:
        await missing.run(["true"], deadline_s=LIMIT_S)
    assert caught.value.data["vmid"] == 999
    probe = await missing.probe(deadline_s=LIMIT_S)
    assert (probe.is_reachable, probe.reason, probe.container_status) == (False, "ContainerMissing", None)
    await missing.close()


async def test_a_container_that_ends_under_its_command(pct_host: PctHost, node: PctTransport) -> None:
    """137 and no report: what became of it is unknown until somebody looks; the probe tells why."""
    running = asyncio.create_task(node.run(["sh", "-c", "touch /root/up; sleep 600"], deadline_s=LIMIT_S))
    async with asyncio.timeout(LIMIT_S):
        while not pct_host.ct_path("/root/up").exists():
            await asyncio.sleep(0.02)
    pct_host.pct("stop", "200")
    with pytest.raises(OutcomeUnknownError) as caught:
        await running
    assert caught.value.data["channel_status"] == 137
    assert (await node.probe(deadline_s=LIMIT_S)).container_status == "stopped"


async def test_a_channel_ends_with_its_container(pct_host: PctHost, node: PctTransport) -> None:
    channel = await node.open_channel(["cat"], deadline_s=LIMIT_S)
    pct_host.pct("stop", "200")
    assert await asyncio.wait_for(channel.receive(), LIMIT_S) == b""
    await channel.close()


async def test_a_frozen_container_is_unknown_and_not_dead(pct_host: PctHost, node: PctTransport) -> None:
    pct_host.freeze_container()
    acting = await missed(lambda deadline_s: node.run(["true"], deadline_s=deadline_s))
    asking = await missed(lambda deadline_s: node.run(["true"], deadline_s=deadline_s, is_read_only=True))
    assert (type(acting), type(asking)) == (OutcomeUnknownError, DeadlineError)
    probe = await node.probe(deadline_s=LIMIT_S)
    assert probe.container_status == "running"
    pct_host.thaw_container()
    assert (await node.run(["true"], deadline_s=LIMIT_S)).exit_code == 0


async def test_a_config_lock_shows_in_the_probe_and_blocks_no_command(
    pct_host: PctHost, node: PctTransport
) -> None:
    pct_host.lock("backup")
    probe = await node.probe(deadline_s=LIMIT_S)
    assert (probe.is_reachable, probe.container_lock) == (True, "backup")
    assert (await node.run(["true"], deadline_s=LIMIT_S)).exit_code == 0


async def test_a_guest_lock_stops_a_big_copy_and_no_small_one(pct_host: PctHost, node: PctTransport) -> None:
    pct_host.set_knob("lock_wait_s", 0.2)
    holding = await asyncio.create_subprocess_exec(
        *pct_host.ssh_words(),
        "flock /run/lock/lxc/pve-config-200.lock sh -c 'touch /root/held; cat'",
        stdin=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(LIMIT_S):
        while not pct_host.root_path("/root/held").exists():
            await asyncio.sleep(0.02)
    with pytest.raises(LockedError) as caught:
        await node.put(BIG, "/root/big", deadline_s=LIMIT_S)
    assert (caught.value.reason, caught.value.retryable) == ("GuestLockBusy", True)
    assert host_rests(pct_host) == b""
    await node.put(b"small", "/root/small", deadline_s=LIMIT_S)
    await holding.communicate(b"")
    pct_host.set_knob("lock_wait_s", LIMIT_S)
    await node.put(BIG, "/root/big", deadline_s=LIMIT_S)
    assert pct_host.ct_path("/root/big").read_bytes() == BIG


async def test_a_push_that_lies_is_found_out(pct_host: PctHost, node: PctTransport) -> None:
    await node.put(BIG, "/root/big", deadline_s=LIMIT_S)
    pct_host.set_knob("push_stops_at", 1000)
    with pytest.raises(ChecksumMismatchError) as caught:
        await node.put(BIG[::-1], "/root/big", deadline_s=LIMIT_S)
    assert caught.value.data["path"] == "/root/big"
    folder = pct_host.ct_path("/root/big").parent
    assert pct_host.ct_path("/root/big").read_bytes() == BIG
    assert list(folder.glob(".dflash-part-*")) == []
    assert host_rests(pct_host) == b""


async def test_what_push_said_is_passed_on(pct_host: PctHost, node: PctTransport) -> None:
    with pytest.raises(CommandFailedError) as caught:
        await node.put(BIG, "/none/big", deadline_s=LIMIT_S)
    assert caught.value.reason == "NoSuchDirectory"
    assert "failed to create file" in (caught.value.hint or "")


async def test_a_big_copy_cut_midway_leaves_nothing_on_the_host(
    pct_host: PctHost, node: PctTransport
) -> None:
    pct_host.link.after(500_000, "cut")
    with pytest.raises(TransportError) as caught:
        await node.put(BIG * 4, "/root/big", deadline_s=LIMIT_S)
    assert caught.value.retryable
    async with asyncio.timeout(LIMIT_S):
        while host_rests(pct_host):
            await asyncio.sleep(0.05)
    assert not pct_host.ct_path("/root/big").exists()


async def test_a_host_without_pct(pct_host: PctHost, node: PctTransport) -> None:
    pct_host.order("pct-remove")
    with pytest.raises(ContainerError) as caught:
        await node.run(["true"], deadline_s=LIMIT_S)
    assert caught.value.reason == "PctMissing"
    probe = await node.probe(deadline_s=LIMIT_S)
    assert (probe.is_reachable, probe.reason) == (False, "PctMissing")


async def test_commands_find_an_environment_of_ours(pct_host: PctHost, node: PctTransport) -> None:
    result = await node.run(["env"], deadline_s=LIMIT_S)
    env = dict(line.split("=", 1) for line in result.stdout.decode().splitlines())
    env.pop("PWD", None)
    assert env == {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "LANG": "C.UTF-8",
        "LC_ALL": "C.UTF-8",
        "HOME": "/root",
        "USER": "root",
    }


async def test_words_reach_the_container_whatever_the_host_s_locale(
    pct_host: PctHost, node: PctTransport
) -> None:
    pct_host.root_path("/root/.bashrc").write_text("export LC_ALL=C\n", "utf-8")
    result = await node.run(["printf", "%s", "é日本"], deadline_s=LIMIT_S)
    assert result.stdout.decode() == "é日本"
    assert all(word.isascii() for call in pct_host.calls() for word in call.argv)


async def test_stdin_shows_in_no_argument_list(pct_host: PctHost, node: PctTransport) -> None:
    await node.run(["cat"], stdin=b"canary-secret-1234", deadline_s=LIMIT_S)
    assert "canary-secret-1234" not in (pct_host.folder / "pct.ndjson").read_text("ascii")


async def test_a_user_who_may_not_sudo(pct_host: PctHost) -> None:
    """Not root on the host: pct goes through sudo, and sudo's refusal has its own name."""
    host = SshTransport(pct_host.target(user="nobody"))
    transport = PctTransport(host, 200)
    assert transport._exec[:3] == ("sudo", "-n", "/usr/sbin/pct")
    await transport.close()


@pytest.mark.parametrize(
    ("text", "kind", "reason"),
    [
        ("container '200' not running!", NotRunningError, "ContainerStopped"),
        ("CT 200 not running", NotRunningError, "ContainerStopped"),
        ("can only push files to a running CT", NotRunningError, "ContainerStopped"),
        ("can only pull files from a running VM at pct.pm line 700.", NotRunningError, "ContainerStopped"),
        ("lxc-attach: 200: ... Failed to get init pid", NotRunningError, "ContainerStopped"),
        ("Configuration file 'nodes/pve1/lxc/200.conf' does not exist", MissingError, "ContainerMissing"),
        ("CT is locked (snapshot-delete)", LockedError, "ContainerLocked"),
        (
            "trying to acquire lock...\ncan't lock file '/run/lock/lxc/pve-config-200.lock' - got timeout",
            LockedError,
            "GuestLockBusy",
        ),
        ("please run as root", AuthError, "PctNotAllowed"),
        ("sudo: a password is required", AuthError, "PctNotAllowed"),
        (
            "Sorry, user x is not allowed to execute '/usr/sbin/pct list' as root on h.",
            AuthError,
            "PctNotAllowed",
        ),
        ("bash: line 1: /usr/sbin/pct: No such file or directory", ContainerError, "PctMissing"),
        ("sh: 1: /usr/sbin/pct: not found", ContainerError, "PctMissing"),
        ("sudo: /usr/sbin/pct: command not found", ContainerError, "PctMissing"),
    ],
)
def test_texts_are_told_apart(text: str, kind: type[Exception], reason: str) -> None:
    error = classify(text, 200)
    assert type(error) is kind
    assert error.reason == reason


def test_other_texts_mean_nothing_by_themselves() -> None:
    assert classify("perl: warning: Setting locale failed.", 200) is None
