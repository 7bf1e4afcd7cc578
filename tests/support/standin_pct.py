"""A stand-in for Proxmox's `pct`: namespaces for containers, and pct's own texts, exit codes and traps.

`standin_pct.py FOLDER VERB ...`: FOLDER holds `ct/<id>/` (config, state, private files) and `pct.ndjson`,
where every call is recorded with argv and environment byte for byte. Runs inside a test host (`host_init`),
standard library only. What it imitates is held by tests/integration/test_pct_standin.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWPID = 0x00020000, 0x04000000, 0x08000000, 0x20000000
PCT_PATH_IN_CT = "/sbin:/bin:/usr/sbin:/usr/bin"
PRIVATE = ("root", "srv", "workspace", "tmp", "run")
VERBS = ("exec", "push", "pull", "start", "stop", "shutdown", "reboot", "status", "list", "config", "unlock")
SIGPWR = 30
STOP_WAIT_S = 60.0
libc = ctypes.CDLL(None, use_errno=True)


class PctError(Exception):
    """Perl's `die`: a text on stderr and an exit code."""

    def __init__(self, text: str, code: int = 255) -> None:
        super().__init__(text)
        self.text, self.code = text, code


class Container:
    def __init__(self, folder: Path, vmid: str) -> None:
        if not vmid.isdigit() or not 100 <= int(vmid) <= 999999999:
            raise PctError(
                "400 Parameter verification failed.\nvmid: invalid format - value does not look like a "
                "valid VM ID\npct <verb> <vmid> [OPTIONS]",
                2,
            )
        self.vmid = vmid
        self.host = folder
        self.folder = folder / "ct" / vmid
        self.conf = self.folder / f"{vmid}.conf"

    def require_config(self) -> None:
        if not self.conf.exists():
            raise PctError(f"Configuration file 'nodes/pve1/lxc/{self.vmid}.conf' does not exist", 2)

    def config(self) -> dict[str, str]:
        pairs = (line.partition(": ") for line in self.conf.read_text("utf-8").splitlines() if line)
        return {key: value for key, _, value in pairs}

    def lock_name(self) -> str:
        return self.config().get("lock", "") if self.conf.exists() else ""

    def check_lock(self) -> None:
        if name := self.lock_name():
            raise PctError(f"CT is locked ({name})")

    def init_pid(self) -> int | None:
        """Pid of process 1 of the container, if it is the one that was started."""
        try:
            state = json.loads((self.folder / "state.json").read_text("utf-8"))
        except (OSError, ValueError):
            return None
        return state["pid"] if start_ticks(state["pid"]) == state["ticks"] else None

    @contextlib.contextmanager
    def guest_lock(self):
        path = f"/run/lock/lxc/pve-config-{self.vmid}.lock"
        wait_s = float(self.knob("lock_wait_s", 10))
        with Path(path).open("w", encoding="utf-8") as file:
            end = time.monotonic() + wait_s
            said = False
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if not said:
                        print("trying to acquire lock...", file=sys.stderr)
                        said = True
                    if time.monotonic() > end:
                        raise PctError(f"can't lock file '{path}' - got timeout", 4) from None
                    time.sleep(0.02)
            yield

    def knob(self, name: str, default):
        try:
            return json.loads((self.folder / "knobs.json").read_text("utf-8")).get(name, default)
        except (OSError, ValueError):
            return default


def start_ticks(pid: int) -> int | None:
    try:
        data = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except OSError:
        return None
    fields = data[data.rindex(")") + 2 :].split()
    return None if fields[0] in "ZX" else int(fields[19])


def record(folder: Path, argv: list[str]) -> None:
    entry = {"t": time.time(), "pid": os.getpid(), "argv": argv, "environ": dict(os.environ)}
    with (folder / "pct.ndjson").open("a", encoding="ascii") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(json.dumps(entry) + "\n")


