"""Leases: who works on a job, for how long, and what happens when nobody does any more.

Only the attempt that holds the lease can complete a job, and the first completion wins; the same
completion again gets the same answer. Whatever else arrives is refused with a conflict, and the
worker drops it.
"""

from datetime import UTC, datetime

from sqlalchemy import bindparam, select
from sqlalchemy.orm import Session

from offbeat.contracts.jobs import JobKind, JobStatus
from offbeat.contracts.leases import (
    CompleteRequest,
    FailRequest,
    Lease,
    LeaseRequest,
    ReleaseRequest,
)
from offbeat.contracts.runs import EventLevel, RunStatus
from offbeat.errors import HeldBackError, InvalidRequestError, LeaseLostError, NotFoundError
from services.orchestrator.fleet import note_attempt, refusal
from services.orchestrator.groups import drop_groups, groups_generated_by
from services.orchestrator.jobs import ASKED_KINDS, INPUT, charge, next_step, requeue_lost
from services.orchestrator.lifecycle import end_run
from services.orchestrator.outages import end_outage, wait_out
from services.orchestrator.parsed_specs import parsed_spec
from services.orchestrator.results import OUTPUT, apply_output
from services.orchestrator.run_state import GroupStatus, RunAction
from services.orchestrator.schema import GroupRow, JobRow, RunRow
from services.orchestrator.store import add_event

ESSENTIAL_KINDS = (JobKind.PREPARE, JobKind.TOKENIZE, JobKind.INIT, JobKind.TRAIN)
"""Without a result of these a run cannot go on."""
WAITING_ROLLOUTS_MAX = 32
"""Keys in an answer to a trainer: those of the next step or two, in a few kilobytes."""

LOCKED_JOB = (
    select(RunRow, JobRow)
    .join(JobRow, JobRow.run_id == RunRow.id)
    .where(JobRow.id == bindparam("job_id"), RunRow.deleted_at.is_(None))
    .with_for_update()
)
"""A job and its run: the run first, as everybody locks them; the job as well, since the scheduler
sends and recalls messages without a lock on the run."""
READY_ROLLOUTS = (
    select(GroupRow.rollouts_key)
    .where(GroupRow.run_id == bindparam("run_id"), GroupRow.status == GroupStatus.READY)
    .order_by(GroupRow.index)
)


def lease(
    session: Session,
    job_id: str,
    request: LeaseRequest,
    *,
    now: float,
    lease_s: float,
    heartbeat_interval_s: float,
) -> Lease | HeldBackError:
    """Give the job to the worker. A repeated request of the holder gets the lease again.

    Where another worker is to have it, its message is taken back and the error says for how long.
    """
    run, job = _lock_job(session, job_id)
    if run.status is not RunStatus.RUNNING and job.kind not in ASKED_KINDS:
        raise LeaseLostError(f"run {run.id} is {run.status}")
    held_by_caller = job.status is JobStatus.LEASED and job.worker_id == request.worker_id
    first = next_step(session, run.id) if job.kind is JobKind.TRAIN else None
    if first is not None and job.seq > first:
        raise LeaseLostError(f"the step before that of job {job_id} is not computed yet")
    if job.attempt != request.attempt or not (job.status is JobStatus.QUEUED or held_by_caller):
        raise LeaseLostError(
            f"attempt {request.attempt} of job {job_id} is not to be had: the job is {job.status}, "
            f"at attempt {job.attempt}"
        )
    held_back = None if held_by_caller else refusal(session, job, request.worker_id, now)
    if held_back is not None:
        job.enqueued_at = None
        return held_back
    job.status = JobStatus.LEASED
    job.worker_id = request.worker_id
    job.leased_at = job.leased_at if held_by_caller else now
    expires_at = job.lease_expires_at = now + lease_s
    spec = parsed_spec(run.spec)
    return Lease(
        job_id=job.id,
        attempt=job.attempt,
        run_id=run.id,
        run_name=spec.name,
        spec=spec,
        input=INPUT.validate_json(job.input),
        expires_at=datetime.fromtimestamp(expires_at, UTC),
        heartbeat_interval_s=heartbeat_interval_s,
        waiting_rollouts=waiting_rollouts(session, job),
    )


def complete(session: Session, job_id: str, request: CompleteRequest, *, now: float) -> None:
    """Take the result and what follows from it; a repetition changes nothing."""
    run, job = _lock_job(session, job_id)
    if job.status is JobStatus.DONE and job.attempt == request.attempt:
        return
    _check_holder(job, request.attempt, request.worker_id)
    if request.output.kind != job.kind:
        raise InvalidRequestError(f"job {job_id} is of kind {job.kind}, not {request.output.kind}")
    apply_output(session, run, job, request.output, now)
    charge(run, job, now)
    note_attempt(session, run, job, ok=True, now=now)
    end_outage(session, run, job, now)
    job.status = JobStatus.DONE
    job.output = OUTPUT.dump_json(request.output).decode()
    job.finished_at = now
    job.lease_expires_at = None


