"""Runs, jobs, groups, events, metrics and workers"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Move the schema forward."""
    op.create_table(
        "runs",
        sa.Column("seq", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("idempotency_key", sa.String(length=128), nullable=True),
        sa.Column("spec", sa.Text(), nullable=False),
        sa.Column(
            "status",
            sa.Enum(
                "queued",
                "running",
                "paused",
                "succeeded",
                "failed",
                "cancelled",
                name="runstatus",
                native_enum=False,
                length=16,
            ),
            nullable=False,
        ),
        sa.Column("status_reason", sa.Text(), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("started_at", sa.Float(), nullable=True),
        sa.Column("active_since", sa.Float(), nullable=True),
        sa.Column("finished_at", sa.Float(), nullable=True),
        sa.Column("prompts_key", sa.String(length=256), nullable=True),
        sa.Column("num_prompts", sa.Integer(), nullable=False),
        sa.Column("eval_prompts_key", sa.String(length=256), nullable=True),
        sa.Column("version", sa.Integer(), nullable=True),
        sa.Column("next_group", sa.Integer(), nullable=False),
        sa.Column("refilled", sa.Integer(), nullable=False),
        sa.Column("generation_failures", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("seq"),
        sa.UniqueConstraint("id"),
        sa.UniqueConstraint("idempotency_key"),
    )
    with op.batch_alter_table("runs", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_runs_status"), ["status"], unique=False)

    op.create_table(
        "workers",
        sa.Column("id", sa.String(length=128), nullable=False),
        sa.Column(
            "role",
            sa.Enum("generator", "trainer", name="workerrole", native_enum=False, length=16),
            nullable=False,
        ),
        sa.Column("pool", sa.String(length=32), nullable=False),
        sa.Column("report", sa.Text(), nullable=False),
        sa.Column("last_seen_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    with op.batch_alter_table("workers", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_workers_last_seen_at"), ["last_seen_at"], unique=False)

    op.create_table(
        "events",
        sa.Column("id", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("run_id", sa.String(length=32), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column(
            "level",
            sa.Enum("info", "warning", "error", name="eventlevel", native_enum=False, length=16),
            nullable=False,
        ),
        sa.Column("kind", sa.String(length=64), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("data", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["run_id"],
            ["runs.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
    )
    with op.batch_alter_table("events", schema=None) as batch_op:
        batch_op.create_index("ix_events_run", ["run_id", "id"], unique=False)

    op.create_table(
        "groups",
        sa.Column("run_id", sa.String(length=32), nullable=False),
        sa.Column("index", sa.Integer(), nullable=False),
        sa.Column("prompt_row", sa.Integer(), nullable=False),
        sa.Column(
            "status",
            sa.Enum(
                "generating",
                "ready",
                "training",
                "trained",
                "dropped",
                name="groupstatus",
                native_enum=False,
                length=16,
            ),
            nullable=False,
        ),
        sa.Column("generate_job_id", sa.String(length=32), nullable=False),
        sa.Column("train_job_id", sa.String(length=32), nullable=True),
        sa.Column("rollouts_key", sa.String(length=256), nullable=True),
        sa.Column("policy_version", sa.Integer(), nullable=True),
        sa.Column("adapter_sha256", sa.String(length=64), nullable=True),
        sa.Column("reward_mean", sa.Float(), nullable=True),
        sa.Column("reward_std", sa.Float(), nullable=True),
        sa.Column("num_tokens", sa.Integer(), nullable=False),
        sa.Column("ready_at", sa.Float(), nullable=True),
        sa.Column("trained_step", sa.Integer(), nullable=True),
        sa.Column("drop_reason", sa.String(length=64), nullable=True),
        sa.ForeignKeyConstraint(
            ["run_id"],
            ["runs.id"],
        ),
        sa.PrimaryKeyConstraint("run_id", "index"),
    )
    with op.batch_alter_table("groups", schema=None) as batch_op:
        batch_op.create_index(
            batch_op.f("ix_groups_generate_job_id"), ["generate_job_id"], unique=False
        )
        batch_op.create_index("ix_groups_run_status", ["run_id", "status"], unique=False)
        batch_op.create_index(batch_op.f("ix_groups_train_job_id"), ["train_job_id"], unique=False)

    op.create_table(
        "jobs",
        sa.Column("seq", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("run_id", sa.String(length=32), nullable=False),
        sa.Column(
            "kind",
            sa.Enum(
                "prepare",
                "init",
                "generate",
                "evaluate",
                "train",
                name="jobkind",
                native_enum=False,
                length=16,
            ),
            nullable=False,
        ),
        sa.Column("pool", sa.String(length=32), nullable=False),
        sa.Column(
            "status",
            sa.Enum(
                "queued",
                "leased",
                "done",
                "failed",
                "dead",
                "cancelled",
                name="jobstatus",
                native_enum=False,
                length=16,
            ),
            nullable=False,
        ),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("failures", sa.Integer(), nullable=False),
        sa.Column("input", sa.Text(), nullable=False),
        sa.Column("output", sa.Text(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("worker_id", sa.String(length=128), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("enqueued_at", sa.Float(), nullable=True),
        sa.Column("leased_at", sa.Float(), nullable=True),
        sa.Column("lease_expires_at", sa.Float(), nullable=True),
        sa.Column("finished_at", sa.Float(), nullable=True),
        sa.ForeignKeyConstraint(
            ["run_id"],
            ["runs.id"],
        ),
        sa.PrimaryKeyConstraint("seq"),
        sa.UniqueConstraint("id"),
    )
    with op.batch_alter_table("jobs", schema=None) as batch_op:
        batch_op.create_index("ix_jobs_run_status", ["run_id", "status"], unique=False)
        batch_op.create_index("ix_jobs_status_kind", ["status", "kind"], unique=False)

    op.create_table(
        "metrics",
        sa.Column("run_id", sa.String(length=32), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("value", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(
            ["run_id"],
            ["runs.id"],
        ),
        sa.PrimaryKeyConstraint("run_id", "name", "step"),
    )
