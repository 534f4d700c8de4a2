"""What workers and the orchestrator say to each other over `/internal/*`.

A worker leases a job, keeps the lease with heartbeats, and completes or fails the attempt. Beside
that it reports that it lives, and adds what it saw to a run's log.
"""

from datetime import datetime
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from offbeat.contracts.base import Contract
from offbeat.contracts.bounds import INT_MAX, Id, Name, Positive, Version
from offbeat.contracts.jobs import JobInput, JobOutput, WorkerRole
from offbeat.contracts.run_spec import PoolName, RunSpec
from offbeat.contracts.weights import Sha256


class LeaseRequest(Contract):
    """`POST /internal/jobs/{id}/lease`."""

    attempt: Positive
    worker_id: Name


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

    attempt: Positive
    worker_id: Name
    progress: Annotated[float, Field(ge=0, le=1)] = 0.0
    computed: bool = False
    """Only the hand-in is left: the run's next step may begin beside it."""


class HeartbeatReply(Contract):
    """The lease is extended."""

    waiting_rollouts: tuple[str, ...] = ()
    """As in the lease, as of now."""


class CompleteRequest(Contract):
    """`POST /internal/jobs/{id}/complete`."""

    attempt: Positive
    worker_id: Name
    output: JobOutput


class FailRequest(Contract):
    """`POST /internal/jobs/{id}/fail`: the attempt is over; permanent failures are not retried, and
    an outage does not count."""

    attempt: Positive
    worker_id: Name
    message: Annotated[str, Field(max_length=4096)]
    permanent: bool
    outage: bool = False
    """It ended because the object store or the weight-proxy is away."""


class ReleaseRequest(Contract):
    """`POST /internal/jobs/{id}/release`: hand the job back, or its message before the lease."""

    attempt: Positive
    worker_id: Name


class ServedVersion(Contract):
    """A version that an engine has loaded and proved."""

    run_id: Id
    version: Version
    adapter_sha256: Sha256


SERVING_KINDS = ("version_served", "canary_failed")
EVENT_CHARS_MAX = 4096
EVENT_AGE_S_MAX = 86_400.0
REPORT_EVENTS_MAX = 64


class WorkerEvent(Contract):
    """Something a worker saw that the run's log should hold."""

    run_id: Id
    kind: Literal["version_served", "canary_failed", "reward_failed"]
    message: Annotated[str, Field(max_length=EVENT_CHARS_MAX)]
    data: Annotated[
        dict[Name, Annotated[str, Field(max_length=4096)] | int | float | bool | None],
        Field(max_length=64),
    ] = Field(default_factory=dict)
    age_s: Annotated[float, Field(ge=0, le=EVENT_AGE_S_MAX)] = 0.0
    """How long ago that was when the report was sent."""

    @model_validator(mode="after")
    def _names_the_version(self) -> Self:
        version = self.data.get("version")
        if self.kind in SERVING_KINDS and not (
            isinstance(version, int) and 0 <= version <= INT_MAX
        ):
            raise ValueError(f"{self.kind} needs data.version, the number of the policy version")
        return self


class WorkerReport(Contract):
    """`PUT /internal/workers/{id}`: sent every few seconds, also by an idle worker."""

    role: WorkerRole
    pool: PoolName
    engine: Name
    host: Annotated[str, Field(max_length=256)]
    pid: int
    started_at: datetime
    serving: Annotated[tuple[ServedVersion, ...], Field(max_length=4096)] = ()
    events: Annotated[tuple[WorkerEvent, ...], Field(max_length=REPORT_EVENTS_MAX)] = ()
    """What it saw since the report before, oldest first."""
