"""Shapes of requests and answers, as OpenAPI shows them.

Requests are closed: an unknown field is an error that names it. Answers name the fields that clients may rely
on; `services.views` builds them as plain dicts, and a field that a view adds passes through. A value that is
not known is null, never 0 or "".
"""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

if TYPE_CHECKING:
    from supervisor.api.hostkeys import HostKey

T = TypeVar("T")
Json = dict[str, Any]

Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]
Text = Annotated[str, StringConstraints(max_length=500, pattern=r"^[^\x00]*$")]
NodePath = Annotated[str, StringConstraints(min_length=1, max_length=4096, pattern=r"^/[^\x00\n]*$")]
LocalPath = Annotated[str, StringConstraints(min_length=1, max_length=4096, pattern=r"^[^\x00\n]+$")]
HostName = Annotated[
    str, StringConstraints(min_length=1, max_length=253, pattern=r"^[A-Za-z0-9:\[][A-Za-z0-9._:%\]-]*$")
]
UserName = Annotated[str, StringConstraints(max_length=64, pattern=r"^[A-Za-z_][A-Za-z0-9._-]*$")]
Fingerprint = Annotated[str, StringConstraints(max_length=100, pattern=r"^SHA256:[A-Za-z0-9+/=]+$")]
Port = Annotated[int, Field(ge=1, le=65535)]
Vmid = Annotated[int, Field(ge=100, le=999_999_999)]
Scope = Literal["read", "operate", "admin"]


class Request(BaseModel):
    """Base of everything that is sent to us."""

    model_config = ConfigDict(extra="forbid")


class View(BaseModel):
    """Base of everything that we answer."""

    model_config = ConfigDict(extra="allow")


class NodeSettings(Request):
    """Settings that can be changed later."""

    host: HostName | None = None
    port: Port | None = None
    user: UserName | None = None
    vmid: Vmid | None = None
    identity_file: LocalPath | None = None
    root: NodePath | None = None
    log_dir: NodePath | None = None
    python: NodePath | None = None
    find_links: LocalPath | None = None
    torch_index_url: LocalPath | None = None
    host_key_fingerprint: Fingerprint | None = None


class NodeCreate(NodeSettings):
    """A node to register."""

    name: Name
    transport: Literal["local", "ssh", "proxmox"]


class NodePatch(NodeSettings):
    """Settings to change; what is left out stays."""


class DeployBody(Request):
    """What to bring to the node."""

    source: LocalPath = "bundled"
    lock: LocalPath | None = None
    python: NodePath | None = None


class StartBody(Request):
    """How to start."""

    resume: LocalPath | None = Field(default=None, description="latest, scratch or a checkpoint's path.")


class StopBody(Request):
    """How to stop."""

    save: bool = True
    reason: Text = ""


class RestartBody(Request):
    """How and when to restart."""

    when: Literal["now", "next_checkpoint"] = "now"
    save: bool = True
    resume: LocalPath | None = Field(default=None, description="latest, scratch or a checkpoint's path.")
    reason: Text = ""


class RollbackBody(Request):
    """When to go back."""

    when: Literal["now", "next_checkpoint"] = "now"


class DeclareLostBody(Request):
    """Why an attempt counts as lost."""

    reason: Text = ""
    force: bool = Field(
        default=False,
        description="Also for a quarantined attempt that is still seen; a start waits for no node.",
    )


class TokenCreate(Request):
    """A token to create."""

    name: Annotated[str, StringConstraints(min_length=1, max_length=100, pattern=r"^[^\x00-\x1f]+$")]
    scope: Scope = "read"
    expires_days: Annotated[int, Field(ge=1, le=3660)] | None = None


class SecretBody(Request):
    """Either a value, which is never shown again, or a reference."""

    value: (
        Annotated[str, StringConstraints(min_length=1, max_length=65_536, pattern=r"^[^\x00]+$")] | None
    ) = None
    reference: Annotated[
        str | None, Field(max_length=4096, description="env:NAME or file:/absolute/path.")
    ] = None


class Page(BaseModel, Generic[T]):
    """One page of a list; `next_cursor` is null at the end."""

    items: list[T]
    next_cursor: str | None = None


