"""An orchestrator that was away: frozen, restarted, or replaced by another one."""

from pathlib import Path

import httpx
import redis

from offbeat.objects import S3ObjectStore
from services.orchestrator.absence import is_absence
from services.orchestrator.state import WORKER_LOST_S
from tests.orchestrator import (
    GENERATOR,
    TRAINER,
    Clock,
    Hand,
    kinds,
    running_orchestrator,
    status,
    submit,
)
from tests.waiting import wait_until

AWAY_S = 1000.0
"""Far more than a lease lasts."""


def alive(http: httpx.Client) -> set[str]:
    workers = http.get("/v1/workers").json()["data"]
    return {worker["id"] for worker in workers if worker["status"] == "alive"}


def emptied(valkey_url: str) -> None:
    with redis.Redis.from_url(valkey_url) as client:
        client.flushall()


def test_an_absence_is_what_could_cost_a_lease() -> None:
    assert [is_absence(gap_s, lease_s=30) for gap_s in (1.2, 9.9, 10.1)] == [False, False, True]
    assert [is_absence(gap_s, lease_s=5) for gap_s in (2.9, 3.1)] == [False, True]


def test_a_frozen_orchestrator_takes_no_job_from_anybody(
    tmp_path: Path, database_url: str, valkey_url: str, store: S3ObjectStore
) -> None:
    emptied(valkey_url)
    clock = Clock()
    frozen_at = clock.now + AWAY_S / 2
    with (
        running_orchestrator(
            tmp_path,
            valkey_url,
            store,
            database_url=database_url,
            clock=clock,
            uptime=lambda: AWAY_S if clock.now > frozen_at else 0.0,
        ) as orchestrator,
        httpx.Client(base_url=orchestrator.url, timeout=60) as http,
    ):
        run_id = submit(http)
        hand = Hand(orchestrator)
        hand.report(TRAINER, "gone long ago")
        wait_until(lambda: alive(http) == {"gone long ago"})
        clock.now += 2 * WORKER_LOST_S
        hand.report(GENERATOR, "hand")
        held = hand.lease(GENERATOR)
        assert held is not None
        clock.now += AWAY_S
        orchestrator.scheduler.wake()
        wait_until(lambda: alive(http) == {"hand"})
        hand.complete(held)
        assert "job_requeued" not in kinds(http, run_id)


def test_a_restarted_orchestrator_takes_no_job_from_anybody(
    tmp_path: Path, database_url: str, valkey_url: str, store: S3ObjectStore
) -> None:
    emptied(valkey_url)
    clock = Clock()
    with running_orchestrator(
        tmp_path, valkey_url, store, database_url=database_url, clock=clock
    ) as before:
        hand = Hand(before)
        hand.report(TRAINER, "gone long ago")
        clock.now += 2 * WORKER_LOST_S
        hand.report(GENERATOR, "hand")
        with httpx.Client(base_url=before.url) as http:
            run_id = submit(http)
        held = hand.lease(GENERATOR)
        assert held is not None
    clock.now += AWAY_S
    with (
        running_orchestrator(
            tmp_path, valkey_url, store, database_url=database_url, clock=clock
        ) as after,
        httpx.Client(base_url=after.url) as http,
    ):
        wait_until(lambda: alive(http) == {"hand"})
        Hand(after).complete(held)
        assert "job_requeued" not in kinds(http, run_id)


def test_a_worker_that_died_while_the_orchestrator_was_away_is_missed_a_lease_later(
    tmp_path: Path, database_url: str, valkey_url: str, store: S3ObjectStore
) -> None:
    emptied(valkey_url)
    clock = Clock()
    with running_orchestrator(
        tmp_path, valkey_url, store, database_url=database_url, clock=clock
    ) as before:
        with httpx.Client(base_url=before.url) as http:
            submit(http)
        hand = Hand(before)
        hand.report(GENERATOR, "hand")
        held = hand.lease(GENERATOR)
        assert held is not None
    clock.now += AWAY_S
    with (
        running_orchestrator(
            tmp_path, valkey_url, store, database_url=database_url, clock=clock
        ) as after,
        httpx.Client(base_url=after.url) as http,
    ):
        wait_until(lambda: alive(http) == {"hand"})
        clock.now += 31
        after.scheduler.wake()
        again = Hand(after).lease(GENERATOR)
        assert again is not None
        assert (again.job_id, again.attempt) == (held.job_id, 2)


def test_a_standby_that_takes_over_takes_no_job_from_anybody(
    tmp_path: Path, database_url: str, valkey_url: str, store: S3ObjectStore
) -> None:
    """What workers told the leader that died they may be slow to tell the new one."""
    emptied(valkey_url)

    with running_orchestrator(
        tmp_path, valkey_url, store, database_url=database_url, clock=Clock()
    ) as leader:
        wait_until(lambda: leader.scheduler.leads)
        hand = Hand(leader)
        hand.report(GENERATOR, "hand")
        with httpx.Client(base_url=leader.url) as http:
            run_id = submit(http)
        held = hand.lease(GENERATOR)
        assert held is not None
        late = Clock(now=Clock().now + AWAY_S)
        with (
            running_orchestrator(
                tmp_path, valkey_url, store, database_url=database_url, clock=late
            ) as standby,
            httpx.Client(base_url=standby.url) as http,
        ):
            leader.scheduler.stop()
            wait_until(lambda: alive(http) == {"hand"})
            Hand(standby).complete(held)
            assert "job_requeued" not in kinds(http, run_id)
            assert status(http, run_id) == "running"
