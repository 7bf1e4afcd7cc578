"""The SSH transport when hosts, keys and links go wrong: each fault ends in time, with its own name."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import paramiko
import pytest

from supervisor.domain.errors import (
    AuthError,
    ConnectError,
    DeadlineError,
    HostKeyError,
    OutcomeUnknownError,
    TransportError,
)
from supervisor.transport.ssh import SshTransport, fingerprint, lanes, parse_host_key, scan_host_key
from tests.support.deadlines import DEADLINES_S, missed
from tests.support.ports import reserved_port
from tests.support.sshd import SshHost, require_test_bed

pytestmark = [pytest.mark.anyio, pytest.mark.sshd, pytest.mark.usefixtures("patient_link")]

LIMIT_S = 60.0


@pytest.fixture
async def node(ssh_host: SshHost) -> AsyncIterator[SshTransport]:
    transport = SshTransport(ssh_host.target())
    yield transport
    await transport.close()


async def appears(path: Path) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not path.exists():
            await asyncio.sleep(0.02)


async def test_a_scan_shows_the_key_without_logging_in(ssh_host: SshHost) -> None:
    line, seen = await scan_host_key("127.0.0.1", ssh_host.port)
    assert line == ssh_host.host_key_line
    assert seen == ssh_host.host_fingerprint
    assert seen.startswith("SHA256:")
    assert "Accepted" not in (ssh_host.folder / "sshd.log").read_text("utf-8")


async def test_a_changed_host_key_is_refused_with_both_fingerprints(ssh_host: SshHost) -> None:
    old, pinned = ssh_host.host_fingerprint, ssh_host.target()
    ssh_host.swap_host_key()
    transport = SshTransport(pinned)
    with pytest.raises(HostKeyError) as caught:
        await transport.run(["touch", "/root/ran"], deadline_s=LIMIT_S)
    assert caught.value.data == {"expected": old, "seen": ssh_host.host_fingerprint}
    assert old in caught.value.message
    assert ssh_host.host_fingerprint in caught.value.message
    assert not ssh_host.root_path("/root/ran").exists()
    probe = await transport.probe(deadline_s=LIMIT_S)
    assert (probe.is_reachable, probe.reason) == (False, "HostKeyChanged")
    await transport.close()


async def test_a_pinned_key_of_another_kind_is_refused_too(ssh_host: SshHost) -> None:
    """The host has no key of the pinned kind: that is a changed key, not a new one to accept."""
    import paramiko

    other = paramiko.RSAKey.generate(2048)
    line = f"{other.get_name()} {other.get_base64()}"
    transport = SshTransport(ssh_host.target(host_key=line))
    with pytest.raises(HostKeyError) as caught:
        await transport.run(["true"], deadline_s=LIMIT_S)
    assert caught.value.data == {
        "expected": fingerprint(parse_host_key(line)),
        "seen": ssh_host.host_fingerprint,
    }
    await transport.close()


async def test_a_key_that_the_host_does_not_know(ssh_host: SshHost) -> None:
    transport = SshTransport(ssh_host.target(identity=str(ssh_host.make_key("stranger"))))
    with pytest.raises(AuthError) as caught:
        await transport.run(["true"], deadline_s=LIMIT_S)
    assert caught.value.reason == "AuthFailed"
    assert "root@127.0.0.1" in caught.value.message
    await transport.close()


async def test_a_key_file_that_is_not_there(ssh_host: SshHost) -> None:
    transport = SshTransport(ssh_host.target(identity="/no/such/key"))
    with pytest.raises(AuthError) as caught:
        await transport.run(["true"], deadline_s=LIMIT_S)
    assert caught.value.reason == "IdentityMissing"
    await transport.close()


async def test_no_server_behind_the_port() -> None:
    key = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAINOJrKiSobsTwi3m47VcEaeK+ATUVbH8/lUUVpxXj6U0"
    with reserved_port() as port, pytest.raises(ConnectError) as caught:
        await scan_host_key("127.0.0.1", port)
    assert caught.value.reason == "ConnectRefused"
    assert parse_host_key(key).get_name() == "ssh-ed25519"


async def test_a_server_that_says_nothing_ends_by_the_deadline(ssh_host: SshHost) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(ConnectError):
            await scan_host_key("127.0.0.1", port, deadline_s=0.5)
        transport = SshTransport(ssh_host.target(port=port))
        with pytest.raises(ConnectError) as caught:
            await transport.run(["true"], deadline_s=0.5)
        assert caught.value.reason == "ConnectTimeout"
    await transport.close()


async def test_a_name_that_does_not_resolve(ssh_host: SshHost) -> None:
    transport = SshTransport(ssh_host.target(host="no..such..host"))
    probe = await transport.probe(deadline_s=LIMIT_S)
    assert (probe.is_reachable, probe.reason) == (False, "DnsFailed")
    await transport.close()


async def test_a_stopped_sshd_and_its_return(ssh_host: SshHost, node: SshTransport) -> None:
    ssh_host.link.refuse()
    assert (await node.probe(deadline_s=LIMIT_S)).reason == "ConnectRefused"
    ssh_host.link.accept()
    assert (await node.probe(deadline_s=LIMIT_S)).reason == "Ok"


async def test_a_cut_between_two_calls_is_not_noticed(ssh_host: SshHost, node: SshTransport) -> None:
    """The second call certainly has not run yet: it connects afresh by itself."""
    for _ in range(3):
        assert (await node.run(["true"], deadline_s=LIMIT_S)).exit_code == 0
        ssh_host.link.cut()


async def test_a_cut_mid_command_is_unknown_and_the_command_finishes(
    ssh_host: SshHost, node: SshTransport
) -> None:
    script = "touch begun; while [ -e begun ]; do sleep 0.05; done; touch done"
    running = asyncio.create_task(node.run(["sh", "-c", f"cd /root; {script}"], deadline_s=LIMIT_S))
    await appears(ssh_host.root_path("/root/begun"))
    # An answer on the same connection comes after everything that was said before it was asked for.
    await node.run(["true"], deadline_s=LIMIT_S)
    ssh_host.link.cut()
    with pytest.raises(OutcomeUnknownError) as caught:
        await running
    assert caught.value.data["has_begun"]
    ssh_host.root_path("/root/begun").unlink()
    await appears(ssh_host.root_path("/root/done"))
    assert (await node.run(["true"], deadline_s=LIMIT_S)).exit_code == 0


async def test_a_cut_while_only_reading_may_be_repeated(ssh_host: SshHost, node: SshTransport) -> None:
    running = asyncio.create_task(
        node.run(["sh", "-c", "touch /root/begun; sleep 600"], deadline_s=LIMIT_S, is_read_only=True)
    )
    await appears(ssh_host.root_path("/root/begun"))
    ssh_host.link.cut()
    with pytest.raises(TransportError) as caught:
        await running
    assert (caught.value.reason, caught.value.retryable) == ("LinkLost", True)


async def test_a_frozen_link_ends_by_the_deadline_and_recovers(ssh_host: SshHost, node: SshTransport) -> None:
    await node.run(["true"], deadline_s=LIMIT_S)
    ssh_host.link.freeze()
    with pytest.raises((ConnectError, DeadlineError)):
        await node.run(["true"], deadline_s=0.7, is_read_only=True)
    probe = await node.probe(deadline_s=0.7)
    assert not probe.is_reachable
    ssh_host.link.thaw()
    assert (await node.probe(deadline_s=LIMIT_S)).is_reachable


async def test_a_link_frozen_for_good_is_replaced(
    ssh_host: SshHost, node: SshTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a missed deadline the connection must prove that it lives, or it is thrown away."""
    monkeypatch.setattr(lanes, "_LIVENESS_S", 1.0)
    await node.run(["true"], deadline_s=LIMIT_S)
    channel = await node.open_channel(["cat"], deadline_s=LIMIT_S)
    ssh_host.link.freeze()
    with pytest.raises((ConnectError, DeadlineError)):
        await node.run(["true"], deadline_s=0.5, is_read_only=True)
    assert await asyncio.wait_for(channel.receive(), LIMIT_S) == b""
    await channel.close()
    ssh_host.link.thaw()
    assert (await node.run(["true"], deadline_s=LIMIT_S)).exit_code == 0


