"""The order of adapter versions: one table, in which the first insert of a version wins.

A row never changes and stays as long as its run, so whatever was read once stays true, and is
remembered; the bytes of its version may be gone before. The table can be refilled from the
manifests in the object store.
"""

import re
import threading
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from cachetools import TTLCache
from pydantic import ValidationError
from sqlalchemy import (
    Column,
    Connection,
    DateTime,
    Engine,
    Integer,
    MetaData,
    Row,
    String,
    Table,
    Text,
    create_engine,
    delete,
    event,
    func,
    insert,
    make_url,
    select,
)
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import IntegrityError as DuplicateRowError
from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.pool import ConnectionPoolEntry
from sqlalchemy.schema import CreateTable

from offbeat import keys
from offbeat.contracts.runs import Page
from offbeat.contracts.weights import Manifest, PublishedVersion
from offbeat.errors import IntegrityError, NotFoundError, OutageError
from offbeat.objects import ObjectStore

BUSY_TIMEOUT_MS = 10_000
"""How long an SQLite writer waits for another; an insert takes milliseconds."""
REBUILD_THREADS = 8
"""Manifests read from the store at a time."""
REMEMBERED_MAX, RUNS_REMEMBERED_MAX = 2048, 512
"""Versions that need not be read again, and runs whose newest one is known; some 4 KB each."""
REMEMBERED_S = 60.0
"""How long another replica may still tell of a run that was deleted here."""
CREATE_LOCK_KEY = 0x0FFBEA8
"""Of the advisory lock under which the table is made."""
MANIFEST_KEY = re.compile(r"runs/[^/]+/manifests/\d+\.json")

METADATA = MetaData()
VERSIONS = Table(
    "versions",
    METADATA,
    Column("run_id", String(128), primary_key=True),
    Column("version", Integer, primary_key=True, autoincrement=False),
    Column("manifest", Text, nullable=False),
    Column("adapter_sha256", String(64), nullable=False),
    Column("published_at", DateTime, nullable=False),  # UTC
)


