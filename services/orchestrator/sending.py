"""Which waiting jobs are sent now: what `dispatch.choose` decides by, read from the database."""

from collections import Counter

from sqlalchemy import bindparam, select
from sqlalchemy.orm import Session

from offbeat.contracts.jobs import JobKind, JobStatus
from services.orchestrator.clocks import move_up, served_s, usual_lengths_s
from services.orchestrator.dispatch import WaitingJob, choose
from services.orchestrator.jobs import IN_FLIGHT, MAY_START, next_steps
from services.orchestrator.outages import may_be_sent
from services.orchestrator.parsed_specs import parsed_spec
from services.orchestrator.quotas import jobs_left
from services.orchestrator.schema import JobRow, RunRow
from services.orchestrator.state import alive_workers

WAITING_JOBS_MAX = 1000
"""Jobs considered for sending at once; the rest is looked at in the next round."""

UNDER_WAY = (
    select(
        *(JobRow.run_id, JobRow.kind, JobRow.pool, JobRow.status, JobRow.leased_at),
        RunRow.project_id,
    )
    .join(RunRow, RunRow.id == JobRow.run_id)
    .where(IN_FLIGHT)
)
WAITING = (
    select(
        *(JobRow.seq, JobRow.id, JobRow.run_id, JobRow.kind, JobRow.pool),
        *(RunRow.spec, RunRow.project_id),
    )
    .join(RunRow, RunRow.id == JobRow.run_id)
    .where(
        JobRow.status == JobStatus.QUEUED,
        JobRow.enqueued_at.is_(None),
        MAY_START,
        RunRow.project_id.not_in(bindparam("full", expanding=True)),
        may_be_sent(bindparam("now")),
    )
    .order_by(JobRow.seq)
    .limit(WAITING_JOBS_MAX)
)


def jobs_to_send(session: Session, now: float) -> list[str]:
    """The ids of the jobs whose turn it is, in order. The clocks of idle runs move up."""
    clocks_s = move_up(session)
    under_way = session.execute(UNDER_WAY).all()
    quotas = jobs_left(session, Counter(job.project_id for job in under_way))
    waiting = _waiting(session, [project for project, left in quotas.items() if left <= 0], now)
    if not waiting:
        return []
    lengths_s = usual_lengths_s(session)
    chosen = choose(
        waiting,
        sent=Counter(
            (job.kind.role, job.pool)
            for job in under_way
            if job.status is JobStatus.QUEUED and job.kind is not JobKind.CHAT
        ),
        workers=alive_workers(session, now),
        busy=Counter(job.run_id for job in under_way),
        quotas=quotas,
        served_s=served_s(
            clocks_s,
            [(job.run_id, job.kind, job.leased_at) for job in under_way],
            lengths_s,
            now,
        ),
        lengths_s=lengths_s,
    )
    return [job.job_id for job in chosen]


def _waiting(session: Session, full: list[str], now: float) -> list[WaitingJob]:
    """The jobs that may be sent, but for those of projects that are at their limit and steps whose
    parent is not known."""
    rows = session.execute(WAITING, {"full": full, "now": now}).all()
    has_steps = any(row.kind is JobKind.TRAIN for row in rows)
    first_steps = next_steps(session) if has_steps else {}
    return [
        WaitingJob(
            seq=row.seq,
            job_id=row.id,
            run_id=row.run_id,
            kind=row.kind,
            pool=row.pool,
            priority=parsed_spec(row.spec).priority,
            project_id=row.project_id,
        )
        for row in rows
        if row.kind is not JobKind.TRAIN or row.seq == first_steps[row.run_id]
    ]
