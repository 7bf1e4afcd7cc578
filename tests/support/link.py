"""A TCP link that can be cut, frozen or refused: the wire between a test's client and its server.

`cut()` resets every connection; `freeze()` keeps them open but moves nothing, in either direction, as a
lost link or a stopped peer does; `thaw()` moves it all again; `refuse()` closes the listener; `after(n,
fault)` breaks the link once n more bytes went towards the server. Runs in one thread; loopback only.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading
from collections.abc import Callable

from tests.support.ports import hold_port

_CHUNK = 64 << 10
_BACKLOG_BYTES = 256 << 10


class _Pair:
    """One client connection and its onward connection."""

    def __init__(self, near: socket.socket, far: socket.socket) -> None:
        self.ends = (near, far)
        self.waiting = {near: bytearray(), far: bytearray()}
        self.is_over = {near: False, far: False}
        for end in self.ends:
            end.setblocking(False)

    def other(self, end: socket.socket) -> socket.socket:
        return self.ends[1] if end is self.ends[0] else self.ends[0]


class Link:
    """Forwards 127.0.0.1:`port` to a server's port until told otherwise."""

    def __init__(self) -> None:
        self.port = 0
        self._target = 0
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._listener: socket.socket | None = None
        self._held: socket.socket | None = None
        self._pairs: set[_Pair] = set()
        self._orders: list[Callable[[], None]] = []
        self._wake_in, self._wake_out = socket.socketpair()
        self._is_frozen = False
        self._is_stopped = False
        self._countdown: tuple[int, str] | None = None
        self._thread = threading.Thread(target=self._loop, name="test-link", daemon=True)
        self.bytes_to_server = 0
        self.connections = 0

    @property
    def is_frozen(self) -> bool:
        """Whether nothing moves now, by `freeze` or by `after`."""
        return self._is_frozen

    def start(self, target_port: int) -> None:
        """Begin to forward."""
        self._target = target_port
        self._held = hold_port()  # so that nobody else gets the port while `refuse` is in force
        self.port = self._held.getsockname()[1]
        self._selector.register(self._wake_in, selectors.EVENT_READ, None)
        self._listen()
        self._thread.start()

    def stop(self) -> None:
        """Close everything and end the thread."""
        if not self._thread.is_alive():
            return
        self._do(self._stop)
        self._thread.join()
        if self._held is not None:
            self._held.close()
        self._selector.close()
        self._wake_in.close()
        self._wake_out.close()

    def cut(self) -> None:
        """Reset every connection; new ones are welcome."""
        self._do(self._cut)

    def freeze(self) -> None:
        """Move no more bytes; connections stay open and new ones are accepted by the kernel only."""
        self._do(lambda: self._set_frozen(True))

    def thaw(self) -> None:
        """Go on where it stopped."""
        self._do(lambda: self._set_frozen(False))

    def refuse(self) -> None:
        """Close the listener and reset what is open: the machine is up, the port closed."""
        self._do(self._refuse)

    def accept(self) -> None:
        """Listen again on the same port."""
        self._do(self._listen)

    def after(self, count: int, fault: str) -> None:
        """`cut` or `freeze` by itself once `count` more bytes went towards the server."""
        self._do(lambda: setattr(self, "_countdown", (count, fault)))

    def _do(self, order: Callable[[], None]) -> None:
        done = threading.Event()

        def carry_out() -> None:
            order()
            done.set()

        with self._lock:
            self._orders.append(carry_out)
        self._wake_out.send(b"!")
        assert done.wait(60), "the test link hangs"

    def _listen(self) -> None:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        listener.listen(64)
        listener.setblocking(False)
        self._listener = listener
        self._selector.register(listener, selectors.EVENT_READ, "listener")

    def _refuse(self) -> None:
        if self._listener is not None:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None
        self._cut()

    def _stop(self) -> None:
        self._refuse()
        self._is_stopped = True

    def _set_frozen(self, is_frozen: bool) -> None:
        self._is_frozen = is_frozen
        for pair in list(self._pairs):
            self._watch(pair)

    def _cut(self) -> None:
        for pair in list(self._pairs):
            self._drop(pair, is_reset=True)

    def _drop(self, pair: _Pair, *, is_reset: bool) -> None:
        self._pairs.discard(pair)
        for end in pair.ends:
            with contextlib.suppress(KeyError):
                self._selector.unregister(end)
            if is_reset:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            end.close()

    def _loop(self) -> None:
        while not self._is_stopped:
            for key, events in self._selector.select():
                if key.data is None:
                    self._obey()
                elif key.data == "listener":
                    self._accept()
                elif key.data in self._pairs:
                    self._move(key.data, key.fileobj, events)  # type: ignore[arg-type]

    def _obey(self) -> None:
        self._wake_in.recv(64)
        with self._lock:
            orders, self._orders = self._orders, []
        for order in orders:
            order()

    def _accept(self) -> None:
        if self._listener is None:
            return
        near, _ = self._listener.accept()
        try:
            far = socket.create_connection(("127.0.0.1", self._target), timeout=60)
        except OSError:
            near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            near.close()
            return
        for end in (near, far):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connections += 1
        pair = _Pair(near, far)
        self._pairs.add(pair)
        self._watch(pair)

    def _watch(self, pair: _Pair) -> None:
        for end in pair.ends:
            events = 0
            if not self._is_frozen:
                other = pair.other(end)
                if not pair.is_over[end] and len(pair.waiting[other]) < _BACKLOG_BYTES:
                    events |= selectors.EVENT_READ
                if pair.waiting[end]:
                    events |= selectors.EVENT_WRITE
            known = end in self._selector.get_map()
            if events and known:
                self._selector.modify(end, events, pair)
            elif events:
                self._selector.register(end, events, pair)
            elif known:
                self._selector.unregister(end)

    def _move(self, pair: _Pair, end: socket.socket, events: int) -> None:
        try:
            if events & selectors.EVENT_READ:
                self._receive(pair, end)
            if pair in self._pairs and events & selectors.EVENT_WRITE:
                sent = end.send(pair.waiting[end])
                del pair.waiting[end][:sent]
        except OSError:
            self._drop(pair, is_reset=True)
            return
        if pair not in self._pairs:
            return
        if any(pair.is_over[e] and not pair.waiting[pair.other(e)] for e in pair.ends):
            self._drop(pair, is_reset=False)
            return
        self._watch(pair)

    def _receive(self, pair: _Pair, end: socket.socket) -> None:
        data = end.recv(_CHUNK)
        if not data:
            pair.is_over[end] = True
            return
        pair.waiting[pair.other(end)] += data
        if end is pair.ends[0]:
            self.bytes_to_server += len(data)
            self._count_down(len(data))

    def _count_down(self, count: int) -> None:
        if self._countdown is None:
            return
        left, fault = self._countdown[0] - count, self._countdown[1]
        self._countdown = (left, fault) if left > 0 else None
        if left <= 0:
            self._cut() if fault == "cut" else self._set_frozen(True)
