"""Requests of a whole fleet, written down together.

What comes while a transaction is under way waits for the next one, which takes a hundred of those
that wait. So what a few workers say is written at once, and what a thousand say costs a few
transactions a second and no thread each.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from anyio.to_thread import run_sync

from offbeat.errors import OffbeatError

T = TypeVar("T")
R = TypeVar("R")
Write = Callable[[Sequence[T]], Sequence[R | OffbeatError]]
"""Takes what waits, in the order in which it came, in one transaction; an answer or an error to
each."""


BATCH_MAX = 100
"""Requests written in one transaction, so that all others wait for some ten milliseconds."""


class Batches(Generic[T, R]):
    """What of one kind is not written yet. Belongs to one event loop."""

    def __init__(self) -> None:
        self._waiting: list[T] = []
        """Those that share the newest batch."""
        self._next: asyncio.Task[Sequence[R | OffbeatError]] | None = None
        """Writes that batch, once those before it are written; none where it has begun."""
        self._writing = asyncio.Lock()

    async def add(self, item: T, write: Write[T, R]) -> R:
        """Return when the item is written: the answer to it. Raises the error to it, or what its
        transaction raises."""
        if self._next is None or len(self._waiting) == BATCH_MAX:
            self._waiting = []
            self._next = asyncio.create_task(self._write(self._waiting, write))
        place = len(self._waiting)
        self._waiting.append(item)
        # Whoever hangs up must not take the transaction from the others.
        answers = await asyncio.shield(self._next)
        answer = answers[place]
        if isinstance(answer, OffbeatError):
            raise answer
        return answer

    async def _write(self, batch: list[T], write: Write[T, R]) -> Sequence[R | OffbeatError]:
        async with self._writing:
            if batch is self._waiting:
                self._next = None
            return await run_sync(write, batch)
