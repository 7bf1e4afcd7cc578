"""Transport into a Proxmox container: `pct exec` and `pct push` stacked on the SSH transport of its host.

Nothing is taken from pct's exit codes, which lie or mean several things: a command's own status comes from
markers printed inside the container, and what pct says is told apart by its texts. The environment is set
here, never inherited. `pct push` reports success on failure, so every copy is verified in the container
before it is renamed. Called through `Transport`; must not import paramiko.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from pathlib import Path

from supervisor.domain.errors import (
    AuthError,
    ChecksumMismatchError,
    CommandFailedError,
    ConfigError,
    ContainerError,
    LockedError,
    MissingError,
    NotRunningError,
    SupervisorError,
)
from supervisor.transport import files
from supervisor.transport.argv import BASE_ENV, check_argv, with_environment
from supervisor.transport.base import DEFAULT_MAX_OUTPUT, CommandResult, NodeProbe, Progress
from supervisor.transport.deadline import Deadline
from supervisor.transport.framing import FramedOutcome, conclude
from supervisor.transport.ssh import SshChannel, SshTransport
from supervisor.transport.ssh.transport import conclude_copy, on_this_loop, wait_begun

PCT_PATH = "/usr/sbin/pct"
MIN_VMID, MAX_VMID = 100, 999_999_999
SMALL_COPY_BYTES = 256 << 10
"""Copies up to this size go through the stdin of one `pct exec`; larger ones by way of the host's disk."""

_HOST_TMP = "/var/tmp"  # noqa: S108 a fresh private folder is made in it

# The folder goes away however the script ends; a cut link ends stdin early, and then the digests differ.
_STAGE_SCRIPT = (
    files.HASH_FUNCTION
    + """umask 077
folder=$1 size=$2
shift 2
trap 'rm -rf -- "$folder"' EXIT
trap 'exit 71' HUP INT PIPE TERM
mkdir -- "$folder" && head -c "$size" > "$folder/content" || exit 73
IFS= read -r want || want=
seen=$(hash "$size" < "$folder/content") || exit 73
[ "${seen%% *}" = "$want" ] || { echo "the copy on the host is incomplete" >&2; exit 74; }
"$@" < /dev/null
"""
)
_STATUS_LINE = re.compile(r"^status: (\w+)\s*$", re.MULTILINE)
_LOCK_LINE = re.compile(r"^lock: (\S+)\s*$", re.MULTILINE)

_NOT_RUNNING = re.compile(
    r"container '\d+' not running!|(?:CT|VM) \d+ not running"
    r"|can only (?:push|pull) files (?:to|from) a running"
    r"|Failed to get init pid|Failed to get attach context"
)
_MISSING = re.compile(r"Configuration file '[^']*' does not exist")
_CONFIG_LOCK = re.compile(r"CT is locked \(([\w-]+)\)")
_GUEST_LOCK = re.compile(r"can't lock file '[^']*' - got timeout")
_NOT_ROOT = re.compile(r"please run as root")
_SUDO = re.compile(
    r"sudo: (?:a password is required|no tty present)|is not allowed to execute|is not in the sudoers"
)
_PCT_MISSING = re.compile(r"pct: (?:command )?not found|pct: No such file")


def classify(text: str, vmid: int) -> SupervisorError | None:
    """What pct's (or sudo's, or the shell's) words mean; None when they mean nothing known."""
    if _MISSING.search(text):
        return MissingError(
            f"no container {vmid} on this host",
            hint="it may have been removed or migrated to another host: check the node's host and vmid",
            vmid=vmid,
        )
    if _NOT_RUNNING.search(text):
        return NotRunningError(f"container {vmid} is not running", hint=f"pct start {vmid}", vmid=vmid)
    if lock := _CONFIG_LOCK.search(text):
        return LockedError(
            f"container {vmid} is locked ({lock.group(1)})",
            hint="wait for the backup, snapshot or migration to end",
            vmid=vmid,
            lock=lock.group(1),
        )
    if _GUEST_LOCK.search(text):
        message = f"container {vmid} is busy: another start, stop or copy holds its lock file"
        hint = "wait until that has ended, then try again"
        return LockedError(message, reason="GuestLockBusy", hint=hint, vmid=vmid, lock="guest")
    if _NOT_ROOT.search(text) or _SUDO.search(text):
        return AuthError(
            f"the host's user may not run pct: {text}",
            reason="PctNotAllowed",
            hint=f"allow it by sudo: {PCT_PATH} with exec, push and status {vmid} --verbose",
        )
    if _PCT_MISSING.search(text):
        message = f"no {PCT_PATH} on this host: {text}"
        return ContainerError(message, reason="PctMissing", hint="is it a Proxmox VE host", vmid=vmid)
    return None


