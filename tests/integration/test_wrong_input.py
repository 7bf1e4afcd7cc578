"""What wrong input gets, as the user sees it: exit code, cause, remedy, and nothing left half done.

The real commands against a real daemon; faults of a host or container are made on a real sshd and the
stand-in pct. Every fault is followed by its remedy where there is one: what was refused then works.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemon import TOY_TRAINER, end_leftovers, live_processes, make_lock
from tests.support.pct_host import DEFAULT_VMID, PctHost
from tests.support.ports import reserved_port
from tests.support.served import WAIT_S, Result, ServedDaemon
from tests.support.sshd import REPOSITORY

pytestmark = pytest.mark.sshd

DONE, FAILED, USAGE, NOT_FOUND, CONFLICT, UNREACHABLE = range(6)

RUN_FILE = """\
name = "{name}"
node = "{node}"
source = "{source}"
[command]
args = {args}
[capabilities]
nvml = "off"
wandb = "off"
flash_linear_attention = "off"
kernels = "off"
[restart]
policy = "never"
[log]
{log}
"""


@dataclass
class Bed:
    """A daemon with a node of this machine, on which the toy trainer is deployed."""

    daemon: ServedDaemon
    folder: Path
    lock: Path

    @property
    def root(self) -> Path:
        """The local node's root."""
        return self.folder / "node"

    def ctl(self, *words: object) -> Result:
        """What the user types."""
        return self.daemon.ctl(*words)

    def run_file(
        self, name: str, *args: str, node: str = "local", log: str = "min_free_bytes = 1000"
    ) -> Path:
        """A run of the toy trainer."""
        path = self.folder / f"{name}.toml"
        words = ["--output-dir", str(self.folder / f"out-{name}"), *args]
        path.write_text(RUN_FILE.format(name=name, node=node, source=TOY_TRAINER, args=words, log=log))
        return path

    def deploy(self, node: str, source: Path = TOY_TRAINER) -> Result:
        """Bring trainer and environment to a node."""
        return self.ctl("node", "deploy", node, "--source", source, "--lock", self.lock)


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    folder = tmp_path_factory.mktemp("bed")
    with ServedDaemon(folder / "daemon") as daemon:
        bed = Bed(daemon, folder, make_lock(folder, nvml=True))
        words = ("--root", bed.root, "--log-dir", folder / "logs", "--find-links", folder / "wheels")
        daemon.done("node", "add", "local", *words)
        daemon.done("node", "deploy", "local", "--source", TOY_TRAINER, "--lock", bed.lock)
        yield bed
    end_leftovers(bed.root)


@pytest.fixture
def add_node(bed: Bed, pct_host: PctHost) -> Iterator[Any]:
    """Register the test host as a node; it is forgotten at the end, with its runs."""
    added = []

    def add(name: str, **changes: object) -> str:
        settings: dict[str, object] = {
            "transport": "proxmox",
            "host": "127.0.0.1",
            "port": pct_host.port,
            "user": "root",
            "vmid": DEFAULT_VMID,
            "identity": pct_host.identity,
            "find_links": "/srv/wheels",
            "log_dir": "/workspace",
            "fingerprint": pct_host.host_fingerprint,
        }
        words = [
            word
            for key, value in (settings | changes).items()
            for word in (f"--{key.replace('_', '-')}", value)
        ]
        bed.daemon.done("node", "add", name, *words)
        added.append(name)
        return name

    yield add
    for name in added:
        for run in bed.daemon.get(f"/v1/nodes/{name}")["runs"]:
            bed.ctl("stop", run)
            bed.ctl("rm", run, "--yes")
        bed.ctl("node", "rm", name, "--yes")


def assert_refused(result: Result, code: int, reason: str, *texts: str) -> None:
    """The documented code, and a message with cause and remedy."""
    assert result.code == code, result
    told = [line for line in result.err.splitlines() if not line.startswith("  next: ")]
    assert told[-3].startswith("error: "), result
    assert f"\n  why: {reason}" in result.err, result
    assert "\n  do: " in result.err, result
    for text in texts:
        assert text in result.err + result.out, result


def assert_never_launched(bed: Bed, run: str) -> None:
    """The request left no attempt that could come up later, once it is withdrawn."""
    bed.daemon.done("stop", run)
    assert [item["started_at"] for item in bed.daemon.attempts(run)] in ([], [None])
    assert not list(bed.folder.glob(f"logs/train_{run}*"))


