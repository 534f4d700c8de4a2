"""The tables. Times are seconds since the epoch, UTC; JSON columns hold contracts as text.

`runs` is the state of each run, `jobs` the work, `groups` the fate of every prompt group, `events`
and `metrics` what users read, `workers` who was seen last when; `projects` and `api_keys` say who
may do what.
"""

from enum import StrEnum
from typing import ClassVar

from sqlalchemy import BigInteger, Boolean, Enum, Float, ForeignKey, Index, Integer, String, Text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from offbeat.contracts.jobs import JobKind, JobStatus, WorkerRole
from offbeat.contracts.runs import EventLevel, RunStatus
from services.orchestrator.run_state import GroupStatus

SEQ_MAX = 2**31 - 1
"""The largest number of a row: an INTEGER of PostgreSQL."""


class Base(DeclarativeBase):
    """The metadata that migrations are compared with. Enumerations are stored as their values."""

    type_annotation_map: ClassVar[dict[type, Enum]] = {
        StrEnum: Enum(
            StrEnum,
            native_enum=False,
            create_constraint=False,
            length=16,
            values_callable=lambda kind: [member.value for member in kind],
        )
    }


class RunRow(Base):
    """One run."""

    __tablename__ = "runs"
    __table_args__ = (
        Index("ix_runs_project", "project_id", "seq"),
        # Every result of a generator has its project's bytes added up.
        Index("ix_runs_stored_bytes", "project_id", "stored_bytes"),
    )

    seq: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=True)
    """Order of creation, and the cursor of the list."""
    id: Mapped[str] = mapped_column(String(32), unique=True)
    project_id: Mapped[str] = mapped_column(String(32))
    idempotency_key: Mapped[str | None] = mapped_column(String(128), unique=True)
    """A hash of the project and of what the client sent."""
    spec: Mapped[str] = mapped_column(Text)
    status: Mapped[RunStatus] = mapped_column(index=True)
    status_reason: Mapped[str | None] = mapped_column(Text)
    created_at: Mapped[float] = mapped_column(Float)
    started_at: Mapped[float | None] = mapped_column(Float)
    active_since: Mapped[float | None] = mapped_column(Float)
    """When it was started, resumed or retried last: limits.max_runtime_s counts from here."""
    finished_at: Mapped[float | None] = mapped_column(Float)
    prompts_key: Mapped[str | None] = mapped_column(String(256))
    num_prompts: Mapped[int] = mapped_column(Integer, default=0)
    eval_prompts_key: Mapped[str | None] = mapped_column(String(256))
    version: Mapped[int | None] = mapped_column(Integer)
    """The newest published version."""
    next_group: Mapped[int] = mapped_column(Integer, default=0)
    """Index of the next group to generate: the cursor in the order of prompts."""
    refilled: Mapped[int] = mapped_column(Integer, default=0)
    """Groups that dynamic sampling has replaced for the next step."""
    generation_failures: Mapped[int] = mapped_column(Integer, default=0)
    """Generate jobs that ended without a result since the last one that had one."""
    generator_s: Mapped[float | None] = mapped_column(Float)
    trainer_s: Mapped[float | None] = mapped_column(Float)
    """Its clocks among the runs that share its workers, see `fairness.py`."""
    missing_role: Mapped[WorkerRole | None] = mapped_column()
    """The kind of worker that it waits for while none is there: the log says so once."""
    stored_bytes: Mapped[int] = mapped_column(BigInteger, default=0)
    """What its jobs have put into the object store, less what was removed since."""
    collected_at: Mapped[float | None] = mapped_column(Float)
    """When its objects were looked through last for what may go."""
    deleted_at: Mapped[float | None] = mapped_column(Float)
    """When a user deleted it: nobody sees it any more, and the collector removes all of it."""


