"""A fleet of worker processes: they come, go, are slow and fail, while a run goes on."""

import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import httpx
import pytest
import redis
from sqlalchemy import select

from offbeat.contracts.jobs import JobKind, JobStatus
from offbeat.objects import S3ObjectStore
from scripts import parts
from services.orchestrator.schema import JobRow
from tests.fleet import Fleet, running_fleet
from tests.orchestrator import (
    GENERATOR,
    TRAINER,
    LaterClock,
    events,
    kinds,
    running_orchestrator,
    status,
    submit,
)
from tests.waiting import wait_until

ENDLESS = ("--job-s", "600")
NEVER_S = 600.0
VISIBILITY_S = 5
MESSAGE_LOST_S = 15.0
BROKER_BACK_S = 180.0
"""Workers wait longer from try to try before they connect to a broker that was away."""


@pytest.fixture
def fleet(tmp_path: Path, empty_broker: str, store: S3ObjectStore) -> Iterator[Fleet]:
    """Over SQLite and a clock that goes."""
    with (
        running_orchestrator(
            tmp_path, empty_broker, store, clock=time.time, message_lost_s=MESSAGE_LOST_S
        ) as orchestrator,
        running_fleet(orchestrator, empty_broker, tmp_path) as fleet,
    ):
        yield fleet


@pytest.fixture
def http(fleet: Fleet) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=fleet.orchestrator.url) as client:
        yield client


def jobs(fleet: Fleet, kind: JobKind = JobKind.GENERATE) -> list[JobRow]:
    with fleet.orchestrator.store.read() as session:
        return list(session.scalars(select(JobRow).where(JobRow.kind == kind)))


def test_a_worker_that_is_told_to_stop_finishes_its_job(fleet: Fleet, http: httpx.Client) -> None:
    submit(http)
    fleet.start(GENERATOR, "leaver", "--job-s", "1.5")
    wait_until(lambda: bool(fleet.holding("leaver")))
    fleet.signal("leaver", signal.SIGTERM)
    assert fleet.ended("leaver") == 0
    (job,) = jobs(fleet, JobKind.PREPARE)
    assert (job.status, job.attempt, job.worker_id) == (JobStatus.DONE, 1, "leaver")
    assert fleet.workers() == {}


@pytest.mark.parametrize("deaf", [(), ("--deaf",)])
def test_what_is_not_done_in_time_is_handed_back_and_does_not_count(
    fleet: Fleet, http: httpx.Client, deaf: tuple[str, ...]
) -> None:
    """Also where the job never looks whether it was taken away."""
    run_id = submit(http, limits={"max_attempts": 1})
    fleet.start(GENERATOR, "leaver", *ENDLESS, *deaf, grace_s=0.5)
    wait_until(lambda: bool(fleet.holding("leaver")))
    fleet.start(GENERATOR, "stayer")
    fleet.signal("leaver", signal.SIGTERM)
    assert fleet.ended("leaver") == 0
    wait_until(lambda: "prompts_ready" in kinds(http, run_id))
    (job,) = jobs(fleet, JobKind.PREPARE)
    assert (job.status, job.attempt, job.failures) == (JobStatus.DONE, 2, 0)
    assert job.worker_id == "stayer"
    assert "job_handed_back" in kinds(http, run_id)


def test_a_second_signal_ends_a_worker_at_once(fleet: Fleet, http: httpx.Client) -> None:
    submit(http)
    fleet.start(GENERATOR, "leaver", *ENDLESS, grace_s=NEVER_S)
    wait_until(lambda: bool(fleet.holding("leaver")))
    fleet.signal("leaver", signal.SIGTERM)
    wait_until(lambda: fleet.workers() == {})
    fleet.signal("leaver", signal.SIGTERM)
    assert fleet.ended("leaver") == 128 + signal.SIGTERM


def test_an_idle_worker_leaves_at_once(fleet: Fleet, http: httpx.Client) -> None:
    fleet.start(GENERATOR, "leaver", grace_s=NEVER_S)
    run_id = submit(http)
    wait_until(lambda: "prompts_ready" in kinds(http, run_id))
    fleet.signal("leaver", signal.SIGTERM)
    assert fleet.ended("leaver") == 0
    assert fleet.workers() == {}


def test_workers_join_and_leave_while_a_run_goes_on(fleet: Fleet, http: httpx.Client) -> None:
    run_id = submit(http, train={"steps": 10})
    fleet.start(TRAINER, "trainer")
    for number in range(3):
        fleet.start(GENERATOR, f"generator-{number}", "--job-s", "0.1", grace_s=0.0)
        if number:
            fleet.signal(f"generator-{number - 1}", signal.SIGTERM)
            assert fleet.ended(f"generator-{number - 1}") == 0
    wait_until(lambda: status(http, run_id) == "succeeded")
    assert sum(job.failures for job in jobs(fleet)) == 0
    assert list(fleet.workers()) == ["generator-2", "trainer"]


def test_a_slow_worker_gets_less_work(fleet: Fleet, http: httpx.Client) -> None:
    """Each takes the next job when it is done with one, and holds no other meanwhile."""
    fleet.start(GENERATOR, "fast", "--job-s", "0.1")
    fleet.start(GENERATOR, "slow", "--job-s", "1")
    fleet.start(TRAINER, "trainer")
    run_id = submit(http, train={"steps": 12}, staleness={"max_versions": 8})
    held = 0
    while status(http, run_id) != "succeeded":
        held = max(held, len(fleet.holding("slow")))
        time.sleep(0.05)
    assert held == 1
    done = Counter(job.worker_id for job in jobs(fleet))
    assert done["slow"] > 0
    assert done["fast"] > 2 * done["slow"]


