"""The loop that moves runs on: load a state, ask `runs.next_commands`, carry it out, send messages.

One thread of the leading orchestrator does it, woken by every completion and at least once a
second. A round looks at the runs to which something has happened, and now and then at all of them,
so that a completion costs the same however many runs there are. Everything it decides is in SQL
before a message is sent, so it may be killed between any two lines.
"""

import threading
import time
from collections.abc import Callable, Collection, Sequence

import structlog
from kombu.exceptions import OperationalError
from sqlalchemy import bindparam, select, update
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from offbeat.contracts.jobs import JobMessage, JobStatus, WorkerRole
from offbeat.contracts.runs import EventLevel, RunStatus
from offbeat.errors import NotFoundError
from services.orchestrator.absence import excuse, is_absence
from services.orchestrator.broker import Broker
from services.orchestrator.commands import carry_out
from services.orchestrator.dispatch import Lane
from services.orchestrator.jobs import requeue
from services.orchestrator.leadership import Leadership
from services.orchestrator.leases import end_attempt
from services.orchestrator.run_state import RunAction
from services.orchestrator.runs import missing_role, next_commands
from services.orchestrator.schema import JobRow, RunRow
from services.orchestrator.sending import jobs_to_send
from services.orchestrator.state import Pools, load_pools, load_states
from services.orchestrator.status import next_status
from services.orchestrator.store import Store, add_event, lock_run, lock_runs

log = structlog.get_logger(__name__)

TICK_S = 1.0
"""The longest time between two rounds, and the shortest between two looks at all runs or for what
was lost; also how often a standby tries to become the leader."""
SWEEPS_SHARE = 0.05
"""Of its time that a busy scheduler looks at runs to which nothing has happened: it is for limits
of time and for changes of the fleet."""
SWEEP_MAX_S = 10.0
"""The longest that such a run waits, however many there are."""
REST_SHARE = 0.95
REST_S = (0.05, 0.25)
"""After a round the scheduler rests for this share of the time, within these bounds: requests get
their turn, and what happens meanwhile is looked at together. So a few runs are moved on at once,
and many cost little. What happens after the rest is looked at at once."""
MOVED_AT_ONCE, SENT_AT_ONCE = 10, 20
"""Runs and messages of one transaction: requests wait for it, on SQLite, for some ten
milliseconds."""
ACTIVE = select(RunRow).where(RunRow.status.in_((RunStatus.QUEUED, RunStatus.RUNNING)))
ACTIVE_OF_JOBS = ACTIVE.with_only_columns(RunRow.id).where(
    RunRow.id.in_(select(JobRow.run_id).where(JobRow.id.in_(bindparam("job_ids", expanding=True))))
)
SENDABLE = (
    select(JobRow.id, JobRow.kind, JobRow.pool, JobRow.attempt)
    .where(
        JobRow.id.in_(bindparam("job_ids", expanding=True)),
        JobRow.status == JobStatus.QUEUED,
        JobRow.enqueued_at.is_(None),
    )
    .with_for_update(skip_locked=True)
)
NOTE_SENT = (
    update(JobRow)
    .where(JobRow.id.in_(bindparam("sent", expanding=True)))
    .values(enqueued_at=bindparam("now"))
    .execution_options(synchronize_session=False)
)


