"""What users may have removed: a whole run, and at once what its `retention` gives up anyway."""

from typing import Annotated

import structlog
from fastapi import APIRouter, Depends, Query
from sqlalchemy import update
from sqlalchemy.orm import Session

from offbeat.contracts.jobs import JobStatus
from offbeat.contracts.runs import GarbageView
from offbeat.errors import ConflictError
from services.orchestrator.dependencies import ServicesDep, UserRoute, user
from services.orchestrator.jobs import OPEN_JOBS
from services.orchestrator.schema import JobRow, RunRow
from services.orchestrator.store import find_run, lock_run
from services.orchestrator.usage import sources_named

router = APIRouter(prefix="/v1", route_class=UserRoute, dependencies=[Depends(user)])

log = structlog.get_logger(__name__)


@router.delete("/runs/{run_id}", status_code=204)
def delete(services: ServicesDep, run_id: str) -> None:
    """Remove a run that has ended: from every list now, its objects and rows soon after."""
    now = services.clock()
    with services.store.write() as session:
        run = lock_run(session, run_id)
        _check_deletable(session, run)
        session.execute(
            update(JobRow)
            .where(JobRow.run_id == run_id, JobRow.status.in_(OPEN_JOBS))
            .values(status=JobStatus.CANCELLED, finished_at=now, lease_expires_at=None)
        )
        run.deleted_at = now
        run.idempotency_key = None
        run.stored_bytes = 0
    log.info("A run was deleted.", run=run_id)


@router.post("/runs/{run_id}/gc")
def collect(
    services: ServicesDep, run_id: str, dry_run: Annotated[bool, Query()] = False
) -> GarbageView:
    """Remove now what the run's `retention` gives up, or only say what that would be."""
    with services.store.read() as session:
        find_run(session, run_id)
    return services.collector.collect(run_id, dry_run=dry_run)


def _check_deletable(session: Session, run: RunRow) -> None:
    if not run.status.is_final:
        raise ConflictError(f"run {run.id} is {run.status}: cancel it, then delete it")
    needed = sources_named(session, run.id, not_begun=True)
    if needed:
        raise ConflictError(
            f"a run that has not begun starts from version {min(needed)} of {run.id}: wait until "
            "it has read it, or cancel it"
        )