def test_an_unknown_node(bed: Bed) -> None:
    for words in (["node", "check", "nowhere"], ["node", "deploy", "nowhere"]):
        assert_refused(bed.ctl(*words), NOT_FOUND, "NotFound", "nowhere", "dflashctl node ls")

    result = bed.ctl("run", bed.run_file("homeless", node="nowhere"))

    assert_refused(result, NOT_FOUND, "NotFound", "nowhere", "dflashctl node ls")
    assert bed.ctl("show", "homeless").code == NOT_FOUND, "the run was not stored"


def test_a_bad_key(bed: Bed, pct_host: PctHost, add_node: Any) -> None:
    node = add_node("badkey", identity=pct_host.make_key("other_key"))

    check = bed.ctl("node", "check", node)
    run = bed.ctl("run", bed.run_file("locked-out", node=node))

    assert_refused(check, UNREACHABLE, "NodeUnreachable", "could not log in at root@127.0.0.1", "public key")
    assert_refused(run, UNREACHABLE, "AuthFailed", "could not log in", "name the right identity file")
    assert_never_launched(bed, "locked-out")
    bed.daemon.done("node", "set", node, "--identity", pct_host.identity)
    bed.daemon.done("node", "check", node)


def test_a_key_file_that_is_not_there(bed: Bed, pct_host: PctHost, add_node: Any) -> None:
    node = add_node("nokey", identity=bed.folder / "no-such-key")

    check = bed.ctl("node", "check", node)
    run = bed.ctl("run", bed.run_file("keyless", node=node))

    assert_refused(check, UNREACHABLE, "NodeUnreachable", "no-such-key")
    assert_refused(run, UNREACHABLE, "IdentityMissing", "no-such-key", "identity")
    assert_never_launched(bed, "keyless")


def test_a_changed_host_key(bed: Bed, pct_host: PctHost, add_node: Any) -> None:
    node = add_node("rekeyed")
    bed.daemon.done("node", "check", node)
    pinned = pct_host.host_fingerprint
    pct_host.swap_host_key()
    pct_host.link.cut()
    calls = len(pct_host.calls())

    check = bed.ctl("node", "check", node)
    run = bed.ctl("run", bed.run_file("suspicious", node=node))
    wrong = bed.ctl("node", "set", node, "--fingerprint", pinned)

    both = (pinned, pct_host.host_fingerprint)
    assert_refused(check, UNREACHABLE, "NodeUnreachable", *both, "--fingerprint")
    assert_refused(run, UNREACHABLE, "HostKeyChanged", *both, "find out why the key changed")
    assert_refused(wrong, CONFLICT, "HostKeyMismatch", *both)
    assert_never_launched(bed, "suspicious")
    assert len(pct_host.calls()) == calls, "nothing was sent to a host that may be another one"
    bed.daemon.done("node", "set", node, "--fingerprint", pct_host.host_fingerprint)
    bed.daemon.done("node", "check", node)


def test_a_stopped_container(bed: Bed, pct_host: PctHost, add_node: Any) -> None:
    node = add_node("halted")
    pct_host.pct("stop", str(DEFAULT_VMID))
    pct_host.lock("backup")

    check = bed.ctl("node", "check", node)
    deploy = bed.deploy(node)
    run = bed.ctl("run", bed.run_file("asleep", node=node))

    assert_refused(check, UNREACHABLE, "NodeUnreachable", "start the container", "container lock  backup")
    assert_refused(deploy, UNREACHABLE, "ContainerStopped", "container 200 is stopped", "start the container")
    assert_refused(run, UNREACHABLE, "ContainerStopped", "`stop` withdraws it")
    assert_never_launched(bed, "asleep")
    pct_host.pct("unlock", str(DEFAULT_VMID))
    pct_host.pct("start", str(DEFAULT_VMID))
    bed.daemon.done("node", "check", node)


def test_a_locked_container(bed: Bed, pct_host: PctHost, add_node: Any) -> None:
    """A lock of its configuration stops no command; one that a start or copy holds stops the upload."""
    node = add_node("backedup")
    bring_wheels(bed, pct_host)
    pct_host.lock("backup")

    check = bed.daemon.done("node", "check", node)
    with held_guest_lock(pct_host):
        deploy = bed.deploy(node)

    assert "warn  container lock    backup" in check.out
    assert "wait for the backup" in check.out
    assert_refused(deploy, UNREACHABLE, "GuestLockBusy", "container 200 is busy", "then try again")
    assert list(pct_host.ct_path("/srv/dflash/envs").glob("*")) == []
    bed.daemon.done("node", "deploy", node, "--source", TOY_TRAINER, "--lock", bed.lock)
    left = [path.name for path in pct_host.ct_path("/srv/dflash/tmp").iterdir()]
    assert [name for name in left if not name.startswith("lock-")] == []


