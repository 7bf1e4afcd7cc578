"""Fixtures that many test modules share, loaded by `tests/conftest.py`: hosts, network block, root logger."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from supervisor.transport.ssh import channels, lanes
from tests.support.pct_host import PctHost
from tests.support.sshd import SshHost, require_test_bed

_LOOPBACK = ("127.", "::1", "localhost", "0.0.0.0")


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """The product runs on asyncio, and so do its tests."""
    return "asyncio"


@pytest.fixture(autouse=True, scope="session")
def _loopback_only() -> Iterator[None]:
    """No test talks to a machine other than this one."""
    patch = pytest.MonkeyPatch()
    real = socket.socket.connect

    def connect(self: socket.socket, address: object) -> None:
        is_ip = self.family in (socket.AF_INET, socket.AF_INET6)
        if is_ip and not str(address[0]).startswith(_LOOPBACK):  # type: ignore[index]
            raise AssertionError(f"a test tried to reach {address}")
        real(self, address)  # type: ignore[arg-type]

    patch.setattr(socket.socket, "connect", connect)
    yield
    patch.undo()


@pytest.fixture
def patient_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """The transport's own short limits, raised: a machine that stalls must not pass for a lost link."""
    monkeypatch.setattr(lanes, "_LIVENESS_S", 60.0)
    monkeypatch.setattr(lanes, "_OPEN_LIMIT_S", 60.0)
    monkeypatch.setattr(channels, "_STATUS_GRACE_S", 60.0)


@pytest.fixture
def ssh_host(tmp_path: Path) -> Iterator[SshHost]:
    """A fresh host with a real sshd."""
    require_test_bed()
    with SshHost(tmp_path / "host") as host:
        yield host


@pytest.fixture
def pct_host(tmp_path: Path) -> Iterator[PctHost]:
    """A fresh Proxmox-like host with container 200 running."""
    require_test_bed()
    with PctHost(tmp_path / "host") as host:
        yield host


@pytest.fixture
def root_logger() -> Iterator[None]:
    """Commands send the log where their process wants it; here that must end with the test."""
    logger = logging.getLogger()
    handlers, level = list(logger.handlers), logger.level
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)
