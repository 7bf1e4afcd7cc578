"""The tables, as SQLModel classes. Rows only: no behaviour, no queries.

Used by services and reconciler through `writer.Store`. JSON columns are replaced whole (assign a new dict),
never changed in place, because a change inside would not be written. Every column type is one that
PostgreSQL has too. A changed class needs a migration; a test compares the two.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, ClassVar

import sqlalchemy as sa
from sqlmodel import Field, SQLModel

SQLModel.metadata.naming_convention = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
}

Json = dict[str, Any]


def _json(*, nullable: bool = True) -> Any:
    return Field(default=None, sa_type=sa.JSON(none_as_null=True), nullable=nullable)


def _json_dict() -> Any:
    return Field(default_factory=dict, sa_type=sa.JSON, nullable=False)


def _json_list() -> Any:
    return Field(default_factory=list, sa_type=sa.JSON, nullable=False)


class Node(SQLModel, table=True):
    """A place where runs execute."""

    __tablename__: ClassVar[str] = "node"

    id: str = Field(primary_key=True)
    name: str = Field(unique=True)
    transport: str
    host: str | None = None
    port: int = 22
    user: str | None = None
    vmid: int | None = None
    identity_file: str | None = None
    host_key: str | None = None
    """`<type> <base64>` as pinned by the operator."""
    host_key_fingerprint: str | None = None
    root: str
    log_dir: str
    python: str | None = None
    find_links: str | None = None
    torch_index_url: str | None = None
    conditions: list[Json] = _json_list()
    facts: Json = _json_dict()
    """What the last probe found: python, disk, gpus, platform, modules."""
    check_report: list[Json] | None = _json()
    """One dict per preflight check: name, status ok|warn|fail, value, message, remedy."""
    checked_at: datetime | None = None
    last_seen_at: datetime | None = None
    unreachable_since: datetime | None = None
    current_deployment_id: str | None = None
    """Newest ready deployment; no foreign key, the two tables would form a cycle."""
    lease_owner: str | None = None
    lease_token: str | None = None
    lease_expires_at: datetime | None = None
    version: int = 1
    created_at: datetime
    updated_at: datetime


class Release(SQLModel, table=True):
    """Content-addressed trainer source."""

    __tablename__: ClassVar[str] = "release"

    digest: str = Field(primary_key=True)
    source: str
    manifest: Json = _json_dict()
    size_bytes: int = Field(default=0, sa_type=sa.BigInteger)
    source_commit: str | None = None
    created_at: datetime


class Environment(SQLModel, table=True):
    """An interpreter with its packages: built from a lock, or external and only watched."""

    __tablename__: ClassVar[str] = "environment"

    digest: str = Field(primary_key=True)
    kind: str
    """`built` or `external`."""
    lock_digest: str | None = None
    lock_text: str | None = None
    """The lock as it was, so that a diff can be explained later."""
    python: str
    """Path of the interpreter in the node."""
    torch_requirement: str | None = None
    platform: str | None = None
    fingerprint: Json | None = _json()
    created_at: datetime


class Deployment(SQLModel, table=True):
    """A release and an environment brought to a node, and whether the pair has proved good."""

    __tablename__: ClassVar[str] = "deployment"

    id: str = Field(primary_key=True)
    node_id: str = Field(foreign_key="node.id", ondelete="CASCADE", index=True)
    sequence: int
    """Counts up per node; the newest ready one is current."""
    release_digest: str | None = Field(default=None, foreign_key="release.digest")
    environment_digest: str | None = Field(default=None, foreign_key="environment.digest")
    state: str
    """`pending`, `ready` or `failed`."""
    is_good: bool | None = None
    """None until a run passed or failed its gate on this pair."""
    capabilities: Json = _json_dict()
    fingerprint: Json | None = _json()
    error: Json | None = _json()
    operation_id: str | None = None
    created_at: datetime
    ready_at: datetime | None = None


class Run(SQLModel, table=True):
    """Intent: what should be true. Desired columns are written by actors, the rest by the reconciler."""

    __tablename__: ClassVar[str] = "run"

    id: str = Field(primary_key=True)
    name: str = Field(unique=True)
    node_id: str = Field(foreign_key="node.id", index=True)
    spec: Json = _json_dict()
    spec_digest: str
    generation: int = 1
    desired: str = "stopped"
    desired_reason: str = ""
    desired_actor: str = ""
    desired_at: datetime
    intent: int = 0
    """Counts up with every start, stop, restart or declare-lost request."""
    stop_request: Json | None = _json()
    """{"save": bool, "reason": str}: how to stop while desired is stopped."""
    restart_request: Json | None = _json()
    """{"intent", "when": now|next_checkpoint, "save", "resume", "reason", "kind": operator|drift|revert}."""
    declare_lost: Json | None = _json()
    """{"attempt_id", "actor", "reason", "force"}."""
    pinned_deployment_id: str | None = None
    """Set by rollback or auto-revert; else the node's current deployment is used."""
    pinned_against_id: str | None = None
    """Deployment that the pin avoids: when a newer one becomes current, the pin no longer holds."""
    good_deployment_id: str | None = None
    """Last deployment on which an attempt of this run passed the gate."""
    conditions: list[Json] = _json_list()
    ledger: Json = _json_dict()
    """`restart.Ledger` as a dict: failures, uncounted, restarts, counters."""
    hold: Json | None = _json()
    """{"reason", "message", "since"} while policy refuses to restart."""
    next_start_at: datetime | None = None
    drift: Json | None = _json()
    """Newest classified drift: {"changes": [...], "class", "first_seen_at", "last_restart_at"}."""
    last_decision: Json | None = _json()
    next_attempt_number: int = 1
    lease_owner: str | None = None
    lease_token: str | None = None
    lease_expires_at: datetime | None = None
    version: int = 1
    created_at: datetime
    updated_at: datetime


