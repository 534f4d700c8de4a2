"""Groups of prompts in the database: their names, and the two ways in which they end."""

import re
from collections.abc import Collection, Sequence

from sqlalchemy import bindparam, func, select
from sqlalchemy.orm import Session

from offbeat.contracts.runs import EventLevel
from offbeat.errors import InvalidRequestError
from services.orchestrator.run_state import GroupStatus
from services.orchestrator.schema import GroupRow
from services.orchestrator.store import add_event

_GROUP_ID = re.compile(r"g[0-9]{6,9}")

OPEN_GROUPS = (GroupStatus.GENERATING, GroupStatus.READY, GroupStatus.TRAINING)
GROUPS = select(GroupRow).order_by(GroupRow.index)
OF_RUN = GROUPS.where(GroupRow.run_id == bindparam("run_id"))
GENERATED_BY = GROUPS.where(GroupRow.generate_job_id == bindparam("job_id"))
TRAINED_BY = GROUPS.where(GroupRow.train_job_id == bindparam("job_id"))
AT_INDEXES = OF_RUN.where(GroupRow.index.in_(bindparam("indexes", expanding=True)))
OPEN = OF_RUN.where(GroupRow.status.in_(OPEN_GROUPS))


def group_id(index: int) -> str:
    """`g000123`: the group's name within its run."""
    return f"g{index:06d}"


def group_index(name: str) -> int:
    """The inverse of `group_id`. `InvalidRequestError` for a name that it does not give."""
    if not _GROUP_ID.fullmatch(name):
        raise InvalidRequestError(f"{name[:40]!r} names no group: a run's are g000000, g000001, …")
    return int(name.removeprefix("g"))


def groups_generated_by(session: Session, job_id: str) -> list[GroupRow]:
    """Those that the generate job makes, in order of their index."""
    return list(session.scalars(GENERATED_BY, {"job_id": job_id}))


def groups_trained_by(session: Session, job_id: str) -> list[GroupRow]:
    """Those that the train job trains on, in order of their index."""
    return list(session.scalars(TRAINED_BY, {"job_id": job_id}))


def groups_at(session: Session, run_id: str, indexes: Collection[int]) -> list[GroupRow]:
    """The run's groups with these indexes, in order."""
    return list(session.scalars(AT_INDEXES, {"run_id": run_id, "indexes": indexes}))


def open_groups(session: Session, run_id: str) -> list[GroupRow]:
    """The run's groups whose fate is not decided, in order of their index."""
    return list(session.scalars(OPEN, {"run_id": run_id}))


def count_groups(session: Session, run_id: str, *statuses: GroupStatus) -> dict[GroupStatus, int]:
    """How many groups of the run have each of these statuses."""
    rows = (
        select(GroupRow.status, func.count())
        .where(GroupRow.run_id == run_id, GroupRow.status.in_(statuses))
        .group_by(GroupRow.status)
    )
    return dict(session.execute(rows).all())


def drop_groups(
    session: Session, run_id: str, rows: Sequence[GroupRow], reason: str, now: float
) -> None:
    """Give groups up. None is lost without this event."""
    if not rows:
        return
    for row in rows:
        row.status = GroupStatus.DROPPED
        row.drop_reason = reason
    add_event(
        session,
        run_id,
        now,
        "groups_dropped",
        f"{len(rows)} group(s) were dropped: {reason}.",
        level=EventLevel.WARNING,
        data={"reason": reason, "group_ids": [group_id(row.index) for row in rows]},
    )
