"""`GET /v1/runs/{id}/diagnosis`: the facts that `diagnosis.py` judges."""

from fastapi import APIRouter, Depends
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from offbeat.contracts.jobs import JobKind, JobStatus, WorkerRole
from offbeat.contracts.run_spec import RunSpec
from offbeat.contracts.runs import Diagnosis
from services.orchestrator.dependencies import ServicesDep, UserRoute, user
from services.orchestrator.diagnosis import TrainSpan, diagnose, trainer_use
from services.orchestrator.outages import outage_began_at
from services.orchestrator.run_state import GroupStatus
from services.orchestrator.runs import METHODS
from services.orchestrator.schema import GroupRow, JobRow
from services.orchestrator.state import alive_workers
from services.orchestrator.store import find_run

router = APIRouter(prefix="/v1", route_class=UserRoute, dependencies=[Depends(user)])


@router.get("/runs/{run_id}/diagnosis")
def diagnosis(services: ServicesDep, run_id: str) -> Diagnosis:
    """What the run waits for, in a sentence and in numbers."""
    with services.store.read() as session:
        run = find_run(session, run_id)
        spec = RunSpec.model_validate_json(run.spec)
        pool = spec.pool
        now = services.clock()
        alive = alive_workers(session, now)
        outage_at = outage_began_at(session, run_id)
        return diagnose(
            status=run.status,
            status_reason=run.status_reason,
            roles=METHODS[spec.kind].roles,
            generators=alive.get((WorkerRole.GENERATOR, pool), 0),
            trainers=alive.get((WorkerRole.TRAINER, pool), 0),
            pool=pool,
            use=trainer_use(_train_spans(session, run_id)),
            dropped_groups=_dropped_groups(session, run_id),
            generated_tokens=_generated_tokens(session, run_id),
            generation_failures=run.generation_failures,
            outage_s=None if outage_at is None else now - outage_at,
        )


def _train_spans(session: Session, run_id: str) -> list[TrainSpan]:
    rows = session.scalars(
        select(JobRow)
        .where(
            JobRow.run_id == run_id, JobRow.kind == JobKind.TRAIN, JobRow.status == JobStatus.DONE
        )
        .order_by(JobRow.seq)
    )
    return [
        TrainSpan(
            created_at=row.created_at,
            leased_at=row.leased_at,
            computed_at=row.computed_at or row.finished_at,
        )
        for row in rows
        if row.leased_at is not None and row.finished_at is not None
    ]


def _dropped_groups(session: Session, run_id: str) -> int:
    count = session.scalar(
        select(func.count()).where(
            GroupRow.run_id == run_id, GroupRow.status == GroupStatus.DROPPED
        )
    )
    return count or 0


def _generated_tokens(session: Session, run_id: str) -> int:
    count = session.scalar(select(func.sum(GroupRow.num_tokens)).where(GroupRow.run_id == run_id))
    return count or 0
