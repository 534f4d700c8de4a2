"""What workers report of themselves, written down together.

Whoever reports while a transaction is under way waits for the next one, which takes all that wait.
So a small fleet's reports are written at once, and those of a thousand workers cost a few
transactions a second and no thread each.
"""

import asyncio
from collections.abc import Mapping

from anyio.to_thread import run_sync
from sqlalchemy import select

from offbeat.contracts.leases import WorkerReport
from services.orchestrator.schema import WorkerRow
from services.orchestrator.store import Store


class Reports:
    """Those that are not written yet. Belongs to one event loop."""

    def __init__(self) -> None:
        self._waiting: dict[str, WorkerReport] = {}
        self._next: asyncio.Task[frozenset[str]] | None = None
        """Writes what waits, once the transaction before has ended."""
        self._writing = asyncio.Lock()

    async def save(self, store: Store, worker_id: str, report: WorkerReport, now: float) -> bool:
        """Return when the report is written: whether the worker is a new one. Raises what its
        transaction raises."""
        self._waiting[worker_id] = report
        if self._next is None:
            self._next = asyncio.create_task(self._write(store, now))
        # A worker that hangs up must not take the transaction from the others.
        return worker_id in await asyncio.shield(self._next)

    async def _write(self, store: Store, now: float) -> frozenset[str]:
        async with self._writing:
            batch, self._waiting, self._next = self._waiting, {}, None
            return await run_sync(write_reports, store, batch, now)


def write_reports(store: Store, reports: Mapping[str, WorkerReport], now: float) -> frozenset[str]:
    """Note that these workers live; which of them are new."""
    with store.write() as session:
        found = session.scalars(select(WorkerRow).where(WorkerRow.id.in_(reports)))
        rows = {row.id: row for row in found}
        new = frozenset(reports.keys() - rows.keys())
        for worker_id in new:
            rows[worker_id] = WorkerRow(id=worker_id)
            session.add(rows[worker_id])
        for worker_id, report in reports.items():
            row = rows[worker_id]
            row.role = report.role
            row.pool = report.pool
            row.report = report.model_dump_json()
            row.last_seen_at = now
    return new
