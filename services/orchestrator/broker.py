"""The broker as the scheduler sees it: send a message, and how many wait."""

from typing import Protocol

from celery import Celery
from kombu.exceptions import OperationalError

from offbeat.contracts.jobs import JobKind, JobMessage, WorkerRole
from offbeat.queue import enqueue, queue_name


class Broker(Protocol):
    """Raises kombu's `OperationalError` when it cannot be reached."""

    def send(self, kind: JobKind, pool: str, message: JobMessage) -> None:
        """Put a message on the queue of the kind's role."""
        ...

    def depth(self, role: WorkerRole, pool: str) -> int:
        """Messages that no worker has taken."""
        ...


class CeleryBroker:
    """Celery over Redis."""

    def __init__(self, app: Celery) -> None:
        self._app = app

    def send(self, kind: JobKind, pool: str, message: JobMessage) -> None:
        """See `Broker.send`."""
        enqueue(self._app, kind, pool, message)

    def depth(self, role: WorkerRole, pool: str) -> int:
        """See `Broker.depth`. Kombu keeps a queue as a Redis list of the same name."""
        with self._app.connection_or_acquire() as connection:
            try:
                with connection.channel() as channel:
                    return int(channel._size(queue_name(role, pool)))
            except connection.connection_errors as error:
                # Kombu translates the transport's errors in its own calls, and this is none.
                raise OperationalError(str(error)) from error
