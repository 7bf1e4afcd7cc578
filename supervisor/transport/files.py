"""Copies into and out of a node, as small shell programs that each transport runs in its own way.

`put` writes to a temporary name beside the target, compares SHA-256 in the node, syncs and renames, so the
final name is either untouched or complete. `get` reads with a limit. The same text runs on `local`, over
`ssh` and inside a container. Called by the transports only; must not know how a command reaches the node.
"""

from __future__ import annotations

import hashlib
import posixpath
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from supervisor.domain.errors import (
    ChecksumMismatchError,
    CommandFailedError,
    DeadlineError,
    OutcomeUnknownError,
    RequestError,
    SupervisorError,
    TransportError,
)
from supervisor.transport.base import CommandResult, Progress

CHUNK_BYTES = 256 << 10
"""Largest piece handed to a connection at once; larger ones slow paramiko down a hundredfold."""

_WRITE_FAILED, _MISMATCH, _RENAME_FAILED = 73, 74, 75
_NOT_FOUND, _NOT_A_FILE = 66, 67

_PART = ".dflash-part-"

HASH_FUNCTION = """hash() {
if [ "$1" -gt 16777216 ] && command -v openssl > /dev/null; then openssl dgst -sha256 -r; else sha256sum; fi
}
"""
"""Shell function: SHA-256 of stdin, of so many bytes; openssl starts slower and hashes much faster."""

# A lost link must not end the script (SIGPIPE) before it has cleaned up.
_FAIL_FUNCTION = """trap '' PIPE
fail() { rm -f -- "$1"; exit "$2"; }
"""

# The last line but one removes what a power cut or a lost link left behind a day ago or earlier.
_RENAME = f"""seen=${{seen%% *}}
[ "$seen" = "$want" ] || {{ rm -f -- "$1"; printf %s "$seen"; exit {_MISMATCH}; }}
chmod "$3" "$1" && sync "$1" && mv -fT -- "$1" "$4" || fail "$1" {_RENAME_FAILED}
sync "${{4%/*}}/"
find "${{4%/*}}/" -maxdepth 1 -type f -name '{_PART}*' -mmin +1440 -delete
printf %s "$seen"
"""

# The digest follows the bytes on stdin, so one pass over the source is enough. A cut link ends stdin early:
# the digest line is then missing, nothing matches and the temporary file goes away.
_RECEIVE = f"""umask 077
head -c "$2" > "$1" || fail "$1" {_WRITE_FAILED}
IFS= read -r want || want=
seen=$(hash "$2" < "$1") || fail "$1" {_WRITE_FAILED}
"""

_VERIFY = f"""want=$5
seen=$(hash "$2" < "$1") || exit {_WRITE_FAILED}
"""

_PUT_SCRIPT = HASH_FUNCTION + _FAIL_FUNCTION + _RECEIVE + _RENAME
_COMMIT_SCRIPT = HASH_FUNCTION + _FAIL_FUNCTION + _VERIFY + _RENAME

_GET_SCRIPT = """[ -e "$1" ] || exit 66
[ -d "$1" ] && exit 67
exec head -c "$2" < "$1"
"""

_REASONS = (
    ("No space left on device", "NoSpace", "free space on the node"),
    ("Disk quota exceeded", "NoSpace", "raise the quota or free space on the node"),
    ("Read-only file system", "ReadOnlyFileSystem", "choose a folder on a writable file system"),
    ("Permission denied", "PermissionDenied", "choose a folder that the user may write to"),
    ("No such file", "NoSuchDirectory", "create the folder first"),
    ("nonexistent", "NoSuchDirectory", "create the folder first"),
    ("cannot overwrite directory", "IsADirectory", "choose another name"),
)


class Upload:
    """The bytes of one copy, hashed and counted while they are handed out in pieces."""

    def __init__(self, source: Path | bytes, progress: Progress | None = None) -> None:
        self._source = source
        self._progress = progress
        self._hash = hashlib.sha256()
        self._failure: OSError | None = None
        if isinstance(source, bytes):
            self.size = len(source)
        else:
            try:
                self.size = source.stat().st_size
            except OSError as error:
                raise _source_error(source, error) from error

    @property
    def digest(self) -> str:
        """Hex digest of what `pieces` has handed out so far."""
        return self._hash.hexdigest()

    def check(self) -> None:
        """Raise what went wrong while the local file was read."""
        if self._failure is not None and isinstance(self._source, Path):
            raise _source_error(self._source, self._failure) from self._failure

    def pieces(self) -> Iterator[bytes]:
        """Yield the content, then one line with its digest; a source that changes size yields no digest."""
        self._hash = hashlib.sha256()
        done = 0
        try:
            for piece in self._read():
                self._hash.update(piece)
                done += len(piece)
                yield piece
                if self._progress:
                    self._progress(done, self.size)
        except OSError as error:
            self._failure = error
            return
        if done == self.size:
            yield f"{self.digest}\n".encode()

    def _read(self) -> Iterator[bytes]:
        if isinstance(self._source, bytes):
            for start in range(0, len(self._source), CHUNK_BYTES):
                yield self._source[start : start + CHUNK_BYTES]
            return
        left = self.size
        with self._source.open("rb") as file:
            while left > 0 and (piece := file.read(min(left, CHUNK_BYTES))):
                left -= len(piece)
                yield piece


