"""The checks behind `dflashctl doctor`: this installation, its settings, the way to the daemon.

Each finding is a dict with name, status (ok, warn, fail), value and remedy; nothing here changes anything.
"""

from __future__ import annotations

import platform
import shutil
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import supervisor
from supervisor.commands.session import default_token_file
from supervisor.domain.errors import SupervisorError

if TYPE_CHECKING:
    from supervisor.commands.session import Session

OLDEST_PYTHON = (3, 11)
Finding = dict[str, Any]

RIVALS = ("supervisor", "trainer")
"""Distributions of other people whose import names are ours."""


def diagnose(session: Session) -> list[Finding]:
    """All findings, in reading order."""
    return [
        _python(),
        _install(),
        _rivals(),
        _page(),
        _uv(),
        _url(session),
        _token(session),
        *_daemon(session),
    ]


def _finding(name: str, status: str, value: str, remedy: str | None = None) -> Finding:
    return {"name": name, "status": status, "value": value, "remedy": remedy}


def _python() -> Finding:
    version = platform.python_version()
    if sys.version_info >= OLDEST_PYTHON:
        return _finding("python", "ok", f"{version} ({sys.executable})")
    return _finding("python", "fail", version, "use Python 3.11 or newer")


def _install() -> Finding:
    try:
        version = metadata.version("dflash-supervisor")
    except metadata.PackageNotFoundError:
        return _finding("package", "warn", "not installed as a package", "install it: make setup")
    return _finding("package", "ok", f"dflash-supervisor {version}")


def _rivals() -> Finding:
    found = []
    for name in RIVALS:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    if found:
        return _finding(
            "environment",
            "fail",
            f"other packages with our import names: {', '.join(found)}",
            "give dflash-supervisor a virtual environment of its own",
        )
    return _finding("environment", "ok", sys.prefix)


def _page() -> Finding:
    folder = Path(supervisor.__file__).parent / "_webui"
    if (folder / "index.html").is_file():
        return _finding("page", "ok", str(folder))
    return _finding("page", "warn", "the web page is not built", "build it: make setup")


def _uv() -> Finding:
    found = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
    if found:
        return _finding("uv", "ok", found)
    return _finding(
        "uv",
        "warn",
        "no uv: environments cannot be built on nodes",
        "reinstall dflash-supervisor with its lock",
    )


def _url(session: Session) -> Finding:
    return _finding("url", "ok", f"{session.url} ({session.sources.get('url', 'default')})")


def _token(session: Session) -> Finding:
    path = session.token_file or default_token_file()
    try:
        session.read_token()
    except SupervisorError as error:
        return _finding("token", "fail", error.message, error.hint)
    mode = path.stat().st_mode & 0o777
    if mode & 0o077:
        return _finding("token", "warn", f"{path} is readable by others: {mode:04o}", f"chmod 600 {path}")
    return _finding("token", "ok", f"{path} ({session.sources.get('token_file', 'default')})")


def _daemon(session: Session) -> list[Finding]:
    try:
        with session.connect() as client:
            ready = client.get("/readyz")
            nodes = client.list_all("/v1/nodes")
    except SupervisorError as error:
        return [_finding("daemon", "fail", error.message, error.hint)]
    findings = [_finding("daemon", "ok", f"ready, version {ready.get('version', 'unknown')}")]
    for node in nodes:
        reachable = next((c for c in node.get("conditions") or [] if c["type"] == "Reachable"), None)
        if reachable is not None and reachable["status"] == "false":
            remedy = f"dflashctl node check {node['name']}"
            findings.append(
                _finding("node", "warn", f"{node['name']} is unreachable: {reachable['reason']}", remedy)
            )
    return findings
