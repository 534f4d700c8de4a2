"""What a scheduler that was away does not hold against others: nobody listened to them.

Leases run out and workers are lost by their silence. While an orchestrator is frozen, starved or
restarted, or a leader is gone and no other leads yet, whoever speaks is not heard; so silence
begins anew when somebody leads again.
"""

from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from offbeat.contracts.jobs import JobStatus
from services.orchestrator.schema import JobRow, WorkerRow
from services.orchestrator.state import WORKER_LOST_S

ABSENCE_MIN_S = 3.0
"""A round that comes so late may be slow and nothing else."""


def is_absence(gap_s: float, lease_s: float) -> bool:
    """Whether so long between two rounds of the scheduler may have cost somebody a lease, or made a
    worker look lost: half the time that either may be silent."""
    return gap_s > max(ABSENCE_MIN_S, min(lease_s, WORKER_LOST_S) / 2)


def excuse(session: Session, away_s: float | None, *, now: float, lease_s: float) -> None:
    """Have all leases begin now, and the silence of the workers that were there before.

    Where it is not known for how long nobody listened, it is since the newest report of a worker.
    """
    held = select(JobRow).where(JobRow.status == JobStatus.LEASED)
    # Who has the lock on a row speaks just now.
    for job in session.scalars(held.with_for_update(skip_locked=True)):
        job.lease_expires_at = now + lease_s
    newest = session.scalar(select(func.max(WorkerRow.last_seen_at)))
    heard_until = (newest or now) if away_s is None else now - away_s
    session.execute(
        update(WorkerRow)
        .where(WorkerRow.last_seen_at > heard_until - WORKER_LOST_S)
        .values(last_seen_at=now)
    )
