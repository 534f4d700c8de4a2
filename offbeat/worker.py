"""One job, from the queue's message to the accepted completion: what generators and trainers share.

    message -> lease -> handler (heartbeat beside it) -> complete | fail -> acknowledge

A handler may leave the hand-in of its result for later; it then runs beside the next job. Whatever
happens, the message is acknowledged in the end: a job that has to run again comes back under a new
attempt from the orchestrator, never from the broker's memory.
"""

import contextvars
import os
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import structlog
from celery import Celery
from celery.signals import setup_logging, worker_shutting_down
from celery.worker.request import Request
from kombu.transport.virtual import QoS

from offbeat.contracts.jobs import JobKind, JobMessage, JobOutput, WorkerRole
from offbeat.contracts.leases import (
    CompleteRequest,
    FailRequest,
    HeartbeatRequest,
    Lease,
    LeaseRequest,
    ReleaseRequest,
)
from offbeat.errors import (
    ConflictError,
    HeldBackError,
    InvalidRequestError,
    LeaseLostError,
    NotFoundError,
    OffbeatError,
    OutageError,
    PermanentJobError,
)
from offbeat.queue import TASK_NAME, queue_name
from offbeat.settings import WorkerSettings
from offbeat.worker_api import OrchestratorClient

log = structlog.get_logger(__name__)

T = TypeVar("T")

MESSAGE_CHARS_MAX = 4000
OUTAGE_PAUSE_S = 15.0
"""How long a worker takes no job after one that ended in an outage, which had waited for a minute
already: the next one would need the same."""


class JobContext:
    """What a handler may know of its lease, and how it notices that it lost it."""

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.progress = 0.0
        self.computed = False
        self.waiting_rollouts = lease.waiting_rollouts
        self._lost = threading.Event()

    @property
    def lost(self) -> bool:
        """Whether the job was taken away."""
        return self._lost.is_set()

    def revoke(self) -> None:
        """Called by the heartbeat when the orchestrator takes the job away."""
        self._lost.set()

    def check(self) -> None:
        """Raise `LeaseLostError` once the job was taken away: call it between units of work."""
        if self.lost:
            raise LeaseLostError(f"job {self.lease.job_id} was taken from this worker")


@dataclass(frozen=True)
class HandIn:
    """What is left of a job once all is computed: to wait for the network, until the result."""

    finish: Callable[[], JobOutput]


