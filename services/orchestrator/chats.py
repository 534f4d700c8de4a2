"""Chat turns in the database: who may ask, how many at once, and what became of a turn.

A turn is a job that does not wait for its turn: its message goes to the chat lane at once, and it
is never tried again, since the person who asked sees what happened. Its row is short-lived.
"""

from dataclasses import dataclass

from sqlalchemy import delete, func, select, update
from sqlalchemy.orm import Session

from offbeat.contracts.chat import ChatInput
from offbeat.contracts.jobs import JobKind, JobMessage, JobStatus, WorkerRole
from offbeat.errors import NotFoundError, RateLimitedError, UnavailableError
from services.orchestrator.jobs import OPEN_JOBS, add_job
from services.orchestrator.parsed_specs import parsed_spec
from services.orchestrator.remains import check_adapter
from services.orchestrator.schema import JobRow, RunRow
from services.orchestrator.state import alive_workers

CHATS_PER_RUN_MAX = 8
"""Turns of a run under way at once: two generators' worth."""
RETRY_AFTER_S = 2
"""A short answer's time."""
PICKUP_TIMEOUT_S = 30.0
"""How long a question waits for a generator before the person is told that none is free."""
KEPT_S = 3600.0
"""How long a row outlives its turn: for a look at what went wrong, no longer."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A turn that was begun."""

    message: JobMessage
    pool: str
    created_at: float

    @property
    def job_id(self) -> str:
        """The turn's job."""
        return self.message.job_id


def check_version(session: Session, run: RunRow, version: int | None) -> int:
    """The newest version of the run; `NotFoundError` unless it has published this one, or any, of
    an adapter, and `GoneError` where this one was removed."""
    if parsed_spec(run.spec).is_full:
        raise NotFoundError(
            f"run {run.id} trains all weights, and generators serve adapters: give the model that "
            "its last step writes as model.id to another run, or to an engine of your own"
        )
    if run.version is None:
        raise NotFoundError(
            f"run {run.id} is {run.status} and has published no version yet: ask again when its "
            "first one is there"
        )
    if version is not None and version > run.version:
        raise NotFoundError(f"run {run.id} has no version {version}: the newest is {run.version}")
    if version is not None:
        check_adapter(session, run.id, version)
    return run.version


def begin(session: Session, run: RunRow, question: ChatInput, now: float) -> Asked:
    """Add the job of a turn to a run that is locked.

    Raises `NotFoundError` where the run has no such version, `GoneError` where it was removed,
    `UnavailableError` where no generator lives, `RateLimitedError` where too many turns are under
    way.
    """
    check_version(session, run, question.version)
    spec = parsed_spec(run.spec)
    if not alive_workers(session, now).get((WorkerRole.GENERATOR, spec.pool)):
        raise UnavailableError(
            f"no generator of pool {spec.pool!r} is alive: start one, then ask again"
        )
    _forget_old(session, now)
    if _num_under_way(session, run.id, now) >= CHATS_PER_RUN_MAX:
        raise RateLimitedError(
            f"run {run.id} answers {CHATS_PER_RUN_MAX} chats already: wait for one to end",
            RETRY_AFTER_S,
        )
    job_id = add_job(session, run, spec, question, now)
    session.flush()
    # It is sent by whoever asks; the scheduler has nothing to do with it.
    session.execute(update(JobRow).where(JobRow.id == job_id).values(enqueued_at=now))
    return Asked(message=JobMessage(job_id=job_id, attempt=1), pool=spec.pool, created_at=now)


def check_answering(session: Session, asked: Asked, now: float) -> bool:
    """Whether the turn is still under way; false where it is done.

    `UnavailableError` says why there will be no answer, or no more of it.
    """
    job = session.scalar(select(JobRow).where(JobRow.id == asked.job_id))
    if job is None or job.status not in (*OPEN_JOBS, JobStatus.DONE):
        reason = "it was given up" if job is None else job.error or f"its job is {job.status}"
        raise UnavailableError(f"the answer does not go on: {reason}")
    if job.status is JobStatus.QUEUED and now > asked.created_at + PICKUP_TIMEOUT_S:
        raise UnavailableError(
            f"no generator of pool {asked.pool!r} took the question within {PICKUP_TIMEOUT_S:g} s: "
            "those alive answer other chats or do not reach Redis; ask again later"
        )
    return job.status in OPEN_JOBS


def give_up(session: Session, job_id: str, now: float) -> None:
    """End a turn that nobody waits for any more."""
    session.execute(
        update(JobRow)
        .where(JobRow.id == job_id, JobRow.status.in_(OPEN_JOBS))
        .values(status=JobStatus.CANCELLED, finished_at=now, lease_expires_at=None)
    )


def _num_under_way(session: Session, run_id: str, now: float) -> int:
    """Turns that are answered, or wait for a generator; not those whose replica has died."""
    query = select(func.count()).where(
        JobRow.run_id == run_id,
        JobRow.status.in_(OPEN_JOBS),
        JobRow.kind == JobKind.CHAT,
        (JobRow.status == JobStatus.LEASED) | (JobRow.created_at > now - PICKUP_TIMEOUT_S),
    )
    return session.scalar(query) or 0


def _forget_old(session: Session, now: float) -> None:
    session.execute(
        delete(JobRow).where(
            JobRow.status.in_(set(JobStatus) - {JobStatus.LEASED}),
            JobRow.kind == JobKind.CHAT,
            JobRow.created_at < now - KEPT_S,
        )
    )