class Problem(View):
    """RFC 9457; `reason` is stable, `instance` is the request's id."""

    type: str
    title: str
    status: int
    detail: str
    instance: str
    reason: str
    retryable: bool
    hint: str | None = None
    data: Json | None = None


class Condition(View):
    """Something orthogonal to the state; unknown is not false."""

    type: str
    status: Literal["true", "false", "unknown"]
    reason: str
    message: str = ""
    since: str


class CheckItem(View):
    """One preflight check."""

    name: str
    status: Literal["ok", "warn", "fail"]
    value: Any = None
    message: str | None = None
    remedy: str | None = None


class HostKeyView(View):
    """The key that a host shows; nothing is pinned yet."""

    algorithm: str
    fingerprint: str


class NodePlan(View):
    """What registering a node would do."""

    steps: list[str]
    host_key: HostKeyView | None = None

    @classmethod
    def of(cls, body: NodeCreate, seen: HostKey | None) -> Self:
        """The plan for a node whose host has been asked for its key."""
        if seen is None:
            return cls(steps=[f"register {body.name} on this machine"])
        key = HostKeyView(algorithm=seen.algorithm, fingerprint=seen.fingerprint)
        return cls(
            steps=[
                f"pin {seen.algorithm} {seen.fingerprint} for {body.host}:{body.port or 22}",
                f"register {body.name}",
            ],
            host_key=key,
        )


class AttemptView(View):
    """One launch of a run; `status` is the trainer's own newest record."""

    id: str
    run: str | None = None
    number: int
    state: str
    is_live: bool
    reason: str | None = None
    message: str = ""
    trigger: str
    generation: int
    resume_from: str
    created_at: datetime
    started_at: datetime | None = None
    ready_at: datetime | None = None
    ended_at: datetime | None = None
    duration_s: float | None = None
    exit_code: int | None = None
    exit_signal: int | None = None
    last_lines: list[str]
    launch_error: Json | None = None
    log_path: str
    log_size: int | None = None
    gpus: list[Json]
    release_digest: str | None = None
    environment_digest: str | None = None
    status: Json | None = None
    status_age_s: float | None = None
    last_checkpoint: Json | None = None
    preflight: list[Json] | None = None


class GpuHistory(View):
    """Samples of all GPUs, thinned out; names are `<index>.<field>`, a value that was missing is null."""

    names: list[str]
    points: list[Json]
    is_thinned: bool


class TelemetryView(View):
    """Newest GPU sample of a node with its age; no GPUs come with a reason."""

    status: Literal["ok", "stale", "unavailable"]
    t: float | None = None
    at: datetime | None = None
    age_s: float | None = None
    gpus: list[Json]
    reason: str | None = None
    message: str | None = None
    history: GpuHistory | None = None


class Hold(View):
    """Why policy refuses to start the run again."""

    reason: str
    message: str
    since: str | None = None


class PairView(View):
    """A release and an environment on a node; `is_good` is null until a run has proved it."""

    id: str
    sequence: int
    state: str
    is_good: bool | None = None
    release_digest: str | None = None
    environment_digest: str | None = None
    created_at: datetime
    ready_at: datetime | None = None


class NewestMetrics(View):
    """The newest metrics line as the trainer wrote it, with its age."""

    t: float
    age_s: float
    step: int | None = None
    train: Json | None = None
    queue: Json | None = None


class RunSummary(View):
    """A run as one line of a list; `queue` and `train` are from the newest attempt's newest line."""

    id: str
    name: str
    node: str | None
    phase: str
    desired: Literal["running", "stopped"]
    desired_reason: str
    desired_actor: str
    desired_at: datetime
    generation: int
    conditions: list[Condition]
    attempt: AttemptView | None = None
    attempt_count: int
    status: Json | None = None
    status_age_s: float | None = None
    metrics: NewestMetrics | None = None
    queue: Json | None = None
    train: Json | None = None
    gpu: TelemetryView | None = None
    hold: Hold | None = None
    next_start_at: datetime | None = None
    next_start_in_s: float | None = None
    restarts: Json
    drift: Json | None = None
    deployment: PairView | None = None
    spec: Json
    version: int
    created_at: datetime
    updated_at: datetime


