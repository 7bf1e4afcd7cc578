"""Deadlines that pass on purpose, on a machine that may stall for longer than the deadline.

`missed` is for calls that must be under way when their deadline passes: with a short one a loaded machine may
not have sent anything yet, which is another and equally right answer. Must not hide any other error.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from supervisor.domain.errors import ConnectError, TransportError

DEADLINES_S = (0.7, 4.0, 25.0, 100.0)
"""The first one does on a quiet machine; what is called must last longer than the last one."""


async def missed(call: Callable[[float], Awaitable[Any]]) -> TransportError:
    """The error of `call(deadline_s)` once a deadline passed after the command had been sent."""
    for deadline_s in DEADLINES_S:
        with pytest.raises(TransportError) as caught:
            await call(deadline_s)
        if not isinstance(caught.value, ConnectError):
            return caught.value
    raise AssertionError(f"nothing was sent within {DEADLINES_S[-1]:g} s: {caught.value}")
