"""Groups of prompts in the database: their names, and the two ways in which they end."""

import re
from collections.abc import Sequence

from sqlalchemy import ColumnElement, func, select
from sqlalchemy.orm import Session

from offbeat.contracts.runs import EventLevel
from offbeat.errors import InvalidRequestError
from services.orchestrator.run_state import GroupStatus
from services.orchestrator.schema import GroupRow
from services.orchestrator.store import add_event

_GROUP_ID = re.compile(r"g[0-9]{6,9}")


def group_id(index: int) -> str:
    """`g000123`: the group's name within its run."""
    return f"g{index:06d}"


def group_index(name: str) -> int:
    """The inverse of `group_id`. `InvalidRequestError` for a name that it does not give."""
    if not _GROUP_ID.fullmatch(name):
        raise InvalidRequestError(f"{name[:40]!r} names no group: a run's are g000000, g000001, …")
    return int(name.removeprefix("g"))


def find_groups(session: Session, *conditions: ColumnElement[bool]) -> list[GroupRow]:
    """The groups that meet the conditions, in order of their index."""
    return list(session.scalars(select(GroupRow).where(*conditions).order_by(GroupRow.index)))


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
