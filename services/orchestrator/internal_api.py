"""`/internal/*`: what workers call. Each route parses, opens one transaction and answers."""

from collections.abc import Sequence

from fastapi import APIRouter, Response
from sqlalchemy import delete

from offbeat.contracts.bounds import Name
from offbeat.contracts.connection import Connection
from offbeat.contracts.leases import (
    CompleteRequest,
    FailRequest,
    HeartbeatReply,
    HeartbeatRequest,
    Lease,
    LeaseRequest,
    ReleaseRequest,
    WorkerReport,
)
from offbeat.errors import ForbiddenError, HeldBackError, OffbeatError
from services.orchestrator import leases
from services.orchestrator.dependencies import Services, ServicesDep, WorkerRoute
from services.orchestrator.heartbeats import Heartbeat, write_heartbeats
from services.orchestrator.reports import Report, write_reports
from services.orchestrator.schema import WorkerRow

router = APIRouter(prefix="/internal", route_class=WorkerRoute, include_in_schema=False)


@router.get("/connection")
def connection(services: ServicesDep, response: Response) -> Connection:
    """Where the weight-proxy and the object store are, and the store's credentials."""
    if services.worker_token is None:
        raise ForbiddenError(
            "credentials are told only to who bears a token: set OFFBEAT_WORKER_TOKEN on both "
            "sides, or give the worker OFFBEAT_WEIGHT_PROXY_URL and OFFBEAT_S3_* itself"
        )
    response.headers["cache-control"] = "no-store"
    return services.connection


@router.post("/jobs/{job_id}/lease", response_model=Lease)
def lease(services: ServicesDep, job_id: str, request: LeaseRequest) -> Response:
    """Take a job; 409 means that the message is void, 423 that the worker has to wait."""
    with services.store.write() as session:
        answer = leases.lease(
            session,
            job_id,
            request,
            now=services.clock(),
            lease_s=services.lease_s,
            heartbeat_interval_s=services.heartbeat_interval_s,
        )
    if isinstance(answer, HeldBackError):
        services.scheduler.wake(job_id)
        raise answer
    return Response(answer.model_dump_json(), media_type="application/json")


@router.post("/jobs/{job_id}/heartbeat")
async def heartbeat(
    services: ServicesDep, job_id: str, request: HeartbeatRequest
) -> HeartbeatReply:
    """Keep a lease; 409 means that it is lost."""
    return await services.heartbeats.add(
        Heartbeat(job_id=job_id, body=request), lambda batch: _write_heartbeats(services, batch)
    )


def _write_heartbeats(
    services: Services, batch: Sequence[Heartbeat]
) -> list[HeartbeatReply | OffbeatError]:
    replies = write_heartbeats(
        services.store, batch, now=services.clock(), lease_s=services.lease_s
    )
    for heartbeat in batch:
        if heartbeat.body.computed:
            services.scheduler.wake(heartbeat.job_id)
    return replies


@router.post("/jobs/{job_id}/complete", status_code=204)
def complete(services: ServicesDep, job_id: str, request: CompleteRequest) -> None:
    """Hand in a result."""
    with services.store.write() as session:
        leases.complete(session, job_id, request, now=services.clock())
    services.scheduler.wake(job_id)


@router.post("/jobs/{job_id}/fail", status_code=204)
def fail(services: ServicesDep, job_id: str, request: FailRequest) -> None:
    """Give a job back with the reason."""
    with services.store.write() as session:
        leases.fail(session, job_id, request, now=services.clock())
    services.scheduler.wake(job_id)


@router.post("/jobs/{job_id}/release", status_code=204)
def release(services: ServicesDep, job_id: str, request: ReleaseRequest) -> None:
    """Hand a job back that the worker will not finish."""
    with services.store.write() as session:
        leases.release(session, job_id, request, now=services.clock())
    services.scheduler.wake(job_id)


@router.delete("/workers/{worker_id}", status_code=204)
def leave(services: ServicesDep, worker_id: Name) -> None:
    """Say that a worker takes no more jobs. What it holds it may still complete."""
    with services.store.write() as session:
        session.execute(delete(WorkerRow).where(WorkerRow.id == worker_id))


@router.put("/workers/{worker_id}", status_code=204)
async def report(services: ServicesDep, worker_id: Name, request: WorkerReport) -> None:
    """Say that a worker lives, and what it saw."""
    await services.reports.add(
        Report(worker_id=worker_id, body=request), lambda batch: _write_reports(services, batch)
    )


def _write_reports(services: Services, batch: Sequence[Report]) -> list[bool]:
    are_new = write_reports(services.store, batch, services.clock())
    if any(are_new):
        services.scheduler.wake()
    return are_new
