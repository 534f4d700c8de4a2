"""What of a run's objects is in use, read from the database in the form that `retention.py` takes.

The caller holds the run's lock, so nothing here changes before it has marked what it gives up.
"""

import re
from collections.abc import Collection

from sqlalchemy import select
from sqlalchemy.orm import Session

from offbeat import keys
from offbeat.contracts.chat import ChatInput
from offbeat.contracts.jobs import (
    EvaluateInput,
    GenerateInput,
    JobInput,
    JobKind,
    JobStatus,
    StepInput,
)
from offbeat.contracts.run_spec import RunSpec
from services.orchestrator.groups import OPEN_GROUPS
from services.orchestrator.jobs import INPUT, OPEN_JOBS
from services.orchestrator.retention import RunFacts
from services.orchestrator.schema import GroupRow, JobRow, MetricRow, RunRow, VersionRow

BEST_BY = {"eval/reward": MetricRow.value.desc(), "eval_loss": MetricRow.value.asc()}
"""The series whose best version stays, best first."""


def load_facts(session: Session, run: RunRow, found: Collection[keys.AttemptKey]) -> RunFacts:
    """What decides about these objects of the run."""
    spec = RunSpec.model_validate_json(run.spec)
    inputs = _open_inputs(session, run.id)
    return RunFacts(
        retention=spec.retention,
        max_versions=spec.staleness.max_versions,
        checkpoint_every=spec.train.checkpoint_every,
        newest=run.version,
        prefixes=_prefixes(session, run.id, {key.version for key in found}),
        used_adapters=frozenset(
            {version for job in inputs for version in _named_versions(job)}
            | _versions_to_evaluate(session, run, spec)
            | _best_version(session, run.id)
            | sources_named(session, run.id)
        ),
        used_states=frozenset(job.base_version for job in inputs if isinstance(job, StepInput)),
        used_keys=frozenset(_used_keys(session, run, inputs)),
        taken=_taken(session, run.id, {key.job_id for key in found}),
    )


def sources_named(session: Session, run_id: str, *, not_begun: bool = False) -> set[int]:
    """The run's versions that other runs name in `lora.init_from`; with `not_begun`, those runs
    alone that still have to read them."""
    named = re.compile(
        rf"{re.escape(run_id)}@(\d+)|s3://[^/]+/runs/{re.escape(run_id)}/versions/(\d+)-.*"
    )
    others = select(RunRow).where(
        RunRow.id != run_id,
        RunRow.deleted_at.is_(None),
        RunRow.spec.contains(run_id, autoescape=True),
    )
    found: set[int] = set()
    for other in session.scalars(others):
        if not_begun and (other.version is not None or other.status.is_final):
            continue
        source = RunSpec.model_validate_json(other.spec).init_from
        match = named.fullmatch(source or "")
        found |= {int(match[1] or match[2])} if match else set()
    return found


def _open_inputs(session: Session, run_id: str) -> list[JobInput]:
    bodies = session.scalars(
        select(JobRow.input).where(JobRow.run_id == run_id, JobRow.status.in_(OPEN_JOBS))
    )
    return [INPUT.validate_json(body) for body in bodies]


def _named_versions(job: JobInput) -> set[int]:
    match job:
        case EvaluateInput(version=version) | ChatInput(version=int(version)):
            return {version}
        case GenerateInput(min_version=version):
            return {version}
        case StepInput(base_version=version):
            return {version, version + 1}
        case _:
            return set()


def _versions_to_evaluate(session: Session, run: RunRow, spec: RunSpec) -> set[int]:
    """Those whose evaluation has not begun, because the run is paused or ended."""
    due = {version for version in spec.eval_versions if version <= (run.version or 0)}
    if not due:
        return set()
    bodies = session.scalars(
        select(JobRow.input).where(JobRow.run_id == run.id, JobRow.kind == JobKind.EVALUATE)
    )
    for job in map(INPUT.validate_json, bodies):
        due -= _named_versions(job)
    return due


def _best_version(session: Session, run_id: str) -> set[int]:
    """The version that did best on what is held out, the newer one of two."""
    found = (
        session.scalar(
            select(MetricRow.step)
            .where(MetricRow.run_id == run_id, MetricRow.name == name)
            .order_by(best_first, MetricRow.step.desc())
            .limit(1)
        )
        for name, best_first in BEST_BY.items()
    )
    return {step for step in found if step is not None}


def _used_keys(session: Session, run: RunRow, inputs: list[JobInput]) -> set[str]:
    waiting = session.scalars(
        select(GroupRow.rollouts_key)
        .where(
            GroupRow.run_id == run.id,
            GroupRow.status.in_(OPEN_GROUPS),
            GroupRow.rollouts_key.is_not(None),
        )
        .distinct()
    )
    steps = [job for job in inputs if isinstance(job, StepInput)]
    named = {group.rollouts_key for step in steps for group in step.groups}
    prompts = {key for key in (run.prompts_key, run.eval_prompts_key) if key is not None}
    return {key for key in waiting if key is not None} | named | prompts


def _prefixes(session: Session, run_id: str, versions: set[int | None]) -> dict[int, str]:
    rows = session.execute(
        select(VersionRow.version, VersionRow.prefix).where(
            VersionRow.run_id == run_id,
            VersionRow.version.in_({version for version in versions if version is not None}),
        )
    )
    return dict(rows.all())


def _taken(session: Session, run_id: str, job_ids: set[str]) -> dict[str, int | None]:
    rows = session.execute(
        select(JobRow.id, JobRow.attempt, JobRow.status).where(
            JobRow.run_id == run_id, JobRow.id.in_(job_ids), JobRow.status.not_in(OPEN_JOBS)
        )
    )
    return {
        job_id: attempt if status is JobStatus.DONE else None for job_id, attempt, status in rows
    }
