"""Process 1 of a test host: a private PID and mount namespace with its own /root, /run, /usr/sbin and sshd.

Started by `tests.support.sshd` through `unshare`; takes one-line orders on stdin and answers each with one
line. When it dies, the kernel ends everything inside, so no test can leave a process behind, and nothing
inside can signal the test runner. Runs on the system's Python with the standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

SSHD = "/usr/sbin/sshd"
SHELF = Path("/mnt")  # what is covered up elsewhere stays within reach here


def mount(*args: str) -> None:
    subprocess.run(["mount", *args], check=True)


def keep_and_mask(masked: dict[str, Path], keep: list[str]) -> None:
    """Put private folders over system ones, but leave `keep` (interpreters, this repository) in sight."""
    places = []
    for number, path in enumerate([*keep, *map(str, masked.values())]):
        place = SHELF / str(number)
        place.mkdir()
        mount("--bind", path, str(place))
        places.append((place, path))
    for place, name in zip((place for place, _ in places[len(keep) :]), masked, strict=True):
        mount("--bind", str(place), name)
    for place, path in sorted(places[: len(keep)], key=lambda pair: pair[1]):
        if any(Path(path).is_relative_to(name) for name in masked):
            Path(path).mkdir(parents=True, exist_ok=True)
            mount("--bind", str(place), path)


def farm_usr_sbin() -> None:
    """A writable /usr/sbin of links to the real one, so that `pct` can be put in and taken out."""
    real = SHELF / "sbin"
    real.mkdir()
    mount("--bind", "/usr/sbin", str(real))
    mount("-t", "tmpfs", "none", "/usr/sbin")
    for entry in real.iterdir():
        Path(f"/usr/sbin/{entry.name}").symlink_to(entry)


class Host:
    def __init__(self, config: dict) -> None:
        self.config = config
        self.folder = Path(config["folder"])
        self.sshd = 0

    def set_up(self) -> None:
        mount("--make-rprivate", "/")
        mount("-t", "proc", "proc", "/proc")
        mount("-t", "tmpfs", "none", str(SHELF))
        farm_usr_sbin()
        self.add_pct()
        home = self.folder / "host-root"
        home.mkdir(exist_ok=True)
        keep_and_mask({"/root": home}, self.config["keep"])
        mount("-t", "tmpfs", "none", "/run")
        Path("/run/sshd").mkdir()
        Path("/run/lock/lxc").mkdir(parents=True)

    def add_pct(self) -> None:
        script = self.config.get("pct_script")
        if script:
            launcher = Path("/usr/sbin/pct")
            folder = self.config["folder"]
            launcher.write_text(
                f'#!/bin/sh\nexec {self.config["python"]} -I -S {script} {folder} "$@"\n', "utf-8"
            )
            launcher.chmod(0o755)

    def remove_pct(self) -> None:
        Path("/usr/sbin/pct").unlink()

    def start_sshd(self) -> None:
        log = str(self.folder / "sshd.log")
        argv = [SSHD, "-D", "-f", str(self.folder / "sshd_config"), "-E", log]
        self.sshd = os.posix_spawn(SSHD, argv, {"PATH": os.environ["PATH"]}, setpgroup=0)

    def stop_sshd(self) -> None:
        """Only the listener; open sessions are processes of their own and go on."""
        os.kill(self.sshd, signal.SIGTERM)
        wait_gone(self.sshd)

    def obey(self, order: str) -> None:
        {
            "sshd-start": self.start_sshd,
            "sshd-stop": self.stop_sshd,
            "pct-add": self.add_pct,
            "pct-remove": self.remove_pct,
        }[order]()


def wait_gone(pid: int) -> None:
    """Until the reaper in the main thread has collected it."""
    while Path(f"/proc/{pid}").exists():
        signal.sigtimedwait([], 0.01)


def serve(host: Host) -> None:
    for line in sys.stdin:
        try:
            host.obey(line.strip())
            answer = "ok"
        except Exception as error:  # noqa: BLE001  the test that gave the order shows it
            answer = f"error {error!r}"
        print(answer, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    host = Host(json.loads(Path(sys.argv[1]).read_text("utf-8")))
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    host.set_up()
    host.start_sshd()
    print("ok", flush=True)
    threading.Thread(target=serve, args=(host,), daemon=True).start()
    while True:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, 0)
            continue
        signal.sigtimedwait([], 0.05)


main()
