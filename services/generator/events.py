"""What a generator adds to a run's log."""

from collections.abc import Callable
from typing import Literal

import structlog

from offbeat.contracts.leases import WorkerEvent
from offbeat.errors import OffbeatError

log = structlog.get_logger(__name__)

MESSAGE_CHARS_MAX = 4000


class Events:
    """Posts events in the name of this worker. One that cannot be delivered is only logged."""

    def __init__(self, send: Callable[[str, WorkerEvent], None], worker_id: str) -> None:
        self._send = send
        self._worker_id = worker_id

    def post(
        self,
        run_id: str,
        kind: Literal["version_served", "canary_failed", "reward_failed"],
        message: str,
        data: dict[str, str | int | float | bool | None],
    ) -> None:
        """Add to the log of the run."""
        event = WorkerEvent(
            kind=kind, worker_id=self._worker_id, message=message[:MESSAGE_CHARS_MAX], data=data
        )
        try:
            self._send(run_id, event)
        except OffbeatError as error:
            log.warning("An event was not delivered.", event_kind=kind, error=error.detail)
