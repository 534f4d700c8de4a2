"""A real orchestrator for tests: SQLite, Valkey, S3, uvicorn; and a worker that a test plays by
hand."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from queue import Empty
from typing import Any

import httpx
from celery import Celery
from pydantic import SecretStr

from offbeat import keys
from offbeat.contracts.jobs import (
    EvaluateInput,
    EvaluateOutput,
    GenerateInput,
    GenerateOutput,
    InitInput,
    InitOutput,
    JobMessage,
    JobOutput,
    PrepareInput,
    PrepareOutput,
    ReplayInput,
    ReplayOutput,
    TrainInput,
    TrainOutput,
    WorkerRole,
)
from offbeat.contracts.leases import CompleteRequest, FailRequest, Lease, LeaseRequest, WorkerReport
from offbeat.contracts.rollouts import GroupSummary
from offbeat.contracts.weights import Canary, Manifest, VersionFile
from offbeat.objects import S3ObjectStore
from offbeat.queue import create_celery, queue_name
from offbeat.settings import QueueSettings
from offbeat.worker_api import OrchestratorClient
from services.orchestrator.app import create_app
from services.orchestrator.broker import CeleryBroker
from services.orchestrator.dependencies import Services
from services.orchestrator.migrate import migrate
from services.orchestrator.scheduler import Scheduler
from services.orchestrator.store import Store
from tests.servers import serve
from tests.specs import spec_dict

GENERATOR, TRAINER = WorkerRole.GENERATOR, WorkerRole.TRAINER
SHA, OTHER_SHA = "ab" * 32, "cd" * 32


@dataclass
class Clock:
    """Seconds that only a test moves on."""

    now: float = 1_000_000.0
    """Far from zero, so that a forgotten `None` shows."""

    def __call__(self) -> float:
        return self.now


@dataclass(kw_only=True)
class Orchestrator:
    """A running orchestrator and its parts."""

    url: str
    store: Store
    scheduler: Scheduler
    clock: Clock | Callable[[], float]
    celery: Celery
    worker: OrchestratorClient


@contextmanager
def running_orchestrator(
    folder: Path,
    valkey_url: str,
    objects: S3ObjectStore,
    *,
    clock: Callable[[], float] | None = None,
    lease_s: float = 30.0,
    message_lost_s: float = 15.0,
    api_key: str | None = None,
    worker_token: str | None = None,
) -> Iterator[Orchestrator]:
    """Start it on the database in `folder`, which may be an old one."""
    clock = clock or Clock()
    store = Store.connect(f"sqlite:///{folder}/orchestrator.db")
    migrate(store.engine)
    celery = create_celery(QueueSettings(redis_url=SecretStr(valkey_url)), "test")
    broker = CeleryBroker(celery)
    scheduler = Scheduler(store, broker, clock=clock, message_lost_s=message_lost_s)
    token = SecretStr(worker_token) if worker_token else None
    services = Services(
        store=store,
        objects=objects,
        broker=broker,
        scheduler=scheduler,
        clock=clock,
        api_key=SecretStr(api_key) if api_key else None,
        worker_token=token,
        lease_s=lease_s,
        heartbeat_interval_s=0.2,
    )
    with serve(create_app(services)) as url:
        client = OrchestratorClient(url, token)
        try:
            yield Orchestrator(
                url=url,
                store=store,
                scheduler=scheduler,
                clock=clock,
                celery=celery,
                worker=client,
            )
        finally:
            client.close()
            celery.close()
    store.engine.dispose()


@dataclass
class Hand:
    """A worker of both roles, played by the test: takes messages, leases, completes."""

    orchestrator: Orchestrator
    pool: str = "default"
    worker_id: str = "hand"
    reward_std: float = 0.5
    """Of every group that it generates."""

    def report(self, role: WorkerRole, worker_id: str | None = None) -> None:
        """Say that a worker is there."""
        self.orchestrator.worker.report(
            worker_id or f"{self.worker_id}-{role}",
            WorkerReport(
                role=role,
                pool=self.pool,
                engine="hand",
                host="test",
                pid=1,
                started_at=datetime.now(UTC),
            ),
        )

    def message(self, role: WorkerRole, wait_s: float = 5.0) -> JobMessage | None:
        """The next message of the role's queue, acknowledged at once; None when none comes."""
        with self.orchestrator.celery.connection_for_read() as connection:
            queue = connection.SimpleQueue(queue_name(role, self.pool))
            try:
                message = queue.get(block=True, timeout=wait_s)
            except Empty:
                return None
            finally:
                queue.close()
            message.ack()
            return JobMessage.model_validate(message.payload[1])

    def lease(self, role: WorkerRole, wait_s: float = 5.0) -> Lease | None:
        """Take the next message and lease its job."""
        message = self.message(role, wait_s)
        if message is None:
            return None
        request = LeaseRequest(attempt=message.attempt, worker_id=self.worker_id)
        return self.orchestrator.worker.lease(message.job_id, request)

    def complete(self, lease: Lease) -> JobOutput:
        """Complete a job with a plausible result."""
        output = plausible_output(lease, self.reward_std)
        request = CompleteRequest(attempt=lease.attempt, worker_id=self.worker_id, output=output)
        self.orchestrator.worker.complete(lease.job_id, request)
        return output

    def fail(self, lease: Lease, message: str, *, permanent: bool = False) -> None:
        """Fail a job."""
        request = FailRequest(
            attempt=lease.attempt, worker_id=self.worker_id, message=message, permanent=permanent
        )
        self.orchestrator.worker.fail(lease.job_id, request)

    def work(self, role: WorkerRole, wait_s: float = 5.0) -> Lease | None:
        """Lease and complete one job."""
        lease = self.lease(role, wait_s)
        if lease is not None:
            self.complete(lease)
        return lease


