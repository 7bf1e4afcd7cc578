"""Last steps of a deploy inside the node: make `current` point to a release, mark an environment complete.

Sent on stdin by `reconciler.scripts`; arguments: marker, one JSON object. Every change is written beside its
final name, fsynced and renamed, so a crash at any byte leaves the old state usable.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from typing import Any


def fsync_folder(path: str) -> None:
    """Make a rename in this folder durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_json(path: str, value: Any) -> None:
    """Write whole or not at all."""
    temporary = "%s.tmp-%d" % (path, os.getpid())
    with open(temporary, "w") as handle:
        json.dump(value, handle, sort_keys=True)
        handle.flush()
        os.fsync(handle.fileno())
    os.rename(temporary, path)
    fsync_folder(os.path.dirname(path))


def inspect(request: dict[str, Any]) -> dict[str, Any]:
    """Which of these content-addressed things are complete here?"""
    root = request["root"]
    found = {}
    for kind, path in request["want"].items():
        found[kind] = os.path.exists(os.path.join(root, path))
    try:
        current = os.readlink(os.path.join(root, "current"))
    except OSError:
        current = None
    return {"found": found, "current": current}


def begin_environment(request: dict[str, Any]) -> dict[str, Any]:
    """Remove what an interrupted build left, and mark the folder as being built."""
    path = os.path.join(request["root"], "envs", request["digest"])
    if os.path.exists(os.path.join(path, "complete.json")):
        return {"is_complete": True, "path": path}
    had_remains = os.path.isdir(path)
    if had_remains:
        shutil.rmtree(path)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    lock_folder = os.path.join(request["root"], "tmp")
    os.makedirs(lock_folder, exist_ok=True)
    return {"is_complete": False, "path": path, "had_remains": had_remains}


def complete_environment(request: dict[str, Any]) -> dict[str, Any]:
    """Write `complete.json`: from now on this folder is an environment and is never changed."""
    path = os.path.join(request["root"], "envs", request["digest"])
    write_json(os.path.join(path, "complete.json"), request["record"])
    return {"path": path}


def discard_environment(request: dict[str, Any]) -> dict[str, Any]:
    """Remove a build that failed, unless it is complete."""
    path = os.path.join(request["root"], "envs", request["digest"])
    if os.path.exists(os.path.join(path, "complete.json")):
        return {"removed": False}
    shutil.rmtree(path, ignore_errors=True)
    return {"removed": True}


def switch(request: dict[str, Any]) -> dict[str, Any]:
    """Point `<root>/current` to the release by renaming a new link over the old one."""
    link = os.path.join(request["root"], "current")
    temporary = "%s.tmp-%d" % (link, os.getpid())
    if os.path.lexists(temporary):
        os.unlink(temporary)
    os.symlink(request["target"], temporary)
    os.rename(temporary, link)
    fsync_folder(request["root"])
    return {"current": os.readlink(link)}


ACTIONS = {
    "inspect": inspect,
    "begin_environment": begin_environment,
    "complete_environment": complete_environment,
    "discard_environment": discard_environment,
    "switch": switch,
}


def main() -> None:
    """Run one action; an OSError becomes a reason with its errno, anything else is a crash to be seen."""
    marker, request = sys.argv[1], json.loads(sys.argv[2])
    try:
        reply = {"ok": True, "result": ACTIONS[request["action"]](request)}
    except OSError as error:
        reason = {28: "NoSpace", 30: "ReadOnly", 13: "PermissionDenied", 122: "NoSpace"}.get(
            error.errno or 0, "NodeFileError"
        )
        message = "%s: %s" % (error.filename, error.strerror)
        reply = {"ok": False, "error": {"reason": reason, "message": message, "errno": error.errno}}
    sys.stdout.write(marker + json.dumps(reply) + "\n")


main()
