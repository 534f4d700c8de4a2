"""The loop that moves runs on: load a state, ask `runs.next_commands`, carry it out, send messages.

One thread of the leading orchestrator does it, woken by every completion and at least once a
second. Everything it decides is in SQL before a message is sent, so it may be killed between any
two lines.
"""

import threading
from collections import Counter
from collections.abc import Callable

import structlog
from kombu.exceptions import OperationalError
from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from offbeat.contracts.jobs import JobKind, JobMessage, JobStatus, WorkerRole
from offbeat.contracts.run_spec import RunSpec
from offbeat.contracts.runs import EventLevel, RunStatus
from offbeat.errors import NotFoundError
from services.orchestrator.broker import Broker
from services.orchestrator.clocks import move_up, served_s, usual_lengths_s
from services.orchestrator.commands import carry_out
from services.orchestrator.dispatch import Lane, WaitingJob, choose
from services.orchestrator.jobs import ASKED_KINDS, next_steps, requeue
from services.orchestrator.leadership import Leadership
from services.orchestrator.leases import end_attempt
from services.orchestrator.quotas import jobs_left
from services.orchestrator.run_state import RunAction
from services.orchestrator.runs import missing_role, next_commands
from services.orchestrator.schema import JobRow, RunRow
from services.orchestrator.state import alive_workers, load_state
from services.orchestrator.status import next_status
from services.orchestrator.store import Store, add_event, lock_run

log = structlog.get_logger(__name__)

TICK_S = 1.0
"""The longest that anything waits to be noticed when nobody wakes the loop; also how often a
standby tries to become the leader."""
WAITING_JOBS_MAX = 1000
"""Jobs considered for sending at once; the rest is looked at in the next tick."""


class Scheduler:
    """Moves every run on. `wake` may be called from any thread."""

    def __init__(
        self,
        store: Store,
        broker: Broker,
        leadership: Leadership,
        *,
        clock: Callable[[], float],
        message_lost_s: float,
    ) -> None:
        self._store = store
        self._broker = broker
        self._clock = clock
        self._message_lost_s = message_lost_s
        self._leadership = leadership
        self._leads = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="scheduler", daemon=True)

    def start(self) -> None:
        """Begin the loop."""
        self._thread.start()

    def stop(self) -> None:
        """End the loop after the tick under way, and let another process lead."""
        self._stopping.set()
        self.wake()
        self._thread.join(timeout=10)

    def wake(self) -> None:
        """Have the leader look at the runs now: something has happened."""
        self._leadership.wake()

    @property
    def leads(self) -> bool:
        """Whether this process moved the runs on when it last tried to."""
        return self._leads

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
                self._leads = self._leadership.acquire()
                if self._leads:
                    self.tick()
            except SQLAlchemyError as error:
                self._leads = False
                log.error("The scheduler could not use the database.", error=str(error))
            except NotFoundError as error:
                log.info("A run was deleted during a round.", error=error.detail)
            self._leadership.wait(TICK_S)
        self._leads = False
        self._leadership.release()

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
        with self._store.write() as session:
            move_up(session)
            jobs = _jobs_to_send(session, now)
        for job in jobs:
            with self._store.write() as session:
                own = select(JobRow).where(JobRow.id == job.job_id)
                row = session.scalar(own.with_for_update(skip_locked=True))
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
            # Locked on PostgreSQL too, so that a lease that comes just now is not overwritten.
            jobs = select(JobRow).where(*lost).with_for_update(skip_locked=True)
            for job in session.scalars(jobs):
                if _lane(job) in empty:
                    log.warning("A message was lost and is sent again.", run=job.run_id, job=job.id)
                    requeue(session, job)


def advance(session: Session, run: RunRow, now: float) -> None:
    """Carry out what the run's state asks for."""
    if run.status is RunStatus.QUEUED:
        run.status = next_status(run.status, RunAction.START)
        run.started_at = run.active_since = now
        add_event(session, run.id, now, "run_started", "The run was started.")
    state = load_state(session, run, now)
    _report_missing(session, run, missing_role(state), now)
    for command in next_commands(state):
        carry_out(session, run, state.spec, command, now)


def _report_missing(session: Session, run: RunRow, missing: WorkerRole | None, now: float) -> None:
    """Say once that nobody is there to do the run's jobs, and once that somebody is."""
    before, run.missing_role = run.missing_role, missing
    if missing is before:
        return
    if missing is None:
        message = f"A {before} is there again: the run goes on."
        add_event(session, run.id, now, "worker_found", message, data={"role": before})
        return
    message = f"No {missing} takes jobs: all are gone or in quarantine. The run waits for one."
    level = EventLevel.WARNING
    add_event(session, run.id, now, "no_worker", message, level=level, data={"role": missing})


def _jobs_to_send(session: Session, now: float) -> list[WaitingJob]:
    quotas = jobs_left(session)
    full = [project_id for project_id, left in quotas.items() if left <= 0]
    waiting = session.execute(
        select(JobRow, RunRow.spec, RunRow.project_id)
        .join(RunRow, RunRow.id == JobRow.run_id)
        .where(
            JobRow.status == JobStatus.QUEUED,
            JobRow.enqueued_at.is_(None),
            (RunRow.status == RunStatus.RUNNING) | JobRow.kind.in_(ASKED_KINDS),
            RunRow.project_id.not_in(full),
        )
        .order_by(JobRow.seq)
        .limit(WAITING_JOBS_MAX)
    ).all()
    if not waiting:
        return []
    first_steps = next_steps(session)
    under_way = session.scalars(
        select(JobRow).where(
            (JobRow.status == JobStatus.LEASED)
            | ((JobRow.status == JobStatus.QUEUED) & JobRow.enqueued_at.is_not(None))
        )
    ).all()
    lengths_s = usual_lengths_s(session)
    return choose(
        [
            WaitingJob(
                seq=job.seq,
                job_id=job.id,
                run_id=job.run_id,
                kind=job.kind,
                pool=job.pool,
                priority=RunSpec.model_validate_json(spec).priority,
                project_id=project_id,
            )
            for job, spec, project_id in waiting
            if job.kind is not JobKind.TRAIN or job.seq == first_steps[job.run_id]
        ],
        sent=Counter(
            _lane(job)
            for job in under_way
            if job.status is JobStatus.QUEUED and job.kind is not JobKind.CHAT
        ),
        workers=alive_workers(session, now),
        busy=Counter(job.run_id for job in under_way),
        quotas=quotas,
        served_s=served_s(session, under_way, lengths_s, now),
        lengths_s=lengths_s,
    )


def _lane(job: JobRow) -> Lane:
    return job.kind.role, job.pool
