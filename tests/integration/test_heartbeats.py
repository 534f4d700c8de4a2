"""Heartbeats of many workers are written together, and each gets its own answer."""

import asyncio
from collections.abc import Iterator

import pytest
from sqlalchemy import event, select

from offbeat.contracts.jobs import JobKind, JobStatus
from offbeat.contracts.leases import HeartbeatReply, HeartbeatRequest
from offbeat.errors import LeaseLostError, NotFoundError
from services.orchestrator.batches import Batches
from services.orchestrator.heartbeats import Heartbeat, write_heartbeats
from services.orchestrator.schema import JobRow
from services.orchestrator.store import Store
from tests.orchestrator_store import orchestrator_store, running_run

NOW = 1_000_000.0
LEASE_S = 30.0
WORKERS = 100


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    """A run whose jobs are leased, each by a worker of its own."""
    with orchestrator_store(database_url, running_run("run", created_at=NOW)) as store:
        with store.write() as session:
            session.add_all(
                JobRow(
                    id=f"job-{number}",
                    run_id="run",
                    kind=JobKind.GENERATE,
                    pool="default",
                    status=JobStatus.LEASED,
                    attempt=2,
                    worker_id=f"worker-{number}",
                    input="{}",
                    created_at=NOW,
                    lease_expires_at=NOW + 1,
                )
                for number in range(WORKERS)
            )
        yield store


def heartbeat(number: int, *, attempt: int = 2, computed: bool = False) -> Heartbeat:
    body = HeartbeatRequest(attempt=attempt, worker_id=f"worker-{number}", computed=computed)
    return Heartbeat(job_id=f"job-{number}", body=body)


def write(store: Store, *heartbeats: Heartbeat) -> list[object]:
    return list(write_heartbeats(store, heartbeats, now=NOW, lease_s=LEASE_S))


def ends(store: Store) -> dict[str, float | None]:
    with store.read() as session:
        return dict(session.execute(select(JobRow.id, JobRow.lease_expires_at)).all())


def test_a_fleet_keeps_its_leases_in_few_transactions(store: Store) -> None:
    commits: list[None] = []
    event.listen(store.engine, "commit", lambda _: commits.append(None))

    async def all_beat() -> list[HeartbeatReply]:
        batches = Batches[Heartbeat, HeartbeatReply]()
        return await asyncio.gather(
            *(
                batches.add(
                    heartbeat(number),
                    lambda batch: write_heartbeats(store, batch, now=NOW, lease_s=LEASE_S),
                )
                for number in range(WORKERS)
            )
        )

    assert asyncio.run(all_beat()) == [HeartbeatReply()] * WORKERS
    assert len(commits) < 10
    assert set(ends(store).values()) == {NOW + LEASE_S}


def test_one_that_lost_its_lease_hears_it_and_the_others_keep_theirs(store: Store) -> None:
    lost, unknown, kept = write(
        store, heartbeat(1, attempt=1), heartbeat(WORKERS), heartbeat(2, computed=True)
    )
    assert isinstance(lost, LeaseLostError)
    assert lost.detail == (
        "attempt 1 of job job-1 is not held by worker-1: the job is leased, at attempt 2"
    )
    assert isinstance(unknown, NotFoundError)
    assert kept == HeartbeatReply()
    assert (ends(store)["job-1"], ends(store)["job-2"]) == (NOW + 1, NOW + LEASE_S)
    with store.read() as session:
        job = session.scalars(select(JobRow).where(JobRow.id == "job-2")).one()
        assert job.computed_at == NOW


def test_an_error_is_raised_to_whom_it_concerns_alone(store: Store) -> None:
    async def both_beat() -> list[HeartbeatReply | BaseException]:
        batches = Batches[Heartbeat, HeartbeatReply]()
        return await asyncio.gather(
            *(
                batches.add(
                    one, lambda batch: write_heartbeats(store, batch, now=NOW, lease_s=LEASE_S)
                )
                for one in (heartbeat(1, attempt=1), heartbeat(2))
            ),
            return_exceptions=True,
        )

    lost, kept = asyncio.run(both_beat())
    assert (type(lost), kept) == (LeaseLostError, HeartbeatReply())


def test_a_job_that_changes_just_now_is_not_waited_for(store: Store) -> None:
    if store.engine.dialect.name == "sqlite":
        pytest.skip("SQLite has one writer at a time and no locks on rows")
    with store.write() as session:
        session.scalar(select(JobRow).where(JobRow.id == "job-1").with_for_update())
        assert write(store, heartbeat(1), heartbeat(2)) == [HeartbeatReply()] * 2
    assert (ends(store)["job-1"], ends(store)["job-2"]) == (NOW + 1, NOW + LEASE_S)
