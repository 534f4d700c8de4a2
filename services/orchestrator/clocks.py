"""The clocks of `fairness.py` in the database, one a run and role."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from statistics import fmean

from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from offbeat.contracts.jobs import JobKind, JobStatus, WorkerRole
from offbeat.contracts.runs import RunStatus
from services.orchestrator.fairness import NO_LENGTH_S, RunClock, moved_up, under_way_s
from services.orchestrator.jobs import OPEN_JOBS
from services.orchestrator.parsed_specs import parsed_spec
from services.orchestrator.schema import JobRow, RunRow

RECENT_JOBS = 200
"""Newest jobs that the usual length of a run's jobs is taken from."""

RunRole = tuple[str, WorkerRole]
COLUMNS = {WorkerRole.GENERATOR: RunRow.generator_s, WorkerRole.TRAINER: RunRow.trainer_s}

RUNNING = select(RunRow.id, RunRow.spec, RunRow.generator_s, RunRow.trainer_s).where(
    RunRow.status == RunStatus.RUNNING
)
WORKING = select(JobRow.run_id, JobRow.kind).where(JobRow.status.in_(OPEN_JOBS)).distinct()
LENGTHS = select(JobRow.run_id, JobRow.kind, JobRow.finished_at - JobRow.leased_at).where(
    JobRow.seq > select(func.max(JobRow.seq) - RECENT_JOBS).scalar_subquery(),
    JobRow.status == JobStatus.DONE,
)


def move_up(session: Session) -> dict[RunRole, float]:
    """Set the clocks of the runs that are new or have no work; the clocks of all that run."""
    rows = session.execute(RUNNING).all()
    working = {(run_id, kind.role) for run_id, kind in session.execute(WORKING)}
    clocks_s: dict[RunRole, float] = {}
    for role, column in COLUMNS.items():
        sharing: dict[tuple[str, int], list[RunClock]] = defaultdict(list)
        for run_id, body, generator_s, trainer_s in rows:
            spec = parsed_spec(body)
            sharing[spec.pool, spec.priority].append(
                RunClock(
                    run_id=run_id,
                    seconds=generator_s if role is WorkerRole.GENERATOR else trainer_s,
                    has_work=(run_id, role) in working,
                )
            )
        for clocks in sharing.values():
            moved = moved_up(clocks)
            for run_id, seconds in moved.items():
                session.execute(update(RunRow).where(RunRow.id == run_id).values({column: seconds}))
            for clock in clocks:
                clocks_s[clock.run_id, role] = moved.get(clock.run_id, clock.seconds or 0.0)
    return clocks_s


def usual_lengths_s(session: Session) -> dict[RunRole, float]:
    """The mean length of each run's newest jobs, by role."""
    lengths: dict[RunRole, list[float]] = defaultdict(list)
    for run_id, kind, length_s in session.execute(LENGTHS):
        lengths[run_id, kind.role].append(length_s)
    return {key: fmean(found) for key, found in lengths.items()}


def served_s(
    clocks_s: Mapping[RunRole, float],
    under_way: Iterable[tuple[str, JobKind, float | None]],
    lengths_s: Mapping[RunRole, float],
    now: float,
) -> dict[RunRole, float]:
    """The clocks with what is under way: jobs by run and kind, and when each was leased."""
    served = dict(clocks_s)
    for run_id, kind, leased_at in under_way:
        key = run_id, kind.role
        elapsed_s = None if leased_at is None else now - leased_at
        counted_s = under_way_s(elapsed_s, lengths_s.get(key, NO_LENGTH_S))
        served[key] = served.get(key, 0.0) + counted_s
    return served
