"""Whether what a request needs of a run's past is still there; `GoneError` says what is not."""

from sqlalchemy import select
from sqlalchemy.orm import Session

from offbeat import keys
from offbeat.contracts.jobs import StepInput
from offbeat.errors import GoneError
from services.orchestrator.schema import JobRow, VersionRow


def check_adapter(session: Session, run_id: str, version: int) -> None:
    """Raise unless the adapter of this version, where it is published, can be pulled."""
    row = session.get(VersionRow, (run_id, version))
    if row is not None and row.adapter_removed_at is not None:
        raise GoneError(
            f"the adapter of version {version} was removed, as the run's retention says; "
            f"/v1/runs/{run_id}/checkpoints shows which ones are there"
        )


def check_step(session: Session, run_id: str, step: StepInput) -> None:
    """Raise unless everything that the step was made from is there."""
    number, parent = step.base_version + 1, session.get(VersionRow, (run_id, step.base_version))
    if parent is not None and parent.state_removed_at is not None:
        raise GoneError(
            f"step {number} cannot be taken again: the trainer state of version "
            f"{step.base_version} was removed, as the run's retention says; "
            f"/v1/runs/{run_id}/checkpoints shows which ones are there"
        )
    parsed = (keys.parse(group.rollouts_key) for group in step.groups)
    lost = session.scalar(
        select(JobRow.id)
        .where(
            JobRow.id.in_({key.job_id for key in parsed if key is not None}),
            JobRow.samples_removed_at.is_not(None),
        )
        .limit(1)
    )
    if lost is not None:
        raise GoneError(
            f"step {number} cannot be taken again: its samples were removed, as "
            "retention.rollout_days says"
        )
