"""The loop that moves runs on: load a state, ask `runs.next_commands`, carry it out, send messages.

One thread does it, woken by every completion and at least once a second. Everything it decides is
in SQL before a message is sent, so it may be killed between any two lines.
"""

import threading
from collections import Counter
from collections.abc import Callable

import structlog
from kombu.exceptions import OperationalError
from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from offbeat.contracts.jobs import JobKind, JobMessage, JobStatus
from offbeat.contracts.run_spec import RunSpec
from offbeat.contracts.runs import RunStatus
from services.orchestrator.broker import Broker
from services.orchestrator.commands import carry_out
from services.orchestrator.dispatch import Lane, WaitingJob, choose
from services.orchestrator.jobs import requeue
from services.orchestrator.leases import end_attempt
from services.orchestrator.run_state import RunAction
from services.orchestrator.runs import next_commands, next_status
from services.orchestrator.schema import JobRow, RunRow
from services.orchestrator.state import alive_workers, load_state
from services.orchestrator.store import Store, add_event, lock_run

log = structlog.get_logger(__name__)

TICK_S = 1.0
"""The longest that anything waits to be noticed when nobody wakes the loop."""
WAITING_JOBS_MAX = 1000
"""Jobs considered for sending at once; the rest is looked at in the next tick."""


class Scheduler:
    """Moves every run on. `wake` may be called from any thread."""

    def __init__(
        self, store: Store, broker: Broker, *, clock: Callable[[], float], message_lost_s: float
    ) -> None:
        self._store = store
        self._broker = broker
        self._clock = clock
        self._message_lost_s = message_lost_s
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="scheduler", daemon=True)

    def start(self) -> None:
        """Begin the loop."""
        self._thread.start()

    def stop(self) -> None:
        """End the loop after the tick under way."""
        self._stopping.set()
        self._wake.set()
        self._thread.join(timeout=10)

    def wake(self) -> None:
        """Look at the runs now: something has happened."""
        self._wake.set()

    def tick(self) -> None:
        """One round over everything."""
        now = self._clock()
        self._reap(now)
        with self._store.read() as session:
            active = (RunStatus.QUEUED, RunStatus.RUNNING)
            run_ids = session.scalars(select(RunRow.id).where(RunRow.status.in_(active))).all()
        for run_id in run_ids:
            with self._store.write() as session:
                advance(session, lock_run(session, run_id), now)
        self._send(now)

    def _loop(self) -> None:
        while not self._stopping.is_set():
            try:
                self.tick()
            except SQLAlchemyError as error:
                log.error("The scheduler could not use the database.", error=str(error))
            self._wake.wait(TICK_S)
            self._wake.clear()

    def _reap(self, now: float) -> None:
        """End the attempts whose lease has run out."""
        with self._store.read() as session:
            expired = session.execute(
                select(JobRow.id, JobRow.run_id).where(
                    JobRow.status == JobStatus.LEASED, JobRow.lease_expires_at < now
                )
            ).all()
        for job_id, run_id in expired:
            with self._store.write() as session:
                run = lock_run(session, run_id)
                job = session.scalar(select(JobRow).where(JobRow.id == job_id))
                if (
                    job is None
                    or job.status is not JobStatus.LEASED
                    or (job.lease_expires_at or now) >= now
                ):
                    continue
                reason = f"worker {job.worker_id} fell silent"
                end_attempt(session, run, job, reason, permanent=False, now=now)

    def _send(self, now: float) -> None:
        """Send messages for the jobs whose turn it is, and again for those that were lost."""
        self._recall_lost_messages(now)
        with self._store.read() as session:
            jobs = _jobs_to_send(session, now)
        for job in jobs:
            with self._store.write() as session:
                row = session.scalar(select(JobRow).where(JobRow.id == job.job_id))
                if row is None or row.status is not JobStatus.QUEUED or row.enqueued_at is not None:
                    continue
                message = JobMessage(job_id=row.id, attempt=row.attempt)
                try:
                    self._broker.send(row.kind, row.pool, message)
                except OperationalError as error:
                    log.warning("The broker does not answer; jobs wait.", error=str(error))
                    return
                row.enqueued_at = now

    def _recall_lost_messages(self, now: float) -> None:
        """Void messages that were sent long ago, never leased, and are not in the broker any
        more."""
        lost = (
            JobRow.status == JobStatus.QUEUED,
            JobRow.enqueued_at < now - self._message_lost_s,
        )
        with self._store.read() as session:
            lanes = {_lane(job) for job in session.scalars(select(JobRow).where(*lost))}
        try:
            empty = {lane for lane in lanes if self._broker.depth(*lane) == 0}
        except OperationalError as error:
            log.warning("The broker does not answer; jobs wait.", error=str(error))
            return
        if not empty:
            return
        with self._store.write() as session:
            for job in session.scalars(select(JobRow).where(*lost)):
                if _lane(job) in empty:
                    log.warning("A message was lost and is sent again.", run=job.run_id, job=job.id)
                    requeue(job)


def advance(session: Session, run: RunRow, now: float) -> None:
    """Carry out what the run's state asks for."""
    if run.status is RunStatus.QUEUED:
        run.status = next_status(run.status, RunAction.START)
        run.started_at = run.active_since = now
        add_event(session, run.id, now, "run_started", "The run was started.")
    state = load_state(session, run, now)
    for command in next_commands(state):
        carry_out(session, run, state.spec, command, now)


def _jobs_to_send(session: Session, now: float) -> list[WaitingJob]:
    waiting = session.execute(
        select(JobRow, RunRow.spec)
        .join(RunRow, RunRow.id == JobRow.run_id)
        .where(
            JobRow.status == JobStatus.QUEUED,
            JobRow.enqueued_at.is_(None),
            (RunRow.status == RunStatus.RUNNING) | (JobRow.kind == JobKind.REPLAY),
        )
        .order_by(JobRow.seq)
        .limit(WAITING_JOBS_MAX)
    ).all()
    if not waiting:
        return []
    under_way = session.scalars(
        select(JobRow).where(
            (JobRow.status == JobStatus.LEASED)
            | ((JobRow.status == JobStatus.QUEUED) & JobRow.enqueued_at.is_not(None))
        )
    ).all()
    return choose(
        [
            WaitingJob(
                seq=job.seq,
                job_id=job.id,
                run_id=job.run_id,
                kind=job.kind,
                pool=job.pool,
                priority=RunSpec.model_validate_json(spec).priority,
            )
            for job, spec in waiting
        ],
        sent=Counter(_lane(job) for job in under_way if job.status is JobStatus.QUEUED),
        workers=alive_workers(session, now),
        busy=Counter(job.run_id for job in under_way),
    )


def _lane(job: JobRow) -> Lane:
    return job.kind.role, job.pool
