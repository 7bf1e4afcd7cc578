"""What is special about commands on this machine: their environment, who is killed, who is reaped."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from supervisor.domain.errors import OutcomeUnknownError, TransportError
from supervisor.transport.local import LocalTransport, login_environment
from tests.support.deadlines import DEADLINES_S

pytestmark = pytest.mark.anyio

LIMIT_S = 60.0


def test_the_login_environment_holds_none_of_our_settings() -> None:
    source = {
        "HOME": "/home/me",
        "PATH": "/odd",
        "SUPERVISOR_PORT": "1",
        "DFLASHCTL_TOKEN_FILE": "/x",
        "WANDB_API_KEY": "secret",
        "HTTPS_PROXY": "http://proxy",
        "LANG": "de_DE",
    }
    env = login_environment(source)
    assert env == {
        "HOME": "/home/me",
        "HTTPS_PROXY": "http://proxy",
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "LANG": "C.UTF-8",
        "LC_ALL": "C.UTF-8",
    }


async def test_a_given_environment_is_all_there_is() -> None:
    result = await LocalTransport(env={"ONLY": "1"}).run(["/usr/bin/env"], deadline_s=LIMIT_S)
    assert result.stdout == b"ONLY=1\n"


async def test_each_command_leads_a_session_of_its_own() -> None:
    result = await LocalTransport().run(["sh", "-c", "cut -d' ' -f1,6 /proc/self/stat"], deadline_s=LIMIT_S)
    _, session = result.stdout.split()
    assert int(session) != os.getsid(0)


async def test_a_deadline_kills_our_child_and_no_other(tmp_path: Path) -> None:
    """What has a session of its own, as a shim has, lives on."""
    pid_file, child_file, go = tmp_path / "pid", tmp_path / "child", tmp_path / "go"
    inner = f"echo $$ > {pid_file}; while [ ! -e {go} ]; do sleep 0.02; done"
    outer = f"echo $$ > {child_file}; setsid sh -c '{inner}' < /dev/null > /dev/null 2>&1 & sleep 600"
    pids: list[str] = []
    try:
        for deadline_s in DEADLINES_S:  # the longer ones for a machine that had not got that far
            with pytest.raises(OutcomeUnknownError, match="killed"):
                await LocalTransport().run(["sh", "-c", outer], deadline_s=deadline_s)
            pids = [file.read_text().strip() for file in (child_file, pid_file) if file.exists()]
            if len(pids) == 2 and all(pids):
                break
        child, other = pids
        assert not Path(f"/proc/{child}").exists()
        assert Path(f"/proc/{other}").exists()
    finally:
        go.touch()


async def test_a_closed_channel_leaves_no_zombie() -> None:
    transport = LocalTransport()
    channel = await transport.open_channel(["sh", "-c", "echo $$; cat > /dev/null"], deadline_s=LIMIT_S)
    pid = int(await channel.receive())
    await channel.close()
    await channel.close()
    async with asyncio.timeout(LIMIT_S):
        while Path(f"/proc/{pid}").exists():
            await asyncio.sleep(0.01)


async def test_a_channel_to_a_program_that_does_not_exist() -> None:
    with pytest.raises(TransportError) as caught:
        await LocalTransport().open_channel(["/no/such/program"], deadline_s=LIMIT_S)
    assert caught.value.reason == "ExecFailed"


async def test_sending_to_an_ended_command_says_so() -> None:
    channel = await LocalTransport().open_channel(["true"], deadline_s=LIMIT_S)
    assert await asyncio.wait_for(channel.receive(), LIMIT_S) == b""

    async def send_on() -> None:
        for _ in range(100):
            await channel.send(b"x" * 100_000, deadline_s=LIMIT_S)
            await asyncio.sleep(0.01)

    with pytest.raises(TransportError) as caught:
        await send_on()
    assert caught.value.reason == "ChannelClosed"
    await channel.close()


async def test_output_written_at_the_very_end_is_whole() -> None:
    """The pipe may still hold it when the process is already gone."""
    script = "import sys,os; os.write(1, b'x' * 60000); os._exit(0)"
    for _ in range(20):
        result = await LocalTransport().run([sys.executable, "-c", script], deadline_s=LIMIT_S)
        assert len(result.stdout) == 60000


async def test_descriptors_do_not_pile_up() -> None:
    transport = LocalTransport()

    async def one() -> None:
        await transport.run(["cat"], stdin=b"x", deadline_s=LIMIT_S)
        channel = await transport.open_channel(["cat"], deadline_s=LIMIT_S)
        await channel.close()

    def count() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    await one()
    before = count()
    for _ in range(20):
        await one()
    async with asyncio.timeout(LIMIT_S):
        while count() > before + 2:
            await asyncio.sleep(0.02)
