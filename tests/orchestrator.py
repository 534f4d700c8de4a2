"""A real orchestrator for tests: SQLite or PostgreSQL, Valkey, S3, uvicorn; and a worker that a
test plays by hand."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import httpx
import redis
from celery import Celery
from fastapi import FastAPI
from pydantic import SecretStr

from offbeat.chat_channel import ChatListener
from offbeat.contracts.connection import Connection, StoreAccess
from offbeat.contracts.jobs import JobMessage, JobOutput, WorkerRole
from offbeat.contracts.leases import (
    CompleteRequest,
    FailRequest,
    Lease,
    LeaseRequest,
    WorkerEvent,
    WorkerReport,
)
from offbeat.objects import S3ObjectStore
from offbeat.queue import create_celery, queue_name
from offbeat.settings import QueueSettings
from offbeat.worker_api import OrchestratorClient
from scripts.bench.scale_queue import message_of
from services.orchestrator.app import create_app
from services.orchestrator.broker import CeleryBroker
from services.orchestrator.collector import Collector
from services.orchestrator.dependencies import Services
from services.orchestrator.leadership import leadership_over
from services.orchestrator.live_streams import STREAMS_MAX, LiveStreams
from services.orchestrator.migrate import migrate
from services.orchestrator.rates import RateLimiter
from services.orchestrator.scheduler import Scheduler
from services.orchestrator.store import Store
from tests.plausible import SHA as SHA
from tests.plausible import plausible_output
from tests.servers import serve
from tests.specs import spec_dict

GENERATOR, TRAINER = WorkerRole.GENERATOR, WorkerRole.TRAINER
MESSAGE_WAIT_S = 30.0
"""Far more than a message takes on a calm machine."""
MESSAGE_LOST_S = 1e6
"""On the test's clock, so that a jump of it for another reason does not void the message that the
test has just taken. Where the clock goes by itself, a test asks for less."""
CONNECTION = Connection(
    weight_proxy_url="http://127.0.0.1:1",
    store=StoreAccess(
        endpoint_url=None,
        bucket="tests",
        region="us-east-1",
        access_key_id="nobody",
        secret_access_key=SecretStr("nothing"),
    ),
)
"""What workers are told: they are played by tests, which do not ask."""


@dataclass
class Clock:
    """Seconds that only a test moves on."""

    now: float = 1_000_000.0
    """Far from zero, so that a forgotten `None` shows."""

    def __call__(self) -> float:
        return self.now


@dataclass
class LaterClock:
    """The real time, moved on by the test."""

    offset_s: float = 0.0

    def __call__(self) -> float:
        return time.time() + self.offset_s


@dataclass(kw_only=True)
class Orchestrator:
    """A running orchestrator and its parts."""

    url: str
    app: FastAPI
    store: Store
    scheduler: Scheduler
    collector: Collector
    clock: Clock | Callable[[], float]
    celery: Celery
    worker: OrchestratorClient

    def pass_time(self, seconds: float) -> None:
        """Move the test's clock on, and have the scheduler look."""
        assert isinstance(self.clock, Clock)
        self.clock.now += seconds
        self.scheduler.wake()


@contextmanager
def running_orchestrator(
    folder: Path,
    valkey_url: str,
    objects: S3ObjectStore,
    *,
    database_url: str | None = None,
    clock: Callable[[], float] | None = None,
    uptime: Callable[[], float] = lambda: 0.0,
    lease_s: float = 30.0,
    message_lost_s: float = MESSAGE_LOST_S,
    api_key: str | None = None,
    worker_token: str | None = None,
    rate_limit: str = "1000000/second",
    stranger_rate: str = "1000000/second",
    streams_max: int = STREAMS_MAX,
    gc_interval_s: float = 3600.0,
    look_interval_s: float = 3600.0,
    forget_versions: Callable[[str], None] = lambda run_id: None,
    connection: Connection = CONNECTION,
) -> Iterator[Orchestrator]:
    """Start it on the given database, else on SQLite in `folder`; either may be an old one.

    By the usual `uptime` it was never away, whatever the test does to the clock.
    """
    clock = clock or Clock()
    store = Store.connect(database_url or f"sqlite:///{folder}/orchestrator.db")
    migrate(store.engine)
    queue = QueueSettings(redis_url=SecretStr(valkey_url))
    celery = create_celery(queue, "test")
    broker = CeleryBroker(celery)
    scheduler = Scheduler(
        store,
        broker,
        leadership_over(store.engine),
        clock=clock,
        uptime=uptime,
        lease_s=lease_s,
        message_lost_s=message_lost_s,
    )
    services = Services(
        store=store,
        objects=objects,
        broker=broker,
        scheduler=scheduler,
        clock=clock,
        api_key=SecretStr(api_key) if api_key else None,
        worker_token=SecretStr(worker_token) if worker_token else None,
        rates=RateLimiter(rate_limit, stranger_rate=stranger_rate),
        chats=ChatListener(queue),
        collector=Collector(
            store=store,
            objects=objects,
            forget_versions=forget_versions,
            clock=clock,
            interval_s=gc_interval_s,
            look_interval_s=look_interval_s,
        ),
        connection=connection,
        lease_s=lease_s,
        heartbeat_interval_s=0.2,
        streams=LiveStreams(streams_max=streams_max),
    )
    with _served(services, celery) as running:
        yield running
    store.engine.dispose()


