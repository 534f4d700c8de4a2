"""Removes what nobody needs any more: old objects of runs, all of deleted runs, old rows.

    list the run -> for each batch: decide and mark in SQL, under the run's lock -> delete objects

The listing is whole before anything is deleted, since some servers skip keys when pages change.
What is marked is refused by the API from then on, so nothing comes to depend on it while it goes.
A process that dies in between leaves marked objects, which the next round lists and removes.
Objects of runs that the database does not know are never touched: the database may be what is
wrong.

The leader does it, in a thread of its own.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime

import structlog
from sqlalchemy import Select, or_, select, update
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from offbeat import keys
from offbeat.contracts.runs import GarbageView, RunStatus
from offbeat.errors import NotFoundError, OffbeatError, UnavailableError
from offbeat.objects import ObjectStore, StoredObject
from services.orchestrator.retention import Reason, Removal, removals
from services.orchestrator.schema import JobRow, RunRow, VersionRow
from services.orchestrator.store import Store, lock_run
from services.orchestrator.tidying import drop_run, forget_workers, prune_run
from services.orchestrator.usage import load_facts

log = structlog.get_logger(__name__)

BATCH_OBJECTS = 500
"""Objects decided on under one lock and deleted before the next ones are looked at."""
DELETE_THREADS = 8
ENDED_INTERVAL_S = 24 * 3600.0
"""How often the objects of a run that has ended are looked through: only their age changes."""
LATE_WRITES_S = 3600.0
"""For so long a worker that fell silent may still write for a deleted run; then its rows go."""
RUNS_PER_LOOK = 100
"""Runs looked through before the collector asks again which are due."""


@dataclass(frozen=True, kw_only=True)
class Collector:
    """Looks through runs; every method may be repeated, and interrupted anywhere."""

    store: Store
    objects: ObjectStore
    forget_versions: Callable[[str], None]
    """Has the weight-proxy remove the versions of a run from its table."""
    clock: Callable[[], float]
    interval_s: float
    """How often the objects of a run that goes on are looked through."""
    look_interval_s: float = 30.0
    """How often SQL is asked whether a run is due."""

    def collect_due(self) -> None:
        """Everything that is due now."""
        now = self.clock()
        with self.store.write() as session:
            forget_workers(session, now)
        with self.store.read() as session:
            due = session.execute(_due(now, self.interval_s)).all()
        for run_id, deleted_at in due:
            if deleted_at is not None:
                self._erase(run_id, deleted_at)
                continue
            try:
                self.collect(run_id)
            except NotFoundError:
                log.info("A run was deleted while its garbage was collected.", run=run_id)

    def collect(self, run_id: str, *, dry_run: bool = False) -> GarbageView:
        """Remove what may go of one run; with `dry_run` only say what that would be."""
        removed = Counter[Reason]()
        num_objects = 0
        for batch in self._batches(run_id):
            found = self._give_up(run_id, batch, dry_run=dry_run)
            num_objects += len(found)
            for removal in found:
                removed[removal.reason] += removal.object.size_bytes
            if found and not dry_run:
                self._delete([removal.object for removal in found])
                self._uncount(run_id, found)
        if not dry_run:
            with self.store.write() as session:
                run = lock_run(session, run_id)
                run.collected_at = self.clock()
                prune_run(session, run)
        view = GarbageView(
            run_id=run_id,
            dry_run=dry_run,
            num_objects=num_objects,
            size_bytes=removed.total(),
            size_bytes_by_reason={str(reason): size for reason, size in removed.items()},
        )
        if num_objects and not dry_run:
            log.info(
                "Garbage was removed.",
                run=run_id,
                objects=num_objects,
                size_bytes=view.size_bytes,
                **view.size_bytes_by_reason,
            )
        return view

    def _give_up(
        self, run_id: str, batch: Sequence[StoredObject], *, dry_run: bool
    ) -> list[Removal]:
        """Those of the objects that may go, marked in the database before anything is deleted."""
        parsed = [key for key in (keys.parse(entry.key) for entry in batch) if key is not None]
        now = self.clock()
        with self.store.write() as session:
            run = lock_run(session, run_id)
            facts = load_facts(session, run, parsed)
            found = removals(batch, facts, datetime.fromtimestamp(now, UTC))
            if not dry_run:
                _mark(session, run, found, now)
        return found

    def _erase(self, run_id: str, deleted_at: float) -> None:
        """Remove all objects of a deleted run, and its rows when nobody can write for it any
        more."""
        num_objects, size_bytes = 0, 0
        for batch in self._batches(run_id):
            self._delete(batch)
            num_objects += len(batch)
            size_bytes += sum(entry.size_bytes for entry in batch)
        if num_objects:
            log.info(
                "A deleted run's objects were removed.",
                run=run_id,
                objects=num_objects,
                size_bytes=size_bytes,
            )
        if self.clock() < deleted_at + LATE_WRITES_S:
            return
        try:
            self.forget_versions(run_id)
        except OffbeatError as error:
            log.warning(
                "The weight-proxy has not forgotten a deleted run; it is told again.",
                run=run_id,
                error=error.detail,
            )
            return
        drop_run(self.store, run_id)
        log.info("A deleted run's rows were removed.", run=run_id)

    def _batches(self, run_id: str) -> Iterator[list[StoredObject]]:
        objects = list(self.objects.scan(keys.run_prefix(run_id)))
        return (objects[n : n + BATCH_OBJECTS] for n in range(0, len(objects), BATCH_OBJECTS))

    def _uncount(self, run_id: str, found: Sequence[Removal]) -> None:
        """Give the project back what was counted: all but what lost attempts left behind."""
        size_bytes = sum(
            removal.object.size_bytes for removal in found if removal.reason is not Reason.DEBRIS
        )
        with self.store.write() as session:
            run = lock_run(session, run_id)
            run.stored_bytes = max(0, run.stored_bytes - size_bytes)

    def _delete(self, batch: Sequence[StoredObject]) -> None:
        with ThreadPoolExecutor(DELETE_THREADS, thread_name_prefix="collector") as pool:
            for _ in pool.map(lambda entry: self.objects.delete(entry.key), batch):
                pass


class CollectorThread:
    """Runs the collector now and then while this process leads."""

    def __init__(self, collector: Collector, leads: Callable[[], bool]) -> None:
        self._collector = collector
        self._leads = leads
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="collector", daemon=True)

    def start(self) -> None:
        """Begin, after a first pause."""
        self._thread.start()

    def stop(self) -> None:
        """End after the run under way; a process that cannot wait may be killed."""
        self._stopping.set()
        self._thread.join(timeout=10)

    def _loop(self) -> None:
        while not self._stopping.wait(self._collector.look_interval_s):
            if not self._leads():
                continue
            try:
                self._collector.collect_due()
            except (SQLAlchemyError, UnavailableError) as error:
                log.warning("Garbage was not removed; it is tried again.", error=str(error))


def _due(now: float, interval_s: float) -> Select[str, float | None]:
    """Runs to look through: deleted ones always, the others the longer ago the sooner."""
    ended = RunRow.status.in_([status for status in RunStatus if status.is_final])
    return (
        select(RunRow.id, RunRow.deleted_at)
        .where(
            or_(
                RunRow.deleted_at.is_not(None),
                RunRow.collected_at.is_(None),
                RunRow.collected_at < RunRow.finished_at,
                RunRow.collected_at < now - ENDED_INTERVAL_S,
                ~ended & (RunRow.collected_at < now - interval_s),
            )
        )
        .order_by(RunRow.deleted_at.is_(None), RunRow.collected_at.nulls_first())
        .limit(RUNS_PER_LOOK)
    )


def _mark(session: Session, run: RunRow, found: Sequence[Removal], now: float) -> None:
    """Say in the database what is given up; what lost attempts left behind was never in it."""
    versions = {
        reason: {removal.key.version for removal in found if removal.reason is reason}
        for reason in (Reason.ADAPTER, Reason.STATE)
    }
    for row in session.scalars(
        select(VersionRow).where(
            VersionRow.run_id == run.id, VersionRow.version.in_(set().union(*versions.values()))
        )
    ):
        if row.version in versions[Reason.ADAPTER]:
            row.adapter_removed_at = row.adapter_removed_at or now
        if row.version in versions[Reason.STATE]:
            row.state_removed_at = row.state_removed_at or now
    jobs = {removal.key.job_id for removal in found if removal.reason is Reason.SAMPLES}
    session.execute(
        update(JobRow)
        .where(JobRow.id.in_(jobs), JobRow.samples_removed_at.is_(None))
        .values(samples_removed_at=now)
    )
