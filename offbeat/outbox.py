"""What a worker saw, on its way to the logs of runs: it goes with the worker's next report.

So a fleet in which every generator serves every version makes no request for that, and what is
seen while the orchestrator is away is told when it is back.
"""

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import structlog

from offbeat.contracts.leases import EVENT_AGE_S_MAX, REPORT_EVENTS_MAX, WorkerEvent
from offbeat.errors import UnavailableError

log = structlog.get_logger(__name__)

WAITING_MAX = 1000
"""Beyond that the oldest are given up: an hour of a busy generator."""
ROUTINE_KINDS = frozenset({"version_served"})
"""Nobody waits for these; all others are reported at once."""


class Outbox:
    """Events that no report has delivered. Every method may be called from any thread."""

    def __init__(self) -> None:
        self.due = threading.Event()
        """Set when the next report should not wait."""
        self._lock = threading.Lock()
        self._waiting: deque[tuple[float, WorkerEvent]] = deque()
        """With the moments at which they came."""

    def add(self, event: WorkerEvent) -> None:
        """Have the next report tell it."""
        with self._lock:
            self._waiting.append((time.monotonic(), event))
            self._give_up_oldest()
        if event.kind not in ROUTINE_KINDS:
            self.due.set()

    @contextmanager
    def sending(self) -> Iterator[tuple[WorkerEvent, ...]]:
        """The oldest events, for one report. They wait for another one where the block raises
        `UnavailableError`, and are gone in any other case."""
        with self._lock:
            count = min(len(self._waiting), REPORT_EVENTS_MAX)
            taken = [self._waiting.popleft() for _ in range(count)]
        now = time.monotonic()
        try:
            yield tuple(
                event.model_copy(update={"age_s": min(now - at, EVENT_AGE_S_MAX)})
                for at, event in taken
            )
        except UnavailableError:
            with self._lock:
                self._waiting.extendleft(reversed(taken))
                self._give_up_oldest()
            raise
        if self._waiting:
            self.due.set()

    def _give_up_oldest(self) -> None:
        while len(self._waiting) > WAITING_MAX:
            _, event = self._waiting.popleft()
            log.warning("An event was not delivered.", run=event.run_id, text=event.message)