class Scheduler:
    """Moves every run on. `wake` may be called from any thread."""

    def __init__(
        self,
        store: Store,
        broker: Broker,
        leadership: Leadership,
        *,
        clock: Callable[[], float],
        uptime: Callable[[], float],
        lease_s: float,
        message_lost_s: float,
    ) -> None:
        """`uptime` counts seconds, also while the machine sleeps, and nobody sets it."""
        self._store = store
        self._broker = broker
        self._clock = clock
        self._uptime = uptime
        self._lease_s = lease_s
        self._message_lost_s = message_lost_s
        self._leadership = leadership
        self._leads = False
        self._led_at: float | None = None
        """By `uptime`: when the last round as the leader began; none where another led since."""
        self._sweep_at_s = 0.0
        """When all runs are looked at again, whatever has happened."""
        self._losses_at_s = 0.0
        """When leases that have run out and lost messages are looked for again."""
        self._changed: set[str | None] = set()
        """Jobs to which something has happened since the last round; None stands for anything."""
        self._lock = threading.Lock()
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

    def wake(self, job_id: str | None = None) -> None:
        """Have the leader look now: something has happened to this job, or to anything."""
        with self._lock:
            self._changed.add(job_id)
        self._leadership.wake()

    @property
    def leads(self) -> bool:
        """Whether this process moved the runs on when it last tried to."""
        return self._leads

    def tick(self) -> None:
        """One round: over all runs now and then, and when something has happened that nobody named;
        else over those to whose jobs something has."""
        now, began_s = self._clock(), time.monotonic()
        self._excuse_absence(now)
        changed = self._take_changed()
        if began_s >= self._losses_at_s:
            self._losses_at_s = began_s + TICK_S
            changed |= self._reap(now)
            self._recall_lost_messages(now)
        if None in changed or began_s >= self._sweep_at_s:
            self._move_on(now)
            took_s = time.monotonic() - began_s
            pause_s = min(max(TICK_S, took_s / SWEEPS_SHARE), SWEEP_MAX_S)
            self._sweep_at_s = began_s + pause_s
        elif changed:
            self._move_on(now, changed)
        self._send(now)

    def _take_changed(self) -> set[str | None]:
        with self._lock:
            changed, self._changed = self._changed, set()
        return changed

    def _move_on(self, now: float, changed: Collection[str | None] | None = None) -> None:
        """Advance the runs that these jobs belong to; without jobs those of all that ask for
        something, which is found without a lock on any."""
        with self._store.read() as session:
            pools = load_pools(session, now)
            run_ids = (
                _due(session, pools, now)
                if changed is None
                else session.scalars(ACTIVE_OF_JOBS, {"job_ids": changed}).all()
            )
        for first in range(0, len(run_ids), MOVED_AT_ONCE):
            some = run_ids[first : first + MOVED_AT_ONCE]
            with self._store.write() as session:
                locked = lock_runs(session, some)
                still_there = [locked[run_id] for run_id in some if run_id in locked]
                advance(session, still_there, pools, now)

    def _loop(self) -> None:
        while not self._stopping.is_set():
            began_s = time.monotonic()
            try:
                self._leads = self._leadership.acquire()
                if self._leads:
                    self.tick()
                else:
                    self._led_at = None
                    self._take_changed()
                    self._sweep_at_s = 0.0
            except SQLAlchemyError as error:
                self._leads = False
                self._sweep_at_s = 0.0
                log.error("The scheduler could not use the database.", error=str(error))
            except NotFoundError as error:
                self._sweep_at_s = 0.0
                log.info("A run was deleted during a round.", error=error.detail)
            self._stopping.wait(rest_s(time.monotonic() - began_s))
            if self._leadership.wait(TICK_S):
                self._sweep_at_s = 0.0
        self._leads = False
        self._leadership.release()

    def _excuse_absence(self, now: float) -> None:
        """Let nobody pay for a time in which this process did not run, or nobody led."""
        up_at = self._uptime()
        away_s = None if self._led_at is None else up_at - self._led_at
        if away_s is None or is_absence(away_s, self._lease_s):
            with self._store.write() as session:
                excuse(session, away_s, now=now, lease_s=self._lease_s)
            log.info("Leases and the silence of workers count from now.", away_s=away_s)
        self._led_at = up_at

    def _reap(self, now: float) -> set[str]:
        """End the attempts whose lease has run out; their jobs."""
        with self._store.read() as session:
            expired = session.execute(
                select(JobRow.id, JobRow.run_id).where(
                    JobRow.status == JobStatus.LEASED, JobRow.lease_expires_at < now
                )
            ).all()
        for job_id, run_id in expired:
            with self._store.write() as session:
                run = lock_run(session, run_id)
                # Heartbeats extend a lease without a lock on its run.
                job = session.scalar(select(JobRow).where(JobRow.id == job_id).with_for_update())
                if (
                    job is None
                    or job.status is not JobStatus.LEASED
                    or (job.lease_expires_at or now) >= now
                ):
                    continue
                reason = f"worker {job.worker_id} fell silent"
                end_attempt(session, run, job, reason, permanent=False, now=now)
        return {job_id for job_id, _ in expired}

    def _send(self, now: float) -> None:
        """Send messages for the jobs whose turn it is."""
        with self._store.write() as session:
            ids = jobs_to_send(session, now)
        for first in range(0, len(ids), SENT_AT_ONCE):
            if not self._send_some(ids[first : first + SENT_AT_ONCE], now):
                return

    def _send_some(self, job_ids: Sequence[str], now: float) -> bool:
        """Whether the broker answers. What was sent before it failed is noted."""
        with self._store.write() as session:
            jobs = {job.id: job for job in session.execute(SENDABLE, {"job_ids": job_ids})}
            sent: list[str] = []
            for job in (jobs[job_id] for job_id in job_ids if job_id in jobs):
                message = JobMessage(job_id=job.id, attempt=job.attempt)
                try:
                    self._broker.send(job.kind, job.pool, message)
                except OperationalError as error:
                    log.warning("The broker does not answer; jobs wait.", error=str(error))
                    break
                sent.append(job.id)
            session.execute(NOTE_SENT, {"sent": sent, "now": now})
            return len(sent) == len(jobs)

    def _recall_lost_messages(self, now: float) -> None:
        """Void messages that were sent long ago, never leased, and are not in the broker any
        more."""
        lost = (
            JobRow.status == JobStatus.QUEUED,
            JobRow.enqueued_at < now - self._message_lost_s,
        )
        with self._store.read() as session:
            kinds = select(JobRow.kind, JobRow.pool).where(*lost).distinct()
            lanes = {(kind.role, pool) for kind, pool in session.execute(kinds)}
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


def rest_s(took_s: float) -> float:
    """How long the scheduler rests after a round that took so long."""
    shortest_s, longest_s = REST_S
    return min(max(took_s * REST_SHARE / (1 - REST_SHARE), shortest_s), longest_s)


def _due(session: Session, pools: Pools, now: float) -> list[str]:
    """The runs in which `advance` would change anything."""
    runs = session.scalars(ACTIVE).all()
    due: list[str] = []
    for run, state in zip(runs, load_states(session, runs, pools, now), strict=True):
        missing = missing_role(state)
        if (
            run.status is RunStatus.QUEUED
            or missing is not run.missing_role
            or next_commands(state)
        ):
            due.append(run.id)
    return due


def advance(session: Session, runs: Sequence[RunRow], pools: Pools, now: float) -> None:
    """Carry out what the states of the runs ask for."""
    for run in runs:
        if run.status is RunStatus.QUEUED:
            run.status = next_status(run.status, RunAction.START)
            run.started_at = run.active_since = now
            add_event(session, run.id, now, "run_started", "The run was started.")
    for run, state in zip(runs, load_states(session, runs, pools, now), strict=True):
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


def _lane(job: JobRow) -> Lane:
    return job.kind.role, job.pool
