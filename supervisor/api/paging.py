"""Cursor lists: a stable order, an opaque cursor, `next_cursor` until the end."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from supervisor.api.errors import HttpError

Json = dict[str, Any]
T = TypeVar("T")


def encode_cursor(key: str) -> str:
    """An opaque cursor behind the item with this key."""
    return base64.urlsafe_b64encode(key.encode()).decode().rstrip("=")


def decode_cursor(cursor: str | None) -> str | None:
    """The key in a cursor.

    Raises:
        HttpError: it is none of ours.
    """
    if cursor is None:
        return None
    try:
        padded = cursor + "=" * (-len(cursor) % 4)
        return base64.b64decode(padded, altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError) as error:
        raise HttpError(
            400, "not a cursor of this list", reason="BadCursor", hint="start again without a cursor"
        ) from error


def decode_number(cursor: str | None) -> int | None:
    """The integer key in a cursor, for lists ordered by number."""
    key = decode_cursor(cursor)
    if key is None:
        return None
    if not key.isdecimal() or len(key) > 18:
        raise HttpError(
            400, "not a cursor of this list", reason="BadCursor", hint="start again without a cursor"
        )
    return int(key)


def page_of(items: Sequence[T], *, key: Callable[[T], str], limit: int, cursor: str | None) -> Json:
    """One page of a short list that is sorted by `key` already; the items may still be rows."""
    after = decode_cursor(cursor)
    rest = [item for item in items if after is None or key(item) > after]
    shown = rest[:limit]
    next_cursor = encode_cursor(key(shown[-1])) if len(rest) > limit else None
    return {"items": shown, "next_cursor": next_cursor}
