"""The orchestrator's tables without the service."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from offbeat.contracts.jobs import WorkerRole
from offbeat.contracts.leases import WorkerEvent, WorkerReport
from offbeat.contracts.runs import RunStatus
from services.orchestrator.migrate import migrate
from services.orchestrator.schema import RunRow
from services.orchestrator.store import Store


@contextmanager
def orchestrator_store(database_url: str, *runs: RunRow) -> Iterator[Store]:
    """A store with these runs."""
    store = Store.connect(database_url)
    migrate(store.engine)
    with store.write() as session:
        session.add_all(runs)
    yield store
    store.engine.dispose()


def running_run(run_id: str, *, created_at: float, deleted_at: float | None = None) -> RunRow:
    """One whose spec nobody reads."""
    return RunRow(
        id=run_id,
        project_id="p",
        spec="{}",
        status=RunStatus.RUNNING,
        created_at=created_at,
        deleted_at=deleted_at,
    )


def worker_report(*events: WorkerEvent, engine: str = "e") -> WorkerReport:
    """What a generator says of itself, and what it saw."""
    return WorkerReport(
        role=WorkerRole.GENERATOR,
        pool="default",
        engine=engine,
        host="h",
        pid=1,
        started_at=datetime(2026, 1, 1, tzinfo=UTC),
        events=events,
    )
