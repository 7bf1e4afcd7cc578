"""A test host with containers: a real sshd and a stand-in `pct`, all in namespaces of their own.

`PctHost` starts container 200; `ct_path` says where a container's file lies for the test runner, `calls`
what pct was asked. Processes inside can be neither seen nor signalled from other tests.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from supervisor.transport.pct import PctTransport
from supervisor.transport.ssh import SshTransport
from tests.support.sshd import SUPPORT, SshHost

DEFAULT_VMID = 200


@dataclass(frozen=True)
class PctCall:
    """One recorded call of the stand-in."""

    argv: list[str]
    environ: dict[str, str]


class PctHost(SshHost):
    """`with PctHost(tmp_path) as host: host.transport()`."""

    def __init__(
        self,
        folder: Path,
        *,
        vmids: tuple[int, ...] = (DEFAULT_VMID,),
        binds: tuple[Path, ...] = (),
        max_sessions: int = 10,
    ) -> None:
        super().__init__(folder, max_sessions=max_sessions, pct_script=SUPPORT / "standin_pct.py")
        self._vmids = vmids
        self._binds = binds

    def __enter__(self) -> PctHost:
        for vmid in self._vmids:
            self.add_container(vmid)
        super().__enter__()
        for vmid in self._vmids:
            self.pct("start", str(vmid))
        return self

    def add_container(self, vmid: int) -> None:
        """Configure a container; it is not started."""
        folder = self.folder / "ct" / str(vmid)
        folder.mkdir(parents=True)
        conf = f"arch: amd64\ncores: 2\nhostname: ct{vmid}\nmemory: 4096\nostype: debian\nunprivileged: 1\n"
        (folder / f"{vmid}.conf").write_text(conf, "utf-8")
        (folder / "binds.json").write_text(json.dumps([str(path) for path in self._binds]), "utf-8")

    def transport(self, vmid: int = DEFAULT_VMID, **changes: object) -> PctTransport:
        """The transport under test, through the link."""
        return PctTransport(SshTransport(self.target(**changes)), vmid)

    def pct(self, *argv: str, check: bool = True) -> subprocess.CompletedProcess[bytes]:
        """Run `pct` on the host with the ssh client, past the link: to arrange and to look."""
        return self.on_host("/usr/sbin/pct", *argv, check=check)

    def on_host(self, *argv: str, check: bool = True) -> subprocess.CompletedProcess[bytes]:
        """Run a command on the host with the ssh client, past the link."""
        done = subprocess.run([*self.ssh_words(), _join(argv)], stdin=subprocess.DEVNULL, capture_output=True)
        if check and done.returncode != 0:
            raise AssertionError(f"{argv}: {done.returncode} {done.stderr!r}")
        return done

    def ct_path(self, path: str, vmid: int = DEFAULT_VMID) -> Path:
        """Where a file below the container's /root /srv /workspace /tmp /run lies for the test runner."""
        place = self.folder / "ct" / str(vmid) / "fs" / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        return place

    def lock(self, name: str, vmid: int = DEFAULT_VMID) -> None:
        """Put a config lock (backup, snapshot ...) on the container."""
        with self._conf(vmid).open("a", encoding="utf-8") as file:
            file.write(f"lock: {name}\n")

    def set_knob(self, name: str, value: object, vmid: int = DEFAULT_VMID) -> None:
        """Change the stand-in's behaviour: lock_wait_s, push_stops_at, start_fails."""
        path = self.folder / "ct" / str(vmid) / "knobs.json"
        knobs = json.loads(path.read_text("utf-8")) if path.exists() else {}
        path.write_text(json.dumps(knobs | {name: value}), "utf-8")

    def freeze_container(self, vmid: int = DEFAULT_VMID) -> None:
        """As a backup in mode suspend: running by its status, but exec hangs until the thaw."""
        (self.folder / "ct" / str(vmid) / "frozen").touch()

    def thaw_container(self, vmid: int = DEFAULT_VMID) -> None:
        """End of `freeze_container`."""
        (self.folder / "ct" / str(vmid) / "frozen").unlink()

    def remove_config(self, vmid: int = DEFAULT_VMID) -> None:
        """As a migration: the host no longer knows the container."""
        self._conf(vmid).unlink()

    def calls(self) -> list[PctCall]:
        """Every call of `pct` so far, byte for byte (surrogate escapes stand for other bytes)."""
        path = self.folder / "pct.ndjson"
        lines = path.read_text("ascii").splitlines() if path.exists() else []
        return [PctCall(entry["argv"], entry["environ"]) for entry in map(json.loads, lines)]

    def _conf(self, vmid: int) -> Path:
        return self.folder / "ct" / str(vmid) / f"{vmid}.conf"


def _join(argv: tuple[str, ...]) -> str:
    return " ".join("'" + word.replace("'", "'\\''") + "'" for word in argv)


def bytes_of(word: str) -> bytes:
    """A recorded word as the bytes it was."""
    return os.fsencode(word)
