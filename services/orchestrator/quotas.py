"""What a project uses of what it may, and what happens at the limit.

- Active runs: creation and `retry` are refused.
- Jobs in flight: `dispatch.py` leaves the project's other jobs waiting in SQL; nothing fails.
- Stored bytes: creation, `resume` and `retry` are refused; a run that goes on to store beyond the
  limit is paused with an event, so a project exceeds it by what its workers were doing at most.

Bytes are added up from what workers report at each completion; the store is never listed.
"""

from collections.abc import Mapping

from sqlalchemy import bindparam, func, select
from sqlalchemy.orm import Session

from offbeat.contracts.chat import ChatOutput
from offbeat.contracts.jobs import (
    EvaluateOutput,
    GenerateOutput,
    InitOutput,
    JobOutput,
    PrepareOutput,
    ReplayOutput,
    TokenizeOutput,
    TrainOutput,
)
from offbeat.contracts.projects import ProjectUse, Quotas
from offbeat.contracts.runs import EventLevel, RunStatus
from offbeat.errors import QuotaExceededError
from services.orchestrator.jobs import IN_FLIGHT
from services.orchestrator.lifecycle import act
from services.orchestrator.run_state import RunAction
from services.orchestrator.schema import JobRow, ProjectRow, RunRow
from services.orchestrator.store import add_event

GROWING = (GenerateOutput, TrainOutput)
"""What a run adds to the store again and again."""
ACTIVE = (RunStatus.QUEUED, RunStatus.RUNNING, RunStatus.PAUSED)
JOB_LIMITS = select(ProjectRow.id, ProjectRow.jobs_in_flight_max)
STORED_BYTES = select(func.sum(RunRow.stored_bytes)).where(
    RunRow.project_id == bindparam("project_id")
)
STORED = select(ProjectRow, STORED_BYTES.scalar_subquery()).where(
    ProjectRow.id == bindparam("project_id")
)


def quotas_of(project: ProjectRow) -> Quotas:
    """The project's limits."""
    return Quotas(
        active_runs_max=project.active_runs_max,
        jobs_in_flight_max=project.jobs_in_flight_max,
        stored_bytes_max=project.stored_bytes_max,
    )


def use_of(session: Session, project_id: str) -> ProjectUse:
    """What the project uses now."""
    return ProjectUse(
        active_runs=_active_runs(session, project_id),
        jobs_in_flight=jobs_in_flight(session).get(project_id, 0),
        stored_bytes=stored_bytes(session, project_id),
    )


def jobs_in_flight(session: Session) -> dict[str, int]:
    """Jobs that are sent or leased, by project."""
    rows = session.execute(
        select(RunRow.project_id, func.count())
        .join(JobRow, JobRow.run_id == RunRow.id)
        .where(IN_FLIGHT)
        .group_by(RunRow.project_id)
    )
    return dict(rows.all())


def jobs_left(session: Session, in_flight: Mapping[str, int]) -> dict[str, int]:
    """Jobs that each project may still have sent, which has so many in flight."""
    limits = session.execute(JOB_LIMITS)
    return {project: limit - in_flight.get(project, 0) for project, limit in limits}


def stored_bytes(session: Session, project_id: str) -> int:
    """What the project's runs have in the object store."""
    return int(session.scalar(STORED_BYTES, {"project_id": project_id}) or 0)


def check_quotas(session: Session, project_id: str) -> None:
    """Raise `QuotaExceededError` where the run that was just made active is one too many.

    The project is locked until the transaction ends, so that two requests cannot both be the last.
    """
    project = session.get_one(ProjectRow, project_id, with_for_update=True)
    num_runs = _active_runs(session, project_id)
    if num_runs > project.active_runs_max:
        raise QuotaExceededError(
            f"project {project_id!r} has {num_runs - 1} active runs of "
            f"{project.active_runs_max} allowed: wait for one to end, cancel one, or have an "
            "administrator raise active_runs_max"
        )
    num_bytes = stored_bytes(session, project_id)
    if num_bytes >= project.stored_bytes_max:
        raise QuotaExceededError(_too_many_bytes(project, num_bytes))


def add_stored(session: Session, run: RunRow, output: JobOutput, now: float) -> None:
    """Count what a job has stored; pause the run where that exceeds the project's limit."""
    run.stored_bytes += _size_bytes(output)
    if not isinstance(output, GROWING) or run.status is not RunStatus.RUNNING:
        return
    project, total = session.execute(STORED, {"project_id": run.project_id}).one()
    num_bytes = int(total)
    if num_bytes >= project.stored_bytes_max:
        add_event(
            session,
            run.id,
            now,
            "quota_exceeded",
            f"The run is paused: {_too_many_bytes(project, num_bytes)}; then resume it.",
            level=EventLevel.WARNING,
            data={"stored_bytes": num_bytes, "stored_bytes_max": project.stored_bytes_max},
        )
        act(session, run, RunAction.PAUSE, now)


def _active_runs(session: Session, project_id: str) -> int:
    query = select(func.count()).where(RunRow.project_id == project_id, RunRow.status.in_(ACTIVE))
    return session.scalar(query) or 0


def _size_bytes(output: JobOutput) -> int:
    match output:
        case PrepareOutput() | TokenizeOutput() | GenerateOutput() | EvaluateOutput():
            return output.stored_bytes
        case InitOutput() | TrainOutput():
            return sum(file.size_bytes for file in output.manifest.files)
        case ReplayOutput() | ChatOutput():
            return 0


def _too_many_bytes(project: ProjectRow, num_bytes: int) -> str:
    return (
        f"project {project.id!r} has {num_bytes:,} bytes in the object store of "
        f"{project.stored_bytes_max:,} allowed: have an administrator raise stored_bytes_max, or "
        "delete what old runs have stored"
    )