def decoded_by_host(word: str) -> str:
    """Under LANG=C perl turns every byte above 127 into U+FFFD before it reaches the container."""
    locale = os.environ.get("LC_ALL") or os.environ.get("LC_CTYPE") or os.environ.get("LANG") or "C"
    if re.search(r"utf-?8", locale, re.IGNORECASE):
        return word
    data = os.fsencode(word)
    return b"".join(bytes([b]) if b < 128 else b"\xef\xbf\xbd" for b in data).decode("utf-8")


def setns(pid: int, names: tuple[str, ...]) -> None:
    fds = [os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY) for name in names]
    for fd in fds:
        if libc.setns(fd, 0) != 0:
            raise OSError(ctypes.get_errno(), "setns")
        os.close(fd)


def attach_failed(vmid: str) -> PctError:
    where = f"lxc-attach: {vmid}: ../src/lxc/attach.c:"
    first = f"{where} get_attach_context: 406 Connection refused - Failed to get init pid"
    second = f"{where} lxc_attach: 1469 Connection refused - Failed to get attach context"
    return PctError(f"{first}\n{second}", 1)


def unknown_option(name: str) -> PctError:
    return PctError(f"Unknown option: {name}\n400 unable to parse option\npct exec <vmid> [<extra-args>]")


def verb_exec(ct: Container, args: list[str]) -> int:
    keep_env = True
    while args and args[0].startswith("-") and args[0] != "--":
        option = args.pop(0).lstrip("-")
        if option != "keep-env":
            raise PctError(
                f"Unknown option: {option}\n400 unable to parse option\npct exec <vmid> [<extra-args>]", 255
            )
        keep_env = args.pop(0) not in ("0", "no", "false")
    had_separator = bool(args) and args[0] == "--"
    command = args[1:] if had_separator else args
    if not had_separator and (bad := next((a for a in command if a.startswith("-")), None)):
        raise unknown_option(bad.lstrip("-"))
    ct.require_config()
    pid = ct.init_pid()
    if pid is None:
        raise PctError(f"container '{ct.vmid}' not running!")
    if not command:
        raise PctError("400 not enough arguments\npct exec <vmid> [<extra-args>] [OPTIONS]", 2)
    while (ct.folder / "frozen").exists():
        time.sleep(0.02)
    cwd = str(Path.cwd())
    words = [decoded_by_host(word) for word in command]
    env = dict(os.environ) if keep_env else {}
    env |= {"PATH": PCT_PATH_IN_CT, "container": "lxc", "TERM": "linux"}
    try:
        setns(pid, ("pid", "mnt", "uts", "ipc"))
    except OSError:
        raise attach_failed(ct.vmid) from None
    child = os.fork()
    if child == 0:
        attach(ct.vmid, words, env, cwd)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return 128 - code if code < 0 else code


def attach(vmid: str, words: list[str], env: dict[str, str], cwd: str) -> None:
    try:
        os.chdir(cwd)
    except OSError:
        os.chdir("/")
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        os.execvpe(words[0], words, env)
    except OSError as error:
        text = f'{error.strerror} - Failed to exec "{words[0]}"'
        os.write(
            2, f"lxc-attach: {vmid}: ../src/lxc/attach.c: lxc_attach_run_command: 1841 {text}\n".encode()
        )
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def in_container(pid: int, work) -> None:
    """Run `work` in a child that sees the container's files; only its stderr comes back."""
    child = os.fork()
    if child == 0:
        try:
            setns(pid, ("mnt",))
            work()
        finally:
            os._exit(0)
    os.waitpid(child, 0)


def verb_push(ct: Container, args: list[str]) -> int:
    options, (source, dest) = split_options(args, 2)
    pid = ct.init_pid()
    if pid is None:
        raise PctError("can only push files to a running CT")
    with ct.guest_lock():
        try:
            data = Path(source).open("rb")  # noqa: SIM115  handed to the child
            data_fd = data.fileno()
        except IsADirectoryError:
            data_fd = os.open("/dev/null", os.O_RDONLY)
        except OSError:
            print(f"failed to open {source} for reading", file=sys.stderr)
            return 0
        limit = ct.knob("push_stops_at", None)
        in_container(pid, lambda: write_in_place(data_fd, dest, options, limit))
    return 0


