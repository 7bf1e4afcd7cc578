"""The listening socket: what its connections inherit."""

from __future__ import annotations

import socket

from supervisor.api.server import Binding, bind


def test_connections_send_without_waiting_for_acknowledgements() -> None:
    with bind(Binding(host="127.0.0.1", port=0)) as listener:
        client = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
        is_prompt = accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        accepted.close()
        client.close()

    assert is_prompt
