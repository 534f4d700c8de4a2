"""Streams of events that stay open: how many there may be, and how long a reader may not read."""

from dataclasses import dataclass, field

import structlog
from sse_starlette import EventSourceResponse
from sse_starlette.sse import ContentStream, SendTimeoutError
from starlette.types import Receive, Scope, Send

from offbeat.errors import UnavailableError

log = structlog.get_logger(__name__)

STREAMS_MAX = 1000
"""Of one replica. Each that follows a run looks into the database twice a second."""
UNREAD_TIMEOUT_S = 30.0
"""How long an event may wait for its reader: a sleeping laptop comes back with `Last-Event-ID`."""


@dataclass(kw_only=True)
class LiveStreams:
    """Those that are open in this process. Belongs to one event loop."""

    streams_max: int = STREAMS_MAX
    num_open: int = field(default=0, init=False)

    def check(self) -> None:
        """Raise `UnavailableError` where there is no room for one more."""
        if self.num_open >= self.streams_max:
            raise UnavailableError(
                f"{self.streams_max} streams are open already: read pages, try again later, or add "
                "a replica"
            )


class LiveStream(EventSourceResponse):
    """A stream of events, counted while it is open."""

    def __init__(
        self, streams: LiveStreams, content: ContentStream, *, sep: str | None = None
    ) -> None:
        super().__init__(content, sep=sep, send_timeout=UNREAD_TIMEOUT_S)
        self._streams = streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until there are no more, or nobody reads them."""
        self._streams.num_open += 1
        try:
            await super().__call__(scope, receive, send)
        except SendTimeoutError:
            log.info("A stream ended, since nobody read it.", path=scope["path"])
        finally:
            self._streams.num_open -= 1
