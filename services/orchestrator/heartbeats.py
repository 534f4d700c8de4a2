"""What keeps leases: the most frequent thing that workers say while they work."""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import bindparam, select
from sqlalchemy.orm import Session

from offbeat.contracts.leases import HeartbeatReply, HeartbeatRequest
from offbeat.errors import NotFoundError, OffbeatError
from services.orchestrator.leases import holder_problem, waiting_rollouts
from services.orchestrator.schema import JobRow
from services.orchestrator.store import Store

UNLOCKED_JOBS = (
    select(JobRow)
    .where(JobRow.id.in_(bindparam("ids", expanding=True)))
    .with_for_update(skip_locked=True)
)
KNOWN_JOBS = select(JobRow.id).where(JobRow.id.in_(bindparam("ids", expanding=True)))


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """One of them."""

    job_id: str
    body: HeartbeatRequest


def write_heartbeats(
    store: Store, heartbeats: Sequence[Heartbeat], *, now: float, lease_s: float
) -> list[HeartbeatReply | OffbeatError]:
    """Extend the leases of their holders.

    A job whose row is locked changes just now: it is left as it is, and the next heartbeat hears
    what became of it. Waiting for it could be waiting in a circle.
    """
    ids = {heartbeat.job_id for heartbeat in heartbeats}
    with store.write() as session:
        jobs = {job.id: job for job in session.scalars(UNLOCKED_JOBS, {"ids": ids})}
        known = set(jobs)
        if missing := ids - known:
            known.update(session.scalars(KNOWN_JOBS, {"ids": missing}))
        return [
            _answer(session, jobs.get(heartbeat.job_id), heartbeat.body, now=now, lease_s=lease_s)
            if heartbeat.job_id in known
            else NotFoundError(f"there is no job {heartbeat.job_id!r}")
            for heartbeat in heartbeats
        ]


def _answer(
    session: Session, job: JobRow | None, request: HeartbeatRequest, *, now: float, lease_s: float
) -> HeartbeatReply | OffbeatError:
    if job is None:
        return HeartbeatReply()
    if problem := holder_problem(job, request.attempt, request.worker_id):
        return problem
    job.lease_expires_at = now + lease_s
    if request.computed and job.computed_at is None:
        job.computed_at = now
    return HeartbeatReply(waiting_rollouts=waiting_rollouts(session, job))
