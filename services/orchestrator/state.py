"""What is known of a run, read from the database in the form that `runs.next_commands` takes."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import BindParameter, ColumnElement, Row, bindparam, case, func, select
from sqlalchemy.orm import Session

from offbeat.contracts.jobs import EvaluateInput, GenerateInput, JobKind, WorkerRole
from offbeat.contracts.runs import RunStatus
from services.orchestrator.dispatch import Lane
from services.orchestrator.groups import OPEN_GROUPS
from services.orchestrator.jobs import INPUT, OPEN_JOBS
from services.orchestrator.parsed_specs import parsed_spec
from services.orchestrator.run_state import Group, GroupStatus, RunState
from services.orchestrator.schema import GroupRow, JobRow, RunRow, WorkerRow

WORKER_LOST_S = 20.0
"""A worker that did not report for so long is taken for gone: four of its reports are missing."""

RUNNING_SPECS = select(RunRow.spec).where(RunRow.status == RunStatus.RUNNING)
OPEN_JOBS_OF_RUNS = (
    select(
        JobRow.run_id,
        JobRow.kind,
        JobRow.computed_at,
        case((JobRow.kind == JobKind.GENERATE, JobRow.input)).label("generate_input"),
    )
    .where(JobRow.run_id.in_(bindparam("run_ids", expanding=True)), JobRow.status.in_(OPEN_JOBS))
    .order_by(JobRow.seq)
)
OPEN_GROUPS_OF_RUNS = (
    select(
        *(GroupRow.run_id, GroupRow.status, GroupRow.index.label("group_index")),
        *(GroupRow.policy_version, GroupRow.reward_std),
    )
    .where(
        GroupRow.run_id.in_(bindparam("run_ids", expanding=True)),
        GroupRow.status.in_(OPEN_GROUPS),
    )
    .order_by(GroupRow.index)
)
OpenJob = Row[str, JobKind, float | None, str | None]
OpenGroup = Row[str, GroupStatus, int, int | None, float | None]


@dataclass(frozen=True, kw_only=True)
class Pools:
    """What runs share."""

    workers: Mapping[Lane, int]
    """Those that get jobs, by role and pool."""
    generating_runs: Mapping[str, int]
    """Running runs that have generate jobs, by pool."""


def load_pools(session: Session, now: float) -> Pools:
    """What all runs share now."""
    specs = map(parsed_spec, session.scalars(RUNNING_SPECS))
    return Pools(
        workers=alive_workers(session, now),
        generating_runs=Counter(spec.pool for spec in specs if spec.kind == "grpo"),
    )


def load_states(
    session: Session, runs: Sequence[RunRow], pools: Pools, now: float
) -> list[RunState]:
    """Everything that `next_commands` needs to know of each run.

    A run of a million jobs costs no more than a young one: only what is open is read, unless the
    spec asks for more.
    """
    run_ids = {"run_ids": [run.id for run in runs]}
    jobs: dict[str, list[OpenJob]] = defaultdict(list)
    for job in session.execute(OPEN_JOBS_OF_RUNS, run_ids):
        jobs[job.run_id].append(job)
    groups: dict[str, list[OpenGroup]] = defaultdict(list)
    for group in session.execute(OPEN_GROUPS_OF_RUNS, run_ids):
        groups[group.run_id].append(group)
    return [_state(session, run, jobs[run.id], groups[run.id], pools, now) for run in runs]


def _state(
    session: Session,
    run: RunRow,
    open_jobs: Sequence[OpenJob],
    groups: Sequence[OpenGroup],
    pools: Pools,
    now: float,
) -> RunState:
    spec = parsed_spec(run.spec)
    num_groups = Counter(group.status for group in groups)
    return RunState(
        spec=spec,
        status=run.status,
        prepared=run.prompts_key is not None,
        version=run.version,
        open_jobs=Counter(job.kind for job in open_jobs),
        evaluated=_evaluated_versions(session, run.id) if spec.eval_versions else frozenset(),
        generating=num_groups[GroupStatus.GENERATING],
        training=num_groups[GroupStatus.TRAINING],
        computed_steps=sum(
            job.kind is JobKind.TRAIN and job.computed_at is not None for job in open_jobs
        ),
        ready=[
            _ready_group(group.group_index, group.policy_version, group.reward_std)
            for group in groups
            if group.status is GroupStatus.READY
        ],
        refilled=run.refilled,
        generation_failures=run.generation_failures,
        oldest_generating=_oldest_generating([job.generate_input for job in open_jobs]),
        generators=pools.workers.get((WorkerRole.GENERATOR, spec.pool), 0),
        generating_runs=pools.generating_runs.get(spec.pool, 0),
        trainers=pools.workers.get((WorkerRole.TRAINER, spec.pool), 0),
        runtime_s=now - (run.active_since or now),
        worker_seconds=(
            _worked_s(session, run.id) if spec.limits.max_gpu_seconds is not None else 0.0
        ),
    )


def may_work(now: float | BindParameter[float]) -> tuple[ColumnElement[bool], ...]:
    """When a worker gets jobs: it reported lately and is not in quarantine."""
    return (
        WorkerRow.last_seen_at > now - WORKER_LOST_S,
        WorkerRow.quarantined_until.is_(None) | (WorkerRow.quarantined_until <= now),
    )


ALIVE_WORKERS = (
    select(WorkerRow.role, WorkerRow.pool, func.count())
    .where(*may_work(bindparam("now")))
    .group_by(WorkerRow.role, WorkerRow.pool)
)


def alive_workers(session: Session, now: float) -> dict[Lane, int]:
    """Workers that get jobs, by role and pool."""
    rows = session.execute(ALIVE_WORKERS, {"now": now})
    return {(role, pool): count for role, pool, count in rows}


def _oldest_generating(inputs: Sequence[str | None]) -> int | None:
    """Versions only go up, so no job is for an older one than the job that was made first."""
    body = next((body for body in inputs if body is not None), None)
    if body is None:
        return None
    job = INPUT.validate_json(body)
    assert isinstance(job, GenerateInput)
    return job.min_version


def _evaluated_versions(session: Session, run_id: str) -> frozenset[int]:
    bodies = session.scalars(
        select(JobRow.input).where(JobRow.run_id == run_id, JobRow.kind == JobKind.EVALUATE)
    )
    jobs = [INPUT.validate_json(body) for body in bodies]
    return frozenset(job.version for job in jobs if isinstance(job, EvaluateInput))


def _worked_s(session: Session, run_id: str) -> float:
    query = select(func.sum(JobRow.finished_at - JobRow.leased_at)).where(JobRow.run_id == run_id)
    return session.scalar(query) or 0.0


def _ready_group(index: int, policy_version: int | None, reward_std: float | None) -> Group:
    assert policy_version is not None, "a ready group says what made it"
    return Group(index=index, policy_version=policy_version, has_signal=bool(reward_std))