class PctTransport:
    """Runs commands as root in one container."""

    def __init__(
        self, host: SshTransport, vmid: int, *, pct_path: str = PCT_PATH, home: str = "/root"
    ) -> None:
        if isinstance(vmid, bool) or not MIN_VMID <= vmid <= MAX_VMID:
            raise ConfigError(
                f"container id {vmid} is not in {MIN_VMID}..{MAX_VMID}", field="vmid", value=vmid
            )
        self._host = host
        self._vmid = vmid
        sudo = () if host.target.user == "root" else ("sudo", "-n")
        self._pct = (*sudo, pct_path)
        clean = with_environment((), env={**BASE_ENV, "HOME": home, "USER": "root"}, clear=True)
        self._exec = (*self._pct, "exec", str(vmid), "--", *clean)

    async def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        deadline_s: float,
        max_output: int = DEFAULT_MAX_OUTPUT,
        is_read_only: bool = False,
    ) -> CommandResult:
        """Run to the end; see `Transport.run`."""
        outcome = await self._host.execute(
            check_argv(argv),
            prefix=self._exec,
            env=None,
            stdin=stdin,
            deadline_s=deadline_s,
            max_output=max_output,
        )
        self._check_entered(outcome)
        return conclude(outcome, is_read_only=is_read_only)

    async def open_channel(self, argv: Sequence[str], *, deadline_s: float) -> SshChannel:
        """Start a command in the container and keep its streams."""
        deadline = Deadline(deadline_s)
        words = check_argv(argv)
        channel = await self._host.start_channel(
            words, prefix=self._exec, env=None, deadline_s=deadline.remaining()
        )
        if await wait_begun(channel, words, deadline.remaining()):
            return channel
        text = channel.early_text
        await channel.close()
        raise classify(text, self._vmid) or self._pct_failed(text, None)

    async def put(
        self,
        source: Path | bytes,
        target: str,
        *,
        mode: int = 0o644,
        progress: Progress | None = None,
        deadline_s: float,
    ) -> str:
        """Copy to `target` in the container; see `Transport.put`."""
        place = files.Target.at(target)
        upload = files.Upload(source, on_this_loop(progress))
        if upload.size > SMALL_COPY_BYTES:
            return await self._put_by_host(upload, place, mode, Deadline(deadline_s))
        argv = files.put_argv(place, size=upload.size, mode=mode)
        outcome = await self._host.execute(
            argv, prefix=self._exec, env=None, stdin=upload.pieces(), deadline_s=deadline_s, lane="bulk"
        )
        upload.check()
        self._check_entered(outcome)
        return files.put_digest(conclude_copy(outcome, target), place, expected=upload.digest)

    async def get(self, source: str, *, max_bytes: int, deadline_s: float) -> bytes:
        """Read a file of the container; see `Transport.get`."""
        outcome = await self._host.execute(
            check_argv(files.get_argv(source, max_bytes=max_bytes)),
            prefix=self._exec,
            env=None,
            deadline_s=deadline_s,
            max_output=max_bytes + 1,
            lane="bulk",
        )
        self._check_entered(outcome)
        return files.get_content(conclude_copy(outcome, source), source, max_bytes=max_bytes)

    async def probe(self, *, deadline_s: float) -> NodeProbe:
        """Ask the host for the container's status and lock, in one command."""
        try:
            result = await self._ask_pct("status", "--verbose", deadline_s=deadline_s)
        except SupervisorError as error:
            return NodeProbe(is_reachable=False, reason=error.reason, message=error.message)
        text = result.stdout.decode("utf-8", "replace")
        status, lock = _STATUS_LINE.search(text), _LOCK_LINE.search(text)
        if status is None:
            said = f"{text}\n{result.stderr.decode('utf-8', 'replace')}".strip()
            cause = classify(said, self._vmid) or self._pct_failed(said, result.exit_code)
            return NodeProbe(is_reachable=False, reason=cause.reason, message=cause.message)
        is_running = status.group(1) == "running"
        return NodeProbe(
            is_reachable=is_running,
            reason="Ok" if is_running else NotRunningError.reason,
            message=f"container {self._vmid} is {status.group(1)}",
            container_status=status.group(1),
            container_lock=lock.group(1) if lock else None,
        )

    async def close(self) -> None:
        """Close the connections to the host."""
        await self._host.close()

    async def _ask_pct(self, verb: str, *options: str, deadline_s: float) -> CommandResult:
        words = (*self._pct, verb, str(self._vmid), *options)
        return await self._host.run(words, deadline_s=deadline_s, is_read_only=True)

    def _check_entered(self, outcome: FramedOutcome) -> None:
        """Raise what kept pct from reaching the container; say nothing about a command that has begun.

        The end of the container ends its commands without a report, and pct says so only at times.
        """
        if outcome.has_begun or outcome.is_expired or outcome.channel_status is None:
            return
        text = outcome.outer_text
        raise classify(text, self._vmid) or self._pct_failed(text, outcome.channel_status)

    def _pct_failed(self, text: str, status: int | None) -> ContainerError:
        return ContainerError(
            f"pct could not enter container {self._vmid} (status {status}): {text or 'no text'}",
            reason="PctFailed",
            vmid=self._vmid,
            exit_code=status,
        )

    async def _put_by_host(
        self, upload: files.Upload, place: files.Target, mode: int, deadline: Deadline
    ) -> str:
        """Copy to a private folder of the host, push it, verify and rename in the container."""
        folder = f"{_HOST_TMP}/dflash-put-{secrets.token_hex(8)}"
        push = (*self._pct, "push", str(self._vmid), f"{folder}/content", place.temporary, "--perms", "0600")
        stage = ("/bin/sh", "-c", _STAGE_SCRIPT, "stage", folder, str(upload.size), *push)
        outcome = await self._host.execute(
            stage, stdin=upload.pieces(), deadline_s=deadline.remaining(), lane="bulk"
        )
        upload.check()
        pushed = conclude_copy(outcome, place.path)
        text = pushed.stderr.decode("utf-8", "replace").strip()
        if error := classify(text, self._vmid):
            raise error
        if pushed.exit_code != 0:
            raise CommandFailedError(
                f"cannot bring {place.path} to the host: {text or f'status {pushed.exit_code}'}",
                reason="StagingFailed",
                hint=f"check {_HOST_TMP} on the host",
                path=place.path,
                exit_code=pushed.exit_code,
                stderr=text,
            )
        argv = files.commit_argv(place, size=upload.size, digest=upload.digest, mode=mode)
        return await self._commit(argv, place, upload.digest, deadline, push_text=text)

    async def _commit(
        self, argv: tuple[str, ...], place: files.Target, digest: str, deadline: Deadline, *, push_text: str
    ) -> str:
        """Rename what was pushed if it is what was sent; `pct push` succeeds by its own account always."""
        try:
            result = await self.run(argv, deadline_s=deadline.remaining())
            return files.put_digest(result, place, expected=digest)
        except (ChecksumMismatchError, CommandFailedError) as error:
            if push_text:
                error.hint = f"pct push said: {push_text}"
            raise
        except SupervisorError as error:
            raise files.harmless(error, place.path) from error
