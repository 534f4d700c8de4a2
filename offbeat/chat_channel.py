"""How chat turns travel through Redis: questions to generators, answers back, nothing kept.

    chat.<pool>      list     turns that wait for a generator, oldest at the right
    answer:<job>     stream   the pieces of one answer

The stream exists as long as somebody listens: the listener makes it, keeps it from expiring and
deletes it, and a speaker that finds it gone stops. So one key carries the answer, the client's
disconnection and the death of the listener. What a turn is lies in SQL, as with every job.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from pydantic import TypeAdapter
from redis import Redis
from redis.asyncio import Redis as AsyncRedis
from redis.exceptions import RedisError

from offbeat.contracts.chat import CHAT_TOKENS_MAX, ChatPiece
from offbeat.contracts.jobs import JobMessage
from offbeat.errors import UnavailableError
from offbeat.queue import redis_tls
from offbeat.settings import QueueSettings

LISTENER_LOST_S = 30
"""A listener that did not read for so long is gone, and its stream with it."""
QUESTION_LOST_S = 120
"""A question that nobody took for so long has been given up long ago."""
PIECES_MAX = CHAT_TOKENS_MAX + 16
"""Entries of a stream: no more than a piece a token, a beginning and an end."""
PIECES_PER_READ = 256
CONNECT_TIMEOUT_S = 5.0
SOCKET_TIMEOUT_S = 15.0
"""Beyond any wait that Redis is asked for here."""

PIECE: TypeAdapter[ChatPiece] = TypeAdapter(ChatPiece)
FIELD = b"piece"
BEGINNING = "0-1"
"""The id of a stream's first entry, which only makes the stream."""


class ChatListener:
    """The side of the orchestrator. It belongs to one event loop."""

    def __init__(self, settings: QueueSettings) -> None:
        url = settings.redis_url.get_secret_value()
        self._redis = AsyncRedis.from_url(url, **_options(settings))

    async def ask(self, message: JobMessage, pool: str) -> None:
        """Begin to listen, then offer the turn to the pool's generators."""
        stream, questions = _stream(message.job_id), _questions(pool)
        with _redis_errors():
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.xadd(stream, {FIELD: b""}, id=BEGINNING)
                pipe.expire(stream, LISTENER_LOST_S)
                pipe.lpush(questions, message.model_dump_json())
                pipe.expire(questions, QUESTION_LOST_S)
                await pipe.execute()

    async def read(self, job_id: str, after: str, wait_s: float) -> tuple[list[ChatPiece], str]:
        """The pieces after an entry, and the id of the last one; none when `wait_s` has passed.

        `UnavailableError` where the stream is lost.
        """
        stream = _stream(job_id)
        with _redis_errors():
            if not await self._redis.expire(stream, LISTENER_LOST_S):
                raise UnavailableError("Redis lost the answer: ask again")
            found = cast(
                list[tuple[bytes, list[tuple[bytes, dict[bytes, bytes]]]]],
                await self._redis.xread(
                    {stream: after}, count=PIECES_PER_READ, block=round(wait_s * 1000)
                ),
            )
        if not found:
            return [], after
        ((_, entries),) = found
        pieces = [PIECE.validate_json(fields[FIELD]) for _, fields in entries]
        return pieces, entries[-1][0].decode()

    async def leave(self, job_id: str) -> None:
        """Listen no more: a generator that still speaks stops."""
        with _redis_errors():
            await self._redis.delete(_stream(job_id))

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.aclose()


class ChatSpeaker:
    """The side of a generator. Every method may be called from any thread."""

    def __init__(self, settings: QueueSettings) -> None:
        url = settings.redis_url.get_secret_value()
        self._redis = Redis.from_url(url, **_options(settings))

    def take(self, pool: str, wait_s: float) -> JobMessage | None:
        """The next turn that waits in the pool; None when `wait_s` has passed."""
        with _redis_errors():
            taken = cast(
                tuple[bytes, bytes] | None, self._redis.brpop([_questions(pool)], timeout=wait_s)
            )
        return None if taken is None else JobMessage.model_validate_json(taken[1])

    def say(self, job_id: str, piece: ChatPiece) -> bool:
        """Add to the answer; false where nobody listens any more."""
        with _redis_errors():
            added = self._redis.xadd(
                _stream(job_id),
                {FIELD: PIECE.dump_json(piece)},
                nomkstream=True,
                maxlen=PIECES_MAX,
            )
        return added is not None

    def is_heard(self, job_id: str) -> bool:
        """Whether somebody listens."""
        with _redis_errors():
            return bool(self._redis.exists(_stream(job_id)))

    def close(self) -> None:
        """Close the connections."""
        self._redis.close()


def _options(settings: QueueSettings) -> dict[str, Any]:
    return {
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "socket_timeout": SOCKET_TIMEOUT_S,
        **redis_tls(settings.redis_url.get_secret_value(), settings.redis_ca_file),
    }


def _stream(job_id: str) -> str:
    return f"answer:{job_id}"


def _questions(pool: str) -> str:
    return f"chat.{pool}"


@contextmanager
def _redis_errors() -> Iterator[None]:
    try:
        yield
    except RedisError as error:
        raise UnavailableError(f"Redis does not answer: {error}") from error