class JobRow(Base):
    """One unit of work."""

    __tablename__ = "jobs"
    __table_args__ = (
        Index("ix_jobs_run_status", "run_id", "status"),
        Index("ix_jobs_status_kind", "status", "kind"),
    )

    seq: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(String(32), unique=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"))
    kind: Mapped[JobKind] = mapped_column()
    pool: Mapped[str] = mapped_column(String(32))
    status: Mapped[JobStatus] = mapped_column()
    attempt: Mapped[int] = mapped_column(Integer, default=1)
    """Number of the message that is valid now; older ones are refused."""
    failures: Mapped[int] = mapped_column(Integer, default=0)
    """Attempts that were leased and brought no result; those that ended in an outage are not."""
    input: Mapped[str] = mapped_column(Text)
    output: Mapped[str | None] = mapped_column(Text)
    error: Mapped[str | None] = mapped_column(Text)
    worker_id: Mapped[str | None] = mapped_column(String(128))
    created_at: Mapped[float] = mapped_column(Float)
    enqueued_at: Mapped[float | None] = mapped_column(Float)
    """When the valid message was sent; none while the job waits for its turn."""
    leased_at: Mapped[float | None] = mapped_column(Float)
    lease_expires_at: Mapped[float | None] = mapped_column(Float)
    computed_at: Mapped[float | None] = mapped_column(Float)
    """When the attempt had only the hand-in left."""
    finished_at: Mapped[float | None] = mapped_column(Float)
    samples_removed_at: Mapped[float | None] = mapped_column(Float)
    """When the object with its samples was given up."""
    outage_since: Mapped[float | None] = mapped_column(Float)
    """When an attempt ended in an outage for the first time, until one brings a result."""
    not_before: Mapped[float | None] = mapped_column(Float)
    """When it may be sent again after an outage."""


class VersionRow(Base):
    """A published version, and what of it was given up since."""

    __tablename__ = "policy_versions"

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    version: Mapped[int] = mapped_column(Integer, primary_key=True)
    prefix: Mapped[str] = mapped_column(String(256))
    """Where the files of the manifest that won lie."""
    adapter_removed_at: Mapped[float | None] = mapped_column(Float)
    state_removed_at: Mapped[float | None] = mapped_column(Float)


class GroupRow(Base):
    """The fate of one group: it is trained once, or dropped with a reason."""

    __tablename__ = "groups"
    __table_args__ = (Index("ix_groups_run_status", "run_id", "status"),)

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    index: Mapped[int] = mapped_column(Integer, primary_key=True)
    prompt_row: Mapped[int] = mapped_column(Integer)
    status: Mapped[GroupStatus] = mapped_column()
    generate_job_id: Mapped[str] = mapped_column(String(32), index=True)
    train_job_id: Mapped[str | None] = mapped_column(String(32), index=True)
    rollouts_key: Mapped[str | None] = mapped_column(String(256))
    policy_version: Mapped[int | None] = mapped_column(Integer)
    adapter_sha256: Mapped[str | None] = mapped_column(String(64))
    reward_mean: Mapped[float | None] = mapped_column(Float)
    reward_std: Mapped[float | None] = mapped_column(Float)
    num_tokens: Mapped[int] = mapped_column(Integer, default=0)
    ready_at: Mapped[float | None] = mapped_column(Float)
    trained_step: Mapped[int | None] = mapped_column(Integer)
    drop_reason: Mapped[str | None] = mapped_column(String(64))


class EventRow(Base):
    """One entry of a run's log."""

    __tablename__ = "events"
    __table_args__ = (Index("ix_events_run", "run_id", "id"),)

    id: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"))
    at: Mapped[float] = mapped_column(Float)
    level: Mapped[EventLevel] = mapped_column()
    kind: Mapped[str] = mapped_column(String(64))
    message: Mapped[str] = mapped_column(Text)
    data: Mapped[str] = mapped_column(Text)


class MetricRow(Base):
    """One value of one series; a step that is reported again overwrites nothing."""

    __tablename__ = "metrics"

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    name: Mapped[str] = mapped_column(String(128), primary_key=True)
    step: Mapped[int] = mapped_column(Integer, primary_key=True)
    value: Mapped[float] = mapped_column(Float)


class WorkerRow(Base):
    """The last report of a worker."""

    __tablename__ = "workers"

    id: Mapped[str] = mapped_column(String(128), primary_key=True)
    role: Mapped[WorkerRole] = mapped_column()
    pool: Mapped[str] = mapped_column(String(32))
    report: Mapped[str] = mapped_column(Text)
    last_seen_at: Mapped[float] = mapped_column(Float, index=True)
    quarantines: Mapped[int] = mapped_column(Integer, default=0)
    """How many it has had since it last did something well."""
    quarantined_until: Mapped[float | None] = mapped_column(Float)
    quarantine_reason: Mapped[str | None] = mapped_column(Text)


class OutcomeRow(Base):
    """How an attempt ended, kept for an hour: what `quarantine.py` judges a worker by."""

    __tablename__ = "outcomes"
    __table_args__ = (Index("ix_outcomes_run", "run_id", "id"),)

    id: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=True)
    worker_id: Mapped[str] = mapped_column(String(128), index=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"))
    work: Mapped[str] = mapped_column(String(16))
    subject: Mapped[str] = mapped_column(String(32))
    at: Mapped[float] = mapped_column(Float, index=True)
    ok: Mapped[bool] = mapped_column(Boolean)


class ProjectRow(Base):
    """Whose runs see one another, and what they may use."""

    __tablename__ = "projects"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    created_at: Mapped[float] = mapped_column(Float)
    active_runs_max: Mapped[int] = mapped_column(Integer)
    jobs_in_flight_max: Mapped[int] = mapped_column(Integer)
    stored_bytes_max: Mapped[int] = mapped_column(BigInteger)


class KeyRow(Base):
    """An API key of a project; of its secret only the hash."""

    __tablename__ = "api_keys"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"), index=True)
    name: Mapped[str] = mapped_column(String(64))
    secret_sha256: Mapped[str] = mapped_column(String(64))
    created_at: Mapped[float] = mapped_column(Float)
