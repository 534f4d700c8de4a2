"""How much of request bodies a service takes in: bytes of one, time for one, bytes of all at once.

Without these bounds a client could fill the memory of a service before its key is even looked at.
"""

import anyio
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

BODY_BYTES_MAX = 16 * 2**20
"""Largest request body: an inline data set of 1,000 rows fits, a tensor does not."""
BODY_TIMEOUT_S = 60.0
"""For a whole body: the largest then needs 280 KB/s, all others are a few KB."""
HELD_BYTES_MAX = 8 * BODY_BYTES_MAX
"""Of all bodies that are being read or answered: what they are parsed to takes several times as
much."""


class BodyLimit:
    """ASGI middleware that refuses a body past the bounds, as it is declared or as it comes."""

    def __init__(
        self,
        app: ASGIApp,
        bytes_max: int = BODY_BYTES_MAX,
        timeout_s: float = BODY_TIMEOUT_S,
        held_bytes_max: int = HELD_BYTES_MAX,
    ) -> None:
        self.app = app
        self.bytes_max = bytes_max
        self.timeout_s = timeout_s
        self.held_bytes_max = held_bytes_max
        self._held_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count the body while it is read."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "0")
        deadline = anyio.current_time() + self.timeout_s
        seen, is_whole = 0, False

        async def counted() -> Message:
            nonlocal seen, is_whole
            if is_whole:
                return await receive()  # the client's departure, which may take any time
            self._check(int(declared))
            message: Message | None = None
            with anyio.CancelScope(deadline=deadline):
                message = await receive()
            if message is None:
                raise HTTPException(
                    408, f"the body was not whole after {self.timeout_s:g} s: send it faster"
                )
            num_bytes = len(message.get("body", b""))
            seen += num_bytes
            self._held_bytes += num_bytes
            is_whole = not message.get("more_body", False)
            self._check(seen)
            return message

        try:
            await self.app(scope, counted, send)
        finally:
            self._held_bytes -= seen

    def _check(self, num_bytes: int) -> None:
        if num_bytes > self.bytes_max:
            raise HTTPException(
                413,
                f"the body is larger than {self.bytes_max} bytes: send less, or put data in the "
                "object store and send its address",
            )
        if self._held_bytes > self.held_bytes_max:
            raise HTTPException(
                503,
                "the service reads too many large bodies already: try again in a moment",
                {"retry-after": "1"},
            )
