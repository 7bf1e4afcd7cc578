"""Host keys of new nodes: asked for by the daemon, shown to the operator, pinned only when confirmed."""

from __future__ import annotations

from dataclasses import dataclass

from supervisor.api.errors import HttpError
from supervisor.domain.errors import ConflictError
from supervisor.transport.ssh import scan_host_key


@dataclass(frozen=True, slots=True)
class HostKey:
    """What a host showed."""

    line: str
    """`<type> <base64>`"""
    fingerprint: str
    """`SHA256:…`"""

    @property
    def algorithm(self) -> str:
        """Key type, for people."""
        return self.line.partition(" ")[0]


async def scan(host: str | None, port: int | None) -> HostKey:
    """Ask a host for its key without logging in.

    Raises:
        HttpError: no host was named.
        ConnectError: no SSH server answered there.
    """
    if not host:
        raise HttpError(422, "host is missing: ssh and proxmox nodes have one", hint="name the SSH host")
    line, fingerprint = await scan_host_key(host, port or 22)
    return HostKey(line, fingerprint)


def pinned_key(seen: HostKey | None, confirmed: str | None) -> dict[str, str]:
    """Fields to store for a key that the operator has confirmed by its fingerprint.

    Raises:
        HttpError: nothing was confirmed.
        ConflictError: the host shows another key than the confirmed one.
    """
    if seen is None:
        return {}
    if confirmed is None:
        raise HttpError(
            422,
            "host_key_fingerprint is missing: a host key is pinned only after its fingerprint was compared",
            reason="HostKeyUnconfirmed",
            hint="send it with ?dry_run=true to see the host's key, compare, then send its fingerprint",
            seen=seen.fingerprint,
        )
    if confirmed != seen.fingerprint:
        raise ConflictError(
            f"the host shows another key: {seen.fingerprint}, confirmed was {confirmed[:80]}",
            reason="HostKeyMismatch",
            hint="find out on the host itself which is right; a wrong one means that somebody is in between",
            seen=seen.fingerprint,
            expected=confirmed,
        )
    return {"host_key": seen.line, "host_key_fingerprint": seen.fingerprint}
