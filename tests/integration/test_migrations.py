"""Databases of every age come to the newest schema with what is in them."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import MetaData, insert, select

from offbeat.contracts.jobs import InitOutput, JobKind, TrainOutput
from offbeat.contracts.weights import Canary, Manifest, VersionFile
from services.orchestrator.migrate import MIGRATIONS, migrate
from services.orchestrator.results import OUTPUT
from services.orchestrator.schema import Base, EventRow, JobRow, RunRow, VersionRow
from services.orchestrator.store import Store
from services.orchestrator.submission import stored_key
from tests.specs import spec

VERSIONS = 450
"""More than the migration reads at once."""


@pytest.fixture(params=["sqlite", "postgresql"])
def empty(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path}/old.db"
    else:
        url = request.getfixturevalue("postgres_url")
    store = Store.connect(url)
    yield store
    store.engine.dispose()


def alembic_config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    return config


def migrate_to(store: Store, revision: str) -> None:
    config = alembic_config()
    with store.engine.connect().execution_options(writes=True) as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, revision)
        connection.commit()


def output(version: int) -> str:
    manifest = Manifest(
        run_id="run-old",
        version=version,
        parent=version - 1 if version else None,
        job_id=f"job-{version}",
        attempt=1,
        prefix=f"runs/run-old/versions/{version:06d}-job-{version}-1/",
        files=(VersionFile(name="adapter_model.safetensors", size_bytes=1, sha256="a" * 64),),
        base_model="tiny",
        base_revision=None,
        rank=2,
        alpha=4,
        target_modules=("q_proj",),
        canary=Canary(prompt_ids=(1,), completion_ids=(2,), logprobs=(-0.5,)),
    )
    made = TrainOutput(manifest=manifest) if version else InitOutput(manifest=manifest)
    return OUTPUT.dump_json(made).decode()


def write_old_run(store: Store) -> None:
    """What an orchestrator of the first schema has left behind."""
    old = MetaData()
    with store.engine.connect().execution_options(writes=True) as connection:
        old.reflect(connection)
        run = {
            "id": "run-old",
            "idempotency_key": "a-key",
            "spec": spec().model_dump_json(),
            "status": "running",
            "created_at": 1.0,
            "num_prompts": 8,
            "version": VERSIONS - 1,
            "next_group": 2,
            "refilled": 0,
            "generation_failures": 0,
        }
        connection.execute(insert(old.tables["runs"]), [run])
        job = {"run_id": "run-old", "pool": "default", "status": "done", "attempt": 1}
        made = {**job, "failures": 0, "input": "{}", "created_at": 1.0, "finished_at": 2.0}
        connection.execute(
            insert(old.tables["jobs"]),
            [
                {
                    **made,
                    "id": f"job-{version}",
                    "kind": JobKind.TRAIN if version else JobKind.INIT,
                    "output": output(version),
                }
                for version in range(VERSIONS)
            ],
        )
        event = {"run_id": "run-old", "at": 1.0, "level": "info", "kind": "x", "message": "kept"}
        connection.execute(insert(old.tables["events"]), [{**event, "data": "{}"}])
        connection.commit()


def test_the_oldest_database_keeps_what_is_in_it(empty: Store) -> None:
    migrate_to(empty, "0001")
    write_old_run(empty)
    for _ in range(2):
        migrate(empty.engine)
    with empty.read() as session:
        run = session.scalars(select(RunRow)).one()
        assert (run.id, run.status, run.version) == ("run-old", "running", VERSIONS - 1)
        assert (run.deleted_at, run.collected_at) == (None, None)
        assert (run.project_id, run.stored_bytes) == ("default", 0)
        assert run.idempotency_key == stored_key("default", "a-key")
        assert len(session.scalars(select(JobRow)).all()) == VERSIONS
        assert session.scalars(select(EventRow.message)).all() == ["kept"]
        versions = session.scalars(select(VersionRow).order_by(VersionRow.version)).all()
        assert [row.version for row in versions] == list(range(VERSIONS))
        assert versions[7].prefix == "runs/run-old/versions/000007-job-7-1/"
        assert {row.state_removed_at for row in versions} == {None}


def test_the_schema_is_what_the_migrations_make(empty: Store) -> None:
    migrate(empty.engine)
    with empty.engine.connect() as connection:
        context = MigrationContext.configure(connection)
        assert compare_metadata(context, Base.metadata) == []


def test_there_is_one_newest_schema() -> None:
    assert len(ScriptDirectory.from_config(alembic_config()).get_heads()) == 1


def test_replicas_that_start_at_once_migrate_once(postgres_url: str) -> None:
    stores = [Store.connect(postgres_url) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda store: migrate(store.engine), stores))
    for store in stores:
        store.ping()
        store.engine.dispose()