def plausible_output(lease: Lease, reward_std: float = 0.5) -> JobOutput:
    """What a real worker might answer."""
    run, job = lease.run_id, lease.job_id
    match lease.input:
        case PrepareInput():
            return PrepareOutput(
                prompts_key=keys.prompts(run, job, lease.attempt, "train"),
                num_prompts=8,
                eval_prompts_key=keys.prompts(run, job, lease.attempt, "eval"),
                num_eval_prompts=lease.spec.data.eval_size,
            )
        case InitInput():
            return InitOutput(manifest=plausible_manifest(lease, 0))
        case TrainInput(base_version=base):
            return TrainOutput(manifest=plausible_manifest(lease, base + 1))
        case ReplayInput(base_version=base):
            return ReplayOutput(version=base + 1, published_sha256=SHA, recomputed_sha256=OTHER_SHA)
        case EvaluateInput(version=version):
            return EvaluateOutput(
                version=version,
                rollouts_key=keys.evaluation(run, version, job, lease.attempt),
                metrics={"eval/reward": 0.5, "eval/pass@1": 0.5},
            )
        case GenerateInput(groups=groups, min_version=version):
            return GenerateOutput(
                rollouts_key=keys.rollouts(run, job, lease.attempt),
                groups=tuple(
                    GroupSummary(
                        group_id=group.group_id,
                        policy_version=version,
                        adapter_sha256=SHA,
                        num_samples=2,
                        num_tokens=6,
                        reward_mean=0.5,
                        reward_std=reward_std,
                    )
                    for group in groups
                ),
                generated_tokens=6 * len(groups),
                generate_s=2.0,
            )


def plausible_manifest(lease: Lease, version: int) -> Manifest:
    """A manifest that nobody has checked."""
    return Manifest(
        run_id=lease.run_id,
        version=version,
        parent=version - 1 if version else None,
        job_id=lease.job_id,
        attempt=lease.attempt,
        prefix=keys.version_prefix(lease.run_id, version, lease.job_id, lease.attempt),
        files=(
            VersionFile(name="adapter_model.safetensors", size_bytes=100, sha256=SHA),
            VersionFile(name="adapter_config.json", size_bytes=10, sha256=SHA),
        ),
        base_model=lease.spec.model.id,
        base_revision=None,
        rank=2,
        alpha=4,
        target_modules=("q_proj",),
        canary=Canary(prompt_ids=(1, 2), completion_ids=(3,), logprobs=(-0.5,)),
        metrics={"reward": 0.25 * version, "sample/staleness_mean": 0.5} if version else {},
    )


def submit(http: httpx.Client, **changes: Any) -> str:
    """Submit a small run with these changes; its id."""
    response = http.post("/v1/runs", json=spec_dict(**changes))
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


def set_up(hand: Hand) -> None:
    """Prepare and initialise the only run."""
    prepared, initialised = hand.work(GENERATOR), hand.work(TRAINER)
    assert prepared is not None
    assert initialised is not None
