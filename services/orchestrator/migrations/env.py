"""Alembic's entry: runs migrations on the connection that `migrate.py` hands over."""

from alembic import context

from services.orchestrator.schema import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    render_as_batch=True,
    transaction_per_migration=False,
)
with context.begin_transaction():
    context.run_migrations()
