"""The start request: what a caller may ask for, checked before anything happens in the node.

Read by the launcher only. A request that fails here leaves no trace. Secrets live in memory from here to the
trainer's environment and must not be written, logged or repeated in an error.
"""

from __future__ import annotations

import json
import os
import pwd
from typing import Any

from .proc import signal_number
from .records import STOP_DEFAULTS, RefusedError, check_id

API = 1
MAX_REQUEST_BYTES = 8 << 20
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class StartRequest:
    """A checked start request; attributes are named as the fields of the JSON."""

    def __init__(self, body: dict[str, Any]) -> None:
        if body.get("v") != API:
            raise RefusedError("BadRequest", "v: this shim speaks version %d, got %r" % (API, body.get("v")))
        self.attempt_id = check_id(body.get("attempt_id"), "attempt_id")
        self.run_id = check_id(body.get("run_id"), "run_id")
        self.run_name = str(body.get("run_name") or self.run_id)
        self.argv = _words(body, "argv")
        if not self.argv or not self.argv[0]:
            raise RefusedError("BadRequest", "argv: empty; give the program to run", field="argv")
        self.cwd = _absolute(body, "cwd", required=False)
        self.log_path = _absolute(body, "log_path", required=True) or ""
        self.env = _environment(body, "env")
        self.secrets = _environment(body, "secrets")
        self.gpus = [check_id(gpu, "gpus") for gpu in _words(body, "gpus")]
        self.share = bool(body.get("share", False))
        self.stop = parse_stop_policy(body.get("stop"))
        self.orphan_after_s = _number(body.get("orphan_after_s", 0), "orphan_after_s")
        self.spec = body.get("spec") if isinstance(body.get("spec"), dict) else {}
        limits = body.get("limits") if isinstance(body.get("limits"), dict) else {}
        self.min_free_bytes = int(_number((limits or {}).get("min_free_bytes") or 0, "limits.min_free_bytes"))
        self.use_cgroup = body.get("cgroup", "auto") != "off"
        self.token = os.urandom(16).hex()

    def environment(self, run_folder: str) -> dict[str, str]:
        """The trainer's whole environment: defaults, then `env`, then secrets, then our two names."""
        user = pwd.getpwuid(os.getuid())
        merged = {
            "PATH": DEFAULT_PATH,
            "HOME": user.pw_dir,
            "USER": user.pw_name,
            "LOGNAME": user.pw_name,
            "SHELL": "/bin/sh",
            "LANG": "C.UTF-8",
            "PYTHONUNBUFFERED": "1",
        }
        merged.update(self.env)
        merged.update(self.secrets)
        merged["DFLASH_RUN_DIR"] = run_folder
        merged["DFLASH_RUN_TOKEN"] = self.token
        return merged


def parse_start(data: bytes) -> StartRequest:
    """The request in `data`, or a RefusedError with reason BadRequest."""
    if len(data) > MAX_REQUEST_BYTES:
        raise RefusedError("BadRequest", "start request: larger than %d bytes" % MAX_REQUEST_BYTES)
    try:
        body = json.loads(data)
    except ValueError as error:
        # The text itself may hold a secret; only the place of the fault is repeated.
        where = getattr(error, "pos", None)
        raise RefusedError("BadRequest", "start request: not JSON (at byte %s)" % where) from None
    if not isinstance(body, dict):
        raise RefusedError("BadRequest", "start request: not a JSON object")
    return StartRequest(body)


def parse_stop_policy(value: Any) -> dict[str, Any]:
    """Stop policy with defaults filled in."""
    given = value if isinstance(value, dict) else {}
    policy: dict[str, Any] = dict(STOP_DEFAULTS)
    for key in policy:
        if given.get(key) is not None:
            policy[key] = given[key]
    signal_number(policy["signal"])
    for key in ("grace_s", "extend_max_s", "term_s", "kill_s", "verify_s"):
        policy[key] = _number(policy[key], "stop." + key)
    return policy


def _number(value: Any, field: str) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 <= value < 2**63:
        raise RefusedError("BadRequest", "%s: not a number >= 0: %r" % (field, value), field=field)
    return float(value)


def _words(body: dict[str, Any], field: str) -> list[str]:
    value = body.get(field) or []
    if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
        raise RefusedError("BadRequest", "%s: not a list of strings" % field, field=field)
    if any("\0" in word for word in value):
        raise RefusedError("BadRequest", "%s: holds a NUL byte" % field, field=field)
    return list(value)


def _absolute(body: dict[str, Any], field: str, required: bool) -> str | None:
    value = body.get(field)
    if value is None and not required:
        return None
    if not isinstance(value, str) or not value.startswith("/") or "\0" in value:
        raise RefusedError("BadRequest", "%s: not an absolute path: %r" % (field, value), field=field)
    return value


def _environment(body: dict[str, Any], field: str) -> dict[str, str]:
    value = body.get(field) or {}
    if not isinstance(value, dict):
        raise RefusedError("BadRequest", "%s: not an object of strings" % field, field=field)
    for name, text in value.items():
        is_bad_name = not name or "=" in name or "\0" in name
        if is_bad_name or not isinstance(text, str) or "\0" in text:
            # Only the name is repeated: the value may be a secret.
            raise RefusedError("BadRequest", "%s: not usable: %r" % (field, name), field=field, name=name)
    return dict(value)
