"""What becomes of workers: outcomes are noted, quarantines begin and end, jobs are withheld.

`quarantine.py` judges; here is what it judges by, and what follows.
"""

from math import ceil

from sqlalchemy import select
from sqlalchemy.orm import Session

from offbeat.contracts.runs import EventLevel
from offbeat.errors import HeldBackError
from services.orchestrator.quarantine import OUTCOMES_KEPT_S, Outcome, Quarantine, judge
from services.orchestrator.schema import JobRow, OutcomeRow, RunRow, WorkerRow
from services.orchestrator.state import may_work
from services.orchestrator.store import add_event

SERVE = "serve"
"""The work of loading and proving a version, beside the kinds of jobs."""
OUTCOMES_JUDGED_MAX = 5000
"""Newest outcomes that a verdict looks at: some minutes of a thousand workers."""
OTHERS_FIRST_S = 30.0
"""How long a job that a worker has failed is kept for others: they may all be busy."""
OTHERS_FIRST_PAUSE_S = 1
"""How long that worker waits before it takes another message."""


def note_attempt(session: Session, run: RunRow, job: JobRow, *, ok: bool, now: float) -> None:
    """Note how the attempt of the job's holder ended."""
    if job.worker_id is not None:
        note(session, run, job.worker_id, job.kind, job.id, ok=ok, now=now)


def note(
    session: Session, run: RunRow, worker_id: str, work: str, subject: str, *, ok: bool, now: float
) -> None:
    """Note how a piece of work ended; quarantine the worker where that is the consequence."""
    session.add(
        OutcomeRow(worker_id=worker_id, run_id=run.id, work=work, subject=subject, at=now, ok=ok)
    )
    worker = session.get(WorkerRow, worker_id)
    if worker is None:
        return
    if ok:
        _welcome_back(session, run, worker, now)
        return
    session.flush()
    outcomes = _outcomes_beside(session, worker_id, now)
    verdict = judge(worker_id, outcomes, quarantines=worker.quarantines, now=now)
    if verdict is not None:
        _quarantine(session, worker, verdict, now)


def _outcomes_beside(session: Session, worker_id: str, now: float) -> list[Outcome]:
    """Those of all workers in the runs that this one failed at, oldest first."""
    failed_at = select(OutcomeRow.run_id).where(
        OutcomeRow.worker_id == worker_id, OutcomeRow.ok.is_(False)
    )
    newest = session.scalars(
        select(OutcomeRow)
        .where(OutcomeRow.run_id.in_(failed_at), OutcomeRow.at >= now - OUTCOMES_KEPT_S)
        .order_by(OutcomeRow.id.desc())
        .limit(OUTCOMES_JUDGED_MAX)
    )
    outcomes = [
        Outcome(
            worker_id=row.worker_id,
            run_id=row.run_id,
            work=row.work,
            subject=row.subject,
            at=row.at,
            ok=row.ok,
        )
        for row in newest
    ]
    return outcomes[::-1]


def _quarantine(session: Session, worker: WorkerRow, verdict: Quarantine, now: float) -> None:
    worker.quarantines += 1
    worker.quarantined_until = verdict.until
    worker.quarantine_reason = verdict.reason
    for run_id in verdict.run_ids:
        add_event(
            session,
            run_id,
            now,
            "worker_quarantined",
            f"Worker {worker.id} gets no jobs for {verdict.until - now:.0f} s: {verdict.reason}.",
            level=EventLevel.WARNING,
            data={"worker_id": worker.id, "until": verdict.until, "reason": verdict.reason},
        )


def _welcome_back(session: Session, run: RunRow, worker: WorkerRow, now: float) -> None:
    if worker.quarantined_until is None or worker.quarantined_until > now:
        return
    worker.quarantines = 0
    worker.quarantined_until = None
    worker.quarantine_reason = None
    message = f"Worker {worker.id} is healthy again after its quarantine."
    add_event(session, run.id, now, "worker_returned", message, data={"worker_id": worker.id})


def refusal(session: Session, job: JobRow, worker_id: str, now: float) -> HeldBackError | None:
    """Why the worker does not get the job now, where it does not."""
    worker = session.get(WorkerRow, worker_id)
    if worker is not None and (worker.quarantined_until or now) > now:
        wait_s = ceil((worker.quarantined_until or now) - now)
        return HeldBackError(
            f"worker {worker_id} is in quarantine for {wait_s} s: {worker.quarantine_reason}",
            wait_s,
        )
    if job.failures and _another_may_do_better(session, job, worker_id, now):
        return HeldBackError(
            f"worker {worker_id} has failed job {job.id}: another one tries it first",
            OTHERS_FIRST_PAUSE_S,
        )
    return None


def _another_may_do_better(session: Session, job: JobRow, worker_id: str, now: float) -> bool:
    failed = set(
        session.scalars(
            select(OutcomeRow.worker_id).where(
                OutcomeRow.run_id == job.run_id,
                OutcomeRow.subject == job.id,
                OutcomeRow.ok.is_(False),
                OutcomeRow.at > now - OTHERS_FIRST_S,
            )
        )
    )
    if worker_id not in failed:
        return False
    able = select(WorkerRow.id).where(
        WorkerRow.role == job.kind.role, WorkerRow.pool == job.pool, *may_work(now)
    )
    return not failed.issuperset(session.scalars(able))
