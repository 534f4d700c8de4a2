"""Health and Prometheus: alive, ready (with real pings), and counts read at each scrape."""

from collections import Counter
from collections.abc import Iterator
from itertools import product
from typing import Any

from fastapi import APIRouter, Response
from kombu.exceptions import OperationalError
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from sqlalchemy import func, select
from sqlalchemy.orm import InstrumentedAttribute, Session

from offbeat.contracts.jobs import JobKind, JobStatus, WorkerRole
from offbeat.contracts.runs import RunStatus
from offbeat.errors import UnavailableError
from services.orchestrator.dependencies import Services, ServicesDep
from services.orchestrator.dispatch import Lane
from services.orchestrator.jobs import MAY_START
from services.orchestrator.schema import GroupRow, JobRow, RunRow
from services.orchestrator.state import alive_workers

DEFAULT_POOL = "default"

router = APIRouter(tags=["health"])


@router.get("/healthz")
def healthz() -> dict[str, str]:
    """The process is alive."""
    return {"status": "ok"}


@router.get("/readyz")
def readyz(services: ServicesDep) -> dict[str, str]:
    """Database, object store and broker answer."""
    services.store.ping()
    services.objects.ping()
    try:
        services.broker.depth(WorkerRole.GENERATOR, DEFAULT_POOL)
    except OperationalError as error:
        raise UnavailableError(f"the broker does not answer: {error}") from error
    return {"status": "ready"}


@router.get("/metrics", response_class=Response)
def metrics(services: ServicesDep) -> Response:
    """Prometheus text format."""
    registry = CollectorRegistry()
    registry.register(SqlCollector(services))
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


class SqlCollector(Collector):
    """Counts what the tables hold: nothing can drift from the state it describes."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def collect(self) -> Iterator[Metric]:
        """Runs, jobs, groups, workers, and the work that there is for them."""
        runs = GaugeMetricFamily("offbeat_runs", "Runs by status.", labels=["status"])
        jobs = GaugeMetricFamily("offbeat_jobs", "Jobs by kind, status.", labels=["kind", "status"])
        groups = GaugeMetricFamily("offbeat_groups", "Groups by status.", labels=["status"])
        workers = GaugeMetricFamily(
            "offbeat_workers", "Workers that reported lately.", labels=["role", "pool"]
        )
        work = GaugeMetricFamily(
            "offbeat_open_jobs",
            "Jobs that wait for a worker or are with one.",
            labels=["role", "pool"],
        )
        with self._services.store.read() as session:
            # What there is none of says so: an alert on the first failure needs the 0 before it.
            of_runs = dict.fromkeys(product(RunStatus), 0) | _counts(session, RunRow.status)
            of_jobs = dict.fromkeys(product(JobKind, JobStatus), 0) | _counts(
                session, JobRow.kind, JobRow.status
            )
            of_groups = _counts(session, GroupRow.status)
            alive = alive_workers(session, self._services.clock())
            open_jobs = _open_jobs(session)
        for family, counts in ((runs, of_runs), (jobs, of_jobs), (groups, of_groups)):
            for labels, count in counts.items():
                family.add_metric(labels, count)
        # A lane without work says so: whoever scales workers would take no answer for a fault.
        default_lanes = {(role, DEFAULT_POOL) for role in WorkerRole}
        for role, pool in sorted(alive.keys() | open_jobs.keys() | default_lanes):
            workers.add_metric([role, pool], alive.get((role, pool), 0))
            work.add_metric([role, pool], open_jobs[role, pool])
        yield from (runs, jobs, groups, workers, work)


def _counts(session: Session, *columns: InstrumentedAttribute[Any]) -> dict[tuple[str, ...], int]:
    """How many rows have each of the values that occur in the columns."""
    rows = session.execute(select(*columns, func.count()).group_by(*columns))
    return {tuple(values): count for *values, count in rows}


def _open_jobs(session: Session) -> Counter[Lane]:
    """Jobs with a worker, and those that one may take: not those of a paused run."""
    rows = session.execute(
        select(JobRow.kind, JobRow.pool, func.count())
        .join(RunRow, RunRow.id == JobRow.run_id)
        .where(
            (JobRow.status == JobStatus.LEASED) | ((JobRow.status == JobStatus.QUEUED) & MAY_START)
        )
        .group_by(JobRow.kind, JobRow.pool)
    )
    counts: Counter[Lane] = Counter()
    for kind, pool, count in rows:
        counts[kind.role, pool] += count
    return counts
