"""Attempts that ended because the object store or the weight-proxy is away: nobody's fault.

They do not count. The job waits, longer each time, and the run's log says so once. Workers repeat
their calls for a minute before they give an attempt up, so what comes here is no hiccup.
"""

from sqlalchemy import BindParameter, ColumnElement, func, or_, select
from sqlalchemy.orm import Session

from offbeat.contracts.jobs import JobKind
from offbeat.contracts.runs import EventLevel
from services.orchestrator.jobs import OPEN_JOBS, requeue_lost
from services.orchestrator.schema import JobRow, RunRow
from services.orchestrator.store import add_event

FIRST_WAIT_S = 2.0
WAIT_MAX_S = 60.0
"""So late at the most does a job notice that the outage is over."""
OUTAGE_MAX_S = 86_400.0
"""After a day a job's attempts count again, so that no run waits for ever."""


def wait_s(away_s: float) -> float | None:
    """How long a job waits that first ended in an outage `away_s` ago: as long again, within
    bounds. None where it has waited long enough."""
    return None if away_s > OUTAGE_MAX_S else min(max(away_s, FIRST_WAIT_S), WAIT_MAX_S)


def wait_out(session: Session, run: RunRow, job: JobRow, reason: str, now: float) -> bool:
    """Let the job wait for the end of the outage; false where the attempt counts as any other.

    A chat never waits: whoever asked is told.
    """
    began_at = job.outage_since or now
    pause_s = wait_s(now - began_at)
    if pause_s is None or job.kind is JobKind.CHAT:
        return False
    if outage_began_at(session, run.id) is None:
        add_event(
            session,
            run.id,
            now,
            "outage_began",
            f"Jobs wait until a part that they need is back; no attempt counts as failed: {reason}",
            level=EventLevel.WARNING,
            data={"job_id": job.id, "worker_id": job.worker_id},
        )
    job.error = reason
    job.outage_since = began_at
    requeue_lost(session, run, job, now)
    job.not_before = now + pause_s
    return True


def end_outage(session: Session, run: RunRow, job: JobRow, now: float) -> None:
    """Note that the job has brought a result."""
    began_at, job.outage_since = job.outage_since, None
    if began_at is None or outage_began_at(session, run.id) is not None:
        return
    message = f"Jobs get what they need again, after {now - began_at:.0f} s: the run goes on."
    add_event(session, run.id, now, "outage_ended", message)


def outage_began_at(session: Session, run_id: str) -> float | None:
    """Since when the run's jobs have waited for the end of an outage; None where none does."""
    return session.scalar(
        select(func.min(JobRow.outage_since)).where(
            JobRow.run_id == run_id, JobRow.status.in_(OPEN_JOBS)
        )
    )


def may_be_sent(now: float | BindParameter[float]) -> ColumnElement[bool]:
    """Whether no outage holds the job back. A time too far off is of a clock that was wrong."""
    due = JobRow.not_before <= now, JobRow.not_before > now + WAIT_MAX_S
    return or_(JobRow.not_before.is_(None), *due)