@contextmanager
def held_guest_lock(host: PctHost) -> Iterator[None]:
    """As while the host starts, stops or copies into the container."""
    host.set_knob("lock_wait_s", 0.2)
    lock = "/run/lock/lxc/pve-config-200.lock"
    holder = subprocess.Popen(
        [*host.ssh_words(), f"flock {lock} sh -c 'echo held; cat'"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    try:
        assert holder.stdout.readline() == b"held\n"
        yield
    finally:
        holder.stdin.close()
        holder.wait(WAIT_S)
        holder.stdout.close()


def test_a_missing_container(bed: Bed, add_node: Any) -> None:
    node = add_node("moved", vmid=999)

    check = bed.ctl("node", "check", node)
    deploy = bed.deploy(node)
    run = bed.ctl("run", bed.run_file("lost", node=node))

    assert_refused(check, UNREACHABLE, "NodeUnreachable", "no container 999 on this host", "--vmid")
    assert_refused(deploy, UNREACHABLE, "ContainerMissing", "no container 999", "correct --vmid")
    assert_refused(run, UNREACHABLE, "ContainerMissing", "no container 999", "correct --vmid")
    assert_never_launched(bed, "lost")
    bed.daemon.done("node", "set", node, "--vmid", DEFAULT_VMID)
    bed.daemon.done("node", "check", node)


def test_an_unreachable_host(bed: Bed, pct_host: PctHost, add_node: Any) -> None:
    with reserved_port() as port:
        dead = ("--transport", "ssh", "--host", "127.0.0.1", "--port", port)
        assert_refused(
            bed.ctl("node", "add", "dead", *dead), UNREACHABLE, "ConnectRefused", "is sshd running"
        )
    assert bed.ctl("node", "show", "dead").code == NOT_FOUND
    node = add_node("offline")
    bed.daemon.done("node", "check", node)
    pct_host.link.refuse()
    pct_host.link.cut()

    check = bed.ctl("node", "check", node)
    deploy = bed.deploy(node)
    run = bed.ctl("run", bed.run_file("waiting", node=node))

    for result, reason in ((check, "NodeUnreachable"), (deploy, "ConnectRefused"), (run, "ConnectRefused")):
        assert_refused(result, UNREACHABLE, reason, "refused the connection", "start the SSH server")
    assert_never_launched(bed, "waiting")
    pct_host.link.accept()
    bed.daemon.done("node", "check", node)


def test_a_stop_of_a_run_that_is_out_of_reach(bed: Bed, pct_host: PctHost, add_node: Any) -> None:
    node = add_node("faraway")
    bring_wheels(bed, pct_host)
    assert bed.deploy(node).code == DONE
    bed.daemon.done("run", bed.run_file("voyager", node=node), "--wait", "ready")
    pct_host.link.refuse()
    pct_host.link.cut()

    logs = bed.ctl("logs", "voyager")
    restart = bed.ctl("restart", "voyager")
    stop = bed.ctl("stop", "voyager")

    assert_refused(logs, UNREACHABLE, "", f"node {node}")
    assert_refused(restart, UNREACHABLE, "ConnectRefused", "refused the connection", "start the SSH server")
    assert_refused(stop, UNREACHABLE, "ConnectRefused", "is stopped when the node is back")
    (during,) = bed.daemon.attempts("voyager")
    assert during["is_live"], "unknown is not dead"
    pct_host.link.accept()
    bed.daemon.until(lambda: not bed.daemon.attempts("voyager")[0]["is_live"], "the stop that was asked for")
    (after,) = bed.daemon.attempts("voyager")
    assert (after["state"], after["exit_code"]) == ("stopped", 9)


def bring_wheels(bed: Bed, host: PctHost) -> None:
    """Put the wheels into the container's find-links folder."""
    for wheel in (bed.folder / "wheels").iterdir():
        host.ct_path(f"/srv/wheels/{wheel.name}").write_bytes(wheel.read_bytes())


def test_a_full_disk_in_the_node(bed: Bed, pct_host: PctHost, add_node: Any) -> None:
    mount = "mkdir /srv/full && mount -t tmpfs -o size=1m none /srv/full"
    pct_host.pct("exec", str(DEFAULT_VMID), "--", "sh", "-c", mount)
    node = add_node("crammed", root="/srv/full")

    check = bed.ctl("node", "check", node)
    deploy = bed.deploy(node)

    assert_refused(check, FAILED, "CheckFailed", "/srv/full has", "2.0 GiB are needed", "→ free space")
    assert_refused(deploy, FAILED, "NoSpace", "/srv/full has", "free space on the file system of /srv/full")
    there = pct_host.pct("exec", str(DEFAULT_VMID), "--", "find", "/srv/full", "-type", "f").stdout.decode()
    assert "/releases/" not in there
    assert "/envs/" not in there


def test_a_full_disk_under_the_log(bed: Bed, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], check=True)
    try:
        log = f'pattern = "{disk}/train_{{name}}{{attempt}}.log"'
        result = bed.ctl("run", bed.run_file("verbose", log=log))

        assert list(disk.iterdir()) == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    assert_refused(result, FAILED, "NoSpace", f"{disk} has", "min_free_bytes", "free disk space")
    assert_never_launched(bed, "verbose")


def test_a_node_without_python(bed: Bed, add_node: Any) -> None:
    node = add_node("bare", python="/usr/bin/python9")

    check = bed.ctl("node", "check", node)
    deploy = bed.deploy(node)
    run = bed.ctl("run", bed.run_file("primitive", node=node))

    assert_refused(check, FAILED, "CheckFailed", "no usable Python on the node: /usr/bin/python9", "--python")
    assert_refused(deploy, FAILED, "NoPython", "/usr/bin/python9", "install Python 3.9 or newer")
    assert_refused(run, FAILED, "NoPython", "/usr/bin/python9", "install Python 3.9 or newer")
    assert_never_launched(bed, "primitive")
    bed.daemon.done("node", "set", node, "--python", "/usr/bin/python3")
    bed.daemon.done("node", "check", node)


def test_this_machine_without_python(bed: Bed) -> None:
    bed.daemon.done("node", "add", "barehere", "--root", bed.folder / "bare", "--python", "/usr/bin/python9")

    run = bed.ctl("run", bed.run_file("clueless", node="barehere"))

    assert_refused(run, FAILED, "NoPython", "/usr/bin/python9", "install Python 3.9 or newer")
    assert_never_launched(bed, "clueless")
    bed.daemon.done("rm", "clueless", "--yes")
    bed.daemon.done("node", "rm", "barehere", "--yes")


def test_a_trainer_that_needs_a_module_which_the_lock_lacks(bed: Bed, tmp_path: Path) -> None:
    source = tmp_path / "trainer"
    source.mkdir()
    (source / "__init__.py").touch()
    (source / "__main__.py").write_text("import no_such_module\n")
    before = bed.daemon.get("/v1/nodes/local")["deployment"]
    current = (bed.root / "current").readlink()

    result = bed.deploy("local", source)

    assert_refused(result, FAILED, "MissingModule", "No module named 'no_such_module'", "add the missing")
    assert bed.daemon.get("/v1/nodes/local")["deployment"] == before
    assert (bed.root / "current").readlink() == current


def test_wrong_paths(bed: Bed) -> None:
    no_file = bed.ctl("run", bed.folder / "no-such.toml")
    no_source = bed.deploy("local", Path("/no/trainer"))
    no_lock = bed.ctl("node", "deploy", "local", "--source", TOY_TRAINER, "--lock", "/no/lock")
    no_data = bed.ctl("run", bed.run_file("dataless", "--data-dir", "/no/data"))

    assert_refused(no_file, USAGE, "InvalidConfig", "no-such.toml", "check the path")
    assert_refused(no_source, FAILED, "SourceNotFound", "/no/trainer", "bundled")
    assert_refused(no_lock, FAILED, "LockNotFound", "/no/lock", "bundled")
    assert_refused(no_data, FAILED, "PathMissing", "/no/data does not exist on the node", "--data-dir")
    assert_never_launched(bed, "dataless")


def test_a_run_that_dies_at_once(bed: Bed) -> None:
    result = bed.ctl("run", bed.run_file("stillborn", "--die-at-once"))

    assert_refused(result, FAILED, "PipelineFailed", "exit code 7", "no such data folder")
    assert "dflashctl logs stillborn --attempt 1" in result.err
    (attempt,) = bed.daemon.attempts("stillborn")
    assert (attempt["state"], attempt["exit_code"]) == ("failed", 7)
    assert "no such data folder" in bed.daemon.done("logs", "stillborn").out
    assert live_processes(bed.root, "stillborn") == []


def test_a_run_file_with_a_typo(bed: Bed) -> None:
    file = bed.run_file("mistyped")
    text = file.read_text()
    for wrong, meant, near in (("[restrat]", "[restart]", "restart"), ('polcy = "', 'policy = "', "policy")):
        file.write_text(text.replace(meant, wrong))
        line = 1 + text[: text.index(meant)].count("\n")

        result = bed.ctl("run", file)

        assert_refused(result, USAGE, "InvalidRunFile", f"{file}:{line}", f"did you mean {near}")
    file.write_text(text.replace('"never"', '"sometimes"'))
    assert_refused(bed.ctl("run", file), USAGE, "InvalidRunFile", str(file), "restart.policy", "on-failure")
    assert bed.ctl("show", "mistyped").code == NOT_FOUND, "nothing was stored"


def test_gpus_that_do_not_exist(bed: Bed) -> None:
    bed.daemon.until(
        lambda: len(bed.daemon.get("/v1/nodes/local/telemetry")["gpus"]) == 2, "NVML to be asked"
    )

    result = bed.ctl("run", bed.run_file("greedy", "--target-gpus", "0,1", "--drafter-gpus", "9"))

    assert_refused(result, FAILED, "GpuNotFound", "GPU 9 does not exist on the node; present: 0, 1", "[gpus]")
    assert_never_launched(bed, "greedy")


def test_a_second_start_and_a_stop_of_a_stopped_run(bed: Bed) -> None:
    file = bed.run_file("busy")
    bed.daemon.done("run", file)
    live = live_processes(bed.root, "busy")

    again = bed.ctl("start", "busy")
    once_more = bed.ctl("run", file)

    assert len(live) == 1
    for result in (again, once_more):
        assert_refused(result, CONFLICT, "AlreadyRunning", "dflashctl restart busy")
    assert live_processes(bed.root, "busy") == live
    bed.daemon.done("stop", "busy")
    assert "it was stopped already" in bed.daemon.done("stop", "busy").out
    assert [item["state"] for item in bed.daemon.attempts("busy")] == ["stopped"]
    assert live_processes(bed.root, "busy") == []


def test_two_daemons_on_one_state_folder(bed: Bed) -> None:
    second = subprocess.run(
        bed.daemon.command(), cwd=REPOSITORY, capture_output=True, text=True, timeout=WAIT_S, check=False
    )

    assert_refused(Result(second.returncode, second.stdout, second.stderr), CONFLICT, "StateFolderInUse")
    assert str(bed.daemon.pid) in second.stderr
    assert str(bed.daemon.state_dir) in second.stderr
    assert bed.daemon.url in second.stderr, "the port that it has, not the 0 that was asked for"
    bed.daemon.done("ps")


def test_a_killed_daemon_whose_run_goes_on_and_is_found_again(bed: Bed) -> None:
    bed.daemon.done("run", bed.run_file("orphan"), "--wait", "ready")
    (before,) = bed.daemon.attempts("orphan")
    live = live_processes(bed.root, "orphan")
    log = Path(before["log_path"])

    bed.daemon.kill()
    nobody = bed.ctl("ps")
    size = log.stat().st_size
    bed.daemon.until(lambda: log.stat().st_size > size, "the trainer to go on without a daemon")
    bed.daemon.start()

    assert_refused(nobody, UNREACHABLE, "DaemonUnreachable", "dflashctl serve")
    bed.daemon.until(
        lambda: any(
            (item["type"], item["status"]) == ("Alive", "true")
            for item in bed.daemon.get("/v1/runs/orphan")["conditions"]
        ),
        "the run to be found again",
    )
    (after,) = bed.daemon.attempts("orphan")
    assert (after["id"], after["state"]) == (before["id"], "ready")
    assert live_processes(bed.root, "orphan") == live
    bed.daemon.done("stop", "orphan")
    assert live_processes(bed.root, "orphan") == []
    assert log.read_text().count("toy trainer: pid") == 1
    assert bed.daemon.attempts("orphan")[0]["exit_code"] == 9
