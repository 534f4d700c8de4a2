"""HTTP connections that nobody can hold open by sending slowly, or fill with headers, which uvicorn
itself allows."""

import asyncio
import resource
from enum import Enum, auto
from typing import ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

PATIENCE_S = 20.0
"""For the headers of a request, and for the rest of a body that was refused."""
HEAD_BYTES_MAX = 16 * 2**10
"""Of a request's first line and headers."""
CONNECTIONS_MAX = 8192
"""At once, of one process: 1,000 workers with a few each, and everybody who watches. A request on
one more gets 503."""
OTHER_FILES = 512
"""Descriptors left for everything else: the database, the store, files that are sent."""


def connections_max() -> int:
    """How many connections this process may have, after it has allowed itself as many files as the
    machine lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = CONNECTIONS_MAX + OTHER_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return max(1, wanted - OTHER_FILES)


class Sending(Enum):
    """What the client sends, or is to send next."""

    HEAD = auto()
    BODY = auto()


class BoundedConnection(HttpToolsProtocol):
    """uvicorn's HTTP/1.1, with a limit on the times at which only the client can go on."""

    patience_s: ClassVar[float] = PATIENCE_S
    _end: asyncio.TimerHandle | None = None
    _sending = Sending.HEAD
    _head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] - as uvicorn's own
        """A client is there."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """The client has sent something."""
        if self._sending is Sending.HEAD:
            self._head_bytes += len(data)
        super().data_received(data)
        too_large = self._sending is Sending.HEAD and self._head_bytes > HEAD_BYTES_MAX
        if too_large and not self.transport.is_closing():
            self.send_400_response(f"The headers are larger than {HEAD_BYTES_MAX} bytes.")
        self._watch()

    def on_headers_complete(self) -> None:
        """The head of a request is there."""
        self._sending, self._head_bytes = Sending.BODY, 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """All of a request is there."""
        self._sending = Sending.HEAD
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """The answer is sent."""
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        self._stop()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Start to count when the client's turn begins, stop when it ends."""
        if not self._is_clients_turn():
            self._stop()
        elif self._end is None:
            self._end = self.loop.call_later(self.patience_s, self.transport.abort)

    def _is_clients_turn(self) -> bool:
        if self._sending is Sending.BODY:
            return self.cycle.response_complete
        # An answer is made, or is complete and uvicorn counts by itself.
        is_answering = self.cycle is not None and not self.cycle.response_complete
        return not is_answering and self.timeout_keep_alive_task is None

    def _stop(self) -> None:
        if self._end is not None:
            self._end.cancel()
            self._end = None
