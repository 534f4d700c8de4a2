"""What workers saw, in the logs of runs."""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from offbeat.contracts.leases import WorkerEvent
from offbeat.contracts.runs import EventLevel
from offbeat.errors import NotFoundError
from services.orchestrator.fleet import SERVE, note
from services.orchestrator.schema import RunRow
from services.orchestrator.store import Store, add_event

WARNING_EVENTS = frozenset({"canary_failed", "reward_failed", "samples_lost"})
SERVE_OUTCOMES = {"version_served": True, "canary_failed": False}


@dataclass(frozen=True, kw_only=True)
class PostedEvent:
    """One of them, and of which run."""

    run_id: str
    body: WorkerEvent


def write_worker_events(
    store: Store, events: Sequence[PostedEvent], now: float
) -> list[NotFoundError | None]:
    """Add them to the logs; all generators of a run serve a new version in the same moment."""
    ids = {event.run_id for event in events}
    with store.write() as session:
        # All are locked before any row of a worker is, in one order: nobody waits in a circle.
        existing = RunRow.id.in_(ids), RunRow.deleted_at.is_(None)
        locked = select(RunRow).where(*existing).order_by(RunRow.id).with_for_update()
        runs = {run.id: run for run in session.scalars(locked)}
        return [_add(session, runs.get(event.run_id), event, now) for event in events]


def _add(
    session: Session, run: RunRow | None, event: PostedEvent, now: float
) -> NotFoundError | None:
    if run is None:
        return NotFoundError(f"there is no run {event.run_id!r}")
    body = event.body
    level = EventLevel.WARNING if body.kind in WARNING_EVENTS else EventLevel.INFO
    data = {"worker_id": body.worker_id, **body.data}
    add_event(session, run.id, now, body.kind, body.message, level=level, data=data)
    if body.kind in SERVE_OUTCOMES:
        version, ok = f"v{body.data['version']}", SERVE_OUTCOMES[body.kind]
        note(session, run, body.worker_id, SERVE, version, ok=ok, now=now)
    return None
