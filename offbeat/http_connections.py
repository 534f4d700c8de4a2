"""HTTP connections that nobody can hold open by sending slowly, which uvicorn itself allows."""

import asyncio
import resource
from typing import ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

PATIENCE_S = 20.0
"""For the headers of a request, and for the rest of a body that was refused."""
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


class BoundedConnection(H11Protocol):
    """uvicorn's HTTP/1.1, with a limit on the times at which only the client can go on."""

    patience_s: ClassVar[float] = PATIENCE_S
    _end: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] - as uvicorn's own
        """A client is there."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """The client has sent something."""
        super().data_received(data)
        self._watch()

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
        if self.conn.their_state is h11.IDLE:  # between two requests, uvicorn counts by itself
            return self.timeout_keep_alive_task is None
        is_answered = self.cycle is not None and self.cycle.response_complete
        return is_answered and self.conn.their_state is h11.SEND_BODY

    def _stop(self) -> None:
        if self._end is not None:
            self._end.cancel()
            self._end = None
