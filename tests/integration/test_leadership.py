"""Two orchestrators on one database: one schedules, and the other takes over."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import httpx
import pytest
from sqlalchemy import text

from offbeat.objects import S3ObjectStore
from services.orchestrator.leadership import Leadership, SessionLock, leadership_over
from services.orchestrator.store import Store
from tests.orchestrator import (
    GENERATOR,
    TRAINER,
    Hand,
    Orchestrator,
    running_orchestrator,
    set_up,
    status,
    submit,
)
from tests.waiting import wait_until

LONG_S = 30.0
"""A wait that a wake-up has to cut short."""


@pytest.fixture
def pair(database_url: str) -> Iterator[tuple[Leadership, Leadership]]:
    stores = [Store.connect(database_url) for _ in range(2)]
    one, two = (leadership_over(store.engine) for store in stores)
    yield one, two
    for leadership, store in zip((one, two), stores, strict=True):
        leadership.release()
        store.engine.dispose()


def test_one_of_two_leads_until_it_lets_go(pair: tuple[Leadership, Leadership]) -> None:
    one, two = pair
    for _ in range(2):
        assert (one.acquire(), two.acquire()) == (True, False)
    one.release()
    wait_until(two.acquire)  # PostgreSQL takes a moment to notice that the session has ended
    assert not one.acquire()


def test_a_wake_up_before_the_wait_is_not_lost(pair: tuple[Leadership, Leadership]) -> None:
    one, _ = pair
    assert one.acquire()
    one.wake()
    one.acquire()
    one.wait(LONG_S)


def test_a_standby_wakes_the_leader_on_postgresql(postgres_url: str) -> None:
    stores = [Store.connect(postgres_url) for _ in range(2)]
    leader, standby = (leadership_over(store.engine) for store in stores)
    assert (leader.acquire(), standby.acquire()) == (True, False)
    waiting = threading.Thread(target=leader.wait, args=(10 * LONG_S,))
    waiting.start()
    standby.wake()
    waiting.join(LONG_S)
    assert not waiting.is_alive()
    for leadership, store in zip((leader, standby), stores, strict=True):
        leadership.release()
        store.engine.dispose()


def test_a_leader_whose_session_is_cut_stands_back_and_may_lead_again(postgres_url: str) -> None:
    store = Store.connect(postgres_url)
    leader = SessionLock(store.engine)
    assert leader.acquire()
    with store.engine.connect() as connection:
        others = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid IN "
        connection.execute(text(others + "(SELECT pid FROM pg_locks WHERE locktype = 'advisory')"))
    leader.wait(LONG_S)
    assert leader.acquire()
    leader.release()
    store.engine.dispose()


def lead_until_killed(database_url: str, says: Connection) -> None:
    leadership = leadership_over(Store.connect(database_url).engine)
    says.send(leadership.acquire())
    signal.pause()


def test_a_standby_leads_when_the_leader_is_killed(database_url: str) -> None:
    here, there = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    leader = context.Process(target=lead_until_killed, args=(database_url, there))
    leader.start()
    assert here.poll(60)
    assert here.recv() is True
    store = Store.connect(database_url)
    standby = leadership_over(store.engine)
    assert not standby.acquire()
    assert leader.pid is not None
    os.kill(leader.pid, signal.SIGKILL)
    leader.join()
    wait_until(standby.acquire)
    standby.release()
    store.engine.dispose()


@pytest.fixture
def replicas(
    tmp_path: Path, postgres_url: str, empty_broker: str, store: S3ObjectStore
) -> Iterator[tuple[Orchestrator, Orchestrator]]:
    with running_orchestrator(tmp_path, empty_broker, store, database_url=postgres_url) as one:
        wait_until(lambda: one.scheduler.leads)
        with running_orchestrator(tmp_path, empty_broker, store, database_url=postgres_url) as two:
            yield one, two


def test_a_run_goes_on_whichever_replica_is_asked_and_whichever_leads(
    replicas: tuple[Orchestrator, Orchestrator],
) -> None:
    leader, standby = replicas
    hand = Hand(standby)
    with httpx.Client(base_url=standby.url, timeout=60) as http:
        run_id = submit(http, staleness={"max_versions": 0})
        set_up(hand)
        assert hand.work(GENERATOR) is not None
        assert hand.work(TRAINER) is not None
        assert (leader.scheduler.leads, standby.scheduler.leads) == (True, False)
        leader.scheduler.stop()
        wait_until(lambda: standby.scheduler.leads)
        assert hand.work(GENERATOR) is not None
        assert hand.work(TRAINER) is not None
        wait_until(lambda: status(http, run_id) == "succeeded")
