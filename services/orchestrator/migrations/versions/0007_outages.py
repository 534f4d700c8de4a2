"""Jobs that wait while the object store or the weight-proxy is away"""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Move the schema forward."""
    op.add_column("jobs", sa.Column("outage_since", sa.Float(), nullable=True))
    op.add_column("jobs", sa.Column("not_before", sa.Float(), nullable=True))


def downgrade() -> None:
    """Move the schema back."""
    op.drop_column("jobs", "not_before")
    op.drop_column("jobs", "outage_since")
