"""The stand-in `pct` answers as the real one does: verbs, texts, exit codes and traps.

Tests of the test bed: whoever changes the stand-in sees here what it must go on imitating.
"""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from tests.support.pct_host import PctHost, bytes_of

pytestmark = pytest.mark.sshd

LIMIT_S = 60.0


def said(done: subprocess.CompletedProcess[bytes]) -> tuple[int, str]:
    return done.returncode, done.stderr.decode().strip()


def wait_for(path: Path) -> None:
    end = time.monotonic() + LIMIT_S
    while not path.exists():
        assert time.monotonic() < end, f"never: {path}"
        time.sleep(0.02)


def test_status_list_and_config(pct_host: PctHost) -> None:
    assert pct_host.pct("status", "200").stdout == b"status: running\n"
    assert pct_host.pct("list").stdout.decode().splitlines() == [
        f"{'VMID':<10} {'Status':<10} {'Lock':<12} {'Name':<20}",
        f"{'200':<10} {'running':<10} {'':<12} {'ct200':<20}",
    ]
    config = pct_host.pct("config", "200").stdout.decode().splitlines()
    assert config == sorted(config)
    assert "hostname: ct200" in config
    verbose = pct_host.pct("status", "200", "--verbose").stdout.decode().splitlines()
    assert verbose == sorted(verbose)
    assert "status: running" in verbose


def test_a_prefix_of_a_verb_is_enough_and_an_unknown_verb_is_255(pct_host: PctHost) -> None:
    assert pct_host.pct("stat", "200").stdout == b"status: running\n"
    code, text = said(pct_host.pct("frobnicate", "200", check=False))
    assert code == 255
    assert text.startswith("ERROR: unknown command 'pct frobnicate'")


def test_a_container_that_is_stopped(pct_host: PctHost) -> None:
    pct_host.pct("stop", "200")
    assert pct_host.pct("status", "200").stdout == b"status: stopped\n"
    assert said(pct_host.pct("exec", "200", "--", "true", check=False)) == (
        255,
        "container '200' not running!",
    )
    assert said(pct_host.pct("push", "200", "/etc/hostname", "/root/x", check=False)) == (
        255,
        "can only push files to a running CT",
    )
    assert said(pct_host.pct("stop", "200", check=False)) == (255, "CT 200 not running")
    assert said(pct_host.pct("reboot", "200", check=False)) == (255, "VM 200 not running")
    pct_host.pct("start", "200")
    assert said(pct_host.pct("start", "200", check=False)) == (255, "CT 200 already running")


def test_a_container_that_does_not_exist(pct_host: PctHost) -> None:
    text = "Configuration file 'nodes/pve1/lxc/999.conf' does not exist"
    for verb in ("status", "config"):
        assert said(pct_host.pct(verb, "999", check=False)) == (2, text)
    assert said(pct_host.pct("exec", "999", "--", "true", check=False)) == (2, text)
    assert said(pct_host.pct("push", "999", "/etc/hostname", "/x", check=False)) == (
        255,
        "can only push files to a running CT",
    )
    assert said(pct_host.pct("stop", "999", check=False)) == (255, "CT 999 not running")
    code, text = said(pct_host.pct("status", "7", check=False))
    assert (code, text.splitlines()[0]) == (2, "400 Parameter verification failed.")


def test_a_config_lock_stops_starts_and_stops_but_not_exec(pct_host: PctHost) -> None:
    pct_host.lock("backup")
    for verb in ("stop", "shutdown"):
        assert said(pct_host.pct(verb, "200", check=False)) == (255, "CT is locked (backup)")
    assert pct_host.pct("exec", "200", "--", "echo", "hi").stdout == b"hi\n"
    pct_host.pct("push", "200", "/etc/hostname", "/root/pushed")
    assert b"lock: backup" in pct_host.pct("config", "200").stdout
    assert b"lock: backup" in pct_host.pct("status", "200", "--verbose").stdout
    pct_host.pct("reboot", "200", "--timeout", "1")
    pct_host.pct("unlock", "200")
    assert said(pct_host.pct("unlock", "200", check=False)) == (
        255,
        "no lock found trying to remove any lock",
    )
    pct_host.pct("stop", "200")


def test_the_guest_lock_times_out_with_4(pct_host: PctHost) -> None:
    pct_host.set_knob("lock_wait_s", 0.2)
    lock = "/run/lock/lxc/pve-config-200.lock"
    code, text = said(
        pct_host.on_host("flock", lock, "pct", "push", "200", "/etc/hostname", "/x", check=False)
    )
    assert code == 4
    assert text == f"trying to acquire lock...\ncan't lock file '{lock}' - got timeout"


def test_exec_passes_status_and_says_what_it_cannot_run(pct_host: PctHost) -> None:
    assert pct_host.pct("exec", "200", "--", "sh", "-c", "exit 42", check=False).returncode == 42
    assert pct_host.pct("exec", "200", "--", "sh", "-c", "kill -9 $$", check=False).returncode == 137
    code, text = said(pct_host.pct("exec", "200", "--", "no-such", check=False))
    assert code == 127
    assert text.endswith('No such file or directory - Failed to exec "no-such"')
    assert pct_host.pct("exec", "200", "--", "/etc/hostname", check=False).returncode == 126
    code, text = said(pct_host.pct("exec", "200", "ls", "-la", check=False))
    assert text.startswith("Unknown option: la")
    assert pct_host.pct("exec", "200", "echo", "plain").stdout == b"plain\n"