def test_q4_four_jobs_start_together_on_four_workers(fleet: Fleet, http: httpx.Client) -> None:
    for number in range(4):
        fleet.start(GENERATOR, f"generator-{number}", *ENDLESS)
    for _ in range(4):
        submit(http)
    wait_until(lambda: all(len(fleet.holding(worker)) == 1 for worker in fleet.processes))


def test_q1_a_message_that_comes_again_while_its_job_goes_on_changes_nothing(
    fleet: Fleet, http: httpx.Client, valkey_url: str
) -> None:
    """The broker restores what is not acknowledged in time when another worker connects."""
    run_id = submit(http, train={"steps": 1}, staleness={"max_versions": 0})
    finish = fleet.folder / "finish"
    until = ("--until", str(finish))
    fleet.start(GENERATOR, "slow", *ENDLESS, *until, visibility_timeout_s=VISIBILITY_S)
    with redis.Redis.from_url(valkey_url) as client:
        overdue = partial(client.zcount, "unacked_index", 0)
        wait_until(lambda: bool(overdue(time.time() - VISIBILITY_S)))
    fleet.start(GENERATOR, "second", visibility_timeout_s=VISIBILITY_S)
    wait_until(lambda: "Dropped a message" in fleet.log("second"))
    finish.touch()
    fleet.start(TRAINER, "trainer")
    wait_until(lambda: status(http, run_id) == "succeeded")
    done = [*jobs(fleet, JobKind.PREPARE), *jobs(fleet), *jobs(fleet, JobKind.TRAIN)]
    assert [(job.status, job.attempt, job.failures) for job in done] == [(JobStatus.DONE, 1, 0)] * 3
    assert done[0].worker_id == "slow"


def test_q3_a_worker_that_cannot_acknowledge_takes_jobs_when_the_broker_is_back(
    tmp_path: Path, store: S3ObjectStore
) -> None:
    port, finish = parts.free_port(), tmp_path / "finish"
    broker, url = parts.valkey(port, tmp_path / "valkey"), f"redis://127.0.0.1:{port}/0"
    with ExitStack() as cleanup:

        def start_broker() -> subprocess.Popen[bytes]:
            process = subprocess.Popen(broker.command, stdout=subprocess.DEVNULL)
            cleanup.callback(process.wait)
            cleanup.callback(process.kill)
            parts.wait_until_ready(broker, process)
            return process

        first = start_broker()
        orchestrator = cleanup.enter_context(
            running_orchestrator(
                tmp_path, url, store, clock=time.time, message_lost_s=MESSAGE_LOST_S
            )
        )
        http = cleanup.enter_context(httpx.Client(base_url=orchestrator.url))
        fleet = cleanup.enter_context(running_fleet(orchestrator, url, tmp_path))
        run_id = submit(http, train={"steps": 1})
        fleet.start(GENERATOR, "worker", *ENDLESS, "--until", str(finish))
        wait_until(lambda: bool(fleet.holding("worker")))
        first.kill()
        first.wait()
        finish.touch()
        wait_until(lambda: "Couldn't ack" in fleet.log("worker"))
        start_broker()
        fleet.start(TRAINER, "trainer")
        wait_until(lambda: status(http, run_id) == "succeeded", BROKER_BACK_S)


def test_q5_the_job_of_a_killed_worker_comes_once_more(
    tmp_path: Path, empty_broker: str, store: S3ObjectStore
) -> None:
    """The clock goes by itself, and is moved on past the lease where nobody holds it any more."""
    clock = LaterClock()
    with (
        running_orchestrator(
            tmp_path,
            empty_broker,
            store,
            clock=clock,
            message_lost_s=MESSAGE_LOST_S,
        ) as orchestrator,
        running_fleet(orchestrator, empty_broker, tmp_path) as fleet,
        httpx.Client(base_url=orchestrator.url) as http,
    ):
        run_id = submit(http, limits={"max_attempts": 2})
        fleet.start(GENERATOR, "victim", *ENDLESS)
        wait_until(lambda: bool(fleet.holding("victim")))
        fleet.start(GENERATOR, "other")
        fleet.signal("victim", signal.SIGKILL)
        assert fleet.ended("victim") == -signal.SIGKILL
        clock.offset_s += 31
        orchestrator.scheduler.wake()
        wait_until(lambda: "prompts_ready" in kinds(http, run_id))
        (job,) = jobs(fleet, JobKind.PREPARE)
        assert (job.status, job.attempt, job.failures) == (JobStatus.DONE, 2, 1)
        assert kinds(http, run_id).count("job_requeued") == 1


def test_a_worker_that_fails_at_what_others_do_is_put_in_quarantine(
    fleet: Fleet, http: httpx.Client
) -> None:
    """It fails at once and so would take every job first, but no job is lost for it."""
    fleet.start(TRAINER, "trainer")
    fleet.start(GENERATOR, "good", "--job-s", "0.05")
    fleet.start(GENERATOR, "bad", "--fails")
    run_id = submit(http, train={"steps": 15}, limits={"max_attempts": 2})
    wait_until(lambda: fleet.workers()["bad"] == "quarantined")
    wait_until(lambda: status(http, run_id) == "succeeded")
    assert "job_dead" not in kinds(http, run_id)
    (event,) = [e for e in events(http, run_id) if e["kind"] == "worker_quarantined"]
    assert event["message"].startswith("Worker bad gets no jobs for 30 s: it failed")
    assert {job.worker_id for job in jobs(fleet)} == {"good"}