class Attempt(SQLModel, table=True):
    """One process lifetime of a run. Terminal rows are immutable."""

    __tablename__: ClassVar[str] = "attempt"
    __table_args__ = (sa.UniqueConstraint("run_id", "number"),)

    id: str = Field(primary_key=True)
    run_id: str = Field(foreign_key="run.id", ondelete="CASCADE")
    node_id: str = Field(foreign_key="node.id", index=True)
    number: int
    intent: int = 0
    """`Run.intent` when it was planned: below it, a newer start or restart was asked for."""
    state: str = Field(index=True)
    reason: str | None = None
    message: str = ""
    trigger: str = "start"
    """start | failure | operator | drift | revert: why this attempt exists."""
    generation: int
    spec: Json = _json_dict()
    deployment_id: str | None = None
    release_digest: str | None = None
    environment_digest: str | None = None
    argv: list[str] = _json_list()
    log_path: str = ""
    log_size: int | None = Field(default=None, sa_type=sa.BigInteger)
    resume_from: str = "latest"
    gpus: list[Json] = _json_list()
    identity: Json | None = _json()
    shim_identity: Json | None = _json()
    shim_state: Json | None = _json()
    preflight: list[Json] | None = _json()
    stop: Json | None = _json()
    """{"id", "reason", "actor", "requested_at", "save", "cause", "step"}; cause = a `StopCause` value."""
    launch_error: Json | None = _json()
    exit_record: Json | None = _json()
    exit_code: int | None = None
    exit_signal: int | None = None
    is_counted: bool | None = None
    """Whether its end counted against the restart budget; None while live."""
    cause_fingerprint: str | None = None
    last_status: Json | None = _json()
    last_status_at: datetime | None = None
    last_checkpoint: Json | None = _json()
    """{"step", "path", "saved_at"} as the trainer reported it."""
    first_checkpoint_step: int | None = None
    """Newest checkpoint step known when the attempt began."""
    last_step: int | None = None
    progress_checks: int = 0
    progress: Json = _json_dict()
    """`health.ProgressMemory` as a dict: steps seen, longest normal interval."""
    fingerprint: Json | None = _json()
    created_at: datetime
    launching_at: datetime | None = None
    started_at: datetime | None = None
    first_output_at: datetime | None = None
    ready_at: datetime | None = None
    stopping_at: datetime | None = None
    ended_at: datetime | None = None
    gpu_clean_at: datetime | None = None
    """When the GPU gate passed after the end."""
    acknowledged_at: datetime | None = None
    """When the shim was told that the exit record is stored."""
    observed_at: datetime | None = None
    version: int = 1
    updated_at: datetime


class Operation(SQLModel, table=True):
    """An actor's recorded request. Reaches exactly one end: done, failed or superseded."""

    __tablename__: ClassVar[str] = "operation"

    id: str = Field(primary_key=True)
    kind: str
    """start | stop | restart | rollback | declare_lost | check | deploy."""
    status: str = Field(default="pending", index=True)
    """pending | running | done | failed | superseded."""
    run_id: str | None = Field(default=None, foreign_key="run.id", ondelete="CASCADE", index=True)
    node_id: str | None = Field(default=None, foreign_key="node.id", ondelete="CASCADE", index=True)
    attempt_id: str | None = None
    intent: int | None = None
    actor: str
    request_id: str | None = None
    params: Json = _json_dict()
    progress: Json | None = _json()
    """{"step", "message", "done", "total"}."""
    result: Json | None = _json()
    error: Json | None = _json()
    """{"reason", "message", "hint", "data"}."""
    version: int = 1
    created_at: datetime
    started_at: datetime | None = None
    finished_at: datetime | None = None