def test_exec_keeps_the_login_s_environment_unless_told_otherwise(pct_host: PctHost) -> None:
    env = pct_host.pct("exec", "200", "--", "env").stdout.decode()
    assert "SSH_CONNECTION=" in env
    assert "container=lxc\n" in env
    assert "HOME=/root\n" in env
    bare = pct_host.pct("exec", "200", "--keep-env", "0", "--", "env").stdout.decode()
    assert "HOME=" not in bare


def test_containers_see_only_themselves_and_the_host_sees_all(tmp_path: Path) -> None:
    with PctHost(tmp_path / "host", vmids=(200, 201)) as host:
        started = "sleep 777 < /dev/null > /dev/null 2>&1 & echo $!"
        for vmid in ("200", "201"):
            host.pct("exec", vmid, "--", "sh", "-c", started)
        inside = host.pct("exec", "200", "--", "pgrep", "-xc", "sleep").stdout
        assert inside == b"1\n"
        assert host.on_host("pgrep", "-xc", "sleep").stdout == b"2\n"
        assert host.pct("exec", "201", "--", "hostname").stdout == b"ct201\n"
        host.pct("exec", "200", "--", "touch", "/root/only-here")
        assert not host.ct_path("/root/only-here", 201).exists()
        assert not host.root_path("/root/only-here").exists()


def test_stop_ends_everything_inside_and_shutdown_lets_it_finish(pct_host: PctHost) -> None:
    trap = "trap 'sleep 0.2; touch /root/finished; exit 0' TERM; touch /root/up; while :; do sleep 0.05; done"
    launch = ["exec", "200", "--", "sh", "-c", 'setsid sh -c "$1" < /dev/null > /dev/null 2>&1 &', "x", trap]
    pct_host.pct(*launch)
    wait_for(pct_host.ct_path("/root/up"))
    pct_host.pct("stop", "200")
    assert not pct_host.ct_path("/root/finished").exists()
    pct_host.ct_path("/root/up").unlink()
    pct_host.pct("start", "200")
    pct_host.pct(*launch)
    wait_for(pct_host.ct_path("/root/up"))
    pct_host.pct("shutdown", "200")
    assert pct_host.ct_path("/root/finished").exists()
    assert pct_host.pct("status", "200").stdout == b"status: stopped\n"


def test_push_and_pull_lie_about_failure(pct_host: PctHost) -> None:
    pct_host.root_path("/root/data").write_bytes(b"content")
    for source, target, text in (
        ("/root/none", "/root/x", "failed to open /root/none for reading"),
        ("/root/data", "/none/x", "failed to create file: /none/x: No such file or directory"),
    ):
        assert said(pct_host.pct("push", "200", source, target)) == (0, text)
    assert said(pct_host.pct("push", "200", "/root/data", "/root/x", "--perms", "zz")) == (
        0,
        "invalid mode: 'zz'",
    )
    assert said(pct_host.pct("push", "200", "/root", "/root/from-folder")) == (0, "")
    assert pct_host.ct_path("/root/from-folder").read_bytes() == b""
    assert pct_host.pct("pull", "200", "/root/none", "/root/pulled").returncode == 0
    assert pct_host.root_path("/root/pulled").read_bytes() == b""
    pct_host.pct("push", "200", "/root/data", "/root/y", "--perms", "600")
    pct_host.pct("pull", "200", "/root/y", "/root/back")
    assert pct_host.root_path("/root/back").read_bytes() == b"content"
    assert pct_host.ct_path("/root/y").stat().st_mode & 0o777 == 0o600


def test_push_writes_in_place(pct_host: PctHost) -> None:
    target = pct_host.ct_path("/root/script")
    target.write_text("old", "utf-8")
    number = target.stat().st_ino
    pct_host.root_path("/root/data").write_bytes(b"new")
    pct_host.pct("push", "200", "/root/data", "/root/script")
    assert (target.read_bytes(), target.stat().st_ino) == (b"new", number)


def test_a_frozen_container_runs_by_its_status_and_hangs_exec(pct_host: PctHost) -> None:
    pct_host.freeze_container()
    assert pct_host.pct("status", "200").stdout == b"status: running\n"
    done = pct_host.on_host("timeout", "1", "pct", "exec", "200", "--", "true", check=False)
    assert (done.returncode, done.stdout, done.stderr) == (124, b"", b"")
    pct_host.thaw_container()
    pct_host.pct("exec", "200", "--", "true")


def test_calls_are_recorded_byte_for_byte(pct_host: PctHost) -> None:
    word = "a 'b' \"c\" $(x)\n\udcffé"
    pct_host.pct("exec", "200", "--", "true", word)
    call = pct_host.calls()[-1]
    assert bytes_of(call.argv[-1]) == bytes_of(word)
    assert call.argv[:4] == ["exec", "200", "--", "true"]
    assert "SSH_CONNECTION" in call.environ


def test_a_pct_that_is_not_there(pct_host: PctHost) -> None:
    pct_host.order("pct-remove")
    code, text = said(pct_host.pct("list", check=False))
    assert code == 127
    assert "/usr/sbin/pct" in text
    pct_host.order("pct-add")
    pct_host.pct("list")


def test_pids_can_be_used_again_on_demand(pct_host: PctHost) -> None:
    """What tests of identity need: a chosen pid for an innocent process."""
    script = "echo 400 > /proc/sys/kernel/ns_last_pid; sh -c 'echo $$'"
    assert pct_host.pct("exec", "200", "--", "sh", "-c", script).stdout == b"401\n"
