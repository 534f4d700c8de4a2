"""Rows as users read them."""

import json
from datetime import UTC, datetime
from typing import Literal

from sqlalchemy import select
from sqlalchemy.orm import Session

from offbeat.contracts.jobs import InitOutput, JobKind, JobStatus, TrainOutput
from offbeat.contracts.leases import WorkerReport
from offbeat.contracts.run_spec import RunSpec
from offbeat.contracts.runs import (
    CheckpointView,
    QuarantineView,
    RunEvent,
    RunProgress,
    RunView,
    WorkerView,
)
from offbeat.contracts.weights import ADAPTER_FILES
from services.orchestrator.groups import count_groups
from services.orchestrator.results import OUTPUT
from services.orchestrator.run_state import GroupStatus
from services.orchestrator.schema import EventRow, JobRow, MetricRow, RunRow, VersionRow, WorkerRow
from services.orchestrator.state import WORKER_LOST_S

ETA_STEPS = 10
"""Recent steps whose pace the remaining time is estimated from."""


def moment(seconds: float) -> datetime:
    """Seconds since the epoch as a time with a zone."""
    return datetime.fromtimestamp(seconds, UTC)


def run_view(session: Session, run: RunRow, now: float) -> RunView:
    """A run with its progress."""
    spec = RunSpec.model_validate_json(run.spec)
    return RunView(
        id=run.id,
        project=run.project_id,
        name=spec.name,
        status=run.status,
        status_reason=run.status_reason,
        pool=spec.pool,
        priority=spec.priority,
        tags=spec.tags,
        created_at=moment(run.created_at),
        started_at=moment(run.started_at) if run.started_at is not None else None,
        finished_at=moment(run.finished_at) if run.finished_at is not None else None,
        progress=_progress(session, run, spec, now),
        spec=spec,
    )


def _progress(session: Session, run: RunRow, spec: RunSpec, now: float) -> RunProgress:
    version = run.version or 0
    metrics = _metrics_at(session, run.id, version)
    groups = count_groups(session, run.id, GroupStatus.GENERATING, GroupStatus.READY)
    return RunProgress(
        step=version,
        steps=spec.train.steps,
        version=run.version,
        reward=metrics.get("reward"),
        loss=metrics.get("loss"),
        staleness_mean=metrics.get("sample/staleness_mean"),
        generated_tokens_per_s=metrics.get("rollout/generated_tok_s"),
        groups_generating=groups.get(GroupStatus.GENERATING, 0),
        groups_ready=groups.get(GroupStatus.READY, 0),
        eta_s=None if run.status.is_final else _eta_s(session, run, spec, now),
    )


def _metrics_at(session: Session, run_id: str, step: int) -> dict[str, float]:
    rows = select(MetricRow.name, MetricRow.value).where(
        MetricRow.run_id == run_id, MetricRow.step == step
    )
    return dict(session.execute(rows).all())


def _eta_s(session: Session, run: RunRow, spec: RunSpec, now: float) -> float | None:
    """Steps left at the mean pace of the last ones; none before two steps are done."""
    finished = session.scalars(
        select(JobRow.finished_at)
        .where(
            JobRow.run_id == run.id, JobRow.kind == JobKind.TRAIN, JobRow.status == JobStatus.DONE
        )
        .order_by(JobRow.seq.desc())
        .limit(ETA_STEPS)
    ).all()
    times = [time for time in finished if time is not None]
    if len(times) < 2:
        return None
    pace_s = (times[0] - times[-1]) / (len(times) - 1)
    left = (spec.train.steps - (run.version or 0)) * pace_s - (now - times[0])
    return max(0.0, left)


def event_view(row: EventRow) -> RunEvent:
    """One entry of a run's log."""
    return RunEvent(
        id=row.id,
        run_id=row.run_id,
        at=moment(row.at),
        level=row.level,
        kind=row.kind,
        message=row.message,
        data=json.loads(row.data),
    )


def checkpoint_view(session: Session, job: JobRow) -> CheckpointView:
    """The version that an init or train job published, and what remains of it."""
    assert job.output is not None
    assert job.finished_at is not None
    output = OUTPUT.validate_json(job.output)
    assert isinstance(output, InitOutput | TrainOutput)
    manifest = output.manifest
    row = session.get_one(VersionRow, (job.run_id, manifest.version))
    has_adapter = manifest.has_adapter and row.adapter_removed_at is None
    has_state = row.state_removed_at is None
    return CheckpointView(
        version=manifest.version,
        step=manifest.version,
        adapter_sha256=manifest.sha256,
        size_bytes=sum(
            file.size_bytes
            for file in manifest.files
            if (has_adapter if file.name in ADAPTER_FILES else has_state)
        ),
        prefix=manifest.prefix,
        published_at=moment(job.finished_at),
        metrics=manifest.metrics,
        has_adapter=has_adapter,
        has_state=has_state,
    )


def worker_view(session: Session, row: WorkerRow, now: float) -> WorkerView:
    """A worker and the jobs it holds."""
    jobs = session.scalars(
        select(JobRow.id).where(JobRow.worker_id == row.id, JobRow.status == JobStatus.LEASED)
    )
    return WorkerView(
        id=row.id,
        status=_worker_status(row, now),
        last_seen_at=moment(row.last_seen_at),
        report=WorkerReport.model_validate_json(row.report),
        jobs=tuple(jobs),
        quarantine=_quarantine_view(row, now),
    )


def _worker_status(row: WorkerRow, now: float) -> Literal["alive", "lost", "quarantined"]:
    if row.last_seen_at <= now - WORKER_LOST_S:
        return "lost"
    return "quarantined" if (row.quarantined_until or now) > now else "alive"


def _quarantine_view(row: WorkerRow, now: float) -> QuarantineView | None:
    if row.quarantined_until is None or row.quarantined_until <= now:
        return None
    return QuarantineView(reason=row.quarantine_reason or "", until=moment(row.quarantined_until))
