"""What remains of each version and of the samples, and which runs are deleted"""

import json

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

ROWS = 200
"""Manifests in memory at a time."""


def upgrade() -> None:
    """Move the schema forward; the versions that are there are read from their jobs' results."""
    versions = op.create_table(
        "policy_versions",
        sa.Column("run_id", sa.String(length=32), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("prefix", sa.String(length=256), nullable=False),
        sa.Column("adapter_removed_at", sa.Float(), nullable=True),
        sa.Column("state_removed_at", sa.Float(), nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"]),
        sa.PrimaryKeyConstraint("run_id", "version"),
    )
    op.add_column("jobs", sa.Column("samples_removed_at", sa.Float(), nullable=True))
    op.add_column("runs", sa.Column("collected_at", sa.Float(), nullable=True))
    op.add_column("runs", sa.Column("deleted_at", sa.Float(), nullable=True))
    _fill(versions)


def _fill(versions: sa.Table) -> None:
    jobs = sa.table("jobs", *map(sa.column, ("seq", "run_id", "kind", "status", "output")))
    after = 0
    while True:
        rows = (
            op.get_bind()
            .execute(
                sa.select(jobs.c.seq, jobs.c.run_id, jobs.c.output)
                .where(jobs.c.kind.in_(["init", "train"]), jobs.c.status == "done")
                .where(jobs.c.seq > after)
                .order_by(jobs.c.seq)
                .limit(ROWS)
            )
            .all()
        )
        if not rows:
            return
        manifests = [(row.run_id, json.loads(row.output)["manifest"]) for row in rows]
        op.bulk_insert(
            versions,
            [
                {"run_id": run_id, "version": manifest["version"], "prefix": manifest["prefix"]}
                for run_id, manifest in manifests
            ],
        )
        after = rows[-1].seq


def downgrade() -> None:
    """Move the schema back."""
    op.drop_column("runs", "deleted_at")
    op.drop_column("runs", "collected_at")
    op.drop_column("jobs", "samples_removed_at")
    op.drop_table("policy_versions")
