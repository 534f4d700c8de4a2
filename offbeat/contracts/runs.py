"""What a user reads: views of runs, events, metrics, checkpoints and workers."""

from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Generic, Literal, TypeVar

from pydantic import Field, JsonValue

from offbeat.contracts.base import Contract
from offbeat.contracts.jobs import JobStatus
from offbeat.contracts.leases import WorkerReport
from offbeat.contracts.projects import DEFAULT_PROJECT
from offbeat.contracts.run_kinds import RunKind
from offbeat.contracts.run_spec import RunSpec
from offbeat.contracts.weights import VersionFile

T = TypeVar("T")

HEADLINES: Mapping[RunKind, Literal["reward", "loss"]] = {"grpo": "reward", "sft": "loss"}


class RunStatus(StrEnum):
    """`queued -> running <-> paused -> succeeded | failed | cancelled`."""

    QUEUED = "queued"
    RUNNING = "running"
    PAUSED = "paused"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        """Whether only `retry` can change it."""
        return self in (RunStatus.SUCCEEDED, RunStatus.FAILED, RunStatus.CANCELLED)


class Page(Contract, Generic[T]):
    """A page of a list; `next_cursor` is the `after` of the next one, none on the last."""

    data: tuple[T, ...]
    has_more: bool
    next_cursor: str | None = None


class RunProgress(Contract):
    """How far a run is, from the newest metrics."""

    step: int
    """Optimizer steps done: the newest policy version."""
    steps: int
    version: int | None
    """The newest published version; none before version 0."""
    reward: float | None
    loss: float | None = None
    staleness_mean: float | None
    generated_tokens_per_s: float | None
    groups_generating: int
    groups_ready: int
    eta_s: float | None


class RunView(Contract):
    """A run as `GET /v1/runs/{id}` shows it."""

    id: str
    project: str = DEFAULT_PROJECT
    name: str
    status: RunStatus
    status_reason: str | None
    pool: str
    priority: int
    tags: dict[str, str]
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    progress: RunProgress
    spec: RunSpec

    @property
    def headline(self) -> str:
        """The series that says how the run goes: `reward` or `loss`, also by `progress`."""
        return HEADLINES[self.spec.kind]

    @property
    def headline_value(self) -> float | None:
        """Its newest value."""
        return self.progress.loss if self.headline == "loss" else self.progress.reward


class EventLevel(StrEnum):
    """How much an event matters."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class RunEvent(Contract):
    """One entry of a run's log. `id` grows, and is the cursor."""

    id: int
    run_id: str
    at: datetime
    level: EventLevel
    kind: str
    message: str
    data: dict[str, JsonValue] = Field(default_factory=dict)


class MetricPoint(Contract):
    """One value of one series."""

    step: int
    value: float


class MetricSeries(Contract):
    """`GET /v1/runs/{id}/metrics`: TRL's names."""

    run_id: str
    series: dict[str, tuple[MetricPoint, ...]]


class RolloutView(Contract):
    """A sample as people read it: text, reward and where it comes from."""

    group_id: str
    prompt_id: str
    sample: int
    policy_version: int
    prompt: str
    completion: str
    finish_reason: str
    reward: float | None
    rewards: dict[str, float | None]
    num_tokens: int
    trained_step: int | None
    """The step that trained it; none while it waits, and for dropped and evaluation samples."""


class CheckpointView(Contract):
    """A policy version that can be downloaded or continued from."""

    version: int
    step: int
    adapter_sha256: str
    """Of the adapter's weights; in full fine-tuning, of the record of the trainer's state."""
    size_bytes: int
    """Of the files that are still there."""
    prefix: str
    published_at: datetime
    metrics: dict[str, float]
    has_adapter: bool = True
    """False where `retention` has given it up, and in full fine-tuning: it cannot be downloaded or
    chatted with."""
    has_state: bool = True
    """False where the next step cannot be replayed any more."""


class ModelView(Contract):
    """The model that a run of full fine-tuning has made."""

    run_id: str
    version: int
    prefix: str
    """Below it the files lie in the bucket; `s3://<bucket>/<prefix>` is a `model.id`."""
    files: tuple[VersionFile, ...]


class GarbageView(Contract):
    """What was removed of a run's objects, or would be."""

    run_id: str
    dry_run: bool
    num_objects: int
    size_bytes: int
    size_bytes_by_reason: dict[str, int]
    """`adapters`, `trainer_states` and `samples` that `retention` gives up; `debris` of attempts
    that were lost."""


class ReplayView(Contract):
    """A step that is taken again to see whether it gives the same adapter."""

    id: str
    run_id: str
    step: int
    status: JobStatus
    error: str | None
    published_sha256: str | None
    recomputed_sha256: str | None
    is_same: bool | None
    """None until it is done."""


class QuarantineView(Contract):
    """Why a worker gets no jobs, and until when."""

    reason: str
    until: datetime


class WorkerView(Contract):
    """A worker as `GET /v1/workers` shows it."""

    id: str
    status: Literal["alive", "lost", "quarantined"]
    last_seen_at: datetime
    report: WorkerReport
    jobs: tuple[str, ...]
    """Ids of the jobs it holds a lease on."""
    quarantine: QuarantineView | None = None


class Diagnosis(Contract):
    """Why a run is as fast as it is: a sentence, and the numbers it rests on."""

    verdict: str
    details: dict[str, JsonValue]


class Problem(Contract):
    """RFC 9457 `application/problem+json`."""

    type: str
    title: str
    status: Annotated[int, Field(ge=400, le=599)]
    detail: str
    errors: tuple["ProblemField", ...] = ()


class ProblemField(Contract):
    """One mistake in a request, and how to mend it."""

    field: str
    message: str
