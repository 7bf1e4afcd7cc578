"""Every error of paramiko and the socket leaves through one door, as one of ours."""

from __future__ import annotations

import inspect
import socket
from collections.abc import Iterator

import paramiko
import pytest

from supervisor.domain.errors import (
    AuthError,
    ConfigError,
    ConnectError,
    HostKeyError,
    OutcomeUnknownError,
    SupervisorError,
    TransportError,
)
from supervisor.transport.ssh import SshTarget, fingerprint, parse_host_key, translate

KEY = paramiko.RSAKey.generate(1024)
OTHER = paramiko.RSAKey.generate(1024)
TARGET = SshTarget(host="node.example", port=2222, host_key=f"ssh-rsa {KEY.get_base64()}", identity="/k")
ARGUMENTS: dict[type[BaseException], tuple[object, ...]] = {
    paramiko.ssh_exception.BadAuthenticationType: ("no", ["publickey"]),
    paramiko.ssh_exception.PartialAuthentication: (["publickey"],),
    paramiko.ChannelException: (2, "Connect failed"),
    paramiko.BadHostKeyException: ("node.example", OTHER, KEY),
    paramiko.ssh_exception.ProxyCommandFailure: ("ssh x", 1),
    paramiko.ssh_exception.NoValidConnectionsError: ({("10.0.0.1", 22): OSError("refused")},),
    paramiko.auth_strategy.AuthFailure: ([],),
}


def subclasses(kind: type[BaseException]) -> Iterator[type[BaseException]]:
    for child in kind.__subclasses__():
        if child.__module__.startswith("paramiko"):
            yield child
            yield from subclasses(child)


def paramiko_exceptions() -> list[type[BaseException]]:
    named = {
        kind
        for _, kind in inspect.getmembers(paramiko.ssh_exception, inspect.isclass)
        if issubclass(kind, BaseException) and kind.__module__.startswith("paramiko")
    }
    return sorted(
        {paramiko.SSHException, *subclasses(paramiko.SSHException), *named}, key=lambda k: k.__name__
    )


def make(kind: type[BaseException]) -> BaseException:
    return kind(*ARGUMENTS.get(kind, ("text",)))


@pytest.mark.parametrize("kind", paramiko_exceptions(), ids=lambda kind: kind.__name__)
def test_every_paramiko_error_is_translated(kind: type[BaseException]) -> None:
    error = translate(make(kind), TARGET, doing="log in")
    assert isinstance(error, TransportError)
    assert not isinstance(error, OutcomeUnknownError)
    assert type(error) is not TransportError
    assert "node.example:2222" in error.message
    if issubclass(kind, paramiko.AuthenticationException):
        assert isinstance(error, AuthError)
        assert not error.retryable


def test_the_walk_finds_what_there_is() -> None:
    names = {kind.__name__ for kind in paramiko_exceptions()}
    assert {"BadHostKeyException", "ChannelException", "IncompatiblePeer", "MessageOrderError"} <= names
    assert len(names) >= 14


def test_a_bad_host_key_names_both_fingerprints() -> None:
    error = translate(make(paramiko.BadHostKeyException), TARGET, doing="log in")
    assert isinstance(error, HostKeyError)
    assert error.data == {"expected": fingerprint(KEY), "seen": fingerprint(OTHER)}
    assert fingerprint(KEY) in error.message
    assert fingerprint(OTHER) in error.message
    assert not error.retryable


@pytest.mark.parametrize(
    ("raised", "reason"),
    [
        (socket.gaierror(-2, "Name or service not known"), "DnsFailed"),
        (ConnectionRefusedError(111, "refused"), "ConnectRefused"),
        (TimeoutError("timed out"), "ConnectTimeout"),
        (ConnectionResetError(104, "reset"), "LinkLost"),
        (BrokenPipeError(32, "pipe"), "LinkLost"),
        (EOFError(), "LinkLost"),
        (paramiko.SSHException("Error reading SSH protocol banner"), "LinkLost"),
        (OSError(113, "No route to host"), "ConnectFailed"),
    ],
)
def test_reasons_of_sockets(raised: BaseException, reason: str) -> None:
    error = translate(raised, TARGET, doing="connect")
    assert isinstance(error, ConnectError)
    assert (error.reason, error.retryable) == (reason, True)


def test_our_own_errors_pass_unchanged() -> None:
    own = SupervisorError("x")
    assert translate(own, TARGET, doing="x") is own


def test_an_unknown_error_is_still_one_of_ours() -> None:
    assert type(translate(ZeroDivisionError("x"), TARGET, doing="x")) is TransportError


@pytest.mark.parametrize("line", ["", "ssh-ed25519", "ssh-ed25519 !!!", "nonsense AAAA", "ssh-ed25519 AAAA"])
def test_host_key_lines_that_are_none(line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_host_key(line)
    assert caught.value.reason == "BadHostKey"


def test_a_host_key_line_may_carry_a_comment() -> None:
    assert parse_host_key(f"ssh-rsa {KEY.get_base64()} root@node") == KEY
