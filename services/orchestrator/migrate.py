"""Brings the database to the newest schema. Safe to run at every start, and on an empty
database."""

from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import Engine, func, select

MIGRATIONS = Path(__file__).parent / "migrations"
LOCK_KEY = 0x0FFBEA6
"""Of the advisory lock under which a database is migrated."""


def migrate(engine: Engine) -> None:
    """Apply the migrations that are missing, in one transaction."""
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    with engine.connect().execution_options(writes=True) as connection:
        if engine.dialect.name == "postgresql":
            # Of replicas that start at once, one migrates and the others find it done.
            connection.execute(select(func.pg_advisory_xact_lock(LOCK_KEY)))
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
        connection.commit()