async def test_a_channel_that_fails_alone_costs_the_others_nothing(
    node: SshTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host may refuse one request on a healthy link, for want of a process; its neighbours live on."""
    exec_command = paramiko.Channel.exec_command

    def refuse(channel: paramiko.Channel, command: str | bytes) -> None:
        if "refused" in str(command):
            raise paramiko.SSHException("Channel closed.")
        exec_command(channel, command)

    channel = await node.open_channel(["cat"], deadline_s=LIMIT_S)
    monkeypatch.setattr(paramiko.Channel, "exec_command", refuse)

    with pytest.raises(OutcomeUnknownError):
        await node.run(["echo", "refused"], deadline_s=LIMIT_S)

    await channel.send(b"still here\n", deadline_s=LIMIT_S)
    assert await asyncio.wait_for(channel.receive(), LIMIT_S) == b"still here\n"
    assert (await node.run(["true"], deadline_s=LIMIT_S)).exit_code == 0
    await channel.send(b"and here\n", deadline_s=LIMIT_S)
    assert await asyncio.wait_for(channel.receive(), LIMIT_S) == b"and here\n"
    await channel.close()


async def test_a_slow_command_costs_the_others_nothing(node: SshTransport) -> None:
    """Its deadline passes on a healthy link, so the agent's channel on that link must live on."""
    channel = await node.open_channel(["cat"], deadline_s=LIMIT_S)
    error = await missed(lambda deadline_s: node.run(["sleep", "600"], deadline_s=deadline_s))
    assert isinstance(error, OutcomeUnknownError)
    await asyncio.sleep(0.5)
    await channel.send(b"alive", deadline_s=LIMIT_S)
    assert await asyncio.wait_for(channel.receive(), LIMIT_S) == b"alive"
    await channel.close()


async def test_a_channel_ends_when_the_link_is_cut(ssh_host: SshHost, node: SshTransport) -> None:
    channel = await node.open_channel(["cat"], deadline_s=LIMIT_S)
    ssh_host.link.cut()
    assert await asyncio.wait_for(channel.receive(), LIMIT_S) == b""
    with pytest.raises(TransportError) as caught:
        await channel.send(b"x", deadline_s=LIMIT_S)
    assert caught.value.reason == "ChannelClosed"
    await channel.close()


async def test_a_channel_whose_peer_takes_nothing_ends_by_the_deadline(node: SshTransport) -> None:
    channel = await node.open_channel(["sleep", "600"], deadline_s=LIMIT_S)
    with pytest.raises(DeadlineError):
        await channel.send(b"x" * (16 << 20), deadline_s=1.0)
    await channel.close()


async def test_a_cut_upload_leaves_the_final_name_untouched_and_no_rest(
    ssh_host: SshHost, node: SshTransport
) -> None:
    target = ssh_host.root_path("/root/whole")
    target.write_bytes(b"before")
    ssh_host.link.after(2_000_000, "cut")
    with pytest.raises(TransportError) as caught:
        await node.put(b"z" * 8_000_000, "/root/whole", deadline_s=LIMIT_S)
    assert caught.value.retryable
    assert target.read_bytes() == b"before"
    async with asyncio.timeout(LIMIT_S):
        while list(target.parent.glob(".dflash-part-*")):
            await asyncio.sleep(0.02)
    assert target.read_bytes() == b"before"
    await node.put(b"after", "/root/whole", deadline_s=LIMIT_S)
    assert target.read_bytes() == b"after"


async def test_a_frozen_upload_ends_by_the_deadline(ssh_host: SshHost, node: SshTransport) -> None:
    await node.put(b"connected", "/root/small", deadline_s=LIMIT_S)
    for deadline_s in DEADLINES_S:  # the longer ones for a machine that had not sent that much by then
        ssh_host.link.after(1_000_000, "freeze")
        with pytest.raises((ConnectError, DeadlineError)) as caught:
            await node.put(b"z" * 8_000_000, "/root/whole", deadline_s=deadline_s)
        if ssh_host.link.is_frozen:
            break
    assert ssh_host.link.is_frozen
    assert caught.type is DeadlineError
    assert not ssh_host.root_path("/root/whole").exists()
    ssh_host.link.cut()


async def test_fifty_calls_at_once_where_two_sessions_are_allowed(tmp_path: Path) -> None:
    require_test_bed()
    with SshHost(tmp_path / "host", max_sessions=2) as host:
        transport = SshTransport(host.target())

        async def one(number: int) -> bytes:
            return (await transport.run(["echo", str(number)], deadline_s=120)).stdout

        assert await asyncio.gather(*map(one, range(50))) == [f"{n}\n".encode() for n in range(50)]
        assert host.link.connections == 1
        await transport.close()


async def test_more_channels_than_fit_queue_until_their_deadline(node: SshTransport) -> None:
    channels = [await node.open_channel(["cat"], deadline_s=LIMIT_S) for _ in range(6)]
    with pytest.raises(ConnectError) as caught:
        await node.run(["true"], deadline_s=0.4)
    assert caught.value.reason == "ChannelsBusy"
    waiting = asyncio.create_task(node.run(["true"], deadline_s=LIMIT_S))
    await asyncio.sleep(0.1)
    await channels[0].close()
    assert (await waiting).exit_code == 0
    for channel in channels:
        await channel.close()


async def test_copies_have_a_connection_of_their_own(ssh_host: SshHost, node: SshTransport) -> None:
    channels = [await node.open_channel(["cat"], deadline_s=LIMIT_S) for _ in range(6)]
    await node.put(b"x", "/root/copied", deadline_s=LIMIT_S)
    assert ssh_host.link.connections == 2
    for channel in channels:
        await channel.close()


async def test_noise_of_login_scripts_is_ignored(ssh_host: SshHost, node: SshTransport) -> None:
    ssh_host.set_noise("Welcome! <<dflash:begin>> your mail: 255")
    result = await node.run(["sh", "-c", "echo out; echo err >&2; exit 3"], deadline_s=LIMIT_S)
    assert (result.exit_code, result.stdout, result.stderr) == (3, b"out\n", b"err\n")
    channel = await node.open_channel(["cat"], deadline_s=LIMIT_S)
    await channel.send(b"hello", deadline_s=LIMIT_S)
    assert await asyncio.wait_for(channel.receive(), LIMIT_S) == b"hello"
    await channel.close()
    await node.put(b"content", "/root/noisy", deadline_s=LIMIT_S)
    assert await node.get("/root/noisy", max_bytes=100, deadline_s=LIMIT_S) == b"content"


async def test_a_login_shell_that_ends_by_itself_is_named(ssh_host: SshHost, node: SshTransport) -> None:
    ssh_host.root_path("/root/.bashrc").write_text("echo go away >&2\nexit 9\n", "utf-8")
    with pytest.raises(TransportError, match="go away") as caught:
        await node.run(["true"], deadline_s=LIMIT_S)
    assert caught.value.reason == "ShellFailed"
    assert caught.value.data["exit_code"] == 9
    with pytest.raises(TransportError, match="go away"):
        await node.open_channel(["cat"], deadline_s=LIMIT_S)


async def test_a_cancelled_call_gives_its_channel_back(node: SshTransport) -> None:
    for _ in range(8):
        running = asyncio.create_task(node.run(["sleep", "600"], deadline_s=LIMIT_S))
        await asyncio.sleep(0.1)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert (await node.run(["true"], deadline_s=LIMIT_S)).exit_code == 0


async def test_after_close_nothing_connects_again(ssh_host: SshHost) -> None:
    transport = SshTransport(ssh_host.target())
    await transport.run(["true"], deadline_s=LIMIT_S)
    await transport.close()
    with pytest.raises(ConnectError) as caught:
        await transport.run(["true"], deadline_s=LIMIT_S)
    assert caught.value.reason == "TransportClosed"
    await transport.close()


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A running ssh-agent of its own, ended by its handle."""
    path = tmp_path / "agent.sock"
    process = subprocess.Popen(["ssh-agent", "-D", "-a", str(path)], stdout=subprocess.DEVNULL)
    monkeypatch.setenv("SSH_AUTH_SOCK", str(path))
    try:
        wait_answering(process, path)
        yield path
    finally:
        process.kill()
        process.wait()


def wait_answering(process: subprocess.Popen[bytes], path: Path) -> None:
    """The socket's file appears before anybody listens on it."""
    end = time.monotonic() + LIMIT_S
    with socket.socket(socket.AF_UNIX) as client:
        while client.connect_ex(str(path)) != 0:
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.01)