def write_in_place(data_fd: int, dest: str, options: dict[str, str], limit: int | None) -> None:
    """As pct does it: truncate the target itself, ignore every write error."""
    dest = "/" + dest.lstrip("/")
    try:
        fd = os.open(dest, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    except OSError as error:
        text = error.strerror if error.errno != 26 else "Text file busy"
        print(f"failed to create file: {dest}: {text}", file=sys.stderr, flush=True)
        return
    if "perms" in options:
        try:
            os.fchmod(fd, int(options["perms"], 8))
        except ValueError:
            print(f"invalid mode: '{options['perms']}'", file=sys.stderr, flush=True)
            return
    done = 0
    with contextlib.suppress(OSError):
        while chunk := os.read(data_fd, 1 << 20):
            if limit is not None:
                chunk = chunk[: max(0, limit - done)]
            while chunk:
                written = os.write(fd, chunk)
                done, chunk = done + written, chunk[written:]


def verb_pull(ct: Container, args: list[str]) -> int:
    _, (source, dest) = split_options(args, 2)
    pid = ct.init_pid()
    if pid is None:
        raise PctError("can only pull files from a running VM at /usr/share/perl5/PVE/CLI/pct.pm line 700.")
    with ct.guest_lock():
        out = os.open(dest, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)

        def work() -> None:
            try:
                data = os.open("/" + source.lstrip("/"), os.O_RDONLY)
            except OSError as error:
                print(f"failed to open {source}: {error.strerror}", file=sys.stderr, flush=True)
                return
            with contextlib.suppress(OSError):
                while chunk := os.read(data, 1 << 20):
                    os.write(out, chunk)

        in_container(pid, work)
    return 0


def split_options(args: list[str], count: int) -> tuple[dict[str, str], list[str]]:
    options, words = {}, []
    rest = iter(args)
    for word in rest:
        if word.startswith("-"):
            options[word.lstrip("-")] = next(rest, "")
        else:
            words.append(word)
    if len(words) != count:
        raise PctError("400 not enough arguments\npct <verb> <vmid> ...", 2)
    return options, words


def verb_start(ct: Container, args: list[str]) -> int:
    if not ct.conf.exists():
        raise PctError(f"Configuration file 'nodes/pve1/lxc/{ct.vmid}.conf' does not exist", 255)
    with ct.guest_lock():
        if ct.lock_name() != "mounted":
            ct.check_lock()
        if ct.init_pid() is not None:
            raise PctError(f"CT {ct.vmid} already running")
        if text := ct.knob("start_fails", ""):
            raise PctError(text)
        launch_init(ct)
    return 0


def launch_init(ct: Container) -> None:
    """Start process 1 of the container, detached from the session that asked for it."""
    ready_in, ready_out = os.pipe()
    if os.fork() == 0:
        os.setsid()
        null = os.open("/dev/null", os.O_RDWR)
        for fd in (0, 1):
            os.dup2(null, fd)
        log = os.open(ct.folder / "init.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 2)
        if libc.unshare(CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID) != 0:
            os._exit(1)
        init = os.fork()
        if init == 0:
            close_all_but(ready_out)
            run_init(ct, ready_out)
        state = {"pid": init, "ticks": start_ticks(init)}
        write_whole(ct.folder / "state.json", json.dumps(state))
        os._exit(0)
    os.close(ready_out)
    answer = os.read(ready_in, 100)
    os.wait()
    if answer != b"ok":
        raise PctError(f"startup for container '{ct.vmid}' failed")


def close_all_but(kept: int) -> None:
    """Process 1 lives on: it must hold no lock file of the command that started it."""
    os.closerange(3, kept)
    os.closerange(kept + 1, 1024)


def write_whole(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(text, "utf-8")
    temporary.replace(path)


def mount(*args: str) -> None:
    subprocess.run(["mount", *args], check=True, stdout=subprocess.DEVNULL)


def run_init(ct: Container, ready: int) -> None:
    try:
        build_root(ct)
        libc.sethostname(b"ct" + ct.vmid.encode(), len(ct.vmid) + 2)
        signal.signal(SIGPWR, lambda *_: clean_shutdown(ct))
        signal.signal(signal.SIGRTMIN + 3, lambda *_: clean_shutdown(ct))
        os.write(ready, b"ok")
        os.close(ready)
        while True:
            try:
                os.waitpid(-1, 0)
            except ChildProcessError:
                signal.sigtimedwait([], 0.05)
    finally:
        os._exit(1)


def clean_shutdown(ct: Container) -> None:
    """As an init does it: TERM to all, a grace period, then the end of process 1 kills the rest."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGTERM)
    end = time.monotonic() + SHUTDOWN_GRACE_S
    while time.monotonic() < end:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                signal.sigtimedwait([], 0.01)
        except ChildProcessError:
            others = [p.name for p in Path("/proc").iterdir() if p.name.isdigit() and p.name != "1"]
            if not others:
                break
            signal.sigtimedwait([], 0.01)
    os._exit(0)


SHUTDOWN_GRACE_S = 60.0


def build_root(ct: Container) -> None:
    """A root of its own: the host's system folders, private data folders, new /proc with a new boot id."""
    host = json.loads((ct.host / "host.json").read_text("utf-8"))
    mount("--make-rprivate", "/")
    root = ct.folder / "rootfs"
    root.mkdir(exist_ok=True)
    mount("-t", "tmpfs", "none", str(root))
    for entry in Path("/").iterdir():
        place = root / entry.name
        if entry.name in (*PRIVATE, "proc", "lost+found", "old_root"):
            continue
        if entry.is_symlink():
            place.symlink_to(entry.readlink())
        elif entry.is_dir():
            place.mkdir()
            mount("--rbind", str(entry), str(place))
    for name in PRIVATE:
        private = ct.folder / "fs" / name
        private.mkdir(parents=True, exist_ok=True)
        (root / name).mkdir()
        mount("--bind", str(private), str(root / name))
    for path in [*host["keep"], *json.loads((ct.folder / "binds.json").read_text("utf-8"))]:
        place = root / path.lstrip("/")
        if str(path).startswith(str(ct.host)) or not Path(path).is_dir():
            continue
        place.mkdir(parents=True, exist_ok=True)
        mount("--bind", path, str(place))
    (root / "tmp").chmod(0o1777)
    (root / "proc").mkdir()
    mount("-t", "proc", "proc", str(root / "proc"))
    boot_id = ct.folder / "boot_id"
    boot_id.write_text(f"{uuid.uuid4()}\n", "ascii")
    mount("--bind", str(boot_id), str(root / "proc/sys/kernel/random/boot_id"))
    (root / ".old").mkdir()
    os.chdir(root)
    subprocess.run(["pivot_root", ".", ".old"], check=True)
    os.chdir("/")
    subprocess.run(["umount", "-l", "/.old"], check=True)
    Path("/.old").rmdir()


def wait_stopped(ct: Container, limit_s: float) -> bool:
    end = time.monotonic() + limit_s
    while ct.init_pid() is not None:
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def verb_stop(ct: Container, args: list[str]) -> int:
    with ct.guest_lock():
        if ct.conf.exists() and ct.lock_name() != "mounted":
            ct.check_lock()
        pid = ct.init_pid()
        if pid is None:
            raise PctError(f"CT {ct.vmid} not running")
        os.kill(pid, signal.SIGKILL)
        wait_stopped(ct, STOP_WAIT_S)
    return 0


def verb_shutdown(ct: Container, args: list[str]) -> int:
    options, _ = split_options(args, 0)
    with ct.guest_lock():
        if ct.conf.exists():
            ct.check_lock()
        pid = ct.init_pid()
        if pid is None:
            raise PctError(f"CT {ct.vmid} not running")
        os.kill(pid, SIGPWR)
        if not wait_stopped(ct, float(options.get("timeout", 60))):
            if options.get("forceStop", "0") == "0":
                raise PctError("command 'lxc-stop' failed: exit code 1")
            os.kill(pid, signal.SIGKILL)
            wait_stopped(ct, STOP_WAIT_S)
    return 0


def verb_reboot(ct: Container, args: list[str]) -> int:
    """Looks at no config lock, and always forces after its timeout."""
    options, _ = split_options(args, 0)
    with ct.guest_lock():
        pid = ct.init_pid()
        if pid is None:
            raise PctError(f"VM {ct.vmid} not running")
        os.kill(pid, SIGPWR)
        if not wait_stopped(ct, float(options.get("timeout", 60))):
            os.kill(pid, signal.SIGKILL)
            wait_stopped(ct, STOP_WAIT_S)
        launch_init(ct)
    return 0


def verb_status(ct: Container, args: list[str]) -> int:
    ct.require_config()
    word = "running" if ct.init_pid() is not None else "stopped"
    if "--verbose" not in args and "-verbose" not in args:
        print(f"status: {word}")
        return 0
    config = ct.config()
    fields = {
        "cpus": config.get("cores", "2"),
        "disk": "0",
        "maxmem": str(int(config.get("memory", "512")) << 20),
        "mem": "0",
        "name": config.get("hostname", f"ct{ct.vmid}"),
        "status": word,
        "type": "lxc",
        "uptime": "0",
        "vmid": ct.vmid,
    }
    if lock := ct.lock_name():
        fields["lock"] = lock
    if pid := ct.init_pid():
        fields["pid"] = str(pid)
    for key in sorted(fields):
        print(f"{key}: {fields[key]}")
    return 0


def verb_config(ct: Container, args: list[str]) -> int:
    ct.require_config()
    for key, value in sorted(ct.config().items()):
        print(f"{key}: {value}")
    return 0


def verb_unlock(ct: Container, args: list[str]) -> int:
    if not ct.lock_name():
        raise PctError("no lock found trying to remove any lock")
    lines = [line for line in ct.conf.read_text("utf-8").splitlines() if not line.startswith("lock:")]
    write_whole(ct.conf, "\n".join(lines) + "\n")
    return 0


def list_containers(folder: Path) -> int:
    rows = []
    for place in sorted((folder / "ct").iterdir(), key=lambda p: int(p.name)):
        ct = Container(folder, place.name)
        if ct.conf.exists():
            word = "running" if ct.init_pid() is not None else "stopped"
            rows.append((ct.vmid, word, ct.lock_name(), ct.config().get("hostname", f"ct{ct.vmid}")))
    if rows:
        for row in [("VMID", "Status", "Lock", "Name"), *rows]:
            print("{:<10} {:<10} {:<12} {:<20}".format(*row))
    return 0


def complete(word: str) -> str:
    """An unambiguous prefix of a verb works."""
    matches = [verb for verb in VERBS if verb == word] or [verb for verb in VERBS if verb.startswith(word)]
    if not word or len(matches) != 1:
        raise PctError(f"ERROR: unknown command 'pct {word}'\npct <verb> <vmid> [ARGS] [OPTIONS]")
    return matches[0]


def main(folder: Path, argv: list[str]) -> int:
    record(folder, argv)
    if os.geteuid() != 0:
        raise PctError("please run as root")
    verb = complete(argv[0] if argv else "")
    if verb == "list":
        return list_containers(folder)
    if len(argv) < 2:
        raise PctError(f"400 not enough arguments\npct {verb} <vmid> [OPTIONS]", 2)
    ct = Container(folder, argv[1])
    return globals()[f"verb_{verb}"](ct, argv[2:])


if __name__ == "__main__":
    try:
        sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
    except PctError as death:
        print(death.text, file=sys.stderr)
        sys.exit(death.code)