class OperationError(View):
    """Why an operation failed."""

    reason: str
    message: str
    hint: str | None = None
    data: Json | None = None


class OperationProgress(View):
    """How far it is."""

    step: str | None = None
    message: str | None = None
    done: float | None = None
    total: float | None = None


class OperationView(View):
    """A recorded request; it reaches exactly one end."""

    id: str
    kind: str
    status: Literal["pending", "running", "done", "failed", "superseded"]
    is_done: bool
    run: str | None = None
    node: str | None = None
    actor: str
    progress: OperationProgress | None = None
    result: Json | None = None
    error: OperationError | None = None
    created_at: datetime
    finished_at: datetime | None = None


class NodeView(View):
    """A node."""

    id: str
    name: str
    transport: str
    host: str | None = None
    port: int | None = None
    user: str | None = None
    vmid: int | None = None
    identity_file: str | None = None
    host_key_fingerprint: str | None = None
    root: str
    log_dir: str
    python: str | None = None
    find_links: str | None = None
    torch_index_url: str | None = None
    conditions: list[Condition]
    facts: Json
    check_status: Literal["ok", "warn", "fail", "unknown"]
    check_report: list[CheckItem] | None = None
    checked_at: datetime | None = None
    checked_age_s: float | None = None
    deployment: PairView | None = None
    runs: list[str]
    live_attempts: int
    gpu: TelemetryView
    operations: list[OperationView]
    last_seen_at: datetime | None = None
    last_seen_age_s: float | None = None
    version: int
    created_at: datetime
    updated_at: datetime


class RunView(RunSummary):
    """A run in full."""

    operations: list[OperationView]
    last_decision: Json | None = None


class EventView(View):
    """One line of the history."""

    id: int
    at: datetime
    actor: str
    subject: str
    level: str
    reason: str
    message: str
    data: Json


class DeploymentView(PairView):
    """A release and an environment brought to a node, with what they can do."""

    is_current: bool
    capabilities: Json
    error: Json | None = None
    operation_id: str | None = None


class CheckpointView(View):
    """A resumable state, as an attempt reported it."""

    step: int | None = None
    path: str
    saved_at: float | str | None = None
    attempt: int
    release_digest: str | None = None


class PlanStep(View):
    """One step, and how long it may take."""

    action: str
    detail: str
    limit_s: float | None = None


class Refusal(View):
    """The error that the request would get."""

    reason: str
    message: str


class Plan(View):
    """What a request would do, with costs and risks; a cost that is not known is null."""

    action: str
    summary: str
    steps: list[PlanStep]
    costs: Json
    risks: list[str]
    would_refuse: Refusal | None = None


class DriftChange(View):
    """One difference between what runs and what the next start would use."""

    kind: str
    name: str
    old: str | None = None
    new: str | None = None
    meaning: str


class DriftView(View):
    """What differs between the running attempt and what the next start would use."""

    run: str
    attempt: int | None = None
    is_drifted: bool
    message: str
    changes: list[DriftChange]
    action: str | None = None


class ExplainView(View):
    """The last decision with its evidence."""

    run: str
    phase: str
    desired: str
    decision: Json | None = None
    hold: Hold | None = None
    next_start_at: datetime | None = None
    restarts: Json
    conditions: list[Condition]
    attempts: list[Json]
    events: list[EventView]
    detects_within_s: Json


class MetricsView(View):
    """Metrics lines, thinned out; missing values are null, never 0."""

    names: list[str]
    items: list[Json]
    attempts: list[Json]
    lines: int
    is_thinned: bool


class TokenView(View):
    """A token without its value."""

    id: str
    name: str
    scope: Scope
    created_at: datetime
    expires_at: datetime | None = None
    revoked_at: datetime | None = None
    last_used_at: datetime | None = None


class TokenCreated(TokenView):
    """A new token; `token` is shown this once."""

    token: str


class SecretView(View):
    """A secret's name and kind."""

    name: str
    kind: Literal["value", "reference"]
    updated_at: datetime | None = None


class SessionView(View):
    """Who is logged in."""

    actor: str
    scope: Scope
    expires_at: datetime | None = None


class ReadyView(View):
    """Whether the daemon can do its work."""

    status: Literal["ready", "not ready"]
    version: str
