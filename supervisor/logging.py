"""Log set-up of the daemon: structlog, console on a terminal, JSON lines otherwise.

Called once by `app.create_app`. Values under secret-looking keys are masked at any depth before they reach a
renderer. Context (run, attempt, operation) is bound with `structlog.contextvars`. Nothing else configures
logging, and no module logs a secret on purpose.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Mapping, MutableMapping
from typing import Any

import structlog

MASK = "********"
FRAMEWORKS = ("alembic", "uvicorn")
_SECRET_KEY = re.compile(
    r"(secret|token|passw|api_?key|authorization|cookie|credential|private)", re.IGNORECASE
)


def redact(value: Any, *, key: str = "") -> Any:
    """Copy `value` with everything under a secret-looking key masked, at any depth."""
    if key and _SECRET_KEY.search(key) and not isinstance(value, bool | int | float | None):
        return MASK
    if isinstance(value, Mapping):
        return {name: redact(item, key=str(name)) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact(item) for item in value]
    return value


def _redact_event(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    for name in list(event):
        if name != "event":
            event[name] = redact(event[name], key=name)
    return event


def configure_logging(level: str | None = None, style: str = "auto") -> None:
    """Send structlog and the standard library's loggers to stderr in one format.

    Without a level a person at a terminal sees warnings only, a log collector our own info lines too; the
    routine lines of the frameworks are left out for both.
    """
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _redact_event,
    ]
    is_terminal = style == "console" or (style == "auto" and sys.stderr.isatty())
    renderer: list[Any] = (
        [structlog.dev.ConsoleRenderer()]
        if is_terminal
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    )
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderer],
        )
    )
    root = logging.getLogger()
    for old in [item for item in root.handlers if getattr(item, "is_ours", False)]:
        root.removeHandler(old)
    handler.is_ours = True  # type: ignore[attr-defined]
    root.addHandler(handler)
    root.setLevel((level or ("warning" if sys.stderr.isatty() else "info")).upper())
    for name in FRAMEWORKS:
        logging.getLogger(name).setLevel(logging.WARNING if level is None else logging.NOTSET)
    logging.getLogger("paramiko").setLevel(logging.WARNING)
    logging.getLogger("uvicorn.access").setLevel(logging.WARNING)
