"""Loopback ports that belong to the test that asked for one, also while nobody listens there.

`reserved_port` keeps a socket bound to the port that never listens: a connection to it is refused, the kernel
gives the number to nobody else, and a server that sets SO_REUSEADDR, as sshd and ours do, can still have it.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


def hold_port(port: int = 0) -> socket.socket:
    """A socket bound to `port`, or to a free one; the port is free again when it is closed."""
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", port))
    return holder


@contextmanager
def reserved_port() -> Iterator[int]:
    """The number of a port that stays ours until the block ends."""
    with hold_port() as holder:
        yield int(holder.getsockname()[1])
