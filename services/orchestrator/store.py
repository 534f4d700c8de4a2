"""The database: transactions, and the rows that users create and read.

Every change of a run happens in one transaction that first locks the run: `BEGIN IMMEDIATE` on
SQLite, a row lock on PostgreSQL. So a lease, a completion and the scheduler never see half of one
another. Heartbeats, which only move the end of a lease, lock its job alone.
"""

import json
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from secrets import token_hex
from sqlite3 import Connection as SqliteConnection
from typing import Any

import structlog
from pydantic import JsonValue
from sqlalchemy import Engine, bindparam, create_engine, event, insert, make_url, select, text
from sqlalchemy.engine import Connection
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from offbeat.contracts.runs import EventLevel
from offbeat.errors import NotFoundError, UnavailableError
from services.orchestrator.schema import EventRow, MetricRow, RunRow

log = structlog.get_logger(__name__)

SQLITE_BUSY_TIMEOUT_MS = 15_000
"""How long a writer waits for another: far longer than any transaction here takes."""
POSTGRESQL_PATIENCE = {
    "connect_timeout": 5,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
}
"""A server whose machine vanished without a word is noticed after some ten seconds."""
ID_BYTES = 5


def new_id(prefix: str) -> str:
    """`run-3f9a0c11d2`: short enough to type, and 2^40 of them."""
    return f"{prefix}-{token_hex(ID_BYTES)}"


class Store:
    """Opens sessions. All sessions of one process share the engine's pool."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        # Whoever finds a SQLite file locked sleeps and tries again, for up to 0.1 s each time. The
        # threads of this process rather wait for one another, and are woken.
        is_file = engine.dialect.name == "sqlite"
        self._turn = threading.Lock() if is_file else nullcontext()

    @classmethod
    def connect(cls, url: str) -> "Store":
        """Open the database; the folder of a SQLite file is made."""
        parsed = make_url(url)
        if parsed.get_backend_name() == "sqlite":
            if parsed.database:
                Path(parsed.database).parent.mkdir(parents=True, exist_ok=True)
            engine = create_engine(parsed)
            event.listen(engine, "connect", _configure_sqlite)
            event.listen(engine, "begin", _begin_sqlite)
        else:
            engine = create_engine(parsed, pool_pre_ping=True, connect_args=POSTGRESQL_PATIENCE)
        return cls(engine)

    def ping(self) -> None:
        """Raise `UnavailableError` unless the database answers."""
        try:
            with self.engine.connect() as connection:
                connection.execute(text("SELECT 1"))
        except SQLAlchemyError as error:
            raise UnavailableError(f"the database does not answer: {error}") from error

    @contextmanager
    def read(self) -> Iterator[Session]:
        """A session that only reads."""
        with Session(self.engine) as session:
            yield session

    @contextmanager
    def write(self) -> Iterator[Session]:
        """A session that commits at the end, or changes nothing."""
        with self._turn, Session(self.engine) as session, session.begin():
            session.connection(execution_options={"writes": True})
            yield session


def _configure_sqlite(connection: SqliteConnection, _: Any) -> None:  # noqa: ANN401
    connection.isolation_level = None  # BEGIN is ours to say, see _begin_sqlite.
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=NORMAL")
    connection.execute("PRAGMA foreign_keys=ON")
    connection.execute(f"PRAGMA busy_timeout={SQLITE_BUSY_TIMEOUT_MS}")


def _begin_sqlite(connection: Connection) -> None:
    """Take the write lock at once: upgrading a read lock later fails with SQLITE_BUSY."""
    writes = connection.get_execution_options().get("writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


RUN = select(RunRow).where(RunRow.id == bindparam("run_id"), RunRow.deleted_at.is_(None))
LOCKED_RUN = RUN.with_for_update()
LOCKED_RUNS = (
    select(RunRow)
    .where(RunRow.id.in_(bindparam("run_ids", expanding=True)), RunRow.deleted_at.is_(None))
    .order_by(RunRow.id)
    .with_for_update()
)


def lock_run(session: Session, run_id: str) -> RunRow:
    """The run, locked until the transaction ends; `NotFoundError` where there is none."""
    row = session.scalar(LOCKED_RUN, {"run_id": run_id})
    if row is None:
        raise NotFoundError(f"there is no run {run_id!r}")
    return row


def lock_runs(session: Session, run_ids: Collection[str]) -> dict[str, RunRow]:
    """Those of the runs that are there. They are locked in one order, and before any row of a
    worker is: nobody waits in a circle."""
    if not run_ids:
        return {}
    return {run.id: run for run in session.scalars(LOCKED_RUNS, {"run_ids": run_ids})}


def find_run(session: Session, run_id: str) -> RunRow:
    """The run; `NotFoundError` where there is none."""
    row = session.scalar(RUN, {"run_id": run_id})
    if row is None:
        raise NotFoundError(f"there is no run {run_id!r}")
    return row


def add_event(
    session: Session,
    run_id: str,
    now: float,
    kind: str,
    message: str,
    *,
    level: EventLevel = EventLevel.INFO,
    data: dict[str, JsonValue] | None = None,
) -> None:
    """Append to the run's log, and say the same in the service's own."""
    session.add(
        EventRow(
            run_id=run_id,
            at=now,
            level=level,
            kind=kind,
            message=message,
            data=json.dumps(data or {}),
        )
    )
    log.log(_LOG_LEVELS[level], message, run=run_id, event_kind=kind)


_LOG_LEVELS = {EventLevel.INFO: 20, EventLevel.WARNING: 30, EventLevel.ERROR: 40}


METRIC_NAMES = select(MetricRow.name).where(
    MetricRow.run_id == bindparam("run_id"), MetricRow.step == bindparam("step")
)


def add_metrics(session: Session, run_id: str, step: int, values: dict[str, float]) -> None:
    """Record a step's values; a value that is there already stays."""
    known = set(session.scalars(METRIC_NAMES, {"run_id": run_id, "step": step}))
    new = [
        {"run_id": run_id, "name": name, "step": step, "value": value}
        for name, value in values.items()
        if name not in known
    ]
    if new:
        session.execute(insert(MetricRow), new)


def events_after(session: Session, run_id: str, after: int, limit: int) -> Sequence[EventRow]:
    """The run's events with an id above `after`, oldest first."""
    return session.scalars(
        select(EventRow)
        .where(EventRow.run_id == run_id, EventRow.id > after)
        .order_by(EventRow.id)
        .limit(limit)
    ).all()
