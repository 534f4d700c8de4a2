"""What users and limits do to a run, and what that means for its jobs and groups."""

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from offbeat.contracts.jobs import JobKind, JobStatus
from offbeat.contracts.runs import EventLevel, RunStatus
from services.orchestrator.groups import drop_groups, open_groups
from services.orchestrator.jobs import OPEN_JOBS, requeue
from services.orchestrator.run_state import RunAction
from services.orchestrator.schema import JobRow, RunRow
from services.orchestrator.status import next_status
from services.orchestrator.store import add_event


def act(session: Session, run: RunRow, action: RunAction, now: float) -> None:
    """Carry out a user's action; `ConflictError` where the status forbids it."""
    before = run.status
    after = next_status(before, action)
    if after is before:
        return
    if action is RunAction.CANCEL:
        end_run(session, run, action, "a user cancelled it", now)
        return
    run.status = after
    run.status_reason = None
    if action is RunAction.PAUSE:
        recall_queued_jobs(session, run.id)
    else:
        run.active_since = now
        run.finished_at = None
        run.generation_failures = 0
        run.generator_s = run.trainer_s = None
    add_event(session, run.id, now, f"run_{_PAST[action]}", f"The run was {_PAST[action]}.")


_PAST = {RunAction.PAUSE: "paused", RunAction.RESUME: "resumed", RunAction.RETRY: "retried"}


def recall_queued_jobs(session: Session, run_id: str) -> None:
    """Void the messages of jobs that nobody has leased: a paused run gives its turn away."""
    waiting = select(JobRow).where(
        JobRow.run_id == run_id, JobRow.status == JobStatus.QUEUED, JobRow.enqueued_at.is_not(None)
    )
    for job in session.scalars(waiting):
        requeue(session, job)


def end_run(session: Session, run: RunRow, action: RunAction, reason: str, now: float) -> None:
    """Give the run a final status; its open jobs are cancelled and its open groups dropped.

    Chats go on: they are about versions that stay."""
    run.status = next_status(run.status, action)
    run.status_reason = reason
    run.finished_at = now
    session.execute(
        update(JobRow)
        .where(
            JobRow.run_id == run.id,
            JobRow.status.in_(OPEN_JOBS),
            JobRow.kind != JobKind.CHAT,
        )
        .values(status=JobStatus.CANCELLED, finished_at=now, lease_expires_at=None)
    )
    left = open_groups(session, run.id)
    drop_groups(session, run.id, left, "run_ended", now)
    level = EventLevel.ERROR if run.status is RunStatus.FAILED else EventLevel.INFO
    message = f"The run {_ENDINGS[run.status]} {reason}."
    add_event(session, run.id, now, f"run_{run.status}", message, level=level)


_ENDINGS = {
    RunStatus.SUCCEEDED: "succeeded:",
    RunStatus.FAILED: "failed:",
    RunStatus.CANCELLED: "was cancelled:",
}
