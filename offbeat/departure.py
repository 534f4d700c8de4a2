"""How a worker leaves: it takes no more jobs, finishes what it can in time, hands the rest back.

    SIGTERM or SIGINT -> no more jobs, the orchestrator is told
                      -> after `grace_s` the jobs that are left are handed back
                      -> the process ends with 0, at the latest `EXIT_MARGIN_S` later

Celery's warm shutdown does the first part: it stops the consumer and waits for the task under way.
It would wait for ever, and its other ways out would lose the job until its lease expires; so the
bound is here. A second signal ends the process at once.
"""

import os
import signal
import threading
import time
from types import FrameType

import structlog

from offbeat.presence import Presence
from offbeat.worker import JobRunner

log = structlog.get_logger(__name__)

EXIT_MARGIN_S = 4.0
"""For a handler to notice that its job was handed back, and for the engine to close. With the
default grace it fits into the 30 s that Kubernetes gives."""


class Departure:
    """The end of one worker process."""

    def __init__(self, runner: JobRunner, presence: Presence, grace_s: float) -> None:
        self._runner = runner
        self._presence = presence
        self._grace_s = grace_s

    def begin(self, **_: object) -> None:
        """Leave. It runs inside a signal handler, so everything that may wait has a thread."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _end_now)
        self._runner.take_no_more()
        for step in (self._presence.leave, self._hand_back_in_time, self._exit_in_time):
            threading.Thread(target=step, name=f"departure-{step.__name__}", daemon=True).start()

    def _hand_back_in_time(self) -> None:
        time.sleep(self._grace_s)
        self._runner.hand_back()

    def _exit_in_time(self) -> None:
        time.sleep(self._grace_s + EXIT_MARGIN_S)
        log.warning("A job that was handed back did not stop; the process ends without it.")
        os._exit(os.EX_OK)


def _end_now(number: int, _: FrameType | None) -> None:
    """No clean-up: a thread that computes would hold it up."""
    os._exit(128 + number)