class Event(SQLModel, table=True):
    """Append-only history, written in the transaction of the change that it tells."""

    __tablename__: ClassVar[str] = "event"
    __table_args__ = ({"sqlite_autoincrement": True},)

    id: int | None = Field(default=None, primary_key=True)
    at: datetime = Field(index=True)
    actor: str
    subject: str = Field(index=True)
    """`run/NAME`, `node/NAME`, `token/ID` ..., kept after the object is gone."""
    level: str = "info"
    reason: str
    message: str
    data: Json = _json_dict()
    run_id: str | None = Field(default=None, index=True)
    node_id: str | None = Field(default=None, index=True)
    attempt_id: str | None = None
    operation_id: str | None = None
    request_id: str | None = None
    cause_id: int | None = None


class MetricLine(SQLModel, table=True):
    """One line of a trainer's metrics, whole."""

    __tablename__: ClassVar[str] = "metric_line"
    __table_args__ = (
        sa.UniqueConstraint("attempt_id", "t", "step"),
        sa.Index("ix_metric_line_run_id_t", "run_id", "t"),
    )

    id: int | None = Field(default=None, primary_key=True)
    run_id: str = Field(foreign_key="run.id", ondelete="CASCADE")
    attempt_id: str = Field(foreign_key="attempt.id", ondelete="CASCADE")
    t: float
    step: int = -1
    """-1 when the line names no step."""
    record: Json = _json_dict()


class GpuSample(SQLModel, table=True):
    """One NVML sample of a node: all its GPUs, or why there are none."""

    __tablename__: ClassVar[str] = "gpu_sample"
    __table_args__ = (sa.Index("ix_gpu_sample_node_id_t", "node_id", "t"),)

    id: int | None = Field(default=None, primary_key=True)
    node_id: str = Field(foreign_key="node.id", ondelete="CASCADE")
    t: float
    gpus: list[Json] = _json_list()
    reason: str | None = None
    message: str | None = None


class Token(SQLModel, table=True):
    """An API token: SHA-256 only; the value was shown once."""

    __tablename__: ClassVar[str] = "token"

    id: str = Field(primary_key=True)
    name: str
    sha256: str = Field(unique=True)
    scope: str
    """read | operate | admin."""
    created_by: str = ""
    created_at: datetime
    expires_at: datetime | None = None
    revoked_at: datetime | None = None
    last_used_at: datetime | None = None


class LoginCode(SQLModel, table=True):
    """A one-time code that opens a browser session in place of a token."""

    __tablename__: ClassVar[str] = "login_code"

    sha256: str = Field(primary_key=True)
    scope: str
    created_at: datetime
    expires_at: datetime
    used_at: datetime | None = None


class BrowserSession(SQLModel, table=True):
    """A logged-in browser; the cookie's value is stored as SHA-256."""

    __tablename__: ClassVar[str] = "browser_session"

    sha256: str = Field(primary_key=True)
    token_id: str | None = Field(default=None, foreign_key="token.id", ondelete="CASCADE")
    scope: str
    actor: str
    created_at: datetime
    expires_at: datetime
    last_used_at: datetime | None = None


class IdempotencyKey(SQLModel, table=True):
    """A request that must have one effect, with its first answer."""

    __tablename__: ClassVar[str] = "idempotency_key"

    actor: str = Field(primary_key=True)
    key: str = Field(primary_key=True)
    fingerprint: str
    """SHA-256 of method, path and body."""
    status: str
    """running | done."""
    response_status: int | None = None
    response_headers: Json | None = _json()
    response_body: Json | None = _json()
    created_at: datetime = Field(index=True)


class Secret(SQLModel, table=True):
    """A secret's ciphertext (the key is in a file outside the database), or a reference to where it lies."""

    __tablename__: ClassVar[str] = "secret"

    name: str = Field(primary_key=True)
    ciphertext: str | None = None
    reference: str | None = None
    """`env:NAME` or `file:PATH`, read by the daemon when needed."""
    version: int = 1
    created_at: datetime
    updated_at: datetime
