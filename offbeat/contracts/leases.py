"""What workers and the orchestrator say to each other over `/internal/*`.

A worker leases a job, keeps the lease with heartbeats, and completes or fails the attempt. Beside
that it reports that it lives, and adds what it saw to a run's log.
"""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field

from offbeat.contracts.base import Contract
from offbeat.contracts.jobs import JobInput, JobOutput, WorkerRole
from offbeat.contracts.run_spec import RunSpec
from offbeat.contracts.weights import Sha256


class LeaseRequest(Contract):
    """`POST /internal/jobs/{id}/lease`."""

    attempt: Annotated[int, Field(ge=1)]
    worker_id: str


class Lease(Contract):
    """The right to work on a job until `expires_at`, and the job itself."""

    job_id: str
    attempt: int
    run_id: str
    run_name: str
    spec: RunSpec
    input: JobInput
    expires_at: datetime
    heartbeat_interval_s: Annotated[float, Field(gt=0)]
    waiting_rollouts: tuple[str, ...] = ()
    """For a train job: the keys of rollouts that the run's next steps will need."""


class HeartbeatRequest(Contract):
    """`POST /internal/jobs/{id}/heartbeat`: keeps the lease; 409 means stop."""

    attempt: Annotated[int, Field(ge=1)]
    worker_id: str
    progress: Annotated[float, Field(ge=0, le=1)] = 0.0
    computed: bool = False
    """Only the hand-in is left: the run's next step may begin beside it."""


class HeartbeatReply(Contract):
    """The lease is extended."""

    waiting_rollouts: tuple[str, ...] = ()
    """As in the lease, as of now."""


class CompleteRequest(Contract):
    """`POST /internal/jobs/{id}/complete`."""

    attempt: Annotated[int, Field(ge=1)]
    worker_id: str
    output: JobOutput


class FailRequest(Contract):
    """`POST /internal/jobs/{id}/fail`: the attempt is over; permanent failures are not retried."""

    attempt: Annotated[int, Field(ge=1)]
    worker_id: str
    message: Annotated[str, Field(max_length=4096)]
    permanent: bool


class ReleaseRequest(Contract):
    """`POST /internal/jobs/{id}/release`: hand the job back, or its message before the lease."""

    attempt: Annotated[int, Field(ge=1)]
    worker_id: str


class ServedVersion(Contract):
    """A version that an engine has loaded and proved."""

    run_id: str
    version: Annotated[int, Field(ge=0)]
    adapter_sha256: Sha256


class WorkerReport(Contract):
    """`PUT /internal/workers/{id}`: sent every few seconds, also by an idle worker."""

    role: WorkerRole
    pool: str
    engine: str
    host: str
    pid: int
    started_at: datetime
    serving: tuple[ServedVersion, ...] = ()


class WorkerEvent(Contract):
    """`POST /internal/runs/{run}/events`: something a worker saw that the run's log should hold."""

    kind: Literal["version_served", "canary_failed", "reward_failed", "samples_lost"]
    worker_id: str
    message: Annotated[str, Field(max_length=4096)]
    data: dict[str, str | int | float | bool | None] = Field(default_factory=dict)
