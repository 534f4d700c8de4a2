"""A turn from the question to the last piece of its answer, for one connection of a client.

    job row -> chat lane -> pieces from Redis -> the client

Whoever stops reading ends the turn: the stream is deleted, and the generator stops within a step.
Nothing here blocks the event loop; SQL runs in threads.
"""

from collections.abc import AsyncGenerator, AsyncIterator

import structlog
from anyio import CancelScope, move_on_after
from anyio.to_thread import run_sync

from offbeat.chat_channel import BEGINNING
from offbeat.contracts.chat import (
    ChatFailed,
    ChatFinished,
    ChatInput,
    ChatPiece,
    ChatStarted,
    ChatText,
)
from offbeat.errors import InvalidRequestError, UnavailableError
from services.orchestrator.access import Caller, check_run
from services.orchestrator.chats import Asked, begin, check_answering, give_up
from services.orchestrator.dependencies import Services
from services.orchestrator.store import lock_run

log = structlog.get_logger(__name__)

READ_WAIT_S = 2.0
"""Silence after which the turn's job is looked at."""
LEAVE_TIMEOUT_S = 10.0
"""How long the end of a turn may take."""

AnswerPiece = ChatStarted | ChatText | ChatFinished


async def answer(
    services: Services, caller: Caller, run_id: str, question: ChatInput
) -> AsyncGenerator[AnswerPiece, None]:
    """The pieces of the answer: a beginning, text, an end. Closing the iterator ends the turn.

    Raises `NotFoundError`, `RateLimitedError` or `InvalidRequestError` for a question that gets no
    answer, and `UnavailableError` for an answer that does not come or breaks off.
    """
    asked = await run_sync(_begin, services, caller, run_id, question)
    is_over = False
    try:
        await services.chats.ask(asked.message, asked.pool)
        async for piece in _pieces(services, asked):
            is_over = isinstance(piece, ChatFinished | ChatFailed)
            if isinstance(piece, ChatFailed):
                error = InvalidRequestError if piece.is_mistake else UnavailableError
                raise error(piece.message)
            yield piece
            if is_over:
                return
    finally:
        with CancelScope(shield=True), move_on_after(LEAVE_TIMEOUT_S):
            await _leave(services, asked, is_over=is_over)


def _begin(services: Services, caller: Caller, run_id: str, question: ChatInput) -> Asked:
    with services.store.write() as session:
        check_run(session, caller, run_id)
        return begin(session, lock_run(session, run_id), question, services.clock())


async def _pieces(services: Services, asked: Asked) -> AsyncIterator[ChatPiece]:
    """Everything that is said. `UnavailableError` once it is sure that nothing more will be."""
    last = BEGINNING
    is_started, is_done = False, False
    while True:
        pieces, last = await services.chats.read(asked.job_id, last, READ_WAIT_S)
        for piece in pieces:
            if is_started and isinstance(piece, ChatStarted):
                raise UnavailableError("the generator left before the answer's end: ask again")
            is_started = is_started or isinstance(piece, ChatStarted)
            yield piece
        if not pieces and is_done:
            raise UnavailableError("the end of the answer was lost: ask again")
        if not pieces:
            is_done = not await run_sync(_is_answering, services, asked)


def _is_answering(services: Services, asked: Asked) -> bool:
    with services.store.read() as session:
        return check_answering(session, asked, services.clock())


async def _leave(services: Services, asked: Asked, *, is_over: bool) -> None:
    try:
        await services.chats.leave(asked.job_id)
    except UnavailableError as error:
        log.warning("An answer's stream is left to expire.", job=asked.job_id, error=error.detail)
    if not is_over:
        await run_sync(_give_up, services, asked)


def _give_up(services: Services, asked: Asked) -> None:
    with services.store.write() as session:
        give_up(session, asked.job_id, services.clock())
