"""A real OpenSSH server for tests, in namespaces of its own, behind a proxy that can break the link.

`SshHost` is a context manager: own host key, own client key, loopback port, own /root. `link` is the proxy
that clients connect to. Must not touch processes that it has not started itself.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from supervisor.transport.ssh import SshTarget, fingerprint, parse_host_key
from tests.support.link import Link
from tests.support.ports import hold_port

REPOSITORY = Path(__file__).resolve().parents[2]
SUPPORT = REPOSITORY / "tests" / "support"
START_LIMIT_S = 60.0
_HELD_PORTS: list[socket.socket] = []
_NEEDED = ("sshd", "ssh-keygen", "unshare", "mount", "pivot_root")


def require_test_bed() -> None:
    """Skip loudly on a laptop without root or OpenSSH; fail in CI, where nothing may be missing."""
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    missing = [name for name in _NEEDED if shutil.which(name, path=path) is None]
    problem = f"missing: {', '.join(missing)} (install openssh-server)" if missing else ""
    if not problem and not _can_unshare():
        problem = "namespaces cannot be made here (root and CAP_SYS_ADMIN are needed)"
    if not problem:
        return
    if os.environ.get("CI"):
        pytest.fail(f"SSH test bed unavailable: {problem}")
    pytest.skip(f"SSH TEST BED UNAVAILABLE: {problem}")


@functools.cache
def _can_unshare() -> bool:
    words = [
        "unshare",
        "--pid",
        "--mount",
        "--uts",
        "--ipc",
        "--fork",
        "mount",
        "-t",
        "tmpfs",
        "none",
        "/mnt",
    ]
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


def kept_paths() -> list[str]:
    """Folders that every namespace must go on seeing: this repository and the interpreter."""
    return sorted({str(REPOSITORY), sys.prefix, sys.base_prefix, str(Path(sys.executable).resolve().parent)})


class SshHost:
    """One test host; `with SshHost(tmp_path) as host: host.target()`."""

    def __init__(self, folder: Path, *, max_sessions: int = 10, pct_script: Path | None = None) -> None:
        self.folder = folder
        self._max_sessions = max_sessions
        self._pct_script = pct_script
        self._process: subprocess.Popen[str] | None = None
        self._port = 0
        self._held: socket.socket | None = None
        self.link: Link = Link()

    def __enter__(self) -> SshHost:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._held = hold_port()
        self._port = self._held.getsockname()[1]
        self.make_key("host_key")
        self.make_key("client_key")
        shutil.copy(self.folder / "client_key.pub", self.folder / "authorized_keys")
        self.write_config()
        config = {
            "folder": str(self.folder),
            "keep": [*kept_paths(), str(self.folder)],
            "python": sys.executable,
            "pct_script": str(self._pct_script) if self._pct_script else None,
        }
        (self.folder / "host.json").write_text(json.dumps(config), "utf-8")
        self._process = subprocess.Popen(
            [
                *("unshare", "--pid", "--mount", "--uts", "--ipc", "--fork", "--kill-child", "--"),
                *(sys.executable, "-I", "-S", str(SUPPORT / "host_init.py"), str(self.folder / "host.json")),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._expect_ok("start")
        self._wait_listening()
        self.link.start(self._port)
        return self

    def __exit__(self, *_: object) -> None:
        self.link.stop()
        process = self._process
        if process is not None:
            process.kill()  # --kill-child ends process 1 with it, and that ends all others inside
            process.wait()
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.close()
            process.stdout.close()
        if self._held is not None:
            self._held.close()

    @property
    def port(self) -> int:
        """Port of the link's near end."""
        return self.link.port

    @property
    def direct_port(self) -> int:
        """Port of sshd itself, past the link."""
        return self._port

    @property
    def host_key_line(self) -> str:
        """The host's public key, as a node record pins it."""
        kind, data, *_ = (self.folder / "host_key.pub").read_text("utf-8").split()
        return f"{kind} {data}"

    @property
    def host_fingerprint(self) -> str:
        """SHA256 fingerprint of the host key."""
        return fingerprint(parse_host_key(self.host_key_line))

    @property
    def identity(self) -> Path:
        """The private key that the host accepts."""
        return self.folder / "client_key"

    def target(self, **changes: object) -> SshTarget:
        """How to reach this host through the link."""
        fields: dict[str, object] = {
            "host": "127.0.0.1",
            "port": self.port,
            "user": "root",
            "host_key": self.host_key_line,
            "identity": str(self.identity),
            "connect_timeout_s": 60.0,
        }
        return SshTarget(**(fields | changes))  # type: ignore[arg-type]

    def ssh_words(self) -> list[str]:
        """The ssh client's words for this host, past the link; the remote command is to be appended."""
        known = self.folder / "known_hosts"
        known.write_text(f"[127.0.0.1]:{self._port} {self.host_key_line}\n", "utf-8")
        options = [f"UserKnownHostsFile={known}", "IdentitiesOnly=yes", "BatchMode=yes", "LogLevel=ERROR"]
        words = ["ssh", "-F", "none", "-p", str(self._port), "-i", str(self.identity)]
        return [*words, *(part for option in options for part in ("-o", option)), "root@127.0.0.1"]

    def order(self, line: str) -> None:
        """One order to process 1 of the host: sshd-start, sshd-stop, pct-add, pct-remove."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        self._expect_ok(line)

    def stop_sshd(self) -> None:
        """Stop listening; open sessions go on."""
        self.order("sshd-stop")

    def start_sshd(self) -> None:
        """Listen again."""
        self.order("sshd-start")
        self._wait_listening()

    def swap_host_key(self) -> None:
        """Come back with another host key, as after a reinstallation."""
        self.stop_sshd()
        for name in ("host_key", "host_key.pub"):
            (self.folder / name).unlink()
        self.make_key("host_key")
        self.start_sshd()

    def set_noise(self, text: str) -> None:
        """Make the login shell print `text` on both streams before every command."""
        self.root_path("/root/.bashrc").write_text(f"echo {text!r}\necho {text!r} >&2\n", "utf-8")

    def root_path(self, path: str) -> Path:
        """Where a path below the host's private /root lies for the test runner."""
        place = self.folder / "host-root" / Path(path).relative_to("/root")
        place.parent.mkdir(parents=True, exist_ok=True)
        return place

    def make_key(self, name: str) -> Path:
        """A new ed25519 key pair in the host's folder."""
        path = self.folder / name
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)
        return path

    def write_config(self) -> None:
        """sshd's own configuration; takes effect with the next start."""
        lines = [
            "ListenAddress 127.0.0.1",
            f"Port {self._port}",
            f"HostKey {self.folder / 'host_key'}",
            f"AuthorizedKeysFile {self.folder / 'authorized_keys'}",
            f"PidFile {self.folder / 'sshd.pid'}",
            f"MaxSessions {self._max_sessions}",
            *("UsePAM no", "StrictModes no", "PasswordAuthentication no", "UseDNS no", "PrintMotd no"),
            *("PermitRootLogin prohibit-password", "Subsystem sftp internal-sftp", "LogLevel VERBOSE"),
        ]
        (self.folder / "sshd_config").write_text("\n".join(lines) + "\n", "utf-8")

    def _expect_ok(self, what: str) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        answer = self._process.stdout.readline().strip()
        assert answer == "ok", f"test host, {what}: {answer or 'died'}"

    def _wait_listening(self) -> None:
        end = time.monotonic() + START_LIMIT_S
        while time.monotonic() < end:
            with (
                contextlib.suppress(ConnectionRefusedError),
                socket.create_connection(("127.0.0.1", self._port), timeout=START_LIMIT_S),
            ):
                return
            time.sleep(0.02)
        raise AssertionError((self.folder / "sshd.log").read_text("utf-8"))


def free_port() -> int:
    """A loopback port that refuses connections; it is kept from others for as long as this process lives."""
    _HELD_PORTS.append(hold_port())
    return int(_HELD_PORTS[-1].getsockname()[1])
