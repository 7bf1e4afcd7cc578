"""The supervisor's error tree. Every class carries data, not prose alone.

Lower libraries' errors are translated at one door each (`raise ... from`); `supervisor.api.errors` maps
these classes to HTTP problems and `supervisor.cli` to exit codes, nobody else does.

    SupervisorError
    ├ ConfigError              settings, run file: what, where, value, way out
    ├ RequestError
    │ ├ NotFoundError          no such node, run, attempt, operation
    │ ├ ConflictError          exists already, live already, refused by policy
    │ ├ InvalidTransitionError a state change that the table does not list
    │ └ UnauthorizedError      no token, wrong token, scope too small
    ├ LeaseLostError           another owner took over; the result is dropped
    ├ TransportError           the link, not the node's processes
    │ ├ ConnectError           dns, tcp, banner
    │ ├ AuthError              key refused
    │ ├ HostKeyError           changed or unknown host key: all traffic stops
    │ ├ DeadlineError          no answer in time, and the request cannot have had an effect
    │ ├ OutcomeUnknownError    the request may have had its effect: look before you repeat
    │ └ CommandFailedError     ran to its end with a status that means failure
    ├ ContainerError
    │ ├ NotRunningError        the container is stopped
    │ ├ MissingError           no such container on that host
    │ └ LockedError            backup, snapshot, migration ... holds it
    ├ DeployError
    │ └ ChecksumMismatchError  bytes that arrived are not the bytes that were sent
    ├ ShimError                the shim refused or cannot be understood
    │ └ VersionMismatchError
    └ StoreError               the database, not the request
      ├ StoreBusyError         locked by someone else beyond the busy timeout: try again
      ├ StoreFullError         no space left for the database
      ├ StoreCorruptError      not a database any more; the file is kept
      └ SchemaTooNewError      written by a newer version; refused
"""

from __future__ import annotations

from typing import Any


class SupervisorError(Exception):
    """Base class. `reason` is a stable CamelCase word, `hint` says what to do, `data` holds the facts."""

    reason = "Failed"
    retryable = False

    def __init__(
        self, message: str, *, reason: str | None = None, hint: str | None = None, **data: Any
    ) -> None:
        super().__init__(message)
        self.message = message
        if reason is not None:
            self.reason = reason
        self.hint = hint
        self.data = data


class ConfigError(SupervisorError):
    """A setting or a run file that cannot work; data may hold `file`, `line`, `field`, `value`."""

    reason = "InvalidConfig"


class RequestError(SupervisorError):
    """The request cannot be carried out as it stands."""

    reason = "BadRequest"


class NotFoundError(RequestError):
    """No object of that kind has this name or id; data: `kind`, `name`."""

    reason = "NotFound"


class ConflictError(RequestError):
    """The object's present state forbids it; data may hold `state`."""

    reason = "Conflict"


class InvalidTransitionError(RequestError):
    """A state change outside the transition table; data: `old`, `new`."""

    reason = "InvalidTransition"


class UnauthorizedError(RequestError):
    """No valid token, or one whose scope is too small; data may hold `needed`."""

    reason = "Unauthorized"


class LeaseLostError(SupervisorError):
    """The lease token no longer matches: another worker owns the row."""

    reason = "LeaseLost"


class TransportError(SupervisorError):
    """The way to the node failed; says nothing about what runs there."""

    reason = "TransportFailed"
    retryable = True


class ConnectError(TransportError):
    """Name resolution, TCP or SSH handshake failed; `reason` is DnsFailed, ConnectRefused ..."""

    reason = "ConnectFailed"


class AuthError(TransportError):
    """The host refused our key."""

    reason = "AuthFailed"
    retryable = False


class HostKeyError(TransportError):
    """The host key is unknown or has changed; data: `expected`, `seen` fingerprints."""

    reason = "HostKeyChanged"
    retryable = False


class DeadlineError(TransportError):
    """No answer within the deadline, for a request that has no effect; data: `deadline_s`."""

    reason = "DeadlineExceeded"


class OutcomeUnknownError(TransportError):
    """The link failed after the request went out: it may have run. Never repeated blindly."""

    reason = "OutcomeUnknown"
    retryable = False


class CommandFailedError(TransportError):
    """A command ended with a failing status; data: `argv`, `exit_code`, `stderr`."""

    reason = "CommandFailed"
    retryable = False


class ContainerError(SupervisorError):
    """The container, not the link, is the obstacle."""

    reason = "ContainerFailed"


class NotRunningError(ContainerError):
    """The container is stopped: evidence about the container, not a transport error."""

    reason = "ContainerStopped"


class MissingError(ContainerError):
    """The host has no such container."""

    reason = "ContainerMissing"


class LockedError(ContainerError):
    """A backup, snapshot or migration holds the container; data: `lock`."""

    reason = "ContainerLocked"
    retryable = True


class DeployError(SupervisorError):
    """A release or environment could not be brought to the node."""

    reason = "DeployFailed"


class ChecksumMismatchError(DeployError):
    """Digest of the bytes in the node differs from what was sent; data: `path`, `expected`, `seen`."""

    reason = "ChecksumMismatch"


class ShimError(SupervisorError):
    """The shim refused a request or answered something that is not its protocol."""

    reason = "ShimFailed"


class VersionMismatchError(ShimError):
    """Shim and daemon share no api version; data: `shim_api`, `supported`."""

    reason = "ShimVersionMismatch"


class StoreError(SupervisorError):
    """The database failed; nothing of the transaction was kept."""

    reason = "StoreFailed"


class StoreBusyError(StoreError):
    """Another process holds the database, or too many writes wait; data: `waited_s`."""

    reason = "StoreBusy"
    retryable = True


class StoreFullError(StoreError):
    """The disk of the state folder is full: nothing was acknowledged, room makes it work again."""

    reason = "StoreFull"
    retryable = True


class StoreCorruptError(StoreError):
    """The file is no intact database; data: `path`, `backups`. It is never repaired or removed in place."""

    reason = "StoreCorrupt"


class SchemaTooNewError(StoreError):
    """The database was written by a newer version; data: `found`, `known`."""

    reason = "SchemaTooNew"
