"""The shape of a check's answer, and the checks that need nothing of ours on the node.

`preflight` and `deploy` build their reports from these. A report says what was looked at, what was found and
what to do; it never decides whether to go on (that is `Report.is_passed` and its caller).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

MIN_PYTHON = (3, 9)
MIN_FREE_ROOT_BYTES = 2 << 30
"""Below this an environment with torch cannot be built."""
MIN_FREE_TMP_BYTES = 64 << 20

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One check: its outcome, the value seen, and the way out when it is not ok."""

    name: str
    status: Status
    value: str
    reason: str = "Ok"
    message: str = ""
    remedy: str = ""

    def to_json(self) -> dict[str, Any]:
        """As stored in `check_report` and shown by `dflashctl node check`."""
        return {
            "name": self.name,
            "status": self.status,
            "value": self.value,
            "reason": self.reason,
            "message": self.message,
            "remedy": self.remedy,
        }


@dataclass(slots=True)
class Report:
    """Findings in the order in which they were made, and the facts behind them."""

    findings: list[Finding] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def add(self, *findings: Finding) -> None:
        """Append findings."""
        self.findings.extend(findings)

    @property
    def is_passed(self) -> bool:
        """Whether nothing failed; warnings do not count."""
        return not self.failures()

    def failures(self) -> list[Finding]:
        """The findings that refuse a launch or deploy."""
        return [finding for finding in self.findings if finding.status == "fail"]

    def to_json(self) -> list[dict[str, Any]]:
        """All findings."""
        return [finding.to_json() for finding in self.findings]

    def summary(self) -> str:
        """The failures in one sentence, each with its value and remedy."""
        return "; ".join(
            f"{item.name}: {item.message or item.value}" + (f" ({item.remedy})" if item.remedy else "")
            for item in self.failures()
        )


def parse_version(text: str) -> tuple[int, ...]:
    """Leading numbers of a version, () when there are none."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def check_python(probe: Mapping[str, Any], *, minimum: tuple[int, int] = MIN_PYTHON) -> Finding:
    """Is the node's interpreter new enough for the shim?"""
    version = str(probe["python"]["version"])
    value = f"{version} ({probe['python']['executable']})"
    if parse_version(version) >= minimum:
        return Finding(name="python", status="ok", value=value)
    wanted = ".".join(str(part) for part in minimum)
    return Finding(
        name="python",
        status="fail",
        value=value,
        reason="PythonTooOld",
        message=f"Python {version} is older than {wanted}",
        remedy=f"install Python {wanted} or newer, or `dflashctl node set NODE --python PATH`",
    )


def check_folder(name: str, folder: Mapping[str, Any], *, min_free_bytes: int) -> Iterable[Finding]:
    """Is the folder writable, and is there room?"""
    path = str(folder["path"])
    if not folder["writable"]:
        yield Finding(
            name=f"{name} writable",
            status="fail",
            value=path,
            reason="NoSpace" if folder.get("errno") in (28, 122) else "NotWritable",
            message=f"cannot write to {path}: {folder['error']}",
            remedy="make it writable for the node's user, free space, or choose another folder",
        )
    else:
        yield Finding(name=f"{name} writable", status="ok", value=path)
    free = folder.get("free")
    if free is None:
        yield Finding(
            name=f"{name} free",
            status="warn",
            value="unknown",
            reason="DiskUnknown",
            message=f"free space of {path} could not be read: {folder.get('error')}",
            remedy="check the mount",
        )
    elif free < min_free_bytes:
        yield Finding(
            name=f"{name} free",
            status="fail",
            value=render_bytes(free),
            reason="NoSpace",
            message=f"{path} has {render_bytes(free)} free, {render_bytes(min_free_bytes)} are needed",
            remedy=f"free space on the file system of {path}",
        )
    else:
        yield Finding(name=f"{name} free", status="ok", value=render_bytes(free))


def check_uv_platform(probe: Mapping[str, Any], *, machine: str) -> Finding:
    """Can the installer that we carry run there? It is one binary for one processor and glibc."""
    libc = next(iter(probe.get("libc") or []), "")
    value = f"{probe.get('platform')} {probe.get('machine')} {libc or 'unknown libc'}"
    if probe.get("platform") == "linux" and probe.get("machine") == machine and libc in ("glibc", ""):
        return Finding(name="installer", status="ok", value=value)
    return Finding(
        name="installer",
        status="warn",
        value=value,
        reason="InstallerUnsupported",
        message=f"environments cannot be built there: the installer is for linux {machine} with glibc",
        remedy="use an external interpreter: [environment] python = PATH",
    )


def render_bytes(count: int) -> str:
    """Bytes for people, binary units."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