async def test_one_key_of_a_full_agent(ssh_host: SshHost, agent: Path) -> None:
    """With seven keys offered in turn the server would hang up before the right one."""
    import paramiko

    keys = [ssh_host.make_key(f"stranger{n}") for n in range(6)] + [ssh_host.identity]
    for key in keys:
        subprocess.run(["ssh-add", "-q", str(key)], check=True)
    right = fingerprint(paramiko.PKey.from_path(ssh_host.identity))
    transport = SshTransport(ssh_host.target(identity=f"agent:{right}"))
    assert (await transport.run(["true"], deadline_s=LIMIT_S)).exit_code == 0
    await transport.close()
    for identity in ("agent", "agent:SHA256:none"):
        transport = SshTransport(ssh_host.target(identity=identity))
        with pytest.raises(AuthError) as caught:
            await transport.run(["true"], deadline_s=LIMIT_S)
        assert caught.value.reason == "IdentityMissing"
        assert right in caught.value.message
        await transport.close()


async def test_a_key_with_a_passphrase_is_named(ssh_host: SshHost) -> None:
    path = ssh_host.folder / "locked"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "secret", "-f", str(path)], check=True)
    transport = SshTransport(ssh_host.target(identity=str(path)))
    with pytest.raises(AuthError) as caught:
        await transport.run(["true"], deadline_s=LIMIT_S)
    assert caught.value.reason == "IdentityEncrypted"
    await transport.close()


async def test_what_was_reported_as_not_run_does_not_run_later(ssh_host: SshHost, node: SshTransport) -> None:
    """The request to open a channel is on its way when the caller leaves; the command must not follow it."""
    await node.run(["true"], deadline_s=LIMIT_S)
    ssh_host.link.freeze()
    with pytest.raises(ConnectError):
        await node.run(["touch", "/root/ran"], deadline_s=0.5)
    ssh_host.link.thaw()
    for _ in range(5):
        assert (await node.run(["true"], deadline_s=LIMIT_S)).exit_code == 0
        await asyncio.sleep(0.1)
    assert not ssh_host.root_path("/root/ran").exists()