def fail(session: Session, job_id: str, request: FailRequest, *, now: float) -> None:
    """End the attempt of the lease's holder; the job is queued again unless it cannot succeed. An
    outage does not count."""
    run, job = _lock_job(session, job_id)
    if job.status is not JobStatus.LEASED and job.error == request.message:
        return
    _check_holder(job, request.attempt, request.worker_id)
    if request.outage and wait_out(session, run, job, request.message, now):
        return
    end_attempt(session, run, job, request.message, permanent=request.permanent, now=now)


def release(session: Session, job_id: str, request: ReleaseRequest, *, now: float) -> None:
    """Let the job wait for another worker; the attempt does not count as failed."""
    run, job = _lock_job(session, job_id)
    if job.status is JobStatus.QUEUED and job.attempt == request.attempt:
        job.enqueued_at = None
        return
    _check_holder(job, request.attempt, request.worker_id)
    add_event(
        session,
        run.id,
        now,
        "job_handed_back",
        f"Worker {job.worker_id} leaves and hands {job.kind} job {job.id} back.",
        data={"job_id": job.id, "attempt": job.attempt, "worker_id": job.worker_id},
    )
    requeue_lost(session, run, job, now)


def end_attempt(
    session: Session, run: RunRow, job: JobRow, reason: str, *, permanent: bool, now: float
) -> None:
    """Count a failed attempt; queue the next one, or give the job up and say what that means."""
    permanent = permanent or job.kind is JobKind.CHAT
    if not permanent:
        note_attempt(session, run, job, ok=False, now=now)
    job.failures += 1
    job.error = reason
    spec = parsed_spec(run.spec)
    attempt = f"Attempt {job.attempt} of {job.kind} job {job.id}"
    if not permanent and job.failures < spec.limits.max_attempts:
        add_event(
            session,
            run.id,
            now,
            "job_requeued",
            f"{attempt} brought no result and is tried again: {reason}",
            level=EventLevel.WARNING,
            data={"job_id": job.id, "attempt": job.attempt, "worker_id": job.worker_id},
        )
        requeue_lost(session, run, job, now)
        return
    charge(run, job, now)
    job.status = JobStatus.FAILED if permanent else JobStatus.DEAD
    job.finished_at = now
    job.lease_expires_at = None
    if job.kind is JobKind.CHAT:
        return  # whoever asked is told
    add_event(
        session,
        run.id,
        now,
        f"job_{job.status}",
        f"{attempt} was the last one: {reason}",
        level=EventLevel.ERROR,
        data={"job_id": job.id, "attempts": job.attempt, "worker_id": job.worker_id},
    )
    _after_loss(session, run, job, reason, now)


def waiting_rollouts(session: Session, job: JobRow) -> tuple[str, ...]:
    """What the job's trainer may fetch beside its step."""
    if job.kind is not JobKind.TRAIN:
        return ()
    ready = session.scalars(READY_ROLLOUTS, {"run_id": job.run_id})
    return tuple(dict.fromkeys(key for key in ready if key is not None))[:WAITING_ROLLOUTS_MAX]


def _lock_job(session: Session, job_id: str) -> tuple[RunRow, JobRow]:
    row = session.execute(LOCKED_JOB, {"job_id": job_id}).first()
    if row is None:
        raise NotFoundError(f"there is no job {job_id!r}")
    run, job = row
    return run, job


def holder_problem(job: JobRow, attempt: int, worker_id: str) -> LeaseLostError | None:
    """Why the worker's attempt does not hold the job, where it does not."""
    held = job.status is JobStatus.LEASED
    if held and job.attempt == attempt and job.worker_id == worker_id:
        return None
    return LeaseLostError(
        f"attempt {attempt} of job {job.id} is not held by {worker_id}: the job is "
        f"{job.status}, at attempt {job.attempt}"
    )


def _check_holder(job: JobRow, attempt: int, worker_id: str) -> None:
    if problem := holder_problem(job, attempt, worker_id):
        raise problem


def _after_loss(session: Session, run: RunRow, job: JobRow, reason: str, now: float) -> None:
    if job.kind is JobKind.GENERATE:
        run.generation_failures += 1
        lost = groups_generated_by(session, job.id)
        drop_groups(session, run.id, lost, "job_lost", now)
    elif job.kind in ESSENTIAL_KINDS and not run.status.is_final:
        end_run(session, run, RunAction.FAIL, f"its {job.kind} job failed: {reason}", now)
