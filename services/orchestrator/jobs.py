"""Jobs in the database: how one is made and how it is made to wait for another turn."""

from pydantic import TypeAdapter
from sqlalchemy.orm import Session

from offbeat.contracts.jobs import JobInput, JobKind, JobStatus
from offbeat.contracts.run_spec import RunSpec
from services.orchestrator.schema import JobRow, RunRow
from services.orchestrator.store import new_id

INPUT: TypeAdapter[JobInput] = TypeAdapter(JobInput)
OPEN_JOBS = (JobStatus.QUEUED, JobStatus.LEASED)


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


def requeue(job: JobRow) -> None:
    """Make the job wait for its turn under a new attempt; messages of older ones are void."""
    job.status = JobStatus.QUEUED
    job.attempt += 1
    job.enqueued_at = None
    job.leased_at = None
    job.lease_expires_at = None
    job.worker_id = None
