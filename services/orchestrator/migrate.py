"""Brings the database to the newest schema. Safe to run at every start, and on an empty database.

`python -m services.orchestrator.migrate` does it and ends; the orchestrator does it at its start.
"""

from pathlib import Path

import structlog
from alembic import command
from alembic.config import Config
from sqlalchemy import Engine, func, select

from offbeat.logs import configure_logs
from services.orchestrator.settings import OrchestratorSettings
from services.orchestrator.store import Store

log = structlog.get_logger(__name__)

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


def main() -> None:
    """Migrate the database of the settings."""
    settings = OrchestratorSettings()
    configure_logs(settings, "migrations")
    store = Store.connect(settings.orchestrator_database_url.get_secret_value())
    migrate(store.engine)
    log.info("The database has the newest schema.")


if __name__ == "__main__":
    main()
