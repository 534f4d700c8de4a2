"""Projects, API keys and quotas; what is there belongs to the project `default`"""

import time
from hashlib import sha256

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Move the schema forward."""
    projects = op.create_table(
        "projects",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("active_runs_max", sa.Integer(), nullable=False),
        sa.Column("jobs_in_flight_max", sa.Integer(), nullable=False),
        sa.Column("stored_bytes_max", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.bulk_insert(
        projects,
        [
            {
                "id": "default",
                "created_at": time.time(),
                "active_runs_max": 1_000,
                "jobs_in_flight_max": 10_000,
                "stored_bytes_max": 10 * 2**40,
            }
        ],
    )
    op.create_table(
        "api_keys",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("project_id", sa.String(length=32), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("secret_sha256", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"]),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_api_keys_project_id", "api_keys", ["project_id"])
    # Without a foreign key: SQLite would have to rebuild the table that all others refer to.
    op.add_column(
        "runs",
        sa.Column("project_id", sa.String(length=32), nullable=False, server_default="default"),
    )
    op.add_column(
        "runs", sa.Column("stored_bytes", sa.BigInteger(), nullable=False, server_default="0")
    )
    op.create_index("ix_runs_project", "runs", ["project_id", "seq"])
    _hash_idempotency_keys()


def downgrade() -> None:
    """Move the schema back; idempotency keys stay hashed, and so are forgotten."""
    op.drop_index("ix_runs_project", "runs")
    op.drop_column("runs", "stored_bytes")
    op.drop_column("runs", "project_id")
    op.drop_table("api_keys")
    op.drop_table("projects")


def _hash_idempotency_keys() -> None:
    """From here on the column holds a hash of project and key."""
    runs = sa.table("runs", sa.column("id", sa.String), sa.column("idempotency_key", sa.String))
    connection = op.get_bind()
    query = sa.select(runs.c.id, runs.c.idempotency_key).where(runs.c.idempotency_key.is_not(None))
    for run_id, key in connection.execute(query).all():
        hashed = sha256(f"default\n{key}".encode()).hexdigest()
        connection.execute(
            sa.update(runs).where(runs.c.id == run_id).values(idempotency_key=hashed)
        )
