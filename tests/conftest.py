"""The real parts that tests share: one Valkey, one S3 server, one PostgreSQL server and one tiny
model a session."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from pydantic import SecretStr

from offbeat.objects import S3ObjectStore
from offbeat.settings import ObjectStoreSettings
from scripts import parts
from tests.postgres import PostgresServer, migrated_database, running_postgres
from tests.tiny_model import write_tiny_model


@pytest.fixture(scope="session", autouse=True)
def unwrapped_output() -> None:
    """The command line writes lines as long as a pipe takes, also where pytest says how wide its
    own terminal is."""
    os.environ.pop("COLUMNS", None)


def run_part(part: parts.Part, log: Path) -> Iterator[None]:
    """Start a part, wait until it is ready, stop it at the end."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            part.command,
            env={**os.environ, **part.environment},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            parts.wait_until_ready(part, process)
            yield
        finally:
            process.terminate()
            process.wait(timeout=60)


@pytest.fixture(scope="session")
def s3_settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStoreSettings]:
    """A running S3 server with authentication."""
    port = parts.free_port()
    folder = tmp_path_factory.mktemp("s3")
    settings = ObjectStoreSettings(
        endpoint_url=f"http://127.0.0.1:{port}",
        bucket="tests",
        access_key_id="test",
        secret_access_key=SecretStr(uuid4().hex),
    )
    part = parts.s3(port, folder / "objects", settings)
    for _ in run_part(part, folder / "log"):
        yield settings


@pytest.fixture(scope="session")
def store(s3_settings: ObjectStoreSettings) -> S3ObjectStore:
    """The store over that server."""
    return S3ObjectStore.connect(s3_settings)


@pytest.fixture(scope="session")
def valkey_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A running Valkey."""
    port = parts.free_port()
    folder = tmp_path_factory.mktemp("valkey")
    for _ in run_part(parts.valkey(port, folder), folder / "log"):
        yield f"redis://127.0.0.1:{port}/0"


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A running PostgreSQL."""
    with running_postgres() as server:
        yield server


@pytest.fixture(scope="session")
def migrated(postgres: PostgresServer) -> str:
    """The name of a database with the orchestrator's tables, to make copies of."""
    return migrated_database(postgres)


@pytest.fixture
def postgres_url(postgres: PostgresServer) -> Iterator[str]:
    """An empty PostgreSQL database."""
    name = postgres.create_database()
    yield postgres.url(name)
    postgres.drop_database(name)


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An empty database of each kind, or one with the orchestrator's tables: either will do."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/test.db"
        return
    server: PostgresServer = request.getfixturevalue("postgres")
    name = server.create_database(request.getfixturevalue("migrated"))
    yield server.url(name)
    server.drop_database(name)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a two-layer Llama."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture
def run_id() -> str:
    """A run id that no other test uses."""
    return f"run-{uuid4().hex[:10]}"
