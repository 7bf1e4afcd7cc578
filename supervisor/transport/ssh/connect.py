"""Opening one SSH connection: own socket, pinned host key, one explicit key; and the one door for its errors.

Nothing is looked up: no known_hosts of the user, no default keys, no agent unless the identity says so.
Unknown and changed host keys are refused with both fingerprints. Called by `ssh.transport` on its threads,
and by `node add` through `scan_host_key`; must not keep connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paramiko

from supervisor.domain.errors import (
    AuthError,
    ConfigError,
    ConnectError,
    HostKeyError,
    SupervisorError,
    TransportError,
)

# Whatever paramiko logs as an error also reaches us as an exception, and is told with its context then.
logging.getLogger("paramiko").setLevel(logging.CRITICAL)

CONNECT_TIMEOUT_S = 10.0
_TCP_USER_TIMEOUT_MS = 20_000
_KEEPALIVE_S = 15
_AGENT = "agent"
_CIPHERS = ("aes256-gcm@openssh.com", "aes128-gcm@openssh.com", "aes256-ctr", "aes128-ctr")
_MACS = ("hmac-sha2-256-etm@openssh.com", "hmac-sha2-512-etm@openssh.com", "hmac-sha2-256", "hmac-sha2-512")


@dataclass(frozen=True, slots=True, kw_only=True)
class SshTarget:
    """Where to connect, as whom, and which host key must answer."""

    host: str
    port: int = 22
    user: str = "root"
    host_key: str
    """OpenSSH public-key line of the pinned key, such as `ssh-ed25519 AAAA...`."""
    identity: str
    """Path of a private key file, or `agent:SHA256:...` for one key of the running ssh-agent."""
    connect_timeout_s: float = CONNECT_TIMEOUT_S


def fingerprint(key: paramiko.PKey) -> str:
    """`SHA256:...` as OpenSSH prints it."""
    return str(key.fingerprint)


def parse_host_key(line: str) -> paramiko.PKey:
    """Parse a public-key line (`type base64 [comment]`).

    Raises:
        ConfigError: it is not one.
    """
    fields = line.split()
    try:
        entry = paramiko.hostkeys.HostKeyEntry.from_line(f"pinned {fields[0]} {fields[1]}")
    except (IndexError, paramiko.SSHException, paramiko.hostkeys.InvalidHostKey) as error:
        raise _bad_host_key(line) from error
    if entry is None or entry.key is None:
        raise _bad_host_key(line)
    return entry.key


def _bad_host_key(line: str) -> ConfigError:
    return ConfigError(
        f"{line[:60]!r} is not an OpenSSH public-key line",
        reason="BadHostKey",
        hint="give the line as in /etc/ssh/ssh_host_ed25519_key.pub",
        field="host_key",
        value=line,
    )


async def scan_host_key(host: str, port: int = 22, *, deadline_s: float = 15.0) -> tuple[str, str]:
    """Ask a host for its key without logging in; returns (public-key line, fingerprint). Pins nothing.

    Raises:
        ConnectError: no SSH server answered.
    """
    pool = ThreadPoolExecutor(1, thread_name_prefix="ssh-scan")
    try:
        async with asyncio.timeout(deadline_s):
            return await asyncio.get_running_loop().run_in_executor(pool, _scan, host, port, deadline_s)
    except TimeoutError as error:
        raise ConnectError(f"{host}:{port} sent no host key in time", reason="ConnectTimeout") from error
    finally:
        pool.shutdown(wait=False)


def _scan(host: str, port: int, timeout_s: float) -> tuple[str, str]:
    sock = open_socket(host, port, timeout_s)
    transport = None
    try:
        transport = paramiko.Transport(sock)
        transport.banner_timeout = timeout_s
        options = transport.get_security_options()
        others = [name for name in options.key_types if name != "ssh-ed25519"]
        options.key_types = ["ssh-ed25519", *others]
        transport.start_client(timeout=timeout_s)
        key = transport.get_remote_server_key()
        return f"{key.get_name()} {key.get_base64()}", fingerprint(key)
    except (paramiko.SSHException, EOFError, OSError) as error:
        raise ConnectError(f"{host}:{port} is no SSH server we can talk to: {error}") from error
    finally:
        if transport is not None:
            transport.close()
        sock.close()


def open_socket(host: str, port: int, timeout_s: float) -> socket.socket:
    """A TCP connection that says by itself when its peer is gone.

    Raises:
        ConnectError: reason DnsFailed, ConnectRefused, ConnectTimeout, HostUnreachable or ConnectFailed.
    """
    where = f"{host}:{port}"
    try:
        sock = socket.create_connection((host, port), timeout=timeout_s)
    except (socket.gaierror, UnicodeError) as error:
        raise ConnectError(f"cannot resolve {host}: {error}", reason="DnsFailed") from error
    except TimeoutError as error:
        message = f"{where} did not answer within {timeout_s:g} s"
        raise ConnectError(message, reason="ConnectTimeout") from error
    except ConnectionRefusedError as error:
        raise ConnectError(
            f"{where} refused the connection", reason="ConnectRefused", hint="is sshd running there"
        ) from error
    except OSError as error:
        raise ConnectError(f"cannot reach {where}: {error.strerror}", reason="HostUnreachable") from error
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _TCP_USER_TIMEOUT_MS)
    return sock


def connect(target: SshTarget) -> paramiko.Transport:
    """Connect and authenticate. Blocks for a few `connect_timeout_s` at most.

    Raises:
        ConnectError, AuthError, HostKeyError.
    """
    pinned = parse_host_key(target.host_key)
    key = _load_identity(target.identity)
    sock = open_socket(target.host, target.port, target.connect_timeout_s)
    client = paramiko.SSHClient()
    client.set_missing_host_key_policy(paramiko.RejectPolicy())
    client.get_host_keys().add(_known_hosts_name(target), pinned.get_name(), pinned)
    limit = target.connect_timeout_s
    try:
        client.connect(
            target.host,
            port=target.port,
            username=target.user,
            pkey=key,
            sock=sock,
            allow_agent=False,
            look_for_keys=False,
            timeout=limit,
            banner_timeout=limit,
            auth_timeout=limit,
            channel_timeout=limit,
            transport_factory=_make_transport,
        )
    except (paramiko.SSHException, EOFError, OSError) as error:
        seen = _seen_key(client)
        client.close()
        sock.close()
        if seen is not None and seen != pinned:
            raise host_key_error(target, pinned, seen) from error
        raise translate(error, target, doing="log in") from error
    transport = client.get_transport()
    assert transport is not None
    transport.set_keepalive(_KEEPALIVE_S)
    return transport


def _make_transport(sock: Any, **options: Any) -> paramiko.Transport:
    """Prefer the authenticated ciphers, which are faster too, and offer none of the outdated ones."""
    transport = paramiko.Transport(sock, **options)
    offered = transport.get_security_options()
    offered.ciphers = _CIPHERS
    offered.digests = _MACS
    return transport


def _known_hosts_name(target: SshTarget) -> str:
    return target.host if target.port == 22 else f"[{target.host}]:{target.port}"


def _seen_key(client: paramiko.SSHClient) -> paramiko.PKey | None:
    transport = client.get_transport()
    if transport is None:
        return None
    with contextlib.suppress(paramiko.SSHException):
        return transport.get_remote_server_key()
    return None


def _load_identity(identity: str) -> paramiko.PKey:
    if identity == _AGENT or identity.startswith(f"{_AGENT}:"):
        return _agent_key(identity.partition(":")[2])
    path = Path(identity).expanduser()
    try:
        return paramiko.PKey.from_path(path)
    except FileNotFoundError as error:
        raise AuthError(
            f"no key file {path}", reason="IdentityMissing", hint="set the node's identity"
        ) from error
    except (TypeError, paramiko.PasswordRequiredException) as error:
        raise AuthError(
            f"the key {path} has a passphrase",
            reason="IdentityEncrypted",
            hint="load it into ssh-agent and give agent:SHA256:... as the identity",
        ) from error
    except (paramiko.SSHException, paramiko.pkey.UnknownKeyType, ValueError, OSError) as error:
        raise AuthError(f"cannot use the key {path}: {error}", reason="IdentityUnreadable") from error


def _agent_key(wanted: str) -> paramiko.PKey:
    """One key of the agent: offering all of them makes servers hang up after a few."""
    try:
        keys = paramiko.Agent().get_keys()
    except (paramiko.SSHException, OSError) as error:
        raise AuthError(f"ssh-agent does not answer: {error}", reason="AgentUnavailable") from error
    for key in keys:
        if fingerprint(key) == wanted or (not wanted and len(keys) == 1):
            return key
    known = ", ".join(fingerprint(key) for key in keys) or "none"
    raise AuthError(
        f"ssh-agent holds no key {wanted or '(several keys: name one)'}; it holds: {known}",
        reason="IdentityMissing",
        hint="ssh-add the key, or give agent:SHA256:... as the identity",
    )


def host_key_error(target: SshTarget, pinned: paramiko.PKey, seen: paramiko.PKey) -> HostKeyError:
    """The refusal of a key that is not the pinned one, naming both."""
    expected, found = fingerprint(pinned), fingerprint(seen)
    return HostKeyError(
        f"host key of {target.host}:{target.port} is {found}, but {expected} is pinned: nothing was sent",
        hint="if the host was reinstalled, compare the fingerprint at its console and pin it again",
        expected=expected,
        seen=found,
    )


def translate(error: BaseException, target: SshTarget, *, doing: str) -> SupervisorError:
    """The one door for paramiko's and the socket's errors; `doing` completes "could not ...".

    Only for requests that have had no effect: what may have run is an OutcomeUnknownError, made elsewhere.
    """
    if isinstance(error, SupervisorError):
        return error
    what = f"could not {doing} at {target.user}@{target.host}:{target.port}"
    if isinstance(error, paramiko.BadHostKeyException):
        return host_key_error(target, error.expected_key, error.key)
    if isinstance(error, paramiko.AuthenticationException):
        return AuthError(
            f"{what}: {_text(error)}",
            hint="put the supervisor's public key into authorized_keys of that user",
        )
    kind, reason = _classify(error)
    return kind(f"{what}: {_text(error)}", reason=reason)


def _classify(error: BaseException) -> tuple[type[TransportError], str]:
    table: tuple[tuple[Any, str], ...] = (
        (paramiko.ChannelException, "ChannelRefused"),
        (paramiko.ssh_exception.IncompatiblePeer, "IncompatiblePeer"),
        (paramiko.ssh_exception.ConfigParseError, "BadSshConfig"),
        (paramiko.ssh_exception.CouldNotCanonicalize, "DnsFailed"),
        (paramiko.ssh_exception.NoValidConnectionsError, "ConnectRefused"),
        (socket.gaierror, "DnsFailed"),
        (ConnectionRefusedError, "ConnectRefused"),
        (TimeoutError, "ConnectTimeout"),
        ((paramiko.SSHException, EOFError, ConnectionError), "LinkLost"),
        (OSError, "ConnectFailed"),
    )
    for kinds, reason in table:
        if isinstance(error, kinds):
            return ConnectError, reason
    return TransportError, "TransportFailed"


def _text(error: BaseException) -> str:
    return str(error).strip() or type(error).__name__
