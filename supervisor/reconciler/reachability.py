"""When a node counts as reachable, unreachable or unknown: the rules alone, no connection.

Fed by `connections`; read by the loop, preflight and the API through the node's `Reachable` condition. A
failure to ask is never evidence about the processes in the node: the most this module says is "cannot be
reached since".
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from supervisor.domain.errors import (
    AuthError,
    ContainerError,
    HostKeyError,
    MissingError,
    NotRunningError,
    SupervisorError,
)

FAILED_PROBES = 3
FAILED_FOR_S = 60.0
ALERT_AFTER_S = 300.0
BACKOFF_BASE_S = 1.0
BACKOFF_CAP_S = 60.0

LINK_REMEDIES: Mapping[str, str] = {
    "ConnectRefused": "start the SSH server, or correct host and port",
    "ConnectTimeout": "check network, firewall and address",
    "DnsFailed": "correct the host name, or use its address",
    "AuthFailed": "install the supervisor's public key for that user, or name the right identity file",
    "HostKeyChanged": "find out why the key changed; if it is right, pin it: "
    "`dflashctl node set NODE --fingerprint SHA256:…`",
    "ContainerStopped": "start the container on its host",
    "ContainerMissing": "correct --vmid, or create the container",
    "ContainerLocked": "wait for the backup, snapshot or migration to end",
    "PctMissing": "the host is not a Proxmox host, or pct is not in the user's PATH",
}
"""What to do about each way of not reaching a node."""


@dataclass(slots=True)
class Reachability:
    """What is known about the way to one node."""

    is_reachable: bool | None = None
    reason: str = "NotTriedYet"
    message: str = "no connection was tried yet"
    since: datetime | None = None
    failures: int = 0
    remedy: str = ""
    container_status: str | None = None
    """`stopped` or `missing` when the host said so, `running` when we spoke with the container, else None."""
    is_blocked: bool = False
    """True after a host key that is not the pinned one: no traffic until an operator acts."""
    is_refused: bool = False
    """The host answers and does not let us in: asking again will not help."""
    is_alerted: bool = False
    _first_failure_s: float | None = field(default=None, repr=False)

    @property
    def is_out_of_reach(self) -> bool:
        """Whether somebody who waits for this node should be told, sooner than the condition turns false."""
        if self.is_reachable is None:
            return self.is_refused or self.failures >= FAILED_PROBES
        return not self.is_reachable

    def note_success(self, now: datetime) -> bool:
        """Record an answer from the node; resets every failure timer. True when the status changed."""
        was = self.is_reachable
        self.failures = 0
        self._first_failure_s = None
        self.is_alerted = self.is_refused = False
        self.container_status = "running"
        self.is_reachable, self.reason, self.message, self.remedy = True, "Ok", "", ""
        if was is not True:
            self.since = now
        return was is not True

    def note_failure(self, error: SupervisorError, now: datetime, monotonic_s: float) -> bool:
        """Record a failed attempt to ask. True when status or reason changed.

        The status goes to unknown at once and to False only after three failures over at least a minute; a
        host that answers but says that the container is stopped is evidence about the container.
        """
        was = (self.is_reachable, self.reason)
        self.failures += 1
        if self._first_failure_s is None:
            self._first_failure_s = monotonic_s
        self.container_status = container_status_of(error)
        self.is_blocked = isinstance(error, HostKeyError)
        self.is_refused = isinstance(error, AuthError)
        failed_for_s = monotonic_s - self._first_failure_s
        is_certain = self.is_blocked or isinstance(error, ContainerError)
        is_long = self.failures >= FAILED_PROBES and failed_for_s >= FAILED_FOR_S
        self.is_reachable = False if is_certain or is_long else None
        self.reason, self.message = error.reason, error.message
        self.remedy = LINK_REMEDIES.get(error.reason, error.hint or "")
        if was[0] != self.is_reachable:
            self.since = now
        return was != (self.is_reachable, self.reason)

    def should_alert(self, monotonic_s: float) -> bool:
        """True once per outage, after it has lasted five minutes."""
        if self.is_alerted or self._first_failure_s is None:
            return False
        if monotonic_s - self._first_failure_s < ALERT_AFTER_S:
            return False
        self.is_alerted = True
        return True


def container_status_of(error: SupervisorError) -> str | None:
    """What this error proves about the container."""
    if isinstance(error, NotRunningError):
        return "stopped"
    if isinstance(error, MissingError):
        return "missing"
    return None


def reconnect_delay_s(failures: int, rng: random.Random, *, error: SupervisorError | None = None) -> float:
    """Wait before the next attempt to connect: 1 s doubling to 60 s, jittered."""
    if isinstance(error, AuthError):
        ceiling = BACKOFF_CAP_S
    else:
        ceiling = min(BACKOFF_CAP_S, BACKOFF_BASE_S * 2 ** max(0, min(failures, 10) - 1))
    return ceiling * (0.5 + rng.random() / 2)
