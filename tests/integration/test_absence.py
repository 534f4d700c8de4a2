"""An orchestrator that was away: frozen, restarted, or replaced by another one."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from offbeat.contracts.leases import Lease
from offbeat.objects import S3ObjectStore
from services.orchestrator.absence import is_absence
from services.orchestrator.state import WORKER_LOST_S
from tests.orchestrator import (
    GENERATOR,
    TRAINER,
    Clock,
    Hand,
    Orchestrator,
    kinds,
    running_orchestrator,
    status,
    submit,
    worker_statuses,
)
from tests.waiting import wait_until

AWAY_S = 1000.0
"""Far more than a lease lasts."""


@dataclass
class FreezingClock(Clock):
    """What a thread reads of the clock and of the uptime is of one moment, so that the process is
    frozen before both or after both."""

    last: threading.local = field(default_factory=threading.local)

    def __call__(self) -> float:
        """See `Clock`."""
        self.last.read = self.now
        return self.last.read

    def uptime(self) -> float:
        """As of what the same thread has read last. It moves on by whole `AWAY_S`: the shorter
        jumps of the clock are no absence."""
        return self.last.read // AWAY_S * AWAY_S


@dataclass(frozen=True, kw_only=True)
class Restarted:
    """An orchestrator that is back, its run, and the job that a worker has held meanwhile."""

    orchestrator: Orchestrator
    http: httpx.Client
    run_id: str
    held: Lease


@pytest.fixture
def restarted(
    tmp_path: Path, database_url: str, empty_broker: str, store: S3ObjectStore
) -> Iterator[Restarted]:
    """After `AWAY_S`; one worker was gone before that, and one is taken to be there."""
    clock = Clock()
    with running_orchestrator(
        tmp_path, empty_broker, store, database_url=database_url, clock=clock
    ) as before:
        hand = Hand(before)
        hand.report(TRAINER, "gone long ago")
        clock.now += 2 * WORKER_LOST_S
        hand.report(GENERATOR, "hand")
        with httpx.Client(base_url=before.url) as http:
            run_id = submit(http)
        held = hand.leased(GENERATOR)
    clock.now += AWAY_S
    with (
        running_orchestrator(
            tmp_path, empty_broker, store, database_url=database_url, clock=clock
        ) as after,
        httpx.Client(base_url=after.url) as http,
    ):
        wait_until(lambda: alive(http) == {"hand"})
        yield Restarted(orchestrator=after, http=http, run_id=run_id, held=held)


def alive(http: httpx.Client) -> set[str]:
    return {worker_id for worker_id, it_is in worker_statuses(http).items() if it_is == "alive"}


def test_an_absence_is_what_could_cost_a_lease() -> None:
    assert [is_absence(gap_s, lease_s=30) for gap_s in (1.2, 9.9, 10.1)] == [False, False, True]
    assert [is_absence(gap_s, lease_s=5) for gap_s in (2.9, 3.1)] == [False, True]


def test_a_frozen_orchestrator_takes_no_job_from_anybody(
    tmp_path: Path, database_url: str, empty_broker: str, store: S3ObjectStore
) -> None:
    clock = FreezingClock()
    with (
        running_orchestrator(
            tmp_path,
            empty_broker,
            store,
            database_url=database_url,
            clock=clock,
            uptime=clock.uptime,
        ) as orchestrator,
        httpx.Client(base_url=orchestrator.url, timeout=60) as http,
    ):
        run_id = submit(http)
        hand = Hand(orchestrator)
        hand.report(TRAINER, "gone long ago")
        wait_until(lambda: alive(http) == {"gone long ago"})
        clock.now += 2 * WORKER_LOST_S
        hand.report(GENERATOR, "hand")
        held = hand.leased(GENERATOR)
        orchestrator.pass_time(AWAY_S)
        wait_until(lambda: alive(http) == {"hand"})
        hand.complete(held)
        assert "job_requeued" not in kinds(http, run_id)


def test_a_restarted_orchestrator_takes_no_job_from_anybody(restarted: Restarted) -> None:
    Hand(restarted.orchestrator).complete(restarted.held)
    assert "job_requeued" not in kinds(restarted.http, restarted.run_id)


def test_a_worker_that_died_while_the_orchestrator_was_away_is_missed_a_lease_later(
    restarted: Restarted,
) -> None:
    restarted.orchestrator.pass_time(31)
    again = Hand(restarted.orchestrator).leased(GENERATOR)
    assert (again.job_id, again.attempt) == (restarted.held.job_id, 2)


def test_a_standby_that_takes_over_takes_no_job_from_anybody(
    tmp_path: Path, database_url: str, empty_broker: str, store: S3ObjectStore
) -> None:
    """What workers told the leader that died they may be slow to tell the new one."""
    with running_orchestrator(
        tmp_path, empty_broker, store, database_url=database_url, clock=Clock()
    ) as leader:
        wait_until(lambda: leader.scheduler.leads)
        hand = Hand(leader)
        hand.report(GENERATOR, "hand")
        with httpx.Client(base_url=leader.url) as http:
            run_id = submit(http)
        held = hand.leased(GENERATOR)
        late = Clock(now=Clock().now + AWAY_S)
        with (
            running_orchestrator(
                tmp_path, empty_broker, store, database_url=database_url, clock=late
            ) as standby,
            httpx.Client(base_url=standby.url) as http,
        ):
            leader.scheduler.stop()
            wait_until(lambda: alive(http) == {"hand"})
            Hand(standby).complete(held)
            assert "job_requeued" not in kinds(http, run_id)
            assert status(http, run_id) == "running"
