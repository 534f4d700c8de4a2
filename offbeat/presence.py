"""That a worker lives: told every few seconds, also while it is idle."""

import os
import socket
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import structlog

from offbeat.contracts.jobs import WorkerRole
from offbeat.contracts.leases import ServedVersion, WorkerEvent, WorkerReport
from offbeat.errors import OffbeatError, UnavailableError
from offbeat.outbox import Outbox
from offbeat.worker_api import OrchestratorClient

log = structlog.get_logger(__name__)

REPORT_INTERVAL_S = 5.0
ALIVE_FILE = "alive"
"""In a worker's data folder; for health checks, which see by its age that the process lives."""


class Presence:
    """Tells the orchestrator by a report, and the machine by a file. What the worker saw goes with
    the reports."""

    def __init__(
        self,
        orchestrator: OrchestratorClient,
        worker_id: str,
        role: WorkerRole,
        pool: str,
        engine: str,
        serving: Callable[[], tuple[ServedVersion, ...]] = tuple,
        *,
        outbox: Outbox | None = None,
        data_dir: Path | None = None,
    ) -> None:
        self._orchestrator = orchestrator
        self._worker_id = worker_id
        self._role = role
        self._pool = pool
        self._engine = engine
        self._serving = serving
        self._outbox = outbox or Outbox()
        self._data_dir = data_dir
        self._started_at = datetime.now(UTC)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="presence", daemon=True)

    def start(self) -> None:
        """Report now and then for ever, in a thread of its own."""
        self._thread.start()

    def stop(self) -> None:
        """Stop reporting, after a last report."""
        self._stopping.set()
        self._outbox.due.set()
        self._thread.join(timeout=REPORT_INTERVAL_S)

    def leave(self) -> None:
        """Stop reporting, and say that the worker takes no more jobs. What it sees while it
        finishes its job is in its own log alone."""
        self.stop()
        try:
            self._orchestrator.leave(self._worker_id)
        except OffbeatError as error:
            log.warning("The orchestrator was not told of the leave.", error=error.detail)

    def _loop(self) -> None:
        while True:
            # In this order: who stops it sets both the other way round.
            self._outbox.due.clear()
            is_last = self._stopping.is_set()
            self._write_alive_file()
            self._report()
            if is_last:
                return
            self._outbox.due.wait(REPORT_INTERVAL_S)

    def _report(self) -> None:
        try:
            with self._outbox.sending() as events:
                self._orchestrator.report(self._worker_id, self._report_with(events))
        except UnavailableError as error:
            log.debug("The orchestrator does not answer yet.", error=error.detail)
        except OffbeatError as error:
            log.warning("The worker's report was refused.", error=error.detail)

    def _write_alive_file(self) -> None:
        if self._data_dir is None:
            return
        try:
            self._data_dir.mkdir(parents=True, exist_ok=True)
            (self._data_dir / ALIVE_FILE).touch()
        except OSError as error:
            log.warning("The data folder cannot be written.", error=str(error))

    def _report_with(self, events: tuple[WorkerEvent, ...]) -> WorkerReport:
        return WorkerReport(
            role=self._role,
            pool=self._pool,
            engine=self._engine,
            host=socket.gethostname(),
            pid=os.getpid(),
            started_at=self._started_at,
            serving=self._serving(),
            events=events,
        )
