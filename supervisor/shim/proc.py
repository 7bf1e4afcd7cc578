"""Processes by identity: who is alive, who belongs to an attempt, and signals that cannot miss.

An identity is (boot_id, start ticks of pid 1, pid, start ticks of pid) as read in this node. Signals go out
only through a pidfd that was opened before the identity was compared, so a reused pid is never hit. Nothing
here selects by name, pattern or use of a GPU. Used by the launcher, the per-attempt shim and the agent.
"""

from __future__ import annotations

import os
import select
import signal
from typing import Any, NamedTuple

from .records import RefusedError

ENVIRON_LIMIT_BYTES = 1 << 20


class Stat(NamedTuple):
    """What `/proc/<pid>/stat` says: state letter, parent, session, threads, start ticks."""

    state: str
    ppid: int
    session: int
    threads: int
    start_ticks: int

    @property
    def is_dead(self) -> bool:
        """A zombie or a process in its last moment; not one whose first thread left while others go on."""
        return self.state in "ZXx" and self.threads <= 1


def read_stat(pid: int) -> Stat | None:
    """`/proc/<pid>/stat`, or None if there is no such process."""
    try:
        with open("/proc/%d/stat" % pid, "rb") as file:
            data = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = data[data.rindex(b")") + 2 :].split()
    return Stat(fields[0].decode("ascii"), int(fields[1]), int(fields[3]), int(fields[17]), int(fields[19]))


def boot_id() -> str:
    """This boot of the node; in a container it is new on each container start."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def init_ticks() -> int:
    """Start ticks of pid 1 of this node."""
    stat = read_stat(1)
    return stat.start_ticks if stat is not None else 0


def identity_of(pid: int) -> dict[str, Any] | None:
    """The identity record of a process that exists now."""
    stat = read_stat(pid)
    if stat is None:
        return None
    return {"boot_id": boot_id(), "init_ticks": init_ticks(), "pid": pid, "start_ticks": stat.start_ticks}


def is_same_boot(identity: dict[str, Any]) -> bool:
    """Whether `identity` was recorded in the present boot of this node."""
    return identity.get("boot_id") == boot_id() and identity.get("init_ticks") == init_ticks()


def is_alive(identity: dict[str, Any] | None) -> bool | None:
    """True or False by evidence, None when it cannot be known (no record, or /proc refuses)."""
    if not isinstance(identity, dict) or not isinstance(identity.get("pid"), int):
        return None
    if not is_same_boot(identity):
        return False
    try:
        stat = read_stat(identity["pid"])
    except OSError:
        return None
    return stat is not None and not stat.is_dead and stat.start_ticks == identity.get("start_ticks")


def open_pidfd(identity: dict[str, Any]) -> int | None:
    """A pidfd pinned to exactly this process, or None if it is gone or the pid is another's now."""
    if not isinstance(identity.get("pid"), int) or identity["pid"] <= 1:
        return None
    try:
        fd = os.pidfd_open(identity["pid"])
    except ProcessLookupError:
        return None
    if is_alive(identity):
        return fd
    os.close(fd)
    return None


def signal_identity(identity: dict[str, Any], number: int) -> bool:
    """Send a signal to exactly this process; False if it is gone (nothing was signalled)."""
    fd = open_pidfd(identity)
    if fd is None:
        return False
    try:
        signal.pidfd_send_signal(fd, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(fd)
    return True


def wait_gone(fd: int, timeout_s: float) -> bool:
    """Wait until the process behind a pidfd has ended."""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(max(0, int(timeout_s * 1000))))


def signal_number(name: Any) -> int:
    """`SIGTERM`, `TERM` or 15 as a number, or a BadRequest."""
    if isinstance(name, int) and not isinstance(name, bool) and 0 < name < 65:
        return name
    text = str(name).upper()
    found = getattr(signal.Signals, text if text.startswith("SIG") else "SIG" + text, None)
    if found is None:
        raise RefusedError("BadRequest", "unknown signal: %r; use a name such as SIGTERM" % (name,))
    return int(found)


