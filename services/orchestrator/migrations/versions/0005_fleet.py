"""Outcomes, quarantines, and the clocks by which runs share workers"""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Move the schema forward."""
    op.create_table(
        "outcomes",
        sa.Column("id", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("worker_id", sa.String(length=128), nullable=False),
        sa.Column("run_id", sa.String(length=32), nullable=False),
        sa.Column("work", sa.String(length=16), nullable=False),
        sa.Column("subject", sa.String(length=32), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("ok", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"]),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_outcomes_run", "outcomes", ["run_id", "id"])
    op.create_index("ix_outcomes_worker_id", "outcomes", ["worker_id"])
    op.create_index("ix_outcomes_at", "outcomes", ["at"])
    op.add_column(
        "workers", sa.Column("quarantines", sa.Integer(), nullable=False, server_default="0")
    )
    op.add_column("workers", sa.Column("quarantined_until", sa.Float(), nullable=True))
    op.add_column("workers", sa.Column("quarantine_reason", sa.Text(), nullable=True))
    op.add_column("runs", sa.Column("generator_s", sa.Float(), nullable=True))
    op.add_column("runs", sa.Column("trainer_s", sa.Float(), nullable=True))
    op.add_column("runs", sa.Column("missing_role", sa.String(length=16), nullable=True))


def downgrade() -> None:
    """Move the schema back."""
    for column in ("missing_role", "trainer_s", "generator_s"):
        op.drop_column("runs", column)
    for column in ("quarantine_reason", "quarantined_until", "quarantines"):
        op.drop_column("workers", column)
    op.drop_table("outcomes")