@contextmanager
def _served(services: Services, celery: Celery) -> Iterator[Orchestrator]:
    app = create_app(services)
    with serve(app) as url:
        client = OrchestratorClient(url, services.worker_token)
        try:
            yield Orchestrator(
                url=url,
                app=app,
                store=services.store,
                scheduler=services.scheduler,
                collector=services.collector,
                clock=services.clock,
                celery=celery,
                worker=client,
            )
        finally:
            client.close()
            celery.close()


@dataclass
class Hand:
    """A worker of both roles, played by the test: takes messages, leases, completes."""

    orchestrator: Orchestrator
    pool: str = "default"
    worker_id: str = "hand"
    reward_std: float = 0.5
    """Of every group that it generates."""

    def report(
        self, role: WorkerRole, worker_id: str | None = None, events: tuple[WorkerEvent, ...] = ()
    ) -> None:
        """Say that a worker is there, and what it saw."""
        self.orchestrator.worker.report(
            worker_id or f"{self.worker_id}-{role}",
            WorkerReport(
                role=role,
                pool=self.pool,
                engine="hand",
                host="test",
                pid=1,
                started_at=datetime.now(UTC),
                events=events,
            ),
        )

    def message(self, role: WorkerRole, wait_s: float = MESSAGE_WAIT_S) -> JobMessage | None:
        """The next message of the role's queue, taken off at once; None when none comes.

        It is read from Valkey itself: closing a consumer in the middle of its wait may hang.
        """
        with redis.Redis.from_url(self.orchestrator.celery.conf.broker_url) as broker:
            taken = broker.brpop([queue_name(role, self.pool)], timeout=wait_s)
        if taken is None:
            return None
        _, body = cast(tuple[bytes, bytes], taken)
        return message_of(body)

    def lease(self, role: WorkerRole, wait_s: float = MESSAGE_WAIT_S) -> Lease | None:
        """Take the next message and lease its job."""
        message = self.message(role, wait_s)
        if message is None:
            return None
        request = LeaseRequest(attempt=message.attempt, worker_id=self.worker_id)
        return self.orchestrator.worker.lease(message.job_id, request)

    def leased(self, role: WorkerRole) -> Lease:
        """The lease of the next message's job, which must come."""
        lease = self.lease(role)
        assert lease is not None, f"no message came for a {role}"
        return lease

    def complete(self, lease: Lease) -> JobOutput:
        """Complete a job with a plausible result."""
        output = plausible_output(lease, self.reward_std)
        request = CompleteRequest(attempt=lease.attempt, worker_id=self.worker_id, output=output)
        self.orchestrator.worker.complete(lease.job_id, request)
        return output

    def fail(
        self, lease: Lease, message: str, *, permanent: bool = False, outage: bool = False
    ) -> None:
        """Fail a job."""
        request = FailRequest(
            attempt=lease.attempt,
            worker_id=self.worker_id,
            message=message,
            permanent=permanent,
            outage=outage,
        )
        self.orchestrator.worker.fail(lease.job_id, request)

    def work(self, role: WorkerRole, wait_s: float = MESSAGE_WAIT_S) -> Lease | None:
        """Lease and complete one job."""
        lease = self.lease(role, wait_s)
        if lease is not None:
            self.complete(lease)
        return lease


def submit(http: httpx.Client, **changes: Any) -> str:
    """Submit a small run with these changes; its id."""
    return submit_spec(http, spec_dict(**changes))


def submit_spec(http: httpx.Client, spec: Mapping[str, Any]) -> str:
    """Submit a run; its id."""
    response = http.post("/v1/runs", json=spec)
    assert response.status_code == 201, response.text
    return response.json()["id"]


def events(http: httpx.Client, run_id: str) -> list[dict[str, Any]]:
    """The run's log so far."""
    return http.get(f"/v1/runs/{run_id}/events", params={"limit": 1000}).json()["data"]


def kinds(http: httpx.Client, run_id: str) -> list[str]:
    """The kinds of its entries."""
    return [event["kind"] for event in events(http, run_id)]


def status(http: httpx.Client, run_id: str) -> str:
    """The run's status."""
    return http.get(f"/v1/runs/{run_id}").json()["status"]


def worker_statuses(http: httpx.Client) -> dict[str, str]:
    """The status of each worker that the orchestrator knows."""
    return {worker["id"]: worker["status"] for worker in http.get("/v1/workers").json()["data"]}


def set_up(hand: Hand) -> None:
    """Prepare and initialise the only run."""
    prepared, initialised = hand.work(GENERATOR), hand.work(TRAINER)
    assert prepared is not None
    assert initialised is not None