@dataclass(frozen=True, slots=True)
class Target:
    """Where a copy goes: its final absolute path, and the temporary name beside it."""

    path: str
    temporary: str

    @classmethod
    def at(cls, path: str) -> Target:
        """Check `path` and choose a random temporary name in the same folder."""
        folder, name = posixpath.split(path)
        if not posixpath.isabs(path) or name in ("", ".", "..") or "\0" in path:
            raise RequestError(
                f"cannot copy to {path!r}: it must be an absolute path of a file", reason="BadPath"
            )
        return cls(path, posixpath.join(folder, f"{_PART}{secrets.token_hex(8)}"))


def put_argv(target: Target, *, size: int, mode: int) -> tuple[str, ...]:
    """The program that receives `size` bytes and a digest line on stdin and puts them at `target`."""
    return ("/bin/sh", "-c", _PUT_SCRIPT, "put", target.temporary, str(size), f"{mode:o}", target.path)


def commit_argv(target: Target, *, size: int, digest: str, mode: int) -> tuple[str, ...]:
    """The program that verifies a temporary file which lies in the node already, and renames it."""
    words = (target.temporary, str(size), f"{mode:o}", target.path, digest)
    return ("/bin/sh", "-c", _COMMIT_SCRIPT, "commit", *words)


def get_argv(path: str, *, max_bytes: int) -> tuple[str, ...]:
    """The program that writes at most `max_bytes` + 1 bytes of `path` to stdout."""
    return ("/bin/sh", "-c", _GET_SCRIPT, "get", path, str(max_bytes + 1))


def put_digest(result: CommandResult, target: Target, *, expected: str) -> str:
    """The digest that the node confirmed.

    Raises:
        ChecksumMismatchError: other bytes arrived than were sent; the final name is untouched.
        CommandFailedError: the node could not write; `reason` and `path` say what and where.
    """
    seen = result.stdout.decode("ascii", "replace")
    if result.exit_code == _MISMATCH or (result.exit_code == 0 and seen != expected):
        raise ChecksumMismatchError(
            f"bytes at {target.path} differ from those sent: {expected[:12]} sent, {seen[:12] or 'no'} there",
            hint="repeat the copy; if it happens again, check the node's disk",
            path=target.path,
            expected=expected,
            seen=seen,
        )
    if result.exit_code != 0:
        raise _file_error(result, target.path, f"cannot write {target.path}")
    return seen


def get_content(result: CommandResult, path: str, *, max_bytes: int) -> bytes:
    """The content that `get_argv` printed.

    Raises:
        CommandFailedError: reason FileNotFound, IsADirectory, FileTooLarge, PermissionDenied ...
    """
    if result.exit_code == _NOT_FOUND:
        raise _failed(result, path, f"no file {path} on the node", "FileNotFound", None)
    if result.exit_code == _NOT_A_FILE:
        raise _failed(result, path, f"{path} on the node is a directory", "IsADirectory", None)
    if result.exit_code != 0:
        raise _file_error(result, path, f"cannot read {path}")
    if len(result.stdout) > max_bytes or result.is_truncated:
        message = f"{path} is larger than {max_bytes} bytes"
        raise _failed(result, path, message, "FileTooLarge", "read it in parts, or raise the limit")
    return result.stdout


def harmless(error: SupervisorError, path: str) -> SupervisorError:
    """Restate an unknown outcome for a copy: the final name is whole or untouched, repeating it is safe."""
    if not isinstance(error, OutcomeUnknownError):
        return error
    deadline_s = error.data.get("deadline_s")
    if deadline_s is not None:
        return DeadlineError(
            f"copy of {path} not done within {deadline_s:g} s", path=path, deadline_s=deadline_s
        )
    return TransportError(f"link lost while {path} was copied", reason="LinkLost", path=path)


def _file_error(result: CommandResult, path: str, what: str) -> CommandFailedError:
    text = result.stderr.decode("utf-8", "replace").strip()
    for needle, reason, hint in _REASONS:
        if needle in text:
            return _failed(result, path, f"{what}: {text}", reason, hint)
    return _failed(result, path, f"{what}: {text or f'status {result.exit_code}'}", "FileFailed", None)


def _failed(
    result: CommandResult, path: str, message: str, reason: str, hint: str | None
) -> CommandFailedError:
    return CommandFailedError(
        message,
        reason=reason,
        hint=hint,
        path=path,
        argv=result.argv[3:],
        exit_code=result.exit_code,
        stderr=result.stderr.decode("utf-8", "replace"),
    )


def _source_error(source: Path, error: OSError) -> RequestError:
    return RequestError(
        f"cannot read {source}: {error.strerror or error}", reason="SourceUnreadable", path=str(source)
    )
