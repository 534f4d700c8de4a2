"""Bounds for the database: the events, values and workers it keeps, and the end of a run's rows.

Everything goes in bounded pieces, so that no transaction holds up the scheduler.
"""

from sqlalchemy import ColumnElement, delete, func, select
from sqlalchemy.orm import Session

from services.orchestrator.quarantine import OUTCOMES_KEPT_S
from services.orchestrator.schema import Base, EventRow, MetricRow, OutcomeRow, RunRow, WorkerRow
from services.orchestrator.store import Store

ROWS_MAX = 2_000
"""Rows that one transaction removes: some milliseconds."""
EVENTS_KEPT = 20_000
"""The newest events of a run, some 10 MB: with 100 generators, those of its last 200 steps."""
METRICS_THINNED = ((10_000, 10), (100_000, 100))
"""So many steps behind the newest one, only the values of every Nth step stay: finer than any
plot. Evaluations, which are rare, stay."""
WORKER_KEPT_S = 7 * 24 * 3600.0
"""A worker that was not seen for so long is forgotten; each pod that ever was had a name."""

OWNED = {
    "metrics": "step",
    "events": "id",
    "groups": "index",
    "outcomes": "id",
    "policy_versions": "version",
    "jobs": "seq",
}
"""The tables of what belongs to a run; of each a column that orders the rows of one run."""


def forget_workers(session: Session, now: float) -> None:
    """Forget workers that are long gone, and how old attempts ended."""
    session.execute(delete(OutcomeRow).where(OutcomeRow.at < now - OUTCOMES_KEPT_S))
    session.execute(delete(WorkerRow).where(WorkerRow.last_seen_at < now - WORKER_KEPT_S))


def prune_run(session: Session, run: RunRow) -> None:
    """Remove the oldest events of a run beyond the bound, and thin out its old values."""
    newest_kept = session.scalar(
        select(EventRow.id)
        .where(EventRow.run_id == run.id)
        .order_by(EventRow.id.desc())
        .offset(EVENTS_KEPT - 1)
        .limit(1)
    )
    if newest_kept is not None:
        _drop_some(session, "events", run.id, EventRow.id < newest_kept)
    for steps_behind, every in METRICS_THINNED:
        last = (run.version or 0) - steps_behind
        if last > 0:
            thinned = (
                MetricRow.step <= last,
                MetricRow.step % every != 0,
                MetricRow.name.not_like("eval/%"),
            )
            _drop_some(session, "metrics", run.id, *thinned)


def drop_run(store: Store, run_id: str) -> None:
    """Remove every row of a run; its own row last, so that whoever dies on the way is repeated."""
    for name in OWNED:
        dropped = True
        while dropped:
            with store.write() as session:
                dropped = _drop_some(session, name, run_id)
    with store.write() as session:
        session.execute(delete(RunRow).where(RunRow.id == run_id))


def _drop_some(session: Session, name: str, run_id: str, *conditions: ColumnElement[bool]) -> bool:
    """Remove the first `ROWS_MAX` rows of a run from a table, and those that are equal in its
    column to the last of them; whether there were any."""
    table = Base.metadata.tables[name]
    order = table.c[OWNED[name]]
    chosen = (table.c.run_id == run_id, *conditions)
    first = select(order).where(*chosen).order_by(order).limit(ROWS_MAX).subquery()
    last = session.scalar(select(func.max(first.c[0])))
    if last is None:
        return False
    session.execute(delete(table).where(*chosen, order <= last))
    return True
