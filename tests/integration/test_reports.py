"""Reports of many workers are written together, and each is there when its request is answered."""

import asyncio
from pathlib import Path

import pytest
from sqlalchemy import event, select
from sqlalchemy.exc import OperationalError

from offbeat.contracts.leases import WorkerReport
from services.orchestrator.batches import BATCH_MAX, Batches
from services.orchestrator.migrate import migrate
from services.orchestrator.reports import Report, write_reports
from services.orchestrator.schema import WorkerRow
from services.orchestrator.store import Store
from tests.orchestrator_store import worker_report

NOW = 1_000_000.0
WORKERS = 2 * BATCH_MAX + 1


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store.connect(f"sqlite:///{tmp_path}/orchestrator.db")
    migrate(store.engine)
    return store


async def save(
    reports: Batches[Report, bool], store: Store, worker_id: str, body: WorkerReport, now: float
) -> bool:
    one = Report(worker_id=worker_id, body=body)
    return await reports.add(one, lambda batch: write_reports(store, batch, now))


def seen(store: Store) -> dict[str, float]:
    with store.read() as session:
        return dict(session.execute(select(WorkerRow.id, WorkerRow.last_seen_at)).all())


def test_a_fleet_that_reports_at_once_takes_few_transactions(store: Store) -> None:
    commits: list[None] = []
    event.listen(store.engine, "commit", lambda _: commits.append(None))

    async def all_report(now: float) -> list[bool]:
        reports = Batches[Report, bool]()
        saves = (save(reports, store, f"w{n}", worker_report(), now) for n in range(WORKERS))
        return await asyncio.gather(*saves)

    assert all(asyncio.run(all_report(NOW)))
    assert seen(store) == {f"w{n}": NOW for n in range(WORKERS)}
    assert len(commits) == 3, "two full transactions and the rest"
    assert not any(asyncio.run(all_report(NOW + 5)))
    assert set(seen(store).values()) == {NOW + 5}


def test_a_worker_that_reports_twice_while_one_waits_is_written_as_it_is_now(store: Store) -> None:
    async def twice() -> None:
        reports = Batches[Report, bool]()
        await asyncio.gather(
            *(
                save(reports, store, "w", worker_report(engine=engine), NOW)
                for engine in ("old", "new")
            )
        )

    asyncio.run(twice())
    with store.read() as session:
        row = session.get_one(WorkerRow, "w")
        assert WorkerReport.model_validate_json(row.report).engine == "new"


def test_all_who_share_a_transaction_hear_that_it_failed_and_the_next_one_works(
    tmp_path: Path,
) -> None:
    broken = Store.connect(f"sqlite:///{tmp_path}/empty.db")

    async def report_twice() -> list[bool | BaseException]:
        reports = Batches[Report, bool]()
        saves = [save(reports, broken, f"w{n}", worker_report(), NOW) for n in range(2)]
        failed = await asyncio.gather(*saves, return_exceptions=True)
        migrate(broken.engine)
        return [*failed, await save(reports, broken, "w0", worker_report(), NOW)]

    *failed, works = asyncio.run(report_twice())
    assert [type(error) for error in failed] == [OperationalError] * 2
    assert works is True
    assert seen(broken) == {"w0": NOW}
