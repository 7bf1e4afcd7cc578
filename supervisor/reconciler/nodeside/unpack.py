"""Unpack a release archive inside the node, verify every file, then give it its final name.

Sent on stdin by `reconciler.scripts`; arguments: marker, archive, root, digest. Stages under
`<root>/tmp`, refuses paths that leave the staging folder, links and special files, compares each file's
SHA-256 with the manifest that is in the archive, fsyncs, renames to `<root>/releases/<digest>`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tarfile
from typing import Any


class RefusedError(Exception):
    """The archive is not what it should be."""


def fsync_path(path: str) -> None:
    """Flush a file or a folder to disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def safe_path(staging: str, name: str) -> str:
    """Where this member goes; refuses everything that is not plainly below `staging`."""
    parts = name.split("/")
    if name.startswith("/") or "\x00" in name or any(part in ("", ".", "..") for part in parts):
        raise RefusedError("archive member has an unsafe path: %r" % name)
    return os.path.join(staging, *parts)


def extract(archive: str, staging: str) -> dict[str, str]:
    """Write all members below `staging`; returns {path: sha256}."""
    digests = {}
    with tarfile.open(archive, "r:gz") as bundle:
        for member in bundle:
            if member.name in ("", "."):
                continue
            target = safe_path(staging, member.name.rstrip("/"))
            if member.isdir():
                os.makedirs(target, exist_ok=True)
                continue
            if not member.isfile():
                raise RefusedError("archive member is neither file nor folder: %r" % member.name)
            os.makedirs(os.path.dirname(target), exist_ok=True)
            source = bundle.extractfile(member)
            assert source is not None
            hasher = hashlib.sha256()
            with open(target, "xb") as handle:
                while True:
                    chunk = source.read(1 << 20)
                    if not chunk:
                        break
                    hasher.update(chunk)
                    handle.write(chunk)
                handle.flush()
                os.fsync(handle.fileno())
            os.chmod(target, 0o555 if member.mode & 0o100 else 0o444)
            digests[member.name] = hasher.hexdigest()
    return digests


def verify(staging: str, digests: dict[str, str]) -> int:
    """Compare what was written with the manifest, both ways."""
    with open(os.path.join(staging, "manifest.json")) as handle:
        manifest = json.load(handle)
    expected = {
        path: (entry["sha256"] if isinstance(entry, dict) else entry)
        for path, entry in manifest["files"].items()
    }
    seen = {path: digest for path, digest in digests.items() if path != "manifest.json"}
    for path in sorted(set(expected) | set(seen)):
        if expected.get(path) != seen.get(path):
            raise RefusedError(
                "file does not match the manifest: %s: expected %s, seen %s"
                % (path, expected.get(path), seen.get(path))
            )
    return len(expected)


def main() -> None:
    """Unpack once; a release that is there already is left alone."""
    marker, archive, root, digest = sys.argv[1:5]
    final = os.path.join(root, "releases", digest)
    staging = os.path.join(root, "tmp", "release-%s.staging" % digest)
    try:
        is_existing = os.path.exists(os.path.join(final, "manifest.json"))
        count = 0
        if not is_existing:
            shutil.rmtree(staging, ignore_errors=True)
            os.makedirs(staging)
            os.makedirs(os.path.dirname(final), exist_ok=True)
            count = verify(staging, extract(archive, staging))
            for folder, _names, _files in os.walk(staging):
                fsync_path(folder)
            os.rename(staging, final)
            fsync_path(os.path.dirname(final))
        reply: dict[str, Any] = {
            "ok": True,
            "result": {"path": final, "existing": is_existing, "files": count},
        }
    except (RefusedError, tarfile.TarError, KeyError, ValueError, EOFError) as error:
        reply = {"ok": False, "error": {"reason": "ChecksumMismatch", "message": str(error), "errno": None}}
    except OSError as error:
        reason = {28: "NoSpace", 122: "NoSpace", 30: "ReadOnly", 13: "PermissionDenied"}.get(
            error.errno or 0, "NodeFileError"
        )
        message = "%s: %s" % (error.filename or final, error.strerror or error)
        reply = {"ok": False, "error": {"reason": reason, "message": message, "errno": error.errno}}
    if not reply["ok"]:
        shutil.rmtree(staging, ignore_errors=True)
    if os.path.exists(archive):
        os.unlink(archive)
    sys.stdout.write(marker + json.dumps(reply) + "\n")


main()
