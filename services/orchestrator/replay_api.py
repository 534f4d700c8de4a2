"""Replays: a trainer takes an old step again and compares its adapter with the published one."""

from typing import Annotated

from fastapi import APIRouter, Body, Depends
from sqlalchemy import select
from sqlalchemy.orm import Session

from offbeat.contracts.jobs import JobKind, JobStatus, ReplayInput, ReplayOutput, TrainInput
from offbeat.contracts.run_spec import RunSpec
from offbeat.contracts.runs import ReplayView
from offbeat.errors import NotFoundError
from services.orchestrator.dependencies import ServicesDep, UserRoute, user
from services.orchestrator.jobs import INPUT, add_job
from services.orchestrator.remains import check_step
from services.orchestrator.results import OUTPUT
from services.orchestrator.schema import JobRow
from services.orchestrator.store import find_run, lock_run

router = APIRouter(prefix="/v1", route_class=UserRoute, dependencies=[Depends(user)])


@router.post("/runs/{run_id}/replays", status_code=202)
def create(
    services: ServicesDep,
    run_id: str,
    step: Annotated[int, Body(embed=True, ge=1, le=10**9)],
) -> ReplayView:
    """Take step N of a run again, whatever the run's status."""
    with services.store.write() as session:
        run = lock_run(session, run_id)
        original = _train_input(session, run_id, step)
        check_step(session, run_id, original)
        replay = ReplayInput(
            base_version=original.base_version, groups=original.groups, examples=original.examples
        )
        spec = RunSpec.model_validate_json(run.spec)
        job_id = add_job(session, run, spec, replay, services.clock())
    services.scheduler.wake()
    return show(services, run_id, job_id)


@router.get("/runs/{run_id}/replays/{replay_id}")
def show(services: ServicesDep, run_id: str, replay_id: str) -> ReplayView:
    """How a replay stands."""
    with services.store.read() as session:
        find_run(session, run_id)
        job = session.scalar(
            select(JobRow).where(
                JobRow.id == replay_id, JobRow.run_id == run_id, JobRow.kind == JobKind.REPLAY
            )
        )
        if job is None:
            raise NotFoundError(f"run {run_id} has no replay {replay_id!r}")
        return _view(job)


def _train_input(session: Session, run_id: str, step: int) -> TrainInput:
    """What the job was told that made version `step`."""
    inputs = session.scalars(
        select(JobRow.input).where(
            JobRow.run_id == run_id, JobRow.kind == JobKind.TRAIN, JobRow.status == JobStatus.DONE
        )
    )
    for body in inputs:
        job = INPUT.validate_json(body)
        if isinstance(job, TrainInput) and job.base_version + 1 == step:
            return job
    raise NotFoundError(f"run {run_id} has not done step {step} yet")


def _view(job: JobRow) -> ReplayView:
    step = INPUT.validate_json(job.input)
    assert isinstance(step, ReplayInput)
    output = OUTPUT.validate_json(job.output) if job.output else None
    assert output is None or isinstance(output, ReplayOutput)
    return ReplayView(
        id=job.id,
        run_id=job.run_id,
        step=step.base_version + 1,
        status=job.status,
        error=job.error,
        published_sha256=output.published_sha256 if output else None,
        recomputed_sha256=output.recomputed_sha256 if output else None,
        is_same=output.published_sha256 == output.recomputed_sha256 if output else None,
    )
