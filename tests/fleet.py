"""Worker processes of a fleet that a test starts, harms and stops."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from offbeat.contracts.jobs import WorkerRole
from tests.orchestrator import Orchestrator, worker_statuses
from tests.waiting import wait_until


@dataclass
class Fleet:
    """The processes of one test, over its orchestrator."""

    orchestrator: Orchestrator
    valkey_url: str
    folder: Path
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(
        self,
        role: WorkerRole,
        worker_id: str,
        *arguments: str,
        grace_s: float = 20.0,
        visibility_timeout_s: int = 3600,
    ) -> None:
        """Start a worker and wait until the orchestrator has heard of it."""
        environment = {
            **os.environ,
            "OFFBEAT_ORCHESTRATOR_URL": self.orchestrator.url,
            "OFFBEAT_REDIS_URL": self.valkey_url,
            "OFFBEAT_WORKER_ID": worker_id,
            "OFFBEAT_GRACE_S": str(grace_s),
            "OFFBEAT_VISIBILITY_TIMEOUT_S": str(visibility_timeout_s),
        }
        command = [sys.executable, "-m", "tests.fleet_worker", "--role", role, *arguments]
        with (self.folder / f"{worker_id}.log").open("wb") as log:
            self.processes[worker_id] = subprocess.Popen(
                command, env=environment, stdout=log, stderr=subprocess.STDOUT
            )
        wait_until(lambda: worker_id in self.workers())

    def log(self, worker_id: str) -> str:
        """What a worker has said so far."""
        return (self.folder / f"{worker_id}.log").read_text()

    def workers(self) -> dict[str, str]:
        """The status of each worker that the orchestrator knows."""
        return worker_statuses(self.orchestrator.worker.http)

    def holding(self, worker_id: str) -> list[str]:
        """The jobs that a worker has a lease on."""
        response = self.orchestrator.worker.http.get("/v1/workers")
        return next((w["jobs"] for w in response.json()["data"] if w["id"] == worker_id), [])

    def signal(self, worker_id: str, number: signal.Signals) -> None:
        """Send a signal to a worker."""
        self.processes[worker_id].send_signal(number)

    def ended(self, worker_id: str) -> int:
        """The exit code of a worker that is about to end."""
        return self.processes[worker_id].wait(timeout=60)


@contextmanager
def running_fleet(orchestrator: Orchestrator, valkey_url: str, folder: Path) -> Iterator[Fleet]:
    """No workers yet; those that are left at the end are killed."""
    fleet = Fleet(orchestrator, valkey_url, folder)
    try:
        yield fleet
    finally:
        for process in fleet.processes.values():
            process.kill()
            process.wait()
