"""One contract for all transports: whatever holds on this machine holds over SSH and inside a container."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import random
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from supervisor.domain.errors import (
    ChecksumMismatchError,
    CommandFailedError,
    DeadlineError,
    OutcomeUnknownError,
    RequestError,
)
from supervisor.transport.argv import with_environment
from supervisor.transport.base import Transport
from supervisor.transport.local import LocalTransport
from supervisor.transport.ssh import SshTransport
from tests.support.deadlines import missed
from tests.support.pct_host import PctHost
from tests.support.sshd import SshHost, require_test_bed

pytestmark = [pytest.mark.anyio, pytest.mark.sshd, pytest.mark.usefixtures("patient_link")]

PYTHON = sys.executable
MEBI = 1 << 20
LIMIT_S = 120.0
SHOW_ARGV = "import os,sys,json; print(json.dumps([os.fsencode(a).hex() for a in sys.argv[1:]]))"
BOTH_STREAMS = """
import sys
for i in range(80):
    sys.stderr.buffer.write(b"e" * 65536)
    sys.stdout.buffer.write(b"o" * 65536)
"""


@dataclass(frozen=True)
class Bed:
    """A way to a node, a folder in it, and how the test runner sees that folder."""

    kind: str
    connect: Callable[[], Transport]
    folder: str
    outside: Path

    def seen(self, name: str) -> Path:
        return self.outside / name

    def leftovers(self) -> list[str]:
        return [path.name for path in self.outside.iterdir() if path.name.startswith(".dflash-part-")]


@pytest.fixture(scope="module", params=["local", "ssh", "proxmox"])
def bed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    base = tmp_path_factory.mktemp(request.param)
    if request.param == "local":
        yield Bed("local", LocalTransport, str(base), base)
        return
    require_test_bed()
    if request.param == "ssh":
        with SshHost(base / "host") as host:
            yield Bed("ssh", lambda: SshTransport(host.target()), "/root", host.root_path("/root"))
    else:
        with PctHost(base / "host") as pct_host:
            yield Bed("proxmox", pct_host.transport, "/root", pct_host.ct_path("/root"))


@pytest.fixture
async def node(bed: Bed) -> AsyncIterator[Transport]:
    transport = bed.connect()
    yield transport
    await transport.close()


async def test_status_and_both_streams_come_back(node: Transport) -> None:
    result = await node.run(["sh", "-c", "echo out; echo err >&2; exit 7"], deadline_s=LIMIT_S)
    assert (result.exit_code, result.stdout, result.stderr) == (7, b"out\n", b"err\n")
    assert not result.is_truncated


@pytest.mark.parametrize("status", [0, 1, 2, 126, 127, 128, 255])
async def test_every_status_is_the_command_s_own(node: Transport, status: int) -> None:
    result = await node.run(["sh", "-c", f"exit {status}"], deadline_s=LIMIT_S)
    assert result.exit_code == status


async def test_a_signal_shows_as_128_plus_n(node: Transport) -> None:
    result = await node.run(["sh", "-c", "kill -9 $$"], deadline_s=LIMIT_S)
    assert result.exit_code == 137


async def test_a_program_that_does_not_exist_is_127(node: Transport) -> None:
    assert (await node.run(["/no/such/program"], deadline_s=LIMIT_S)).exit_code == 127
    assert (await node.run(["no-such-program"], deadline_s=LIMIT_S)).exit_code == 127


@pytest.mark.parametrize("word", ["exit", "if", "A=b", "{", ":"])
async def test_shell_words_are_programs_and_not_syntax(node: Transport, word: str) -> None:
    result = await node.run([word, "3"], deadline_s=LIMIT_S)
    assert result.exit_code == 127


async def test_stdin_and_stdout_carry_any_byte(node: Transport) -> None:
    data = bytes(range(256)) * 4096
    result = await node.run(["cat"], stdin=data, deadline_s=LIMIT_S)
    assert result.stdout == data


async def test_stdin_that_nobody_reads_does_no_harm(node: Transport) -> None:
    result = await node.run(["true"], stdin=b"x" * (4 * MEBI), deadline_s=LIMIT_S)
    assert result.exit_code == 0


async def test_without_stdin_the_command_sees_eof(node: Transport) -> None:
    assert (await node.run(["wc", "-c"], deadline_s=LIMIT_S)).stdout.strip() == b"0"


async def test_five_megabytes_on_both_streams_at_once(node: Transport) -> None:
    result = await node.run([PYTHON, "-c", BOTH_STREAMS], deadline_s=LIMIT_S, max_output=8 * MEBI)
    assert (result.stdout, result.stderr) == (b"o" * 80 * 65536, b"e" * 80 * 65536)


async def test_output_above_the_cap_is_cut_and_marked(node: Transport) -> None:
    result = await node.run([PYTHON, "-c", BOTH_STREAMS], deadline_s=LIMIT_S, max_output=1000)
    assert result.is_truncated
    assert result.exit_code == 0
    assert (result.stdout, result.stderr) == (b"o" * 1000, b"e" * 1000)


async def test_endless_output_ends_by_the_deadline(node: Transport) -> None:
    error = await missed(
        lambda deadline_s: node.run(["yes"], deadline_s=deadline_s, max_output=1000, is_read_only=True)
    )
    assert isinstance(error, DeadlineError)
    assert (await node.run(["true"], deadline_s=LIMIT_S)).exit_code == 0


async def test_a_missed_deadline_is_unknown_for_acts_and_plain_for_questions(node: Transport) -> None:
    given: list[float] = []

    async def sleep(deadline_s: float, *, is_read_only: bool = False) -> None:
        given.append(deadline_s)
        await node.run(["sleep", "600"], deadline_s=deadline_s, is_read_only=is_read_only)

    acting = await missed(sleep)
    assert isinstance(acting, OutcomeUnknownError)
    assert acting.data["deadline_s"] == given[-1]
    asking = await missed(lambda deadline_s: sleep(deadline_s, is_read_only=True))
    assert isinstance(asking, DeadlineError)


async def test_a_background_child_that_keeps_the_streams_delays_nothing(node: Transport) -> None:
    result = await node.run(["sh", "-c", "sleep 60 & echo done; echo late >&2"], deadline_s=45)
    assert (result.stdout, result.stderr) == (b"done\n", b"late\n")


async def test_the_environment_is_ours_and_not_the_login_s(node: Transport) -> None:
    result = await node.run(["env"], deadline_s=LIMIT_S)
    env = dict(line.split("=", 1) for line in result.stdout.decode().splitlines() if "=" in line)
    assert env["PATH"] == "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    assert env["LANG"] == "C.UTF-8"
    assert env["HOME"]
    assert not [name for name in env if name.startswith("SUPERVISOR_")]


async def test_cwd_and_environment_are_given_explicitly(node: Transport, bed: Bed) -> None:
    value = "a 'b' \"c\" $HOME `x` \n ä"
    argv = with_environment(["sh", "-c", 'pwd; printf %s "$VALUE"'], env={"VALUE": value}, cwd=bed.folder)
    result = await node.run(argv, deadline_s=LIMIT_S)
    assert result.stdout.decode() == f"{bed.folder}\n{value}"


async def test_a_clean_environment_holds_nothing_else(node: Transport) -> None:
    argv = with_environment(["/usr/bin/env"], env={"ONLY": "1"}, clear=True)
    assert (await node.run(argv, deadline_s=LIMIT_S)).stdout == b"ONLY=1\n"


def hostile_strings(canary: str) -> list[str]:
    """Two hundred words that go wrong when any layer parses them; `canary` must never come into being."""
    touch = f"touch {canary}"
    fixed = [
        *(
            "'",
            '"',
            "''",
            "\\",
            "\\\\",
            "`",
            "$",
            "$$",
            "!",
            "!!",
            "~",
            "*",
            "?",
            "[a]",
            "{a,b}",
            "#",
            "&",
            "|",
        ),
        *(
            ";",
            "<",
            ">",
            "(",
            ")",
            " ",
            "  a  b ",
            "\t",
            "\n",
            "\r\n",
            "\na\n",
            "-",
            "--",
            "-n",
            "-e",
            "--help",
        ),
        *(
            "",
            "=",
            "A=b",
            "%s",
            "%n%n",
            "\\n",
            "\\0",
            "\\x41",
            "é",
            "ä'ö\"ü",
            "日本語",
            "🧨",
            "\u202e",
            "\x01\x7f",
        ),
        *(
            f"$({touch})",
            f"`{touch}`",
            f"; {touch}",
            f"&& {touch}",
            f"| {touch}",
            f"\n{touch}\n",
            f"' ; {touch} ; '",
        ),
        *(f'" ; {touch} ; "', f"$(( $({touch}) ))", f"<({touch})", f"> {canary}", f"${{x:=$({touch})}}"),
        *("<<dflash:0:end=0>>", "EOF", "'$(id)'", "'\"'\"'", "\\'", "a\\", "%PATH%", "${IFS}", "$'\\x41'"),
        *("\udcff\udcfe", "a" * 5000, "'" * 3000, "ä" * 3000),
    ]
    dice = random.Random(20)
    alphabet = "'\"\\`$(){}[]<>|&;*?!~#%=- \t\nabä日\x01"
    while len(fixed) < 199:
        fixed.append("".join(dice.choice(alphabet) for _ in range(dice.randint(1, 40))))
    return [*fixed, "x'\n$(" * (100 << 10 >> 2)]


async def test_hostile_words_arrive_byte_for_byte(node: Transport, bed: Bed) -> None:
    words = hostile_strings(f"{bed.folder}/canary")
    assert len(words) == 200
    result = await node.run([PYTHON, "-c", SHOW_ARGV, *words], deadline_s=LIMIT_S, max_output=16 * MEBI)
    seen = [bytes.fromhex(word) for word in json.loads(result.stdout)]
    assert seen == [os.fsencode(word) for word in words]
    assert not bed.seen("canary").exists()


async def test_hostile_words_one_by_one_on_the_short_way(node: Transport, bed: Bed) -> None:
    """Alone and in ASCII they travel on the command line, not as data."""
    words = [word for word in hostile_strings(f"{bed.folder}/canary") if word.isascii()][:60]
    for word in words:
        result = await node.run(["printf", "%s", word], deadline_s=LIMIT_S)
        assert result.stdout == word.encode()
    assert not bed.seen("canary").exists()


@pytest.mark.parametrize("argv", [[], [""], ["-x"], ["true", "a\0b"]])
async def test_what_no_kernel_can_run_is_refused_at_once(node: Transport, argv: list[str]) -> None:
    with pytest.raises(RequestError):
        await node.run(argv, deadline_s=LIMIT_S)


async def test_a_channel_echoes_and_ends(node: Transport) -> None:
    channel = await node.open_channel(["cat"], deadline_s=LIMIT_S)
    for message in (b"one\n", b"\x00\xff two\n", b"x" * (3 * MEBI)):
        sending = asyncio.create_task(channel.send(message, deadline_s=LIMIT_S))
        seen = b""
        while len(seen) < len(message):
            seen += await asyncio.wait_for(channel.receive(), LIMIT_S)
        assert seen == message
        await sending
    await channel.close()


async def test_a_channel_says_when_the_command_has_ended(node: Transport) -> None:
    channel = await node.open_channel(["sh", "-c", "echo bye; echo why >&2"], deadline_s=LIMIT_S)
    seen = b""
    while chunk := await asyncio.wait_for(channel.receive(), LIMIT_S):
        seen += chunk
    assert seen == b"bye\n"
    assert await asyncio.wait_for(channel.receive(), LIMIT_S) == b""
    assert channel.stderr_tail() == b"why\n"
    await channel.close()


async def test_a_channel_keeps_the_tail_of_stderr(node: Transport) -> None:
    script = "import sys; sys.stderr.write('a' * 200000 + 'END'); sys.stderr.flush(); print('x')"
    channel = await node.open_channel([PYTHON, "-c", script], deadline_s=LIMIT_S)
    while await asyncio.wait_for(channel.receive(), LIMIT_S):
        pass
    assert len(channel.stderr_tail()) == 65536
    assert channel.stderr_tail().endswith(b"aEND")
    await channel.close()


async def test_receive_can_be_cancelled_without_loss(node: Transport) -> None:
    channel = await node.open_channel(["cat"], deadline_s=LIMIT_S)
    for _ in range(3):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(channel.receive(), 0.05)
    await channel.send(b"still here", deadline_s=LIMIT_S)
    assert await asyncio.wait_for(channel.receive(), LIMIT_S) == b"still here"
    await channel.close()


async def test_receivers_that_come_and_go_lose_no_byte(node: Transport) -> None:
    """A reader with a short patience, over and over, while megabytes arrive."""
    script = "import os\nfor i in range(300): os.write(1, i.to_bytes(4, 'big') * 4096)"
    channel = await node.open_channel([PYTHON, "-c", script], deadline_s=LIMIT_S)
    seen = bytearray()
    async with asyncio.timeout(LIMIT_S):
        while len(seen) < 300 * 4 * 4096:
            with contextlib.suppress(TimeoutError):
                seen += await asyncio.wait_for(channel.receive(), 0.0005)
    assert seen == b"".join(number.to_bytes(4, "big") * 4096 for number in range(300))
    await channel.close()


async def test_closing_a_channel_shows_the_command_eof(node: Transport, bed: Bed) -> None:
    mark = bed.seen("saw-eof")
    channel = await node.open_channel(
        ["sh", "-c", 'cat > /dev/null; : > "$1"', "x", f"{bed.folder}/saw-eof"], deadline_s=LIMIT_S
    )
    await channel.close()
    await appears(mark)


async def appears(path: Path) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not path.exists():
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("size", [0, 1, 300_000, 5 * MEBI])
async def test_what_was_put_can_be_got(node: Transport, bed: Bed, size: int) -> None:
    data = random.Random(size).randbytes(size)
    seen: list[tuple[int, int]] = []
    digest = await node.put(
        data, f"{bed.folder}/copy", mode=0o640, progress=lambda *at: seen.append(at), deadline_s=LIMIT_S
    )
    assert digest == hashlib.sha256(data).hexdigest()
    assert bed.seen("copy").read_bytes() == data
    assert bed.seen("copy").stat().st_mode & 0o777 == 0o640
    assert await node.get(f"{bed.folder}/copy", max_bytes=size, deadline_s=LIMIT_S) == data
    assert bed.leftovers() == []
    await asyncio.sleep(0)
    assert seen == sorted(seen)
    assert not size or seen[-1] == (size, size)


@pytest.mark.parametrize("size", [1000, MEBI])
async def test_a_file_is_copied_from_disk(node: Transport, bed: Bed, tmp_path: Path, size: int) -> None:
    source = tmp_path / "source"
    source.write_bytes(os.urandom(size))
    await node.put(source, f"{bed.folder}/from-disk", deadline_s=LIMIT_S)
    assert bed.seen("from-disk").read_bytes() == source.read_bytes()


async def test_a_source_that_is_not_there(node: Transport, bed: Bed, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no-such-source"):
        await node.put(tmp_path / "no-such-source", f"{bed.folder}/x", deadline_s=LIMIT_S)


async def test_a_source_that_shrinks_while_it_is_read(node: Transport, bed: Bed, tmp_path: Path) -> None:
    source = tmp_path / "shrinking"
    source.write_bytes(os.urandom(2 * MEBI))

    class Shrinking(type(source)):  # type: ignore[misc]
        def open(self, *args: object, **kwargs: object) -> object:
            os.truncate(self, MEBI)
            return Path(self).open("rb")

    with pytest.raises((ChecksumMismatchError, CommandFailedError)):
        await node.put(Shrinking(source), f"{bed.folder}/shrunk", deadline_s=LIMIT_S)
    assert not bed.seen("shrunk").exists()
    assert bed.leftovers() == []


@pytest.mark.parametrize("size", [10, MEBI])
async def test_names_with_anything_in_them(node: Transport, bed: Bed, size: int) -> None:
    name = "a 'b' \"c\" $(touch canary)\n-é"
    await node.put(b"z" * size, f"{bed.folder}/{name}", deadline_s=LIMIT_S)
    assert bed.seen(name).read_bytes() == b"z" * size
    assert await node.get(f"{bed.folder}/{name}", max_bytes=size, deadline_s=LIMIT_S) == b"z" * size
    assert not bed.seen("canary").exists()


@pytest.mark.parametrize("size", [10, MEBI])
async def test_a_folder_that_does_not_exist(node: Transport, bed: Bed, size: int) -> None:
    with pytest.raises(CommandFailedError) as caught:
        await node.put(b"x" * size, f"{bed.folder}/missing/file", deadline_s=LIMIT_S)
    assert caught.value.reason == "NoSuchDirectory"
    assert caught.value.data["path"] == f"{bed.folder}/missing/file"


@pytest.mark.parametrize("size", [10, MEBI])
async def test_a_directory_is_never_replaced(node: Transport, bed: Bed, size: int) -> None:
    bed.seen("a-directory").mkdir(exist_ok=True)
    with pytest.raises(CommandFailedError) as caught:
        await node.put(b"x" * size, f"{bed.folder}/a-directory", deadline_s=LIMIT_S)
    assert caught.value.reason == "IsADirectory"
    assert bed.leftovers() == []


@pytest.mark.parametrize("size", [2 * MEBI, 200 << 10])
async def test_a_full_disk_leaves_the_final_name_untouched(node: Transport, bed: Bed, size: int) -> None:
    folder = f"{bed.folder}/full-{size}"
    tmpfs = "size=1m" if size > MEBI else "size=100k"
    script = 'mkdir -p "$1" && mount -t tmpfs -o "$2" none "$1" && echo before > "$1/file"'
    made = await node.run(["sh", "-c", script, "x", folder, tmpfs], deadline_s=LIMIT_S)
    assert made.exit_code == 0, made.stderr
    try:
        with pytest.raises((CommandFailedError, ChecksumMismatchError)) as caught:
            await node.put(os.urandom(size), f"{folder}/file", deadline_s=LIMIT_S)
        if bed.kind != "proxmox" or size < MEBI:  # pct push says nothing about a full disk
            assert caught.value.reason == "NoSpace"
        assert await node.get(f"{folder}/file", max_bytes=100, deadline_s=LIMIT_S) == b"before\n"
        listing = await node.run(["ls", "-A", folder], deadline_s=LIMIT_S)
        assert listing.stdout == b"file\n"
    finally:
        await node.run(["umount", folder], deadline_s=LIMIT_S)


async def test_overwriting_is_atomic_for_readers(node: Transport, bed: Bed) -> None:
    """A reader that opened the old file goes on reading the old file."""
    await node.put(b"old" * 1000, f"{bed.folder}/atomic", deadline_s=LIMIT_S)
    with bed.seen("atomic").open("rb") as reader:
        first = reader.read(3)
        await node.put(b"new" * 200_000, f"{bed.folder}/atomic", deadline_s=LIMIT_S)
        assert first + reader.read() == b"old" * 1000
    assert bed.seen("atomic").read_bytes() == b"new" * 200_000


@pytest.mark.parametrize("target", ["relative/name", "/", "/root/..", "/a\0b"])
async def test_targets_must_be_absolute_files(node: Transport, target: str) -> None:
    with pytest.raises(RequestError):
        await node.put(b"x", target, deadline_s=LIMIT_S)


async def test_get_names_what_is_wrong(node: Transport, bed: Bed) -> None:
    bed.seen("ten").write_bytes(b"0123456789")
    for path, limit, reason in (
        (f"{bed.folder}/none", 10, "FileNotFound"),
        (bed.folder, 10, "IsADirectory"),
        (f"{bed.folder}/ten", 9, "FileTooLarge"),
    ):
        with pytest.raises(CommandFailedError) as caught:
            await node.get(path, max_bytes=limit, deadline_s=LIMIT_S)
        assert caught.value.reason == reason
    assert await node.get(f"{bed.folder}/ten", max_bytes=10, deadline_s=LIMIT_S) == b"0123456789"


async def test_get_reads_files_without_a_size(node: Transport) -> None:
    assert b"ctxt" in await node.get("/proc/stat", max_bytes=4 * MEBI, deadline_s=LIMIT_S)


async def test_probe_finds_the_node(node: Transport, bed: Bed) -> None:
    probe = await node.probe(deadline_s=LIMIT_S)
    assert (probe.is_reachable, probe.reason) == (True, "Ok")
    assert probe.container_status == ("running" if bed.kind == "proxmox" else None)


async def test_many_calls_at_once(node: Transport) -> None:
    async def one(number: int) -> bytes:
        return (await node.run(["echo", str(number)], deadline_s=LIMIT_S)).stdout

    assert await asyncio.gather(*map(one, range(30))) == [f"{n}\n".encode() for n in range(30)]