class Registry:
    """The versions table. Safe to share between threads and, over one database, processes."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._remembered: TTLCache[tuple[str, int], PublishedVersion] = TTLCache(
            REMEMBERED_MAX, REMEMBERED_S
        )
        self._newest: TTLCache[str, PublishedVersion] = TTLCache(RUNS_REMEMBERED_MAX, REMEMBERED_S)
        self._lock = threading.Lock()

    @classmethod
    def connect(cls, url: str) -> "Registry":
        """Open the database, SQLite or PostgreSQL, and make the table where there is none."""
        parsed = make_url(url)
        engine = create_engine(parsed, pool_pre_ping=True)
        if parsed.get_backend_name() == "sqlite":
            Path(parsed.database or "").parent.mkdir(parents=True, exist_ok=True)
            event.listen(engine, "connect", _set_pragmas)
        with engine.begin() as connection:
            if parsed.get_backend_name() == "postgresql":
                # Two replicas that start at once would both find no table and make it.
                connection.execute(select(func.pg_advisory_xact_lock(CREATE_LOCK_KEY)))
            connection.execute(CreateTable(VERSIONS, if_not_exists=True))
        return cls(engine)

    def close(self) -> None:
        """Close the connections."""
        self._engine.dispose()

    def ping(self) -> None:
        """Raise `OutageError` unless the table answers."""
        self.is_empty()

    def is_empty(self) -> bool:
        """Whether nothing was ever published, or the table was lost."""
        with self._connection() as connection:
            return connection.execute(select(VERSIONS.c.version).limit(1)).first() is None

    def publish(self, candidate: PublishedVersion) -> PublishedVersion:
        """Insert the candidate unless its version is taken; the row that holds the version then.

        The answer is the very object `candidate` when it won.
        """
        try:
            with self._connection() as connection:
                connection.execute(insert(VERSIONS), [_row(candidate)])
        except DuplicateRowError:
            winner = self.get(candidate.manifest.run_id, candidate.manifest.version)
            if winner is None:
                raise NotFoundError("the run was deleted a moment ago") from None
            return winner
        self._remember(candidate)
        self._remember_newest(candidate)
        return candidate

    def forget(self, run_id: str) -> None:
        """Remove the versions of a run that is deleted."""
        with self._connection() as connection:
            connection.execute(delete(VERSIONS).where(VERSIONS.c.run_id == run_id))
        with self._lock:
            for key in [key for key in self._remembered if key[0] == run_id]:
                del self._remembered[key]
            self._newest.pop(run_id, None)

    def remembered(self, run_id: str, version: int) -> PublishedVersion | None:
        """One version as `get` finds it, if that takes no look at the table."""
        with self._lock:
            return self._remembered.get((run_id, version))

    def get(self, run_id: str, version: int) -> PublishedVersion | None:
        """One version, or None where it is not published."""
        if known := self.remembered(run_id, version):
            return known
        query = select(VERSIONS).where(VERSIONS.c.run_id == run_id, VERSIONS.c.version == version)
        with self._connection() as connection:
            row = connection.execute(query).first()
        if row is None:
            return None
        published = _published(row)
        self._remember(published)
        return published

    def latest(self, run_id: str) -> PublishedVersion | None:
        """The newest version of a run, or None before the first."""
        query = (
            select(VERSIONS)
            .where(VERSIONS.c.run_id == run_id)
            .order_by(VERSIONS.c.version.desc())
            .limit(1)
        )
        with self._connection() as connection:
            row = connection.execute(query).first()
        if row is None:
            return None
        published = _published(row)
        self._remember_newest(published)
        return published

    def remembered_newest(self, run_id: str) -> PublishedVersion | None:
        """What `latest` found, or was published here since: other replicas may have newer ones."""
        with self._lock:
            return self._newest.get(run_id)

    def newest(self, run_ids: Collection[str]) -> dict[str, int]:
        """The newest version number of each of these runs that has one."""
        query = (
            select(VERSIONS.c.run_id, func.max(VERSIONS.c.version))
            .where(VERSIONS.c.run_id.in_(run_ids))
            .group_by(VERSIONS.c.run_id)
        )
        with self._connection() as connection:
            return dict(connection.execute(query).all())

    def page(self, run_id: str, after: int, limit: int) -> Page[PublishedVersion]:
        """Up to `limit` versions above `after`, oldest first."""
        query = (
            select(VERSIONS)
            .where(VERSIONS.c.run_id == run_id, VERSIONS.c.version > after)
            .order_by(VERSIONS.c.version)
            .limit(limit + 1)
        )
        with self._connection() as connection:
            rows = connection.execute(query).all()
        has_more = len(rows) > limit
        return Page(
            data=tuple(_published(row) for row in rows[:limit]),
            has_more=has_more,
            next_cursor=str(rows[limit - 1].version) if has_more else None,
        )

    def rebuild(self, store: ObjectStore) -> int:
        """Fill the empty table from the manifests in the store; how many there were.

        All rows come in one transaction: a table that is not empty is always whole.
        """
        found = [key for key in store.list(keys.manifests()) if MANIFEST_KEY.fullmatch(key)]
        with ThreadPoolExecutor(REBUILD_THREADS, thread_name_prefix="rebuild") as pool:
            rows = [_row(each) for each in pool.map(lambda key: _read_manifest(store, key), found)]
        # A replica that starts at the same time inserts the same rows, also all of them or none.
        with suppress(DuplicateRowError), self._connection() as connection:
            if rows:
                connection.execute(insert(VERSIONS), rows)
        return len(rows)

    def _remember(self, published: PublishedVersion) -> None:
        with self._lock:
            self._remembered[published.manifest.run_id, published.manifest.version] = published

    def _remember_newest(self, published: PublishedVersion) -> None:
        manifest = published.manifest
        with self._lock:
            known = self._newest.get(manifest.run_id)
            if known is None or known.manifest.version < manifest.version:
                self._newest[manifest.run_id] = published

    @contextmanager
    def _connection(self) -> Iterator[Connection]:
        try:
            with self._engine.begin() as connection:
                yield connection
        except (OperationalError, InterfaceError, PoolTimeoutError) as error:
            raise OutageError(f"the database does not answer: {error.args[0]}") from error


def _row(published: PublishedVersion) -> dict[str, str | int | datetime]:
    manifest = published.manifest
    return {
        "run_id": manifest.run_id,
        "version": manifest.version,
        "manifest": manifest.model_dump_json(),
        "adapter_sha256": manifest.sha256,
        "published_at": published.published_at.astimezone(UTC).replace(tzinfo=None),
    }


def _published(row: Row[str, int, str, str, datetime]) -> PublishedVersion:
    return PublishedVersion(
        manifest=Manifest.model_validate_json(row.manifest),
        published_at=row.published_at.replace(tzinfo=UTC),
    )


def _read_manifest(store: ObjectStore, key: str) -> PublishedVersion:
    try:
        published = PublishedVersion.model_validate_json(store.get(key))
    except ValidationError as error:
        raise IntegrityError(
            f"{key!r} is not a manifest ({error.error_count()} faults): restore the object, or "
            "delete it to give up its version, then start again"
        ) from error
    manifest = published.manifest
    if key != keys.manifest(manifest.run_id, manifest.version):
        raise IntegrityError(
            f"{key!r} holds the manifest of version {manifest.version} of {manifest.run_id!r}: "
            "move it back to its own key, then start again"
        )
    return published


def _set_pragmas(connection: DBAPIConnection, _: ConnectionPoolEntry) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute(f"PRAGMA busy_timeout={BUSY_TIMEOUT_MS}")
    cursor.close()
