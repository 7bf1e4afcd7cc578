"""What paramiko, sshd and `pct exec` really do: the measured facts that the transports are built on.

Each test shows one trap with the bare library, beside what the transport makes of it where that is short.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import paramiko
import pytest

from supervisor.domain.errors import OutcomeUnknownError
from supervisor.transport.ssh.connect import connect
from tests.support.origin import (
    BRACKETED_RESTART,
    LOG,
    OLD_RESTART,
    install_trainer,
    log_of,
    run_restart,
)
from tests.support.pct_host import PctHost
from tests.support.sshd import SshHost

pytestmark = [pytest.mark.sshd, pytest.mark.usefixtures("patient_link")]

LIMIT_S = 60.0
NEVER_S = 2.0  # long enough for what would come in milliseconds, if it came


@pytest.fixture
def link(ssh_host: SshHost) -> Iterator[paramiko.Transport]:
    transport = connect(ssh_host.target())
    yield transport
    transport.close()


def start(transport: paramiko.Transport, command: str) -> paramiko.Channel:
    channel = transport.open_session(timeout=LIMIT_S)
    channel.exec_command(command)
    return channel


def wait_for(what: object, path: Path | None = None) -> None:
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        if path.exists() if path else what():  # type: ignore[operator]
            return
        time.sleep(0.02)
    raise AssertionError(f"never: {path or what}")


def test_a_command_that_dies_of_a_signal_has_status_minus_one(link: paramiko.Transport) -> None:
    channel = start(link, "kill -9 $$")
    wait_for(channel.exit_status_ready)
    assert channel.recv_exit_status() == -1


def test_a_cut_link_has_status_minus_one_too_and_the_command_goes_on(
    ssh_host: SshHost, link: paramiko.Transport
) -> None:
    done = ssh_host.root_path("/root/done")
    channel = start(
        link, "touch /root/begun; while [ -e /root/begun ]; do sleep 0.05; done; touch /root/done"
    )
    wait_for(None, ssh_host.root_path("/root/begun"))
    ssh_host.link.cut()
    wait_for(channel.exit_status_ready)
    assert channel.recv_exit_status() == -1
    assert not done.exists()
    ssh_host.root_path("/root/begun").unlink()
    wait_for(None, done)


def test_a_background_child_holds_the_stream_but_not_the_status(link: paramiko.Transport) -> None:
    channel = start(link, "sleep 60 & exit 4")
    wait_for(channel.exit_status_ready)
    assert channel.recv_exit_status() == 4
    assert select.select([channel], [], [], NEVER_S)[0] == []
    assert not channel.eof_received


def test_stderr_that_nobody_reads_blocks_stdout_for_ever(link: paramiko.Transport) -> None:
    channel = start(link, "head -c 4000000 /dev/zero >&2; echo done")
    channel.settimeout(NEVER_S)
    with pytest.raises(socket.timeout):
        channel.recv(1)


def test_a_status_awaited_before_the_output_is_read_never_comes(link: paramiko.Transport) -> None:
    channel = start(link, "head -c 5000000 /dev/zero")
    time.sleep(NEVER_S)
    assert not channel.exit_status_ready()


def test_keepalive_calls_a_frozen_server_active(ssh_host: SshHost, link: paramiko.Transport) -> None:
    go, gone = ssh_host.root_path("/root/go"), ssh_host.root_path("/root/gone")
    channel = start(link, "while [ ! -e /root/go ]; do sleep 0.02; done; touch /root/gone")
    link.set_keepalive(1)
    ssh_host.link.freeze()
    go.touch()
    wait_for(None, gone)
    waiting = threading.Thread(target=channel.recv_exit_status, daemon=True)
    waiting.start()
    waiting.join(3 * NEVER_S)
    assert waiting.is_alive()
    assert link.is_active()


def test_the_eleventh_channel_is_refused(link: paramiko.Transport) -> None:
    channels = [start(link, "cat") for _ in range(10)]
    with pytest.raises(paramiko.ChannelException) as caught:
        link.open_session(timeout=LIMIT_S)
    assert caught.value.code == 2
    assert all(not channel.closed for channel in channels)


def test_sftp_cut_midway_leaves_a_short_file_under_the_final_name(
    ssh_host: SshHost, link: paramiko.Transport
) -> None:
    target = ssh_host.root_path("/root/whole")
    sftp = paramiko.SFTPClient.from_transport(link)
    assert sftp is not None
    ssh_host.link.after(8_000_000, "cut")
    with pytest.raises((OSError, EOFError, paramiko.SSHException)):
        sftp.putfo(ZeroFile(16_000_000), "/root/whole")
    wait_for(lambda: target.exists() and target.stat().st_size > 0)
    assert target.stat().st_size < 16_000_000


class ZeroFile:
    """So many zero bytes."""

    def __init__(self, size: int) -> None:
        self._left = size

    def read(self, count: int) -> bytes:
        count = min(count, self._left)
        self._left -= count
        return bytes(count)


def test_sftp_on_a_full_disk_says_failure_and_leaves_a_short_file(
    ssh_host: SshHost, link: paramiko.Transport
) -> None:
    made = start(link, "mkdir /root/full && mount -t tmpfs -o size=1m none /root/full && echo made")
    assert made.recv(10) == b"made\n"
    sftp = paramiko.SFTPClient.from_transport(link)
    assert sftp is not None
    with pytest.raises(OSError, match="Failure"):
        sftp.putfo(ZeroFile(8_000_000), "/root/full/whole")
    size = sftp.stat("/root/full/whole").st_size
    assert size is not None
    assert 0 < size < 8_000_000


def test_the_remote_shell_parses_what_pct_exec_was_given(pct_host: PctHost) -> None:
    """Unquoted, half of the command runs on the host."""
    client = connect(pct_host.target())
    channel = start(client, "pct exec 200 -- sh -c 'exit 3; echo inside'; echo outside")
    assert channel.recv(100) == b"outside\n"
    channel = start(client, "pct exec 200 -- sh -c exit 3; hostname > /root/where")
    channel.recv_exit_status()
    assert pct_host.root_path("/root/where").exists()
    client.close()


def test_pct_exec_on_a_stopped_container_is_255_as_ssh_s_own_errors_are(pct_host: PctHost) -> None:
    pct_host.pct("stop", "200")
    stopped = pct_host.pct("exec", "200", "--", "true", check=False)
    own = pct_host.on_host("sh", "-c", "exit 255", check=False)
    assert stopped.returncode == own.returncode == 255
    assert stopped.stderr == b"container '200' not running!\n"


def test_a_locale_of_c_spoils_words_beyond_ascii(pct_host: PctHost) -> None:
    done = pct_host.on_host("env", "LC_ALL=C", "pct", "exec", "200", "--", "printf", "%s", "é")
    assert done.stdout == "\ufffd\ufffd".encode()


def test_pct_exec_overwrites_the_path(pct_host: PctHost) -> None:
    done = pct_host.pct("exec", "200", "--", "sh", "-c", "echo $PATH")
    assert done.stdout == b"/sbin:/bin:/usr/sbin:/usr/bin\n"


def test_a_pushed_file_can_be_short_or_absent_with_status_zero(pct_host: PctHost) -> None:
    pct_host.root_path("/root/data").write_bytes(b"x" * 3_000_000)
    mount = "mkdir -p /root/full && mount -t tmpfs -o size=1m none /root/full"
    pct_host.pct("exec", "200", "--", "sh", "-c", mount)
    full = pct_host.pct("push", "200", "/root/data", "/root/full/data", check=False)
    assert (full.returncode, full.stdout, full.stderr) == (0, b"", b"")
    size = pct_host.pct("exec", "200", "--", "stat", "-c", "%s", "/root/full/data").stdout
    assert 0 < int(size) < 3_000_000
    missing = pct_host.pct("push", "200", "/root/data", "/root/none/data", check=False)
    assert missing.returncode == 0
    assert b"failed to create file: /root/none/data" in missing.stderr


def test_the_command_in_the_container_outlives_its_session(pct_host: PctHost) -> None:
    client = connect(pct_host.target())
    loop = "touch /root/begun; while [ -e /root/begun ]; do sleep 0.05; done; touch /root/done"
    start(client, f"pct exec 200 -- sh -c '{loop}'")
    wait_for(None, pct_host.ct_path("/root/begun"))
    pct_host.link.cut()
    pct_host.ct_path("/root/begun").unlink()
    wait_for(None, pct_host.ct_path("/root/done"))
    client.close()


def test_what_exec_starts_is_in_group_and_session_zero(pct_host: PctHost) -> None:
    """So that a group kill before setsid can only go wrong."""
    done = pct_host.pct("exec", "200", "--", "sh", "-c", "cut -d' ' -f5,6 /proc/self/stat")
    assert done.stdout == b"0 0\n"


def test_the_boot_id_is_new_on_every_start_and_pids_begin_anew(pct_host: PctHost) -> None:
    def boot_id() -> bytes:
        return pct_host.pct("exec", "200", "--", "cat", "/proc/sys/kernel/random/boot_id").stdout

    first = boot_id()
    assert first == boot_id()
    pct_host.pct("reboot", "200", "--timeout", "1")
    assert boot_id() not in (first, Path("/proc/sys/kernel/random/boot_id").read_bytes())


def test_the_old_restart_kills_its_own_shell_and_starts_nothing(pct_host: PctHost) -> None:
    """137, not one line of output, no log: the failure that this project began with."""
    install_trainer(pct_host)
    seen = run_restart(pct_host, OLD_RESTART)
    assert (seen.returncode, seen.stdout, seen.stderr) == (137, b"", b"")
    assert not log_of(pct_host).exists()


def test_the_old_restart_takes_the_running_trainer_with_it(pct_host: PctHost) -> None:
    install_trainer(pct_host)
    launch = "setsid /root/run.sh < /dev/null > /workspace/first.log 2>&1 & echo $!"
    pid = pct_host.pct("exec", "200", "--", "bash", "-c", launch).stdout.strip().decode()
    log = pct_host.ct_path("/workspace/first.log")
    wait_for(lambda: log.exists() and b"training" in log.read_bytes())
    assert run_restart(pct_host, OLD_RESTART).returncode == 137
    look = ("exec", "200", "--", "cat", f"/proc/{pid}/cmdline")
    wait_for(lambda: b"train_dflash_pipeline" not in pct_host.pct(*look, check=False).stdout)
    assert not log_of(pct_host).exists()


def test_brackets_in_the_check_as_well_would_have_let_it_start(pct_host: PctHost) -> None:
    install_trainer(pct_host)
    patient = BRACKETED_RESTART.replace("sleep 0.7", f"until [ -s {LOG} ]; do sleep 0.05; done")
    seen = run_restart(pct_host, patient)
    assert seen.returncode == 0
    assert b"python3 /root/train_dflash_pipeline.py" in seen.stdout
    assert log_of(pct_host).read_bytes() == b"training\n"


@pytest.mark.anyio
async def test_through_the_transport_the_old_restart_cannot_fail_silently(pct_host: PctHost) -> None:
    """The shell's end without a report is an error that says so."""
    install_trainer(pct_host)
    transport = pct_host.transport()
    killer = "pkill -9 -f '[s]h -c printf'; echo never"
    with pytest.raises(OutcomeUnknownError, match="without a report") as caught:
        await transport.run(["bash", "-c", killer], deadline_s=LIMIT_S)
    assert caught.value.data["channel_status"] == 137
    await transport.close()


def test_nothing_here_can_reach_the_test_runner(pct_host: PctHost) -> None:
    """The widest pattern kills the container's processes and nobody else."""
    seen = pct_host.pct("exec", "200", "--", "sh", "-c", "kill -9 -1; echo survived", check=False)
    assert seen.returncode == 137 or seen.stdout == b"survived\n"
    assert Path(f"/proc/{os.getpid()}").exists()
    assert pct_host.pct("status", "200").stdout == b"status: running\n"
