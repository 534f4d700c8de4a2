"""One job, from the queue's message to the accepted completion: what generators and trainers share.

    message -> lease -> handler (heartbeat beside it) -> complete | fail -> acknowledge

Whatever happens, the message is acknowledged in the end: a job that has to run again comes back
under a new attempt from the orchestrator, never from the broker's memory.
"""

import os
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

import structlog
from celery import Celery
from celery.signals import setup_logging

from offbeat.contracts.jobs import JobKind, JobMessage, JobOutput, WorkerRole
from offbeat.contracts.leases import (
    CompleteRequest,
    FailRequest,
    HeartbeatRequest,
    Lease,
    LeaseRequest,
    ServedVersion,
    WorkerReport,
)
from offbeat.errors import (
    ConflictError,
    InvalidRequestError,
    LeaseLostError,
    NotFoundError,
    OffbeatError,
    PermanentJobError,
    UnavailableError,
)
from offbeat.queue import TASK_NAME, queue_name
from offbeat.settings import WorkerSettings
from offbeat.worker_api import OrchestratorClient

log = structlog.get_logger(__name__)

REPORT_INTERVAL_S = 5.0
MESSAGE_CHARS_MAX = 4000


class JobContext:
    """What a handler may know of its lease, and how it notices that it lost it."""

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.progress = 0.0
        self._lost = threading.Event()

    def revoke(self) -> None:
        """Called by the heartbeat when the orchestrator takes the job away."""
        self._lost.set()

    def check(self) -> None:
        """Raise `LeaseLostError` once the job was taken away: call it between units of work."""
        if self._lost.is_set():
            raise LeaseLostError(f"job {self.lease.job_id} was taken from this worker")


Handler = Callable[[JobContext], JobOutput]


class JobRunner:
    """Runs the jobs that the messages of one worker name."""

    def __init__(
        self,
        orchestrator: OrchestratorClient,
        worker_id: str,
        handlers: Mapping[JobKind, Handler],
    ) -> None:
        self.orchestrator = orchestrator
        self.worker_id = worker_id
        self.handlers = handlers

    def run(self, message: JobMessage) -> None:
        """Lease, work, report. Raises nothing that another delivery of the message could mend."""
        try:
            request = LeaseRequest(attempt=message.attempt, worker_id=self.worker_id)
            lease = self.orchestrator.lease(message.job_id, request)
        except (ConflictError, NotFoundError) as refusal:
            log.info("Dropped a message.", job=message.job_id, reason=refusal.detail)
            return
        except OffbeatError as error:
            log.warning("Could not lease a job.", job=message.job_id, error=error.detail)
            return
        with structlog.contextvars.bound_contextvars(
            run=lease.run_id, job=lease.job_id, attempt=lease.attempt, kind=lease.input.kind
        ):
            self._work(JobContext(lease))

    def _work(self, context: JobContext) -> None:
        lease = context.lease
        finished = threading.Event()
        with ThreadPoolExecutor(1, thread_name_prefix="heartbeat") as pool:
            pool.submit(self._keep_lease, context, finished)
            try:
                output = self.handlers[JobKind(lease.input.kind)](context)
                context.check()
            except LeaseLostError:
                log.info("Stopped: the job was taken away.")
                return
            except Exception as error:  # noqa: BLE001 - a job may fail, its worker may not
                self._report_failure(lease, error)
                return
            finally:
                finished.set()
        self._report_result(lease, output)

    def _keep_lease(self, context: JobContext, finished: threading.Event) -> None:
        lease = context.lease
        while not finished.wait(lease.heartbeat_interval_s):
            request = HeartbeatRequest(
                attempt=lease.attempt, worker_id=self.worker_id, progress=context.progress
            )
            try:
                self.orchestrator.heartbeat(lease.job_id, request)
            except (ConflictError, NotFoundError):
                context.revoke()
                return
            except OffbeatError as error:
                log.warning("A heartbeat did not arrive.", error=error.detail)

    def _report_result(self, lease: Lease, output: JobOutput) -> None:
        request = CompleteRequest(attempt=lease.attempt, worker_id=self.worker_id, output=output)
        try:
            self.orchestrator.complete(lease.job_id, request)
        except ConflictError as refusal:
            log.info("The result came too late and was dropped.", reason=refusal.detail)
        except OffbeatError as error:
            log.error("The result could not be handed in.", error=error.detail)

    def _report_failure(self, lease: Lease, error: Exception) -> None:
        permanent = isinstance(error, PermanentJobError | InvalidRequestError)
        expected = isinstance(error, OffbeatError)
        log.error("The job failed.", error=str(error), exc_info=None if expected else error)
        message = error.detail if isinstance(error, OffbeatError) else repr(error)
        request = FailRequest(
            attempt=lease.attempt,
            worker_id=self.worker_id,
            message=message[:MESSAGE_CHARS_MAX],
            permanent=permanent,
        )
        try:
            self.orchestrator.fail(lease.job_id, request)
        except OffbeatError as unreported:
            log.warning("The failure could not be reported.", error=unreported.detail)


class Presence:
    """Tells the orchestrator every few seconds that the worker lives, also while it is idle."""

    def __init__(
        self,
        orchestrator: OrchestratorClient,
        worker_id: str,
        role: WorkerRole,
        pool: str,
        engine: str,
        serving: Callable[[], tuple[ServedVersion, ...]] = tuple,
    ) -> None:
        self._orchestrator = orchestrator
        self._worker_id = worker_id
        self._role = role
        self._pool = pool
        self._engine = engine
        self._serving = serving
        self._started_at = datetime.now(UTC)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="presence", daemon=True)

    def start(self) -> None:
        """Report now and then for ever, in a thread of its own."""
        self._thread.start()

    def stop(self) -> None:
        """Stop reporting."""
        self._stopping.set()
        self._thread.join(timeout=REPORT_INTERVAL_S)

    def _loop(self) -> None:
        while True:
            try:
                self._orchestrator.report(self._worker_id, self._report())
            except UnavailableError as error:
                log.debug("The orchestrator does not answer yet.", error=error.detail)
            except OffbeatError as error:
                log.warning("The worker's report was refused.", error=error.detail)
            if self._stopping.wait(REPORT_INTERVAL_S):
                return

    def _report(self) -> WorkerReport:
        return WorkerReport(
            role=self._role,
            pool=self._pool,
            engine=self._engine,
            host=socket.gethostname(),
            pid=os.getpid(),
            started_at=self._started_at,
            serving=self._serving(),
        )


def worker_identity(settings: WorkerSettings, role: WorkerRole) -> str:
    """The configured name, or one that is unique to this process."""
    return settings.worker_id or f"{role}-{socket.gethostname()}-{os.getpid()}"


def _leave_logs_alone(**_: object) -> None:
    """Celery configures logging, and the root logger's level, unless this signal has a listener."""


def consume(app: Celery, runner: JobRunner, role: WorkerRole, pool: str) -> None:
    """Serve the queue of this role and pool until the process is told to stop.

    The pool is a thread: a forked child could not use CUDA (vllm#12754), nor the model of its
    parent.
    """

    setup_logging.connect(_leave_logs_alone, weak=False)

    @app.task(name=TASK_NAME)
    def run_job(job_id: str, attempt: int) -> None:
        runner.run(JobMessage(job_id=job_id, attempt=attempt))

    app.worker_main(
        [
            "--quiet",
            "worker",
            "--pool=threads",
            "--concurrency=1",
            f"--queues={queue_name(role, pool)}",
            f"--hostname={runner.worker_id}",
            "--without-gossip",
            "--without-mingle",
        ]
    )
