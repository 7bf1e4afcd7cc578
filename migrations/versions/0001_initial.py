"""Initial tables."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "environment",
        sa.Column("digest", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("lock_digest", sa.String(), nullable=True),
        sa.Column("lock_text", sa.String(), nullable=True),
        sa.Column("python", sa.String(), nullable=False),
        sa.Column("torch_requirement", sa.String(), nullable=True),
        sa.Column("platform", sa.String(), nullable=True),
        sa.Column("fingerprint", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_environment")),
    )
    op.create_table(
        "event",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("actor", sa.String(), nullable=False),
        sa.Column("subject", sa.String(), nullable=False),
        sa.Column("level", sa.String(), nullable=False),
        sa.Column("reason", sa.String(), nullable=False),
        sa.Column("message", sa.String(), nullable=False),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.Column("run_id", sa.String(), nullable=True),
        sa.Column("node_id", sa.String(), nullable=True),
        sa.Column("attempt_id", sa.String(), nullable=True),
        sa.Column("operation_id", sa.String(), nullable=True),
        sa.Column("request_id", sa.String(), nullable=True),
        sa.Column("cause_id", sa.Integer(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_event")),
        sqlite_autoincrement=True,
    )
    op.create_index(op.f("ix_event_at"), "event", ["at"], unique=False)
    op.create_index(op.f("ix_event_node_id"), "event", ["node_id"], unique=False)
    op.create_index(op.f("ix_event_run_id"), "event", ["run_id"], unique=False)
    op.create_index(op.f("ix_event_subject"), "event", ["subject"], unique=False)
    op.create_table(
        "idempotency_key",
        sa.Column("actor", sa.String(), nullable=False),
        sa.Column("key", sa.String(), nullable=False),
        sa.Column("fingerprint", sa.String(), nullable=False),
        sa.Column("status", sa.String(), nullable=False),
        sa.Column("response_status", sa.Integer(), nullable=True),
        sa.Column("response_headers", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("response_body", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("actor", "key", name=op.f("pk_idempotency_key")),
    )
    op.create_index(op.f("ix_idempotency_key_created_at"), "idempotency_key", ["created_at"], unique=False)
    op.create_table(
        "login_code",
        sa.Column("sha256", sa.String(), nullable=False),
        sa.Column("scope", sa.String(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("used_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("sha256", name=op.f("pk_login_code")),
    )
    op.create_table(
        "node",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("transport", sa.String(), nullable=False),
        sa.Column("host", sa.String(), nullable=True),
        sa.Column("port", sa.Integer(), nullable=False),
        sa.Column("user", sa.String(), nullable=True),
        sa.Column("vmid", sa.Integer(), nullable=True),
        sa.Column("identity_file", sa.String(), nullable=True),
        sa.Column("host_key", sa.String(), nullable=True),
        sa.Column("host_key_fingerprint", sa.String(), nullable=True),
        sa.Column("root", sa.String(), nullable=False),
        sa.Column("log_dir", sa.String(), nullable=False),
        sa.Column("python", sa.String(), nullable=True),
        sa.Column("find_links", sa.String(), nullable=True),
        sa.Column("torch_index_url", sa.String(), nullable=True),
        sa.Column("conditions", sa.JSON(), nullable=False),
        sa.Column("facts", sa.JSON(), nullable=False),
        sa.Column("check_report", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("checked_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("last_seen_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("unreachable_since", sa.DateTime(timezone=True), nullable=True),
        sa.Column("current_deployment_id", sa.String(), nullable=True),
        sa.Column("lease_owner", sa.String(), nullable=True),
        sa.Column("lease_token", sa.String(), nullable=True),
        sa.Column("lease_expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_node")),
        sa.UniqueConstraint("name", name=op.f("uq_node_name")),
    )
    op.create_table(
        "release",
        sa.Column("digest", sa.String(), nullable=False),
        sa.Column("source", sa.String(), nullable=False),
        sa.Column("manifest", sa.JSON(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("source_commit", sa.String(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_release")),
    )
    op.create_table(
        "secret",
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("ciphertext", sa.String(), nullable=True),
        sa.Column("reference", sa.String(), nullable=True),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_secret")),
    )
    op.create_table(
        "token",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("sha256", sa.String(), nullable=False),
        sa.Column("scope", sa.String(), nullable=False),
        sa.Column("created_by", sa.String(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("revoked_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("last_used_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_token")),
        sa.UniqueConstraint("sha256", name=op.f("uq_token_sha256")),
    )
    op.create_table(
        "browser_session",
        sa.Column("sha256", sa.String(), nullable=False),
        sa.Column("token_id", sa.String(), nullable=True),
        sa.Column("scope", sa.String(), nullable=False),
        sa.Column("actor", sa.String(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("last_used_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(
            ["token_id"], ["token.id"], name=op.f("fk_browser_session_token_id_token"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("sha256", name=op.f("pk_browser_session")),
    )
    op.create_table(
        "deployment",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("node_id", sa.String(), nullable=False),
        sa.Column("sequence", sa.Integer(), nullable=False),
        sa.Column("release_digest", sa.String(), nullable=True),
        sa.Column("environment_digest", sa.String(), nullable=True),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("is_good", sa.Boolean(), nullable=True),
        sa.Column("capabilities", sa.JSON(), nullable=False),
        sa.Column("fingerprint", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("error", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("operation_id", sa.String(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ready_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(
            ["environment_digest"],
            ["environment.digest"],
            name=op.f("fk_deployment_environment_digest_environment"),
        ),
        sa.ForeignKeyConstraint(
            ["node_id"], ["node.id"], name=op.f("fk_deployment_node_id_node"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(
            ["release_digest"], ["release.digest"], name=op.f("fk_deployment_release_digest_release")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_deployment")),
    )
    op.create_index(op.f("ix_deployment_node_id"), "deployment", ["node_id"], unique=False)
    op.create_table(
        "gpu_sample",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("node_id", sa.String(), nullable=False),
        sa.Column("t", sa.Float(), nullable=False),
        sa.Column("gpus", sa.JSON(), nullable=False),
        sa.Column("reason", sa.String(), nullable=True),
        sa.Column("message", sa.String(), nullable=True),
        sa.ForeignKeyConstraint(
            ["node_id"], ["node.id"], name=op.f("fk_gpu_sample_node_id_node"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_gpu_sample")),
    )
    op.create_index("ix_gpu_sample_node_id_t", "gpu_sample", ["node_id", "t"], unique=False)
    op.create_table(
        "run",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("node_id", sa.String(), nullable=False),
        sa.Column("spec", sa.JSON(), nullable=False),
        sa.Column("spec_digest", sa.String(), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("desired", sa.String(), nullable=False),
        sa.Column("desired_reason", sa.String(), nullable=False),
        sa.Column("desired_actor", sa.String(), nullable=False),
        sa.Column("desired_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("intent", sa.Integer(), nullable=False),
        sa.Column("stop_request", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("restart_request", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("declare_lost", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("pinned_deployment_id", sa.String(), nullable=True),
        sa.Column("pinned_against_id", sa.String(), nullable=True),
        sa.Column("good_deployment_id", sa.String(), nullable=True),
        sa.Column("conditions", sa.JSON(), nullable=False),
        sa.Column("ledger", sa.JSON(), nullable=False),
        sa.Column("hold", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("next_start_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("drift", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("last_decision", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("next_attempt_number", sa.Integer(), nullable=False),
        sa.Column("lease_owner", sa.String(), nullable=True),
        sa.Column("lease_token", sa.String(), nullable=True),
        sa.Column("lease_expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["node_id"], ["node.id"], name=op.f("fk_run_node_id_node")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_run")),
        sa.UniqueConstraint("name", name=op.f("uq_run_name")),
    )
    op.create_index(op.f("ix_run_node_id"), "run", ["node_id"], unique=False)
    op.create_table(
        "attempt",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("run_id", sa.String(), nullable=False),
        sa.Column("node_id", sa.String(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("intent", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("reason", sa.String(), nullable=True),
        sa.Column("message", sa.String(), nullable=False),
        sa.Column("trigger", sa.String(), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("spec", sa.JSON(), nullable=False),
        sa.Column("deployment_id", sa.String(), nullable=True),
        sa.Column("release_digest", sa.String(), nullable=True),
        sa.Column("environment_digest", sa.String(), nullable=True),
        sa.Column("argv", sa.JSON(), nullable=False),
        sa.Column("log_path", sa.String(), nullable=False),
        sa.Column("log_size", sa.BigInteger(), nullable=True),
        sa.Column("resume_from", sa.String(), nullable=False),
        sa.Column("gpus", sa.JSON(), nullable=False),
        sa.Column("identity", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("shim_identity", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("shim_state", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("preflight", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("stop", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("launch_error", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("exit_record", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("exit_code", sa.Integer(), nullable=True),
        sa.Column("exit_signal", sa.Integer(), nullable=True),
        sa.Column("is_counted", sa.Boolean(), nullable=True),
        sa.Column("cause_fingerprint", sa.String(), nullable=True),
        sa.Column("last_status", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("last_status_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("last_checkpoint", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("first_checkpoint_step", sa.Integer(), nullable=True),
        sa.Column("last_step", sa.Integer(), nullable=True),
        sa.Column("progress_checks", sa.Integer(), nullable=False),
        sa.Column("progress", sa.JSON(), nullable=False),
        sa.Column("fingerprint", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("launching_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("first_output_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("ready_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("stopping_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("gpu_clean_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("acknowledged_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("observed_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["node_id"], ["node.id"], name=op.f("fk_attempt_node_id_node")),
        sa.ForeignKeyConstraint(
            ["run_id"], ["run.id"], name=op.f("fk_attempt_run_id_run"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_attempt")),
        sa.UniqueConstraint("run_id", "number", name=op.f("uq_attempt_run_id_number")),
    )
    op.create_index(op.f("ix_attempt_node_id"), "attempt", ["node_id"], unique=False)
    op.create_index(op.f("ix_attempt_state"), "attempt", ["state"], unique=False)
    op.create_table(
        "operation",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("status", sa.String(), nullable=False),
        sa.Column("run_id", sa.String(), nullable=True),
        sa.Column("node_id", sa.String(), nullable=True),
        sa.Column("attempt_id", sa.String(), nullable=True),
        sa.Column("intent", sa.Integer(), nullable=True),
        sa.Column("actor", sa.String(), nullable=False),
        sa.Column("request_id", sa.String(), nullable=True),
        sa.Column("params", sa.JSON(), nullable=False),
        sa.Column("progress", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("result", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("error", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(
            ["node_id"], ["node.id"], name=op.f("fk_operation_node_id_node"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(
            ["run_id"], ["run.id"], name=op.f("fk_operation_run_id_run"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_operation")),
    )
    op.create_index(op.f("ix_operation_node_id"), "operation", ["node_id"], unique=False)
    op.create_index(op.f("ix_operation_run_id"), "operation", ["run_id"], unique=False)
    op.create_index(op.f("ix_operation_status"), "operation", ["status"], unique=False)
    op.create_table(
        "metric_line",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("run_id", sa.String(), nullable=False),
        sa.Column("attempt_id", sa.String(), nullable=False),
        sa.Column("t", sa.Float(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("record", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(
            ["attempt_id"], ["attempt.id"], name=op.f("fk_metric_line_attempt_id_attempt"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(
            ["run_id"], ["run.id"], name=op.f("fk_metric_line_run_id_run"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_metric_line")),
        sa.UniqueConstraint("attempt_id", "t", "step", name=op.f("uq_metric_line_attempt_id_t_step")),
    )
    op.create_index("ix_metric_line_run_id_t", "metric_line", ["run_id", "t"], unique=False)


def downgrade() -> None:
    op.drop_index("ix_metric_line_run_id_t", table_name="metric_line")
    op.drop_table("metric_line")
    op.drop_index(op.f("ix_operation_status"), table_name="operation")
    op.drop_index(op.f("ix_operation_run_id"), table_name="operation")
    op.drop_index(op.f("ix_operation_node_id"), table_name="operation")
    op.drop_table("operation")
    op.drop_index(op.f("ix_attempt_state"), table_name="attempt")
    op.drop_index(op.f("ix_attempt_node_id"), table_name="attempt")
    op.drop_table("attempt")
    op.drop_index(op.f("ix_run_node_id"), table_name="run")
    op.drop_table("run")
    op.drop_index("ix_gpu_sample_node_id_t", table_name="gpu_sample")
    op.drop_table("gpu_sample")
    op.drop_index(op.f("ix_deployment_node_id"), table_name="deployment")
    op.drop_table("deployment")
    op.drop_table("browser_session")
    op.drop_table("token")
    op.drop_table("secret")
    op.drop_table("release")
    op.drop_table("node")
    op.drop_table("login_code")
    op.drop_index(op.f("ix_idempotency_key_created_at"), table_name="idempotency_key")
    op.drop_table("idempotency_key")
    op.drop_index(op.f("ix_event_subject"), table_name="event")
    op.drop_index(op.f("ix_event_run_id"), table_name="event")
    op.drop_index(op.f("ix_event_node_id"), table_name="event")
    op.drop_index(op.f("ix_event_at"), table_name="event")
    op.drop_table("event")
    op.drop_table("environment")
