"""When a job's attempt had only its hand-in left"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Move the schema forward."""
    op.add_column("jobs", sa.Column("computed_at", sa.Float(), nullable=True))


def downgrade() -> None:
    """Move the schema back."""
    op.drop_column("jobs", "computed_at")
