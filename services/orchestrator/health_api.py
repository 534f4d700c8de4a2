"""Health and Prometheus: alive, ready (with real pings), and counts read at each scrape."""

from collections.abc import Iterator

from fastapi import APIRouter, Response
from kombu.exceptions import OperationalError
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from sqlalchemy import func, select

from offbeat.contracts.jobs import WorkerRole
from offbeat.errors import UnavailableError
from services.orchestrator.dependencies import Services, ServicesDep
from services.orchestrator.schema import GroupRow, JobRow, RunRow
from services.orchestrator.state import alive_workers

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
        services.broker.depth(WorkerRole.GENERATOR, "default")
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
        """Runs, jobs, groups and workers."""
        runs = GaugeMetricFamily("offbeat_runs", "Runs by status.", labels=["status"])
        jobs = GaugeMetricFamily("offbeat_jobs", "Jobs by kind, status.", labels=["kind", "status"])
        groups = GaugeMetricFamily("offbeat_groups", "Groups by status.", labels=["status"])
        workers = GaugeMetricFamily(
            "offbeat_workers", "Workers that reported lately.", labels=["role", "pool"]
        )
        with self._services.store.read() as session:
            for status, count in session.execute(
                select(RunRow.status, func.count()).group_by(RunRow.status)
            ):
                runs.add_metric([status], count)
            for kind, status, count in session.execute(
                select(JobRow.kind, JobRow.status, func.count()).group_by(
                    JobRow.kind, JobRow.status
                )
            ):
                jobs.add_metric([kind, status], count)
            for status, count in session.execute(
                select(GroupRow.status, func.count()).group_by(GroupRow.status)
            ):
                groups.add_metric([status], count)
            alive = alive_workers(session, self._services.clock())
        for (role, pool), count in alive.items():
            workers.add_metric([role, pool], count)
        yield from (runs, jobs, groups, workers)
