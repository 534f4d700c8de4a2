"""`python -m tests.fleet_worker`: a worker process whose jobs take as long as it is told.

Everything but the work is real: Celery, leases, heartbeats, reports, the way in which it leaves.
"""

import argparse
import os
import time
from pathlib import Path

from offbeat.contracts.jobs import JobKind, JobOutput, WorkerRole
from offbeat.departure import Departure
from offbeat.errors import WorkerError
from offbeat.logs import configure_logs
from offbeat.presence import Presence
from offbeat.queue import create_celery
from offbeat.settings import QueueSettings, WorkerSettings
from offbeat.worker import JobContext, JobRunner, consume, worker_identity
from offbeat.worker_api import OrchestratorClient
from tests.plausible import plausible_output

CHECK_S = 0.02


def main() -> None:
    """Work until told to stop."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--role", type=WorkerRole, required=True)
    parser.add_argument("--job-s", type=float, default=0.0)
    parser.add_argument("--until", type=Path, help="or until this file is there")
    parser.add_argument("--fails", action="store_true")
    parser.add_argument("--deaf", action="store_true", help="never look whether the job is lost")
    options = parser.parse_args()
    settings = WorkerSettings()
    configure_logs(settings, options.role)
    worker_id = worker_identity(settings, options.role)
    orchestrator = OrchestratorClient(settings.orchestrator_url, settings.worker_token)

    def work(context: JobContext) -> JobOutput:
        deadline = time.monotonic() + options.job_s
        while time.monotonic() < deadline and not (options.until and options.until.exists()):
            time.sleep(CHECK_S)
            if not options.deaf:
                context.check()
        if options.fails:
            raise WorkerError("the disk of this worker is full")
        return plausible_output(context.lease)

    runner = JobRunner(orchestrator, worker_id, dict.fromkeys(JobKind, work))
    presence = Presence(orchestrator, worker_id, options.role, settings.pool, f"pid {os.getpid()}")
    presence.start()
    departure = Departure(runner, presence, settings.grace_s)
    app = create_celery(QueueSettings(), worker_id)
    consume(app, runner, options.role, settings.pool, departure.begin)
    presence.stop()


if __name__ == "__main__":
    main()
