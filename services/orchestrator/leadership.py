"""Which of several orchestrators schedules: the one that holds the database's lock.

All of them serve requests; one, the leader, moves runs on. On PostgreSQL the lock belongs to a
session, so it is free as soon as its process is gone, and a request that reaches a standby wakes
the leader with a notification. On SQLite it is a file beside the database: such orchestrators share
a machine, and what a standby hears waits for the leader's next look at all runs.

Two leaders at once, for a moment after a network has broken, would only send some messages twice:
what they decide is decided under the locks of the runs.
"""

import fcntl
import os
import threading
from pathlib import Path
from typing import Protocol
from uuid import uuid4

import psycopg
import structlog
from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import SQLAlchemyError

log = structlog.get_logger(__name__)

LOCK_KEY = 0x0FFBEA7
"""Of the advisory lock, the same in every orchestrator of a database."""
CHANNEL = "offbeat_scheduler"
KEEPALIVES = (
    "SET tcp_keepalives_idle = 5",
    "SET tcp_keepalives_interval = 2",
    "SET tcp_keepalives_count = 3",
)
"""A leader whose machine vanished without a word loses the lock after some ten seconds."""


class Leadership(Protocol):
    """Whether this process leads. Everything but `wake` belongs to the scheduler's thread."""

    def acquire(self) -> bool:
        """Whether this process leads now. `SQLAlchemyError` where that cannot be told."""
        ...

    def wait(self, timeout_s: float) -> bool:
        """Return when somebody wakes the leader, or after the timeout; whether it was another
        process."""
        ...

    def wake(self) -> None:
        """Wake the leader, whichever process it is. May be called from any thread."""
        ...

    def release(self) -> None:
        """Let another process lead."""
        ...


def leadership_over(engine: Engine) -> Leadership:
    """The lock of this database."""
    if engine.dialect.name == "postgresql":
        return SessionLock(engine)
    database = engine.url.database
    return FileLock(Path(f"{database}.leader") if database else None)


class FileLock:
    """For SQLite: a lock on a file, which ends with the process. In memory there is no other."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._file: int | None = None
        self._woken = threading.Event()

    def acquire(self) -> bool:
        """See `Leadership.acquire`."""
        if self._path is None or self._file is not None:
            return True
        file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return False
        self._file = file
        log.info("This orchestrator leads.")
        return True

    def wait(self, timeout_s: float) -> bool:
        """See `Leadership.wait`."""
        self._woken.wait(timeout_s)
        self._woken.clear()
        return False

    def wake(self) -> None:
        """See `Leadership.wake`: a leader in another process is not reached."""
        self._woken.set()

    def release(self) -> None:
        """See `Leadership.release`."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


class SessionLock:
    """For PostgreSQL: an advisory lock of one session, over which notifications come as well.

    It must not run through a pooler that shares sessions between transactions.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine.execution_options(isolation_level="AUTOCOMMIT")
        self._name = uuid4().hex
        self._session: Connection | None = None
        self._leads = False
        self._woken = threading.Event()

    def acquire(self) -> bool:
        """See `Leadership.acquire`."""
        try:
            session = self._session or self._open()
            if self._leads:
                session.execute(text("SELECT 1"))
            elif session.scalar(text("SELECT pg_try_advisory_lock(:key)"), {"key": LOCK_KEY}):
                session.execute(text(f"LISTEN {CHANNEL}"))
                self._leads = True
                log.info("This orchestrator leads.")
        except SQLAlchemyError:
            self.release()
            raise
        return self._leads

    def wait(self, timeout_s: float) -> bool:
        """See `Leadership.wait`."""
        if not self._leads:
            self._woken.wait(timeout_s)
            self._woken.clear()
            return False
        assert self._session is not None
        driver = self._session.connection.driver_connection
        assert isinstance(driver, psycopg.Connection)
        try:
            heard = driver.notifies(timeout=timeout_s, stop_after=1)
            return any(notice.payload != self._name for notice in heard)
        except psycopg.Error as error:
            log.warning("The session that holds the scheduler's lock broke.", error=str(error))
            self.release()
            return False

    def wake(self) -> None:
        """See `Leadership.wake`. Where it fails the leader's next round sees what happened."""
        self._woken.set()
        try:
            with self._engine.connect() as connection:
                connection.execute(text(f"NOTIFY {CHANNEL}, '{self._name}'"))
        except SQLAlchemyError as error:
            log.warning("The leader could not be woken.", error=str(error))

    def release(self) -> None:
        """See `Leadership.release`."""
        if self._leads:
            log.info("This orchestrator does not lead any more.")
        self._leads = False
        if self._session is not None:
            self._session.invalidate()  # The server frees the lock when the session ends.
            self._session.close()
            self._session = None

    def _open(self) -> Connection:
        self._session = self._engine.connect()
        for setting in KEEPALIVES:
            self._session.execute(text(setting))
        return self._session
