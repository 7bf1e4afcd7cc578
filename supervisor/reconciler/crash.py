"""Named crash points: places where a test makes the daemon die as if by SIGKILL.

`crash("name")` stands between every two steps whose order matters. Without `DFLASH_CRASH_AT` in the
environment it does nothing. Each name is registered once, so a test can loop over all of them.
"""

from __future__ import annotations

import os

CRASH_POINTS = (
    "launch.before_preflight",
    "launch.before_commit",
    "launch.after_commit",
    "launch.after_start_request",
    "launch.after_apply",
    "stop.before_commit",
    "stop.after_commit",
    "stop.after_request",
    "stop.after_apply",
    "finish.before_apply",
    "finish.after_apply",
    "finish.after_ack",
    "restart.before_apply",
    "restart.after_apply",
    "operation.before_end",
    "deploy.after_claim",
    "deploy.after_shim",
    "deploy.after_release",
    "deploy.after_environment",
    "deploy.after_switch",
    "deploy.after_apply",
)

_CRASH_AT = os.environ.get("DFLASH_CRASH_AT", "")


def crash(name: str) -> None:
    """Die here, without cleaning up, when this point was asked for."""
    assert name in CRASH_POINTS, name
    if name == _CRASH_AT:
        os._exit(137)
