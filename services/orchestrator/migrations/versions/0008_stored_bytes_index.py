"""What a project stores is added up from an index alone, however many runs it has had"""

from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Move the schema forward."""
    op.create_index("ix_runs_stored_bytes", "runs", ["project_id", "stored_bytes"])


def downgrade() -> None:
    """Move the schema back."""
    op.drop_index("ix_runs_stored_bytes", "runs")
