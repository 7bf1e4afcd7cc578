"""JSON that is always valid, whatever a trainer reported.

A loss may be NaN and a rate infinite; RFC 8259 knows neither. Such a number becomes `null`, because a missing
value is shown as missing by every consumer and 0 would be a lie. Used for every JSON answer and every stream.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from starlette.responses import JSONResponse


def render_json(content: Any) -> str:
    """Serialize compactly; non-finite numbers become null, datetimes RFC 3339."""
    try:
        return _dumps(content)
    except ValueError:
        return _dumps(without_non_finite(content))


def without_non_finite(value: Any) -> Any:
    """Copy of `value` with NaN and infinities replaced by None, at any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: without_non_finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_non_finite(item) for item in value]
    return value


class SafeJSONResponse(JSONResponse):
    """The default response class of the API."""

    def render(self, content: Any) -> bytes:
        """Serialize through `render_json`."""
        # A lone surrogate in a log line or a file name has no UTF-8 form; `replace` shows it as "?".
        return render_json(content).encode("utf-8", "replace")


def _dumps(content: Any) -> str:
    return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_default)


def _default(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat().replace("+00:00", "Z")
    raise TypeError(f"not JSON: {type(value).__name__}")
