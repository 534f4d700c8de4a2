"""A simulated worker: it takes real messages and speaks the real routes, and computes nothing.

    message -> lease -> work (heartbeat beside it) -> complete

Like a real one it takes one message at a time and reports every few seconds that it lives.
"""

import asyncio
import random
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from http import HTTPStatus

from offbeat.contracts.jobs import JobOutput, WorkerRole
from offbeat.contracts.leases import (
    CompleteRequest,
    HeartbeatRequest,
    Lease,
    LeaseRequest,
    ServedVersion,
    WorkerReport,
)
from offbeat.objects import S3ObjectStore
from offbeat.outbox import Outbox
from offbeat.presence import REPORT_INTERVAL_S
from offbeat.queue import queue_name
from scripts.bench.scale_calls import COMPLETE, HEARTBEAT, LEASE, REPORT, Caller, Ledger, Service
from scripts.bench.scale_cases import ScaleCase
from scripts.bench.scale_queue import MessageQueue

POOL = "default"


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What all workers of a fleet share."""

    case: ScaleCase
    urls: Mapping[Service, str]
    broker_url: str
    store: S3ObjectStore
    ledger: Ledger


class Worker(ABC):
    """See the module."""

    role: WorkerRole

    def __init__(self, name: str, around: Surroundings) -> None:
        self.name = name
        self.around = around
        self.caller = Caller(around.urls, around.ledger)
        self._messages = MessageQueue(around.broker_url, queue_name(self.role, POOL))
        self.tasks = asyncio.TaskGroup()
        """All that it does at once, for as long as it runs."""
        self.joined = asyncio.Event()
        """Set once the orchestrator knows of it."""
        self.outbox = Outbox()
        self.lease_took_s = 0.0
        """The newest one."""
        self._started_at = datetime.now(UTC)

    @abstractmethod
    async def work(self, lease: Lease) -> None:
        """Do the job, and complete it."""

    def serving(self) -> tuple[ServedVersion, ...]:
        """The versions that it could sample with now."""
        return ()

    async def run(self) -> None:
        """Report and work until cancelled."""
        try:
            async with self.tasks:
                self.tasks.create_task(self._report())
                self.tasks.create_task(self._serve())
        finally:
            self._messages.close()
            self.caller.close()

    async def complete(self, lease: Lease, output: JobOutput) -> None:
        """Hand the result in."""
        request = CompleteRequest(attempt=lease.attempt, worker_id=self.name, output=output)
        await self.caller.call(COMPLETE, request, job=lease.job_id)

    async def put(self, key: str, body: bytes) -> None:
        """Store an object."""
        await asyncio.to_thread(self.around.store.put, key, body)

    async def beat(self, lease: Lease, *, computed: bool = False) -> None:
        """One heartbeat."""
        request = HeartbeatRequest(attempt=lease.attempt, worker_id=self.name, computed=computed)
        await self.caller.call(HEARTBEAT, request, job=lease.job_id)

    @asynccontextmanager
    async def beating(self, lease: Lease) -> AsyncIterator[None]:
        """Keep the lease for the length of the block."""

        async def keep() -> None:
            while True:
                await asyncio.sleep(lease.heartbeat_interval_s)
                await self.beat(lease)

        task = self.tasks.create_task(keep())
        try:
            yield
        finally:
            task.cancel()

    async def _report(self) -> None:
        # The workers of a fleet do not report in the same moment.
        pause_s = random.uniform(0, REPORT_INTERVAL_S)
        while True:
            with self.outbox.sending() as events:
                report = WorkerReport(
                    role=self.role,
                    pool=POOL,
                    engine="simulated",
                    host="localhost",
                    pid=1,
                    started_at=self._started_at,
                    serving=self.serving(),
                    events=events,
                )
                await self.caller.call(REPORT, report, worker=self.name)
            self.joined.set()
            await asyncio.sleep(pause_s)
            pause_s = REPORT_INTERVAL_S

    async def _serve(self) -> None:
        while True:
            message = await self._messages.take()
            request = LeaseRequest(attempt=message.attempt, worker_id=self.name)
            began_s = time.monotonic()
            answer = await self.caller.call(LEASE, request, job=message.job_id)
            self.lease_took_s = time.monotonic() - began_s
            if answer.status == HTTPStatus.OK:
                await self.work(Lease.model_validate_json(answer.content))
            elif answer.status == HTTPStatus.LOCKED:
                await asyncio.sleep(float(answer.headers["retry-after"]))
