"""What workers report: of themselves, and of what they saw."""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import bindparam, select

from offbeat.contracts.leases import WorkerReport
from services.orchestrator.schema import WorkerRow
from services.orchestrator.store import Store, lock_runs
from services.orchestrator.worker_events import add_worker_events

WORKERS = select(WorkerRow).where(WorkerRow.id.in_(bindparam("ids", expanding=True)))


@dataclass(frozen=True, kw_only=True)
class Report:
    """One of them."""

    worker_id: str
    body: WorkerReport


def write_reports(store: Store, reports: Sequence[Report], now: float) -> list[bool]:
    """Note that these workers live and what they saw; of each whether it is a new one."""
    with store.write() as session:
        runs = lock_runs(session, {e.run_id for report in reports for e in report.body.events})
        ids = {report.worker_id for report in reports}
        found = session.scalars(WORKERS, {"ids": ids})
        rows = {row.id: row for row in found}
        new = ids - rows.keys()
        for worker_id in new:
            rows[worker_id] = WorkerRow(id=worker_id)
            session.add(rows[worker_id])
        for report in reports:
            row = rows[report.worker_id]
            row.role = report.body.role
            row.pool = report.body.pool
            row.report = report.body.model_dump_json(exclude={"events"})
            row.last_seen_at = now
        for report in reports:
            add_worker_events(session, runs, report.worker_id, report.body.events, now)
    return [report.worker_id in new for report in reports]
