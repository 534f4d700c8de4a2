"""What workers saw, in the logs of runs."""

from collections.abc import Iterable

import structlog
from sqlalchemy.orm import Session

from offbeat.contracts.leases import WorkerEvent
from offbeat.contracts.runs import EventLevel
from services.orchestrator.fleet import SERVE, note
from services.orchestrator.schema import RunRow
from services.orchestrator.store import add_event

log = structlog.get_logger(__name__)

WARNING_EVENTS = frozenset({"canary_failed", "reward_failed"})
SERVE_OUTCOMES = {"version_served": True, "canary_failed": False}


def add_worker_events(
    session: Session,
    runs: dict[str, RunRow],
    worker_id: str,
    events: Iterable[WorkerEvent],
    now: float,
) -> None:
    """Add what a worker saw to the logs of these runs; what is about another one is dropped."""
    for event in events:
        run = runs.get(event.run_id)
        if run is None:
            log.info("An event of a run that is not there was dropped.", run=event.run_id)
            continue
        at = now - event.age_s
        level = EventLevel.WARNING if event.kind in WARNING_EVENTS else EventLevel.INFO
        data = {"worker_id": worker_id, **event.data}
        add_event(session, run.id, at, event.kind, event.message, level=level, data=data)
        if event.kind in SERVE_OUTCOMES:
            version, ok = f"v{event.data['version']}", SERVE_OUTCOMES[event.kind]
            note(session, run, worker_id, SERVE, version, ok=ok, now=at)
