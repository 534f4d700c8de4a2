"""Jobs in the database: how one is made and how it is made to wait for another turn."""

from collections.abc import Sequence

from pydantic import TypeAdapter
from sqlalchemy import ColumnElement, bindparam, func, select
from sqlalchemy.orm import Session

from offbeat.contracts.jobs import JobInput, JobKind, JobStatus, WorkerRole
from offbeat.contracts.run_spec import RunSpec
from offbeat.contracts.runs import RunStatus
from services.orchestrator.schema import JobRow, RunRow
from services.orchestrator.store import add_event, new_id

INPUT: TypeAdapter[JobInput] = TypeAdapter(JobInput)
OPEN_JOBS = (JobStatus.QUEUED, JobStatus.LEASED)
ASKED_KINDS = (JobKind.REPLAY, JobKind.CHAT)
"""What a user asks for is done whatever the run's status."""
MAY_START = (RunRow.status == RunStatus.RUNNING) | JobRow.kind.in_(ASKED_KINDS)
"""Of queued jobs, joined with their runs."""
IN_FLIGHT = (JobRow.status == JobStatus.LEASED) | (
    (JobRow.status == JobStatus.QUEUED) & JobRow.enqueued_at.is_not(None)
)
"""Sent or leased."""
NOT_COMPUTED = (
    JobRow.kind == JobKind.TRAIN,
    JobRow.status.in_(OPEN_JOBS),
    JobRow.computed_at.is_(None),
)
NEXT_STEPS = (
    select(JobRow.run_id, func.min(JobRow.seq)).where(*NOT_COMPUTED).group_by(JobRow.run_id)
)
NEXT_STEP = select(func.min(JobRow.seq)).where(JobRow.run_id == bindparam("run_id"), *NOT_COMPUTED)


def add_job(session: Session, run: RunRow, spec: RunSpec, job: JobInput, now: float) -> str:
    """Add a job that waits for its turn; its id."""
    row = JobRow(
        id=new_id("job"),
        run_id=run.id,
        kind=JobKind(job.kind),
        pool=spec.pool,
        status=JobStatus.QUEUED,
        input=INPUT.dump_json(job).decode(),
        created_at=now,
    )
    session.add(row)
    return row.id


def next_steps(session: Session) -> dict[str, int]:
    """Of each run the first train job, by `seq`, that is open and not computed: the one whose
    parent is known. Later ones wait for it."""
    return dict(session.execute(NEXT_STEPS).all())


def next_step(session: Session, run_id: str) -> int | None:
    """The one of this run."""
    return session.scalar(NEXT_STEP, {"run_id": run_id})


def charge(run: RunRow, job: JobRow, now: float) -> None:
    """Count an attempt that ends, however it ends."""
    if job.leased_at is None:
        return
    spent_s = (job.computed_at or now) - job.leased_at
    if job.kind.role is WorkerRole.GENERATOR:
        run.generator_s = (run.generator_s or 0.0) + spent_s
    else:
        run.trainer_s = (run.trainer_s or 0.0) + spent_s


def requeue(session: Session, job: JobRow) -> None:
    """Make the job wait for its turn under a new attempt; messages of older ones are void.

    So are those of the run's later steps, which wait for a train job.
    """
    sent = JobRow.status == JobStatus.QUEUED, JobRow.enqueued_at.is_not(None)
    for step in _later_steps(session, job, *sent):
        _put_back(step)
    _put_back(job)


def requeue_lost(session: Session, run: RunRow, job: JobRow, now: float) -> None:
    """Count the attempt that held the job, and make the job wait for its turn.

    A trainer that has begun a later step waits in vain for this one to be handed in, and it may be
    the only one that could take it again: that step is taken back.
    """
    begun = JobRow.status == JobStatus.LEASED, JobRow.computed_at.is_(None)
    for step in _later_steps(session, job, *begun):
        add_event(
            session,
            run.id,
            now,
            "job_taken_back",
            f"Train job {step.id} waits until the step before it is taken again.",
            data={"job_id": step.id, "attempt": step.attempt, "worker_id": step.worker_id},
        )
        charge(run, step, now)
        _put_back(step)
    charge(run, job, now)
    requeue(session, job)


def _later_steps(
    session: Session, job: JobRow, *conditions: ColumnElement[bool]
) -> Sequence[JobRow]:
    """Those of the run's train jobs after this one that meet the conditions; none of another
    job."""
    if job.kind is not JobKind.TRAIN:
        return ()
    later = JobRow.run_id == job.run_id, JobRow.kind == JobKind.TRAIN, JobRow.seq > job.seq
    return session.scalars(select(JobRow).where(*later, *conditions)).all()


def _put_back(job: JobRow) -> None:
    job.status = JobStatus.QUEUED
    job.attempt += 1
    job.enqueued_at = None
    job.leased_at = None
    job.lease_expires_at = None
    job.computed_at = None
    job.worker_id = None
