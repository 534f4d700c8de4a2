"""What is known of a run, read from the database in the form that `runs.next_commands` takes."""

from collections import Counter
from collections.abc import Sequence

from sqlalchemy import ColumnElement, func, select
from sqlalchemy.orm import Session

from offbeat.contracts.jobs import EvaluateInput, GenerateInput, JobKind, WorkerRole
from offbeat.contracts.run_spec import RunSpec
from services.orchestrator.dispatch import Lane
from services.orchestrator.groups import count_groups, find_groups
from services.orchestrator.jobs import INPUT, OPEN_JOBS
from services.orchestrator.run_state import Group, GroupStatus, RunState
from services.orchestrator.schema import GroupRow, JobRow, RunRow, WorkerRow

WORKER_LOST_S = 20.0
"""A worker that did not report for so long is taken for gone: four of its reports are missing."""


def load_state(session: Session, run: RunRow, now: float) -> RunState:
    """Everything that `next_commands` needs to know of a run."""
    spec = RunSpec.model_validate_json(run.spec)
    open_jobs = session.scalars(
        select(JobRow).where(JobRow.run_id == run.id, JobRow.status.in_(OPEN_JOBS))
    ).all()
    groups = count_groups(session, run.id)
    ready = find_groups(session, GroupRow.run_id == run.id, GroupRow.status == GroupStatus.READY)
    evaluations = session.scalars(
        select(JobRow.input).where(JobRow.run_id == run.id, JobRow.kind == JobKind.EVALUATE)
    )
    worked = session.scalar(
        select(func.sum(JobRow.finished_at - JobRow.leased_at)).where(JobRow.run_id == run.id)
    )
    workers = alive_workers(session, now)
    return RunState(
        spec=spec,
        status=run.status,
        prepared=run.prompts_key is not None,
        version=run.version,
        open_jobs=Counter(job.kind for job in open_jobs),
        evaluated=frozenset(_evaluated_version(body) for body in evaluations),
        generating=groups.get(GroupStatus.GENERATING, 0),
        training=groups.get(GroupStatus.TRAINING, 0),
        computed_steps=sum(
            job.kind is JobKind.TRAIN and job.computed_at is not None for job in open_jobs
        ),
        ready=[_waiting_group(row) for row in ready],
        refilled=run.refilled,
        generation_failures=run.generation_failures,
        oldest_generating=_oldest_generating(open_jobs),
        generators=workers.get((WorkerRole.GENERATOR, spec.pool), 0),
        trainers=workers.get((WorkerRole.TRAINER, spec.pool), 0),
        runtime_s=now - (run.active_since or now),
        worker_seconds=worked or 0.0,
    )


def may_work(now: float) -> tuple[ColumnElement[bool], ...]:
    """When a worker gets jobs: it reported lately and is not in quarantine."""
    return (
        WorkerRow.last_seen_at > now - WORKER_LOST_S,
        WorkerRow.quarantined_until.is_(None) | (WorkerRow.quarantined_until <= now),
    )


def alive_workers(session: Session, now: float) -> dict[Lane, int]:
    """Workers that get jobs, by role and pool."""
    rows = session.execute(
        select(WorkerRow.role, WorkerRow.pool, func.count())
        .where(*may_work(now))
        .group_by(WorkerRow.role, WorkerRow.pool)
    )
    return {(role, pool): count for role, pool, count in rows}


def _oldest_generating(open_jobs: Sequence[JobRow]) -> int | None:
    bodies = [job.input for job in open_jobs if job.kind is JobKind.GENERATE]
    jobs = [INPUT.validate_json(body) for body in bodies]
    return min((job.min_version for job in jobs if isinstance(job, GenerateInput)), default=None)


def _evaluated_version(body: str) -> int:
    job = INPUT.validate_json(body)
    assert isinstance(job, EvaluateInput)
    return job.version


def _waiting_group(row: GroupRow) -> Group:
    assert row.policy_version is not None, "a ready group says what made it"
    return Group(
        index=row.index, policy_version=row.policy_version, has_signal=bool(row.reward_std)
    )