Handler = Callable[[JobContext], JobOutput | HandIn]


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
        self._leaving = threading.Event()
        self._held: set[JobContext] = set()
        """The jobs that the worker has a lease on."""
        self._hand_ins = ThreadPoolExecutor(1, thread_name_prefix="hand-in")
        self._handing_in: Future[None] | None = None

    def close(self) -> None:
        """Wait for the hand-in under way."""
        self._hand_ins.shutdown()

    @property
    def leaving(self) -> bool:
        """Whether it takes no more jobs."""
        return self._leaving.is_set()

    def take_no_more(self) -> None:
        """Give every further message back; the jobs that are held go on."""
        self._leaving.set()

    def hand_back(self) -> None:
        """Stop working on what is held, and let other workers do it."""
        for context in tuple(self._held):
            context.revoke()
            self._release(context.lease.job_id, context.lease.attempt)

    def _release(self, job_id: str, attempt: int) -> None:
        request = ReleaseRequest(attempt=attempt, worker_id=self.worker_id)
        try:
            self.orchestrator.release(job_id, request)
            log.info("Handed a job back.", job=job_id)
        except OffbeatError as error:
            log.warning("A job could not be handed back.", job=job_id, error=error.detail)

    def run(self, message: JobMessage) -> None:
        """Lease, work, report. Raises nothing that another delivery of the message could mend."""
        if self.leaving:
            self._release(message.job_id, message.attempt)
            return
        try:
            request = LeaseRequest(attempt=message.attempt, worker_id=self.worker_id)
            lease = self.orchestrator.lease(message.job_id, request)
        except (ConflictError, NotFoundError) as refusal:
            log.info("Dropped a message.", job=message.job_id, reason=refusal.detail)
            return
        except HeldBackError as delay:
            log.info("Gets no job for now.", reason=delay.detail)
            # The worker takes one message at a time, so it takes none while this one waits.
            self._leaving.wait(delay.retry_after_s)
            return
        except OffbeatError as error:
            log.warning("Could not lease a job.", job=message.job_id, error=error.detail)
            return
        with structlog.contextvars.bound_contextvars(
            run=lease.run_id, job=lease.job_id, attempt=lease.attempt, kind=lease.input.kind
        ):
            self._work(JobContext(lease))

    def _work(self, context: JobContext) -> None:
        finished = threading.Event()
        self._held.add(context)
        name = f"heartbeat-{context.lease.job_id}"
        threading.Thread(target=self._keep_lease, args=(context, finished), name=name).start()
        handler = self.handlers[JobKind(context.lease.input.kind)]
        result = self._attempt(context, lambda: handler(context))
        if isinstance(result, HandIn):
            self._hand_in_later(context, result, finished)
            return
        finished.set()
        if result is not None:
            self._report_result(context.lease, result)
        self._held.discard(context)

    def _attempt(self, context: JobContext, work: Callable[[], T]) -> T | None:
        """The result of the work; None where it failed, or the lease is lost."""
        try:
            result = work()
            context.check()
        except LeaseLostError:
            log.info("Stopped: the job was taken away.")
            return None
        except Exception as error:  # noqa: BLE001 - a job may fail, its worker may not
            self._report_failure(context.lease, error)
            return None
        return result

    def _hand_in_later(
        self, context: JobContext, hand_in: HandIn, finished: threading.Event
    ) -> None:
        """Hand the result in beside the next job, once the one before has been handed in."""

        def work() -> None:
            output = self._attempt(context, hand_in.finish)
            finished.set()
            if output is not None:
                self._report_result(context.lease, output)
            self._held.discard(context)

        if self._handing_in is not None:
            self._handing_in.result()
        context.computed = True
        self._beat(context)
        self._handing_in = self._hand_ins.submit(contextvars.copy_context().run, work)

    def _keep_lease(self, context: JobContext, finished: threading.Event) -> None:
        while not finished.wait(context.lease.heartbeat_interval_s) and not context.lost:
            self._beat(context)

    def _beat(self, context: JobContext) -> None:
        lease = context.lease
        request = HeartbeatRequest(
            attempt=lease.attempt,
            worker_id=self.worker_id,
            progress=context.progress,
            computed=context.computed,
        )
        try:
            reply = self.orchestrator.heartbeat(lease.job_id, request)
            context.waiting_rollouts = reply.waiting_rollouts
        except (ConflictError, NotFoundError):
            context.revoke()
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
            outage=isinstance(error, OutageError),
        )
        try:
            self.orchestrator.fail(lease.job_id, request)
        except OffbeatError as unreported:
            log.warning("The failure could not be reported.", error=unreported.detail)
        if request.outage:
            self._leaving.wait(OUTAGE_PAUSE_S)


def worker_identity(settings: WorkerSettings, role: WorkerRole) -> str:
    """The configured name, or one that is unique to this process."""
    return settings.worker_id or f"{role}-{socket.gethostname()}-{os.getpid()}"


def _leave_logs_alone(**_: object) -> None:
    """Celery configures logging, and the root logger's level, unless this signal has a listener."""


class JobRequest(Request):
    """A message whose acknowledgement may fail with the connection to the broker.

    Kombu then counts it as under way for ever, takes no other one, and so never notices that the
    connection is gone. Here it counts as done; the broker delivers it once more, for nothing.
    """

    def acknowledge(self) -> None:
        """Acknowledge it to the broker, and in any case to this process."""
        super().acknowledge()
        QoS.ack(self.message.channel.qos, self.message.delivery_tag)


def consume(
    app: Celery,
    runner: JobRunner,
    role: WorkerRole,
    pool: str,
    on_stop: Callable[..., None],
) -> None:
    """Serve the queue of this role and pool until the process is told to stop.

    `on_stop` is then called, within the signal handler; the task under way goes on.

    The pool is a thread: a forked child could not use CUDA (vllm#12754), nor the model of its
    parent.
    """

    setup_logging.connect(_leave_logs_alone, weak=False)
    worker_shutting_down.connect(on_stop, weak=False)

    @app.task(name=TASK_NAME, Request=JobRequest)
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
    runner.close()