def has_token(pid: int, token: str) -> bool:
    """Whether the process carries our run token in its environment (a wiped one proves nothing)."""
    try:
        with open("/proc/%d/environ" % pid, "rb") as file:
            data = file.read(ENVIRON_LIMIT_BYTES)
    except OSError:
        return False
    return ("DFLASH_RUN_TOKEN=" + token).encode("ascii") in data.split(b"\0")


class Family:
    """The processes that are ours for one attempt: by session, descent, cgroup, token or earlier sight.

    Args:
        trainer: identity of the recorded trainer, which leads its own session.
        shim_pid: the per-attempt shim that orphans are re-parented to, or None when it is not the parent.
        token: value of DFLASH_RUN_TOKEN given to the trainer.
        cgroup: the attempt's own cgroup folder, or None.
    """

    def __init__(self, trainer: dict[str, Any], shim_pid: int | None, token: str, cgroup: str | None) -> None:
        self.trainer = trainer
        self.shim_pid = shim_pid
        self.token = token
        self.cgroup = cgroup
        self._seen: dict[int, int] = {}
        self._in_cgroup: set[int] = set()
        self._leads = False

    def members(self) -> list[dict[str, Any]]:
        """Identities of all living processes of the attempt, the trainer included if it lives."""
        if not is_same_boot(self.trainer):
            return []
        table = self._snapshot()
        ours = {pid for pid, stat in table.items() if self._is_ours(pid, stat)}
        ours |= self._descendants(table, ours)
        ours.discard(os.getpid())
        if self.shim_pid is not None:
            ours.discard(self.shim_pid)
        self._seen = {pid: table[pid].start_ticks for pid in ours}
        boot, ticks = boot_id(), init_ticks()
        alive = sorted(pid for pid in ours if not table[pid].is_dead)
        return [
            {"boot_id": boot, "init_ticks": ticks, "pid": pid, "start_ticks": table[pid].start_ticks}
            for pid in alive
        ]

    def _snapshot(self) -> dict[int, Stat]:
        table: dict[int, Stat] = {}
        for name in os.listdir("/proc"):
            if name.isdigit():
                try:
                    stat = read_stat(int(name))
                except OSError:
                    continue
                if stat is not None:
                    table[int(name)] = stat
        self._in_cgroup = set(_cgroup_pids(self.cgroup))
        # Once the trainer is reaped its number may lead a stranger's session, so the session proves nothing.
        leader = table.get(self.trainer["pid"])
        self._leads = leader is not None and leader.start_ticks == self.trainer["start_ticks"]
        return table

    def _is_ours(self, pid: int, stat: Stat) -> bool:
        # Nothing older than the trainer can descend from it: an old session id or pid is never mistaken.
        if stat.start_ticks < self.trainer["start_ticks"]:
            return False
        if pid == self.trainer["pid"]:
            return bool(stat.start_ticks == self.trainer["start_ticks"])
        if self._seen.get(pid) == stat.start_ticks or pid in self._in_cgroup:
            return True
        return (self._leads and stat.session == self.trainer["pid"]) or has_token(pid, self.token)

    def _descendants(self, table: dict[int, Stat], ours: set[int]) -> set[int]:
        roots = set(ours)
        if self.shim_pid is not None:
            roots.add(self.shim_pid)
        found: set[int] = set()
        for pid in table:
            chain = []
            current = pid
            while current > 1 and current in table and current not in roots and current not in found:
                chain.append(current)
                current = table[current].ppid
            if current in roots or current in found:
                found.update(p for p in chain if table[p].start_ticks >= self.trainer["start_ticks"])
        return found


def _cgroup_pids(cgroup: str | None) -> list[int]:
    if cgroup is None:
        return []
    try:
        with open(os.path.join(cgroup, "cgroup.procs"), encoding="ascii") as file:
            return [int(line) for line in file]
    except (OSError, ValueError):
        return []
